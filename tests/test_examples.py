"""What the examples say of themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn

import paragrad as pg

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_group_of_the_thesis_steps_like_one_process_with_the_whole_mini_batch():
    spec = importlib.util.spec_from_file_location("thesis_system", EXAMPLES / "thesis_system.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    group = example.Group(model, nn.CrossEntropyLoss(), "adam:lr=0.01", members=3)
    alone = pg.TorchLearner(model, nn.CrossEntropyLoss(), "adam:lr=0.01")
    for rows in (10, 9, 2, 7):  # parts of uneven length, and fewer rows than members
        batch = (torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,)))
        one, other = group.step(batch), alone.step(batch)
        assert abs(one.loss - other.loss) < 1e-12
        assert one.weight == other.weight
    assert torch.allclose(group.weights, alone.weights, atol=1e-12, rtol=0)
