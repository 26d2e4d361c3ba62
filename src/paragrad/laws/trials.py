"""The runs on which an engine is tested, small enough to be compared with a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.data.plan import Plan
from paragrad.engines.engine import Engine
from paragrad.laws.bowl import SIZE, Faulty
from paragrad.result import Result
from paragrad.run import Run
from paragrad.rundir.record import read
from paragrad.schemes.agn import AGN
from paragrad.schemes.downpour import Downpour
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.syncsgd import SyncSGD
from paragrad.train import train
from paragrad.types import Event, Vector

BATCH, EPOCHS, WINDOW = 4, 3, 2
RATE, MOMENTUM = 0.05, 0.9
OPTIMIZER = f"sgd:lr={RATE},momentum={MOMENTUM}"


@dataclass
class Trial:
    """A run with its result and the events that its callbacks received."""

    directory: Path
    result: Result | None = None
    error: Exception | None = None
    events: list[Event] = field(default_factory=list)
    moved_by_refused: list[int] = field(default_factory=list)
    """Clocks at which a rejected commit changed the center."""

    @property
    def record(self) -> list[Event]:
        """Recorded events."""
        return list(read(self.directory))

    def done(self) -> Result:
        """Return the result; raise if the run failed."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class _Callback:
    """Keeps events, compares the center before and after a rejected commit, and stops the run at an update."""

    def __init__(self, trial: Trial, stop_at: int | None) -> None:
        self._trial = trial
        self._stop_at = stop_at
        self._center: Any = None
        self._value: Vector | None = None

    def watch(self, center: Any) -> None:
        """Keep the center of the run."""
        self._center, self._value = center, center.value.clone()

    def __call__(self, event: Event) -> bool | None:
        self._trial.events.append(event)
        if event.kind == "commit" and self._center is not None:
            self._value = self._center.value.clone()
        elif event.kind == "refused" and self._value is not None and not torch.equal(self._value, self._center.value):
            self._trial.moved_by_refused.append(self._center.clock)
        return event.kind == "commit" and event.data["clock"] == self._stop_at


@dataclass
class Trials:
    """The runs that the laws use, each made when it is first needed."""

    engine: Engine
    lone: Engine
    directory: Path

    def __post_init__(self) -> None:
        workers = self.engine.workers
        rows = max(46, BATCH * (2 * workers + 1) - 2)  # a short last mini-batch, and rounds that do not divide evenly
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, 5, dtype=torch.float64, generator=generator)
        self.rows = x, (x[:, :3] + 0.3 * x[:, 2:]).argmax(1)
        self.points = torch.randn(rows, SIZE, dtype=torch.float64, generator=generator)
        self.plan = Plan(rows, BATCH, EPOCHS, 0)

    def model(self) -> nn.Module:
        """Return a small network in float64, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def plain(self, together: int) -> nn.Module:
        """Train on the same rows in a plain loop, with this many mini-batches of an epoch per step."""
        model, plan, (x, y) = self.model(), self.plan, self.rows
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        for first in range(0, plan.positions, plan.batches):
            for lo in range(first, first + plan.batches, together):
                rows = [row for p in range(lo, min(lo + together, first + plan.batches)) for row in plan.rows_of(p)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return model

    @cached_property
    def alone(self) -> Trial:
        """One worker that adds its movement to the center unchanged."""
        return self._train("alone", Downpour(window=WINDOW), engine=self.lone)

    @cached_property
    def rounds(self) -> Trial:
        """All workers in synchronous rounds."""
        return self._train("rounds", SyncSGD())

    @cached_property
    def alone_ahead(self) -> Trial:
        """One worker that computes its next window while its commit is in flight."""
        return self._train("alone-ahead", Downpour(window=WINDOW, overlap=1), engine=self.lone)

    @cached_property
    def rounds_ahead(self) -> Trial:
        """All workers in synchronous rounds, each computing its next gradient while the last is in flight."""
        return self._train("rounds-ahead", SyncSGD(overlap=1))

    @cached_property
    def busy(self) -> Trial:
        """All workers, asynchronous."""
        return self._train("busy", AGN(window=WINDOW))

    @cached_property
    def halves(self) -> tuple[Trial, Trial]:
        """A run that is stopped in the middle and resumed."""
        half = max(2, self.plan.positions // (2 * WINDOW))
        return self._train("halves", AGN(window=WINDOW), stop_at=half), self._train("halves", AGN(window=WINDOW), resume=True)

    @cached_property
    def poisoned(self) -> Trial:
        """Each worker makes one step that is NaN."""
        return self._train("poisoned", AGN(window=WINDOW), model=partial(Faulty, "nan"), data=self.points)

    @cached_property
    def failing(self) -> Trial:
        """Workers that raise an exception."""
        return self._train("failing", AGN(window=WINDOW), model=partial(Faulty, "raise"), data=self.points)

    def _train(
        self,
        name: str,
        scheme: Scheme,
        *,
        engine: Engine | None = None,
        model: nn.Module | Callable[[], Any] | None = None,
        data: Any = None,
        stop_at: int | None = None,
        resume: bool = False,
    ) -> Trial:
        trial = Trial(self.directory / name)
        run = Run(out=trial.directory, resume=resume, checkpoint_every=None, callbacks=(_Callback(trial, stop_at),))
        try:
            trial.result = train(
                self.model() if model is None else model,
                self.rows if data is None else data,
                scheme=scheme,
                engine=engine or self.engine,
                epochs=EPOCHS,
                batch_size=BATCH,
                optimizer=OPTIMIZER if model is None else None,
                run=run,
                verbose=0,
            )
        except Exception as error:
            trial.error = error
        return trial
