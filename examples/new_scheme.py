"""Write your own scheme in twelve lines, check it, and train with it.

python examples/new_scheme.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

import paragrad as pg


@dataclass(frozen=True)
class Cautious(pg.Scheme):
    """c <- c + d / (1 + τ): the staler a commit, the less it counts."""

    window: int = 5

    def apply(self, center: pg.CenterView, commits: Sequence[pg.Commit]) -> torch.Tensor:
        for commit in commits:
            center.value += commit.value / (1 + commit.staleness)
        return center.value


def main(epochs: int = 20) -> pg.Result:
    """Check the scheme, then train with it."""
    pg.check_scheme(Cautious(), plain=True)
    print("Cautious passes all checks.")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    result = pg.train(model, "digits", holdout=0.2, scheme=Cautious(), engine=pg.Local(workers=4), epochs=epochs)
    print(f"accuracy {result.accuracy:.3f}, mean staleness {result.staleness.mean:.2f}")
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
