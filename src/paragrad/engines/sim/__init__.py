"""A simulated cluster: all workers in this process, under a virtual clock."""
