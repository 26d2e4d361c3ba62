"""Workers are killed, stopped, and crash: the others lose nothing, and every row is used once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.schemes.traits import name_of
from tests.conftest import Watch, every_batch_once, stop_after, train

TOTAL = 50 * 4
SCHEMES = [pg.SyncSGD(), pg.AGN(window=3), pg.AEASGD(window=3), pg.DiLoCo(window=3), pg.ModelAveraging(window=3), pg.Downpour()]


def kill(watch: Watch, event: pg.Event) -> None:
    watch.signal((event.data["worker"] + 1) % 3, signal.SIGKILL)


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_a_killed_worker_is_replaced_and_every_row_is_used_once(scheme, model, rows, tmp_path):
    watch = Watch(at=5, act=kill)
    result = train(model, rows, tmp_path / "run", watch, scheme=scheme)
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["lost_workers"] == 1
    assert watch.kinds()["worker"] == 4
    assert result.summary["samples"] == 400 * 4


def test_a_stopped_worker_is_replaced_while_others_go_on(model, rows, tmp_path):
    def stop(watch: Watch, event: pg.Event) -> None:
        watch.signal((event.data["worker"] + 1) % 3, signal.SIGSTOP)

    watch = Watch(at=5, act=stop)
    result = train(model, rows, tmp_path / "run", watch, scheme=pg.AGN(window=3), engine=pg.Local(workers=3, replace_after=0.5))
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["lost_workers"] == 1
    (lost,) = [event for event in watch.events if event.kind == "lost"]
    assert "SIGKILL" in lost.data["reason"]


class Touchy(nn.Module):
    """Misbehaves once, in the process that gets to make the file."""

    def __init__(self, inner: nn.Module, flag: Path, how: str, often: bool = False) -> None:
        super().__init__()
        self.inner, self.flag, self.how, self.often = inner, flag, how, often
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training and self.calls > 6 and (self.often or self._first()):
            if self.how == "raise":
                raise RuntimeError("the detector is on fire")
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.inner(x)

    def _first(self) -> bool:
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


@pytest.mark.parametrize("how", ["exit", "segfault"])
def test_a_crashing_worker_is_replaced(how, model, rows, tmp_path):
    result = train(Touchy(model, tmp_path / "flag", how), rows, tmp_path / "run", scheme=pg.AGN(window=3))
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["lost_workers"] == 1


def test_an_exception_in_a_worker_reaches_the_caller_with_rank_and_traceback(model, rows, tmp_path):
    with pytest.raises(pg.WorkerError, match="the detector is on fire") as caught:
        train(Touchy(model, tmp_path / "flag", "raise"), rows, tmp_path / "run", scheme=pg.AGN(window=3))
    assert caught.value.rank in range(3)
    assert "Traceback" in str(caught.value)
    assert "in forward" in str(caught.value)
    assert list((tmp_path / "run" / "checkpoints").iterdir()), "what was trained must be kept"


def test_an_exception_can_be_survived(model, rows, tmp_path):
    engine = pg.Local(workers=3, on_failure="replace")
    result = train(Touchy(model, tmp_path / "flag", "raise"), rows, tmp_path / "run", scheme=pg.AGN(window=3), engine=engine)
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["lost_workers"] == 1


def test_a_worker_that_dies_three_times_without_a_commit_ends_the_run_naming_the_signal(model, rows, tmp_path):
    with pytest.raises(pg.WorkerError, match="SIGSEGV 3 times without making a commit"):
        train(Touchy(model, tmp_path / "flag", "segfault", often=True), rows, tmp_path / "run", scheme=pg.AGN(window=10))


def test_a_nan_is_refused_counted_and_ends_the_run_as_diverged(rows, tmp_path):
    class Nan(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (float("nan") if self.training else 1.0)

    watch = Watch()
    with pytest.raises(pg.Diverged, match="3 times in a row"):
        train(Nan(8, 2), rows, tmp_path / "run", watch, scheme=pg.Downpour())
    assert watch.kinds()["refused"] >= 3
    assert watch.kinds()["commit"] == 0


def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 100 * nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    "engine",
    [pg.Local(workers=2), pg.Vector(workers=2), pg.Network(workers=2, here=2), pg.Network(workers=2, here=2, shards=2)],
    ids=["local", "vector", "network", "shards"],
)
def test_a_run_that_diverged_at_the_center_goes_on_as_if_it_had_not(engine, model, rows, tmp_path):
    """The optimiser has made a step that came to nothing, and is no longer that of the weights: it is not in a checkpoint."""

    def go_on(out: str, lr: float, *callbacks, resume: bool = True) -> pg.Result:
        return pg.train(
            model,
            (rows[0], rows[1]),
            loss=steep,
            engine=engine,
            scheme=pg.SyncSGD(),
            optimizer=f"sgd:lr={lr},momentum=0.9",
            batch_size=8,
            epochs=2,
            run=pg.Run(tmp_path / out, resume=resume, callbacks=callbacks, checkpoint_every=None),
        )

    whole = go_on("whole", 0.001, resume=False)
    go_on("run", 0.001, stop_after(20), resume=False)
    with pytest.raises(pg.Diverged, match="would have made the center infinite"):
        go_on("run", 3e38)
    result = go_on("run", 0.001)
    assert every_batch_once(tmp_path / "run", 100)
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), whole.model.parameters(), strict=True))


def test_workers_log_into_the_run_directory(rows, tmp_path):
    class Chatty(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("said by", os.getpid(), file=sys.stderr)
            return super().forward(x)

    watch = Watch()
    result = train(Chatty(8, 2), rows, tmp_path / "run", watch, scheme=pg.AGN(window=3))
    for rank, pid in watch.pids.items():
        assert f"said by {pid}" in (result.directory / "logs" / f"worker-{rank}.log").read_text()


def test_workers_that_build_different_models_are_refused(rows, tmp_path):
    parent = os.getpid()

    def make() -> pg.TorchLearner:
        width = 4 if os.getpid() == parent else 5
        return pg.TorchLearner(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2)), nn.CrossEntropyLoss(), "sgd")

    with pytest.raises(
        pg.UsageError, match=r"built a model of 57 values .* the center has 46 .*Every worker must build the same"
    ):
        train(make, rows, tmp_path / "run")
