"""A vector run that is stopped and resumed is the unbroken one to the bit: every start computes its steps by one formula."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

import paragrad as pg
from paragrad.data.plan import Plan
from paragrad.data.seeds import states
from paragrad.data.source import Arrays, Items
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.torch import TorchLearner
from tests.conftest import every_batch_once, stop_after

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 230
"""The last mini-batch of an epoch is a short one."""
BATCHES = 3 * -(-ROWS // 8)


def easy():
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def mlp():
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 2))


def normalised():
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def convolved():
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2))


class Tied(nn.Module):
    """A weight of a linear layer that is used outside of it, too."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(8, 5), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(torch.tanh(torch.tanh(self.inside(x)) @ self.inside.weight))


class Jittered(Dataset):
    """Rows to which noise is added when they are asked for, from all generators that a Dataset may draw from."""

    def __init__(self):
        self.x, self.y = easy()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        noise = 0.1 * torch.randn(8) + 0.1 * np.random.randn() + 0.1 * random.random()
        return self.x[row] + noise, self.y[row]


CASES = {
    "syncsgd, momentum": (mlp, pg.SyncSGD(), "sgd:lr=0.1,momentum=0.9"),
    "syncsgd, plain": (mlp, pg.SyncSGD(), "sgd:lr=0.1"),
    "syncsgd, adam": (convolved, pg.SyncSGD(), "adam:lr=0.01"),
    "syncsgd, batch norm": (normalised, pg.SyncSGD(), "rmsprop:lr=0.01"),
    "syncsgd, schedule and clipping": (
        mlp, pg.SyncSGD(), pg.Optimizer("sgd:lr=0.1", schedule="cosine", clip_norm=0.2),
    ),
    "averaging, plain": (mlp, pg.ModelAveraging(window=3), "sgd:lr=0.1"),
    "averaging, tied": (Tied, pg.ModelAveraging(window=2), "sgd:lr=0.1"),
    "averaging, convolution": (convolved, pg.ModelAveraging(window=2), "sgd:lr=0.1,weight_decay=0.01"),
    "diloco": (mlp, pg.DiLoCo(window=3), "sgd:lr=0.05"),
}  # fmt: skip


def trained(out, case, data, *stops, **engine):
    """A run that is stopped after so many commits each time, and resumed; its last result."""
    make, scheme, optimizer = case
    torch.manual_seed(11)
    model = make()
    for number, stop in enumerate((*stops, None)):
        torch.manual_seed(number)  # whatever was drawn before makes no difference
        result = pg.train(
            model,
            data,
            scheme=scheme,
            optimizer=optimizer,
            engine=pg.Vector(3, **engine),
            batch_size=8,
            epochs=3,
            run=pg.Run(out, resume=number > 0, callbacks=() if stop is None else (stop_after(stop),), checkpoint_every=None),
        )
    assert every_batch_once(out, BATCHES)
    return result


def assert_equal(mine, whole):
    for (name, a), b in zip(mine.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_at_random_points_is_the_unbroken_one_to_the_bit(name, tmp_path):
    whole = trained(tmp_path / "whole", CASES[name], easy())
    draw = random.Random(name)
    for attempt in range(12):
        stops = [draw.randrange(1, whole.summary["commits"] // 2) for _ in range(draw.randrange(1, 3))]
        assert_equal(trained(tmp_path / str(attempt), CASES[name], easy(), *stops), whole)


@pytest.mark.parametrize("engine", [{}, {"mode": "loop"}, {"chunk": 2}], ids=["together", "loop", "chunks"])
def test_so_is_one_whose_rows_are_drawn_at_random(engine, tmp_path):
    case = CASES["averaging, plain"]
    whole = trained(tmp_path / "whole", case, Jittered(), **engine)
    for stop in (1, 4, 11):
        assert_equal(trained(tmp_path / str(stop), case, Jittered(), stop, **engine), whole)


# -- by construction, on any processor --------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """The names and shapes of all that torch computes inside it, but for views and for memory that later steps use again."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        if not func.is_view and func is not torch.ops.aten.zeros.default:
            self.seen.append((str(func), shapes, sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


OPTIMIZERS = ["sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9", "adagrad", "rmsprop", "adadelta", "adam", "adamw"]


def rows_of(make, optimizer="sgd:lr=0.1", *, gradients=False, data=None):
    torch.manual_seed(11)
    learner = TorchLearner(make(), nn.CrossEntropyLoss(), optimizer)
    return learner, TorchRows(learner, 3, data or Arrays(easy()), Plan(ROWS, 8, 3), gradients=gradients)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("gradients", [False, True], ids=["steps", "gradients"])
@pytest.mark.parametrize("make", [mlp, normalised, convolved, Tied], ids=lambda make: make.__name__)
def test_the_first_step_is_made_by_the_operations_of_all_others(make, gradients, optimizer):
    _, rows = rows_of(make, optimizer, gradients=gradients)
    seen = []
    for step in range(4):
        with Operations() as operations:
            rows.run([Task(row, (3 * step + row,)) for row in range(3)])
        seen.append(operations.seen)
    assert len(seen[0]) > 10
    assert seen[0] == seen[1] == seen[2] == seen[3]


@pytest.mark.parametrize("make", [mlp, normalised], ids=lambda make: make.__name__)
def test_the_dry_run_leaves_no_trace(make):
    learner, _ = rows_of(make, "adam")
    start = [vector.clone() for vector in (learner.weights, learner.buffers, learner.integers)]
    drawn = states()
    rows = TorchRows(learner, 3, Items(Jittered()), Plan(ROWS, 8, 3))
    assert torch.equal(drawn[0], states()[0])
    assert str(drawn[1:]) == str(states()[1:])
    for mine, here, begun in zip(
        (learner.weights, learner.buffers, learner.integers), (rows.weights, rows.buffers, rows.integers), start, strict=True
    ):
        assert torch.equal(mine, begun)
        assert torch.equal(here, begun.expand_as(here))
    assert not any(rows._all[name].any() for name in ("steps", "slot0", "slot1"))
