"""Whether a model can be computed together is tried, and the trial tells rounding at a kink from a step that is another."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.learners import linear, trial
from paragrad.learners.batchable import why_not
from paragrad.learners.torch import TorchLearner

REASON = "a step of two workers together differs from two separate steps"


@pytest.fixture
def rounded(monkeypatch):
    """Linear layers of rows round in another way than alone, whatever the processor: some last bits up, some down."""
    whole, draw = linear._BatchedLinear.forward, torch.Generator().manual_seed(0)

    def shaken(ctx, x, weight, bias, sink):
        out = whole(ctx, x, weight, bias, sink)
        sign = 2 * torch.randint(0, 2, out.shape, generator=draw) - 1
        return out + sign * (4 * torch.finfo(out.dtype).eps * x.abs().max() * weight.abs().max())

    monkeypatch.setattr(linear._BatchedLinear, "forward", staticmethod(shaken))


def scaled_by(factor, monkeypatch):
    whole = linear._BatchedLinear.forward
    monkeypatch.setattr(linear._BatchedLinear, "forward", staticmethod(lambda *given: whole(*given) * factor))


def images(rows, pixels=784, seed=0):
    """Most pixels are black, as in MNIST."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, pixels, generator=draw) * (torch.rand(rows, pixels, generator=draw) < 0.2)
    return Arrays((x, torch.randint(0, 10, (rows,), generator=draw)))


def mlp(*sizes, kink=nn.ReLU):
    layers = [layer for ins, outs in pairwise(sizes) for layer in (nn.Linear(ins, outs), kink())]
    return nn.Sequential(*layers[:-1])


def tried(module, data, batch_size=32, seed=0):
    learner = TorchLearner(module, nn.CrossEntropyLoss(), "adam")
    before = [vector.clone() for vector in (learner.weights, learner.buffers, learner.integers)]
    drawn = torch.get_rng_state()
    why = why_not(learner, data, Plan(len(data), batch_size, 1, seed))
    assert torch.equal(drawn, torch.get_rng_state()), "the trial has drawn random numbers"
    for mine, old in zip((learner.weights, learner.buffers, learner.integers), before, strict=True):
        assert torch.equal(mine, old), "the trial has left a trace"
    return why


def worst_element(module, data, batch_size, seed):
    """What was looked at before: the largest difference, of the largest element of the gradient."""
    learner, plan = TorchLearner(module, nn.CrossEntropyLoss(), "adam"), Plan(len(data), batch_size, 1, seed)
    rows = trial.TorchRows(learner, 1, data, plan, gradients=True)
    rows.run([trial.Task(0, (0,))])
    alone = torch.empty_like(learner.weights)
    learner.gradient(data.batch(plan.rows_of(0)), alone)
    return float((rows.gradients[0] - alone).abs().max() / alone.abs().max())


def test_the_model_of_the_thesis_is_computed_together_at_every_seed(rounded):
    data = images(256)
    for seed in range(3):
        torch.manual_seed(seed)
        assert tried(mlp(784, 1000, 2000, 1000, 10), data, 128, seed) is None


def test_it_is_when_it_is_asked_for(rounded, tmp_path):
    torch.manual_seed(1)
    model, engine = mlp(784, 100, 200, 100, 10), pg.Vector(20, mode="together")
    result = pg.train(
        model, images(640), scheme=pg.AGN(window=15), optimizer="adam", engine=engine, seed=1, run=pg.Run(tmp_path / "run")
    )
    assert result.summary["steps"] == 20


def cancelling(rows=64):
    """Inputs that add up to 0, or to a last bit, as they are added: 0.1 + 0.2 - 0.3."""
    draw = torch.Generator().manual_seed(0)
    scale = 1 + torch.rand(rows, 1, generator=draw)
    x = torch.cat([0.1 * scale, 0.2 * scale, -(0.1 * scale + 0.2 * scale), 0.1 * scale, 0.2 * scale, -0.3 * scale], 1)
    return Arrays((x, torch.randint(0, 10, (rows,), generator=draw)))


class Equal(nn.Module):
    """A first layer whose weights are all equal, and so its units at a kink."""

    def __init__(self, kink, dtype=None):
        super().__init__()
        self.first, self.out, self.kink, self.dtype = nn.Linear(6, 16, bias=False), nn.Linear(16, 10), kink, dtype
        nn.init.constant_(self.first.weight, 0.7)

    def forward(self, x):
        hidden = self.kink(self.first(x))
        assert self.dtype in (None, hidden.dtype)
        return self.out(hidden)


KINKS = [nn.ReLU(), nn.LeakyReLU(0.2), nn.ReLU6(), nn.Hardtanh(0.0, 1.0), nn.PReLU()]


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["any type", "float32 only"])
@pytest.mark.parametrize("kink", KINKS, ids=lambda kink: type(kink).__name__)
def test_units_at_exactly_zero_make_no_difference(kink, dtype, rounded):
    flips = 0
    for seed in range(3):
        torch.manual_seed(seed)
        model = Equal(kink, dtype)
        flips += worst_element(model, cancelling(), 32, seed) > 1e-3
        assert tried(model, cancelling(), seed=seed) is None
    assert flips == 3, "nothing was tried"


@pytest.mark.parametrize("kink", [nn.ReLU, nn.Tanh, nn.Identity])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_a_small_network_is_computed_together_at_every_seed(kink, width, rounded):
    for seed in range(8):
        torch.manual_seed(seed)
        assert tried(mlp(20, width, 10, kink=kink), images(96, 20), seed=seed) is None


@pytest.mark.parametrize("factor", [1.001, 0.99, 2.0])
@pytest.mark.parametrize("kink", [nn.ReLU, nn.Tanh])
def test_a_step_that_is_another_is_refused(kink, factor, monkeypatch):
    scaled_by(factor, monkeypatch)
    for seed in range(2):
        torch.manual_seed(seed)
        assert tried(mlp(20, 16, 10, kink=kink), images(96, 20), seed=seed) == REASON


def test_so_it_is_where_a_model_is_written_for_one_type(monkeypatch):
    scaled_by(1.02, monkeypatch)
    assert tried(Equal(nn.ReLU(), torch.float32), images(96, 6)) == REASON


def test_running_statistics_that_are_others_are_refused(monkeypatch):
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(20, 10)
            self.register_buffer("mean", torch.zeros(10))

        def forward(self, x):
            out = super().forward(x)
            self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0) * (1.01 if torch._C._functorch.is_batchedtensor(out) else 1.0))
            return out

    assert tried(Counts(), images(96, 20)) == REASON


# -- what a run says of it --------------------------------------------------------------------------------------------


def said(tmp_path, model, **engine):
    events = []
    data = images(160, 20)
    pg.train(
        model,
        data,
        scheme=pg.AGN(window=2),
        engine=pg.Vector(**engine),
        run=pg.Run(tmp_path / "run", callbacks=(events.append,)),
    )
    return [(event.kind, event.data["message"]) for event in events if "one after another" in event.data.get("message", "")]


def test_a_fallback_is_warned_of_with_its_reason_and_what_it_costs(tmp_path):
    model = nn.Sequential(nn.Linear(20, 8), nn.Dropout(0.5), nn.Linear(8, 10))
    ((kind, message),) = said(tmp_path, model, workers=5)
    assert kind == "warning"
    assert "one after another: the model draws random numbers (dropout)" in message
    assert message.endswith("With 5 workers on cpu this may take up to 5 times as long, compared with all of them together.")


@pytest.mark.parametrize(
    ("model", "workers"),
    [(nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 10)), 1), (mlp(20, 3000, 10), 3)],
    ids=["one worker", "a large model on a CPU"],
)
def test_what_costs_nothing_is_a_note(model, workers, tmp_path):
    ((kind, _),) = said(tmp_path, model, workers=workers)
    assert kind == "note"
