"""Data: from arrays, files and datasets to mini-batches, and the worker that trains on each."""
