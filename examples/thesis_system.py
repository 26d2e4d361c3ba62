"""The system that Hermans' thesis recommends and never built: groups that are synchronous inside and asynchronous between.

    python examples/thesis_system.py

Inside a group, mini-batch parallelism: its members take a part of the mini-batch each, and their mean gradient makes one step.
Between groups, ADAG on accumulated gradients: a group commits the mean of a window of such steps, and the center takes the
less of it, element by element, the farther it has moved since. A group is a Learner; everything else is as usual. Here the
members are threads of one process that share its weights; on a machine with several GPUs they would be its devices.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import paragrad as pg


class Group(pg.TorchLearner):
    """Members with the same weights in the same memory; a step is the optimiser's on their mean gradient."""

    def __init__(self, module: nn.Module, loss: nn.Module, optimizer: str, members: int) -> None:
        super().__init__(module, loss, optimizer)
        if self.buffers.numel() or self.integers.numel():
            raise pg.UsageError("The members of a group would each keep batch-norm statistics of their own: use layer norm.")
        self.members = [pg.TorchLearner(module, loss, optimizer) for _ in range(members)]
        self.gradients = [torch.empty_like(self.weights) for _ in range(members)]
        self.optimizer = self.center_optimizer()
        self.pool = ThreadPoolExecutor(members)
        self.alias(self.weights.clone())

    def alias(self, vector: torch.Tensor) -> None:
        """The members' weights lie where the group's do."""
        super().alias(vector)
        for member in self.members:
            member.alias(vector)

    def step(self, batch: Any) -> pg.Step:
        """Each member's mean gradient of its part, weighted by its rows; then one step for all."""
        parts = [part for part in zip(*(tensor.chunk(len(self.members)) for tensor in batch), strict=True) if len(part[0])]
        done = list(self.pool.map(lambda k: self.members[k].gradient(parts[k], self.gradients[k]), range(len(parts))))
        weight = sum(step.weight for step in done)
        mean = sum(gradient * (step.weight / weight) for gradient, step in zip(self.gradients, done, strict=False))
        assert isinstance(mean, torch.Tensor)
        self.optimizer.step(self.weights, mean)
        return pg.Step(loss=sum(step.loss * step.weight for step in done) / weight, weight=weight)


class TwoMembers:
    """Makes a group; a class of its own, so that it can travel to the worker processes."""

    def __call__(self) -> Group:
        """The same start for every group."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        return Group(model, nn.CrossEntropyLoss(), "adam:lr=0.002", members=2)


def main(epochs: int = 20) -> pg.Result:
    """Two groups of two members on the digits; the data is given whole and 20 % of it held out."""
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
