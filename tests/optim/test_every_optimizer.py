"""Every optimiser of torch.optim by its name: with one worker it is plain torch to the bit, or is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.learners.torch import TorchLearner
from paragrad.optim import optimizer as optim
from paragrad.optim.optimizer import ELEMENTWISE, names

REFUSED = {"sparseadam": "needs sparse gradients.*use Adam"}
NO_BIAS = ("muon",)
"""Those that take matrices only."""
FIELDS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "adam": {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True},
    "rmsprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "lbfgs": {"lr": 0.5, "max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"},
    "asgd": {"lr": 0.1, "t0": 3},
    "cg": {"beta": "hestenes-stiefel", "evaluations": 10},
}


def text(name: str) -> str:
    """The optimiser and its fields as one types them."""
    fields = {key: str(value).replace(" ", "") for key, value in FIELDS.get(name, {}).items()}
    return name + ":" * bool(fields) + ",".join(f"{key}={value}" for key, value in fields.items())


def net(*, bias: bool) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias))


def source() -> Arrays:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    return Arrays((x, (x.sum(1) > 0).long()))


@pytest.mark.parametrize("small", [0, 10**9], ids=["pieces", "flat"])
@pytest.mark.parametrize("name", sorted(names()))
def test_one_worker_is_plain_torch_to_the_bit_or_is_refused(name: str, small: int, monkeypatch) -> None:
    monkeypatch.setattr(optim, "SMALL", small)
    bias, plan = name not in NO_BIAS, Plan(40, 8, 3, 0)

    def make(device: str = "cpu") -> TorchLearner:
        return TorchLearner(net(bias=bias), nn.CrossEntropyLoss(), text(name))

    if name in REFUSED:
        with pytest.raises(pg.UsageError, match=REFUSED[name]):
            make()
        return
    found = Serial(Job(pg.ModelAveraging(window=4), make, source(), None, plan, 40), 1).run().value
    plain = net(bias=bias)
    optimizer = names()[name](list(plain.parameters()), **FIELDS.get(name, {}))
    for position in range(plan.positions):
        x, y = source().batch(plan.rows_of(position))

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            return float(loss.detach())

        if make().searches:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert torch.equal(found, nn.utils.parameters_to_vector(plain.parameters()))
    start = nn.utils.parameters_to_vector(net(bias=bias).parameters())
    assert not torch.equal(found, start)


def test_nothing_of_torch_was_left_out_and_what_is_refused_is_no_more_than_must_be() -> None:
    there = {
        name.lower()
        for name, thing in vars(torch.optim).items()
        if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer) and thing is not torch.optim.Optimizer
    }
    assert set(names()) == there | {"cg"}
    assert {name.lower() for name in ELEMENTWISE} <= there


@pytest.mark.parametrize("name", ["muon", "sparseadam"])
def test_what_cannot_be_used_says_so_before_a_run(name: str, tmp_path) -> None:
    x, y = source().tree
    with pytest.raises(pg.UsageError, match=r"cannot be made.*2D|sparse gradients"):
        pg.train(net(bias=True), (x, y), optimizer=name, run=pg.Run(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cg", "lbfgs", "adam", "sgd"])
def test_the_state_of_an_optimizer_goes_on_where_it_was(name: str) -> None:
    learners = [TorchLearner(net(bias=True), nn.CrossEntropyLoss(), text(name)) for _ in range(2)]
    one, other = learners
    batch = source().tree
    for _ in range(5):
        one.step(batch)
    other.weights.copy_(one.weights)
    other.load(one.state())
    for _ in range(3):
        one.step(batch)
        other.step(batch)
        assert torch.equal(one.weights, other.weights)
