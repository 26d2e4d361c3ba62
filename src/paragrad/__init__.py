"""Parallel gradient descent for PyTorch and Keras: the public names, loaded when first used."""
