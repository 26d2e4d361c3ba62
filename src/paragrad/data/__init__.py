"""From arrays, files and datasets to mini-batches, and who works on which."""
