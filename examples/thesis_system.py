"""Train synchronous groups that cooperate asynchronously, which Hermans' thesis recommends but did not build.

    python examples/thesis_system.py

Within a group, each member computes the gradient of a part of the mini-batch, and the group makes one step with their mean.
Between groups, ADAG works on accumulated gradients: a group commits the mean of a window of such steps. The farther an element
of the center has moved since, the more the center scales down that element of the commit. A group is a Learner. Here its
members are threads of one process that share the weights; on a machine with several GPUs they would be the GPUs.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import paragrad as pg


class Group(pg.TorchLearner):
    """Members that share one weight vector; the optimiser steps on their mean gradient."""

    def __init__(self, module: nn.Module, loss: nn.Module, optimizer: str, members: int) -> None:
        super().__init__(module, loss, optimizer)
        if self.buffers.numel() or self.integers.numel():
            raise pg.UsageError("Each member of a group would have its own batch-norm statistics: use layer norm.")
        self.members = [pg.TorchLearner(module, loss, optimizer) for _ in range(members)]
        self.gradients = [torch.empty_like(self.weights) for _ in range(members)]
        self.optimizer = self.center_optimizer()
        self.pool = ThreadPoolExecutor(members)
        self.alias(self.weights.clone())

    def alias(self, vector: torch.Tensor) -> None:
        """Have the members share the group's weights."""
        super().alias(vector)
        for member in self.members:
            member.alias(vector)

    def step(self, batch: Any) -> pg.Step:
        """Average the members' gradients, weighted by their rows, and make one step."""
        parts = [part for part in zip(*(tensor.chunk(len(self.members)) for tensor in batch), strict=True) if len(part[0])]
        done = list(self.pool.map(lambda k: self.members[k].gradient(parts[k], self.gradients[k]), range(len(parts))))
        weight = sum(step.weight for step in done)
        mean = sum(gradient * (step.weight / weight) for gradient, step in zip(self.gradients, done, strict=False))
        assert isinstance(mean, torch.Tensor)
        self.optimizer.step(self.weights, mean)
        return pg.Step(loss=sum(step.loss * step.weight for step in done) / weight, weight=weight)


class TwoMembers:
    """Creates a group. It is a class so that it can be sent to the worker processes."""

    def __call__(self) -> Group:
        """Return a group; all groups start from the same weights."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        return Group(model, nn.CrossEntropyLoss(), "adam:lr=0.002", members=2)


def main(epochs: int = 20) -> pg.Result:
    """Train two groups of two members on the digits, with 20 % of the rows held out."""
    result = pg.train(
        TwoMembers(),
        "digits",
        holdout=0.2,
        scheme=pg.ADAG(window=5),
        engine=pg.Local(workers=2),
        epochs=epochs,
        batch_size=32,
    )
    print(f"2 groups of 2: accuracy {result.accuracy:.3f}, mean staleness {result.staleness.mean:.2f}")
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
