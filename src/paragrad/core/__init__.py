"""The algorithm without I/O: the flat vector, the worker's loop, the center, and the job they share."""
