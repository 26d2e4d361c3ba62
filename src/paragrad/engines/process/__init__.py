"""Child processes: the fork server, signals, devices and shared memory."""
