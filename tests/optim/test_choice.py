"""Schedules and clipping under schemes: one worker is a plain torch loop, SyncSGD the large batch, on every engine."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.config import options
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.laws.bowl import Bowl
from paragrad.learners.torch import TorchLearner
from paragrad.optim.choice import Optimizer
from paragrad.rundir.record import read

ROWS, BATCH, EPOCHS = 60, 6, 3
CHOICES = {
    "schedule": Optimizer("sgd:lr=0.5", schedule="cosine:warmup=0.2,floor=0.1"),
    "norm": Optimizer("sgd:lr=0.5,momentum=0.9", clip_norm=0.05),
    "value": Optimizer("adam:lr=0.05", clip_value=0.01),
    "both": Optimizer("adamw:lr=0.05,weight_decay=0.1", schedule="step:at=0.3+0.6,factor=0.5", clip_norm=0.1),
    "function": Optimizer(lambda parameters: torch.optim.RMSprop(parameters, lr=0.02), schedule=lambda done: 1 - done**2),
    "groups": Optimizer(
        lambda model: torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]),
        schedule="linear",
        clip_norm=0.1,
    ),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)
    return x, (x.sum(1) > 0).long()


def job(scheme: pg.Scheme, chosen: Optimizer, batch_size: int = BATCH) -> Job:
    plan = Plan(ROWS, batch_size, EPOCHS, 0)
    return Job(scheme, lambda _: TorchLearner(net(), nn.CrossEntropyLoss(), chosen), Arrays(rows()), None, plan, ROWS)


def factor_of(name: str) -> Callable[[float], float]:
    """The schedules above, written out."""

    def cosine(done: float) -> float:
        if done < 0.2:
            return 0.01 + (1 - 0.01) * done / 0.2
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * ((done - 0.2) / (1 - 0.2))))

    return {
        "schedule": cosine,
        "both": lambda done: 0.5 ** ((done >= 0.3) + (done >= 0.6)),
        "function": lambda done: 1 - done**2,
        "groups": lambda done: 1.0 - 1.0 * done,
    }.get(name, lambda done: 1.0)


def plainly(name: str, batch_size: int = BATCH) -> torch.Tensor:
    """A plain torch loop with the same."""
    model, source, plan = net(), Arrays(rows()), Plan(ROWS, batch_size, EPOCHS, 0)
    parameters = list(model.parameters())
    optimizer = {
        "schedule": lambda: torch.optim.SGD(parameters, lr=0.5),
        "norm": lambda: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        "value": lambda: torch.optim.Adam(parameters, lr=0.05),
        "both": lambda: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
        "function": lambda: torch.optim.RMSprop(parameters, lr=0.02),
        "groups": lambda: torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]),
    }[name]()
    rates = [group["lr"] for group in optimizer.param_groups]
    for position in range(plan.positions):
        x, y = source.batch(plan.rows_of(position))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor_of(name)(position / plan.positions)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if name in ("norm", "both", "groups"):
            nn.utils.clip_grad_norm_(parameters, 0.05 if name == "norm" else 0.1)
        if name == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach()


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "scheme", [pg.ModelAveraging(window=4), pg.ModelAveraging(window=1), pg.SyncSGD(), pg.Hogwild(window=3)]
)
def test_one_worker_is_a_plain_loop_to_the_bit(name: str, scheme: pg.Scheme) -> None:
    assert torch.equal(Serial(job(scheme, CHOICES[name]), 1).run().value, plainly(name))


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("workers", [2, 5])
def test_syncsgd_is_the_large_batch(name: str, workers: int) -> None:
    parts = Serial(job(pg.SyncSGD(), CHOICES[name]), workers)
    assert torch.allclose(parts.run().value, plainly(name, BATCH * workers), atol=1e-12, rtol=0)
    assert not parts.meddled


def test_asynchronous_delayed_windows_count_the_workers_own_steps_on() -> None:
    """A worker that goes on while its commit is under way has a rate that never rises, whatever it has heard."""
    chosen = Optimizer("sgd:lr=1", schedule="linear")
    made = Serial(job(pg.AsyncDiLoCo(window=2, outer_lr=0.7, delay=1, outer_momentum=0.0), chosen), 1)
    made.run()
    total = made.job.plan.positions
    ends = [sum(commit.steps for commit in made.applied[: k + 1]) for k in range(len(made.applied))]
    assert [commit.lr for commit in made.applied] == [1 - (end - 1) / total for end in ends]


class Watched(Bowl):
    """Notes what it is told of the progress of the run."""

    def __init__(self, told: list[float]) -> None:
        super().__init__()
        self.told = told

    def set_progress(self, progress: float) -> None:
        self.told.append(progress)


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(1, 4),
    window=st.integers(1, 5),
    stolen=st.booleans(),
    order=st.randoms(use_true_random=False),
    scheme=st.sampled_from([pg.AGN, pg.Downpour, pg.ModelAveraging]),
)
def test_what_a_worker_is_told_never_goes_back_and_stays_below_what_has_begun(workers, window, stolen, order, scheme) -> None:
    told: list[list[float]] = []

    def make(device: str) -> Watched:
        told.append([])
        return Watched(told[-1])

    data = Arrays(torch.randn(40, 7, dtype=torch.float64))
    plan = Plan(40, 3, 2, 0)
    Serial(Job(scheme(window=window), make, data, None, plan, 40), workers, choose=order.choice, stolen=stolen).run()
    heard = [progress for mine in told for progress in mine]
    assert len(heard) == plan.positions
    assert all(0 <= progress < 1 for progress in heard)
    for mine in told:
        assert mine == sorted(mine)
        assert len(set(mine)) == len(mine)
    if workers == 1:
        assert heard == [k / plan.positions for k in range(plan.positions)]


@pytest.mark.parametrize("scheme", [pg.OrMo(window=3, momentum=0.0), pg.DeanDownpour(rate=0.1, window=3)], ids=repr)
def test_a_scheme_that_knows_one_rate_has_one_for_all_steps_of_a_commit(scheme: pg.Scheme) -> None:
    told: list[list[float]] = []

    def make(device: str) -> Watched:
        told.append([])
        return Watched(told[-1])

    data, plan = Arrays(torch.randn(36, 7, dtype=torch.float64)), Plan(36, 3, 2, 0)
    Serial(Job(scheme, make, data, None, plan, 36), 2).run()
    for mine in told[1:]:
        assert mine == sorted(mine)
        assert [mine.count(progress) for progress in sorted(set(mine))] == [3, 3, 3, 3]
    with pytest.raises(pg.UsageError, match=r"plain SGD.*clip_norm=1\.0"):
        pg.train(net(), rows(), optimizer=Optimizer("sgd:lr=0.5", clip_norm=1.0), scheme=scheme, batch_size=6)


# -- the vector engine ------------------------------------------------------------------------------------------


TOGETHER = [
    *((pg.AGN(window=3), name) for name in ("sgd", "sgd:momentum=0.9", "adam", "adamw", "rmsprop", "adagrad", "adadelta")),
    (pg.ModelAveraging(window=4), "adam"),
    (pg.SyncSGD(), "adam"),
    (pg.OrMo(), "sgd"),
]


@pytest.mark.parametrize(("scheme", "optimizer"), TOGETHER, ids=str)
def test_rows_that_are_computed_together_come_to_where_they_come_alone(scheme, optimizer, tmp_path) -> None:
    rate = {"adadelta": 1.0}.get(optimizer, 0.05)
    chosen = Optimizer(
        f"{optimizer}{',' if ':' in optimizer else ':'}lr={rate}",
        schedule="cosine:warmup=0.3",
        **({} if scheme.plain_sgd else {"clip_norm": 0.2}),
    )
    found = []
    for mode in ("together", "loop"):
        result = pg.train(
            net(),
            rows(),
            optimizer=chosen,
            scheme=scheme,
            engine=pg.Vector(workers=3, mode=mode),
            batch_size=7,
            epochs=3,
            run=pg.Run(tmp_path / mode),
        )
        found.append(nn.utils.parameters_to_vector(result.model.parameters()).detach())
    assert torch.allclose(*found, atol=1e-9, rtol=0)
    assert float((found[0] - nn.utils.parameters_to_vector(net().parameters())).abs().max().detach()) > 0.001


def test_values_are_clipped_in_rows_too(tmp_path) -> None:
    found = []
    for mode in ("together", "loop"):
        engine, run = pg.Vector(workers=3, mode=mode), pg.Run(tmp_path / mode)
        result = pg.train(net(), rows(), optimizer=CHOICES["value"], engine=engine, batch_size=6, epochs=2, run=run)
        found.append(nn.utils.parameters_to_vector(result.model.parameters()).detach())
    assert torch.allclose(*found, atol=1e-9, rtol=0)


# -- real processes, replay, resume -----------------------------------------------------------------------------

CHOSEN = Optimizer("adam:lr=0.05", schedule="cosine:warmup=0.1", clip_norm=0.5)


@pytest.mark.parametrize("scheme", [pg.AGN(window=3), pg.SyncSGD()], ids=repr)
def test_a_run_with_a_schedule_repeats_to_the_bit(scheme: pg.Scheme, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pg.train(
        net(),
        rows(),
        loss="crossentropy",
        optimizer=CHOSEN,
        scheme=scheme,
        engine=pg.Local(workers=2),
        batch_size=6,
        epochs=3,
        run=pg.Run(out),
    )
    assert pg.replay(out, net(), rows()).equal  # what run.toml says
    assert pg.replay(out, net(), rows(), optimizer=CHOSEN).equal
    assert not pg.replay(out, net(), rows(), optimizer=replace(CHOSEN, schedule=None)).equal
    said = options.read_config(out / "run.toml")
    assert (said["optimizer"], said["schedule"], said["clip_norm"]) == ("adam:lr=0.05", "cosine:warmup=0.1", 0.5)
    assert Optimizer.from_settings(said) == CHOSEN


def test_an_answer_that_is_given_again_says_the_progress_of_the_first() -> None:
    made, said = Serial(job(pg.AGN(window=2), CHOSEN), 2), {}
    deliver = made.deliver

    def noted(replies: list[pg.Reply]) -> None:
        said.update({(reply.worker, reply.sequence): reply.progress for reply in replies})
        deliver(replies)

    made.deliver = noted
    made.run(commits=5)
    for actor in made.actors:
        (again,) = made.center.receive(actor.sent)
        assert again.progress == said[again.worker, again.sequence]
    assert min(said[actor.me.rank, actor.sent.sequence] for actor in made.actors) < made.center.progress


def test_a_run_whose_messages_come_twice_repeats_to_the_bit(tmp_path: Path) -> None:
    faults = tuple(pg.DuplicateMessage(worker=0, at=2.0 * k) for k in range(1, 8))
    cluster = pg.Cluster(latency=0.3, faults=faults)
    engine, out = pg.Vector(workers=3, mode="loop", cluster=cluster), tmp_path / "out"
    pg.train(
        net(),
        rows(),
        loss="crossentropy",
        optimizer=CHOSEN,
        scheme=pg.AGN(window=2),
        engine=engine,
        batch_size=3,
        epochs=3,
        run=pg.Run(out),
    )
    assert any(event.kind == "repeated" for event in read(out / "record.jsonl"))
    assert pg.replay(out, net(), rows()).equal


def test_a_resumed_run_goes_on_where_its_schedule_was(tmp_path: Path) -> None:
    def run(out: Path, **more) -> torch.Tensor:
        result = pg.train(
            net(),
            rows(),
            optimizer=CHOSEN,
            scheme=pg.SyncSGD(),
            engine=pg.Local(workers=2),
            batch_size=6,
            epochs=3,
            run=pg.Run(out, **more),
        )
        return nn.utils.parameters_to_vector(result.model.parameters()).detach()

    def stop(event: pg.Event) -> None:
        if event.kind == "commit" and event.data["clock"] == 7 and event.data["worker"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = run(tmp_path / "whole")
    with pytest.raises(pg.Interrupted, match=r"update ([7-9]|1\d)\b"):
        run(tmp_path / "parts", callbacks=(stop,))
    assert torch.equal(run(tmp_path / "parts", resume=True), whole)


def test_a_schedule_made_in_python_is_named_and_asked_for_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    chosen = Optimizer("sgd:lr=0.1", schedule=lambda done: 1 - done)
    pg.train(net(), rows(), loss="crossentropy", optimizer=chosen, engine=pg.Local(workers=2), batch_size=6, run=pg.Run(out))
    assert options.read_config(out / "run.toml")["schedule"] == "python:<lambda>"
    with pytest.raises(pg.UsageError, match=r"The schedule of the run .* optimizer=pg\.Optimizer\(\.\.\.\)"):
        pg.replay(out, net(), rows())
