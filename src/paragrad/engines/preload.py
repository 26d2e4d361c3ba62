"""What the fork server loads once, so that no worker has to: torch, its optimisers, and the worker itself."""

import torch
import torch._dynamo
import torch.optim

import paragrad.engines.localworker
import paragrad.learners.torch

__all__ = ["paragrad", "torch"]
