"""Parameters that require no gradient and that training changes: EMA copies, target networks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.data.plan import Plan
from paragrad.errors import UsageError
from paragrad.learners.torch import TorchLearner
from paragrad.rundir.record import read

SIZE, ROWS = 8, 64


def lerp(average: nn.Parameter, now: nn.Parameter) -> None:
    average.lerp_(now, 0.1)


def in_place(average: nn.Parameter, now: nn.Parameter) -> None:
    average.mul_(0.9).add_(now, alpha=0.1)


def by_data(average: nn.Parameter, now: nn.Parameter) -> None:
    average.data.mul_(0.9).add_(now.data, alpha=0.1)


def replaced(average: nn.Parameter, now: nn.Parameter) -> None:
    average.data = 0.9 * average.data + 0.1 * now.data


WAYS = {way.__name__: way for way in (lerp, in_place, by_data, replaced)}


class Averaged(nn.Module):
    """A network with an exponential moving average of its weights, which is what it evaluates; and a frozen backbone."""

    def __init__(self, way: str = "lerp") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.backbone = nn.Linear(4, 6).requires_grad_(False)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        nn.init.zeros_(self.net[2].bias)
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        x = self.backbone(x)
        if not self.training:
            return self.ema(x)
        with torch.no_grad():
            for average, now in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                WAYS[self.way](average, now)
        return self.net(x)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def plain_loop(model: nn.Module, *, epochs: int, seed: int, lr: float = 0.3) -> nn.Module:
    x, y = rows()
    plan = Plan(rows=ROWS, batch_size=SIZE, epochs=epochs, seed=seed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for position in range(plan.positions):
        index = plan.rows_of(position)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return model


def trained(model: nn.Module | Any, **options: Any) -> Any:
    given = {"optimizer": "sgd:lr=0.3", "scheme": pg.SyncSGD(), "engine": pg.Local(workers=1), "epochs": 2, "batch_size": SIZE}
    return pg.train(model, rows(), **(given | options))


def assert_equal(mine: nn.Module, theirs: nn.Module) -> None:
    theirs_by_name = theirs.state_dict()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, theirs_by_name[name]), name


SCHEMES = {"syncsgd": pg.SyncSGD(), "modelaveraging": pg.ModelAveraging(window=3), "agn": pg.AGN(window=2)}


ENGINES = {
    "local": pg.Local(workers=1),
    "network": pg.Network(workers=1, here=1, shared=False),
    "network-shared": pg.Network(workers=1, here=1),
    "vector": pg.Vector(workers=1, mode="loop"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_one_worker_ends_exactly_where_the_plain_loop_ends(way: str, engine: Any) -> None:
    reference = plain_loop(Averaged(way), epochs=2, seed=3)
    for scheme in ("syncsgd", "modelaveraging"):
        result = trained(Averaged(way), engine=engine, scheme=SCHEMES[scheme], seed=3)
        assert_equal(result.model, reference)
        assert not torch.equal(result.model.ema[0].weight, Averaged().ema[0].weight)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_replicas_that_are_computed_together_carry_it_too(scheme: Any) -> None:
    together, alone = (
        trained(Averaged("in_place"), engine=pg.Vector(workers=2, mode=mode), scheme=scheme, seed=3).model
        for mode in ("together", "loop")
    )
    for mine, theirs in zip(together.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_only_what_changes_is_carried_and_a_note_says_so() -> None:
    result = trained(Averaged(), engine=pg.Local(workers=2), holdout=0.25)
    notes = [event.data["message"] for event in read(result.directory) if event.kind == "note"]
    carried = sum(parameter.numel() for parameter in Averaged().ema.parameters())
    assert any(note.startswith(f"{carried} values of parameters that require no gradient change in training") for note in notes)
    assert torch.equal(result.model.backbone.weight, Averaged().backbone.weight)


def test_with_several_workers_it_moves_as_batch_norm_statistics_do() -> None:
    """A round of SyncSGD: each worker has averaged the same weights once, and the mean of their averages is that."""
    result = trained(Averaged(), engine=pg.Local(workers=2), seed=3)
    x, y = rows()
    model, plan = Averaged().train(), Plan(rows=ROWS, batch_size=SIZE, epochs=2, seed=3)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.3)
    for position in range(0, plan.positions, 2):
        both = torch.cat([torch.from_numpy(plan.rows_of(position + k)) for k in (0, 1)])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[both]), y[both]).backward()
        optimizer.step()
    for mine, theirs in zip(result.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_it_goes_through_resume_replay_and_load(tmp_path: Path) -> None:
    whole = trained(Averaged(), scheme=pg.ModelAveraging(window=3), run=pg.Run(out=tmp_path / "whole"), epochs=4, seed=3)
    run = tmp_path / "run"
    trained(Averaged(), scheme=pg.ModelAveraging(window=3), run=pg.Run(out=run), epochs=2, seed=3)
    again = pg.load(run, Averaged(), checkpoint="latest").module
    assert_equal(again, plain_loop(Averaged(), epochs=2, seed=3))
    resumed = trained(Averaged(), scheme=pg.ModelAveraging(window=3), run=pg.Run(out=run, resume=True), epochs=4, seed=3)
    assert_equal(resumed.model, whole.model)
    assert_equal(pg.load(run, Averaged()).module, whole.model)
    assert pg.replay(tmp_path / "whole", Averaged(), rows()).equal


class Late(nn.Module):
    """A target network that is copied after every third step."""

    def __init__(self, first: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.steps = first

    def forward(self, x):
        if self.training and self.steps % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())
        self.steps += self.training
        return self.net(x)


def test_a_target_network_that_is_copied_now_and_then_is_carried() -> None:
    result = trained(Late(0))
    assert not torch.equal(result.model.target.weight, Late(0).target.weight)


@pytest.mark.parametrize("engine", [pg.Local(workers=2), pg.Vector(workers=2, mode="loop")], ids=["local", "vector"])
def test_one_that_no_trial_step_shows_ends_the_run_with_the_reason(engine: Any) -> None:
    with pytest.raises(UsageError, match=r"'target\.(weight|bias)' requires no gradient, but training changes it"):
        trained(Late(1), engine=engine)


class Stepped(torch.optim.SGD):
    """An optimiser that moves the average itself."""

    def __init__(self, model: Averaged) -> None:
        super().__init__(model.net.parameters(), lr=0.3)
        self._model = model

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for average, now in zip(self._model.ema.parameters(), self._model.net.parameters(), strict=True):
                average.lerp_(now, 0.1)


class Still(Averaged):
    def forward(self, x):
        return (self.net if self.training else self.ema)(self.backbone(x))


def stepped(model):
    return Stepped(model)


def test_an_average_that_the_optimiser_moves() -> None:
    for engine in (pg.Local(workers=2), pg.Vector(workers=2)):
        result = trained(Still(), optimizer=stepped, scheme=pg.ModelAveraging(window=2), engine=engine)
        assert not torch.equal(result.model.ema[0].weight, Still().ema[0].weight)
    with pytest.raises(UsageError, match=r"The optimiser changes the parameter 'ema\.0\.weight'.*at the center"):
        trained(Still(), optimizer=stepped)


class Counting(TorchLearner):
    """A step of the user's own that moves the average."""

    def step(self, batch):
        done = super().step(batch)
        with torch.no_grad():
            for average, now in zip(self.module.ema.parameters(), self.module.net.parameters(), strict=True):
                average.lerp_(now, 0.1)
        return done


def test_a_learner_of_ones_own_carries_it_too() -> None:
    result = trained(lambda: Counting(Still(), nn.CrossEntropyLoss(), "sgd:lr=0.3"), optimizer=None, scheme=pg.AGN(window=2))
    assert not torch.equal(result.model.module.ema[0].weight, Still().ema[0].weight)


class Trainable(Averaged):
    """The copy still requires a gradient, as that of torch.optim.swa_utils.AveragedModel does."""

    def __init__(self) -> None:
        super().__init__()
        self.ema.requires_grad_(True)


@pytest.mark.parametrize("scheme", [pg.SyncSGD(), pg.AGN(window=2)], ids=["syncsgd", "agn"])
def test_a_copy_that_requires_a_gradient_is_refused(scheme: Any) -> None:
    with pytest.raises(UsageError, match=r"Parameter 'ema\.0\.weight' requires a gradient, but gets none"):
        trained(Trainable(), scheme=scheme)


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_weights_that_forward_changes_are_lost_with_gradients_alone() -> None:
    torch.manual_seed(0)
    for engine in (pg.Local(workers=1), pg.Vector(workers=1)):
        with pytest.raises(UsageError, match="The forward pass changes the parameter 'weight', but workers ship gradients"):
            trained(Clamped(4, 2), engine=engine)
    result = trained(Clamped(4, 2), scheme=pg.ModelAveraging(window=1))
    assert result.model.weight.abs().max() < 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=3), st.integers(1, 5))
def test_exactly_what_a_step_writes_to_is_found(moves: list[bool], width: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, width)
            self.copies = nn.ModuleList(copy.deepcopy(self.net).requires_grad_(False) for _ in moves)

        def forward(self, x):
            for moved, other in zip(moves, self.copies, strict=True):
                if moved:
                    other.weight.data.lerp_(self.net.weight.data, 0.5)
            return self.net(x)

    learner = TorchLearner(Model(), nn.MSELoss(), "sgd:lr=0.1")
    found = learner.try_step((torch.ones(2, 3), torch.ones(2, width)), at_center=True)
    assert found == tuple(f"copies.{k}.weight" for k, moved in enumerate(moves) if moved)


def test_scattered_workers_keep_what_is_frozen() -> None:
    learner = TorchLearner(Averaged(), nn.CrossEntropyLoss(), "sgd:lr=0.1")
    before = learner.module.backbone.weight.clone()
    learner.scatter(7)
    assert torch.equal(learner.module.backbone.weight, before)
