"""Child processes: the fork server, signals, devices, shared memory. Knows no center."""
