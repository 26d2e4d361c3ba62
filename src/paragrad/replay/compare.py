"""replay(...): repeat a run from its record, in one process, and compare the centers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from paragrad import codecs, schemes
from paragrad.codecs.codec import Codec
from paragrad.config import options
from paragrad.core.center import Center
from paragrad.data import load
from paragrad.engines.process.devices import usable_cores
from paragrad.errors import UsageError
from paragrad.jobs import named, recipe
from paragrad.jobs.build import build_job, read_rows
from paragrad.learners.criterion import Loss
from paragrad.learners.learner import Learner
from paragrad.models import toys
from paragrad.models.builtin import is_keras
from paragrad.optim.choice import SETTINGS, Optimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.replay.engine import Replay
from paragrad.replay.history import History
from paragrad.replay.history import read as read_history
from paragrad.rundir import checkpoint, record
from paragrad.rundir.directory import named_tensors
from paragrad.rundir.outcome import bring, trained
from paragrad.rundir.snapshots import PENDING
from paragrad.schemes.scheme import Scheme
from paragrad.train import digest

TOLERANCE = 1e-3
"""The difference that is allowed where the run was computed in another way than its replay: rounding grows with a run."""


@dataclass(frozen=True)
class Compared:
    """A center of the run beside that of the replay."""

    what: str
    """The file that holds it."""
    clock: int
    equal: bool
    """To the bit."""
    largest: float
    """The largest absolute difference."""
    relative: float
    """The same as a share of the largest value of the tensor it is in."""


@dataclass(frozen=True)
class Replayed:
    """What came of a replay."""

    directory: Path
    clock: int
    """Updates made again."""
    commits: int
    """Commits that they were made of."""
    compared: tuple[Compared, ...]
    """Each center that the run has left: its checkpoints, and its model if it was finished."""
    tolerance: float
    """The largest absolute difference that is allowed."""
    strayed: str | None
    """The first commit whose loss is not the recorded one, where there is any."""
    notes: tuple[str, ...]
    seconds: float
    model: Any
    """The model as the replay trained it."""

    @property
    def equal(self) -> bool:
        """Whether every center is the same to the bit."""
        return all(pair.equal for pair in self.compared)

    @property
    def largest(self) -> float:
        """The largest absolute difference in any of them."""
        return max((pair.largest for pair in self.compared), default=0.0)

    @property
    def relative(self) -> float:
        """The same as a share of the largest value of a tensor."""
        return max((pair.relative for pair in self.compared), default=0.0)

    @property
    def within(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.equal or self.largest <= self.tolerance

    def __repr__(self) -> str:
        """A line: a notebook shows what a cell ends with."""
        return (
            f"Replayed(equal={self.equal}, largest={self.largest:.3g}, clock={self.clock}, directory={str(self.directory)!r})"
        )


def replay(
    directory: str | Path,
    model: nn.Module | Callable[[], Learner] | None = None,
    data: Any = None,
    *,
    holdout: float | None = None,
    loss: Loss | str | None = None,
    optimizer: OptimizerLike | None = None,
    scheme: Scheme | str | None = None,
    codec: Codec | str | None = None,
    tolerance: float | None = None,
) -> Replayed:
    """Repeat the run in a directory: the same windows, commits and answers, in the order in which its center heard of them.

    directory   of a run, finished or not; one that was resumed is repeated from its beginning
    model       as it was given to ``pg.train``, untrained; None: what run.toml names
    data        as it was given to ``pg.train``; None: what run.toml names
    holdout, loss, optimizer    as they were given to ``pg.train``; None: what run.toml says
    scheme, codec   only where it is one of your own
    tolerance   the largest absolute difference that still counts as the same (``Replayed.within``); None: 0 where workers
                were computed one after another on the CPU, which gives the same bits, else ``TOLERANCE``
    """
    directory = Path(directory)
    settings, history = _read(directory)
    start = history.attempts[0].start
    mine: Scheme = _own("scheme", None if scheme is None else named.scheme(scheme), start["scheme"], schemes, directory)
    codec = None if "codec" not in start else _own("codec", named.codec(codec), start["codec"], codecs, directory)
    notes = _notes(history)
    if model is None:
        model, source = _from_recipe(settings, data, holdout, directory)
    else:
        source = _source(settings, model, data, holdout, loss)
    _check_data(source.train, start, directory)
    loss = _given("loss", loss, settings, directory)
    if optimizer is None and not is_keras(model):
        _given("optimizer", None, settings, directory)
        _given("schedule", None, settings, directory)
        optimizer = Optimizer.from_settings(settings)
    job = build_job(
        model,
        dataclasses.replace(source, validation=None),
        scheme=mine,
        codec=codec,
        loss=loss,
        optimizer=optimizer,
        workers=start["workers"],
        epochs=start["epochs"],
        batch_size=start["batch_size"],
        seed=start["seed"],
        partition=start["partition"],
        distances=start["distances"],
    )
    learner = job.make_learner("cpu")
    job.check(learner)
    _check_model(learner, start, directory)

    left = _Left(directory, history, notes)
    stage = Replay(job, learner, history, looked=left.compare)
    began = time.perf_counter()
    center = stage.run()
    seconds = time.perf_counter() - began
    clock, tensors = left.kept or (center.clock, center.model())
    bring(learner, tensors)
    final = trained(model, learner, center)
    if history.whole:
        left.compare_model(learner, clock)
    left.note_what_was_not_reached()
    return Replayed(
        directory=directory,
        clock=center.clock,
        commits=stage.commits,
        compared=tuple(left.compared),
        tolerance=(0.0 if _bits(history) else TOLERANCE) if tolerance is None else tolerance,
        strayed=None if stage.strayed is None else f"arrival {stage.strayed.number} ({stage.strayed})",
        notes=tuple(notes + stage.notes),
        seconds=seconds,
        model=final,
    )


class _Left:
    """The centers that a run has left behind, compared with those of its replay as they are made."""

    def __init__(self, directory: Path, history: History, notes: list[str]) -> None:
        self.compared: list[Compared] = []
        self._model = directory / "model.safetensors"
        self._notes = notes
        self._checkpoints: dict[int, Path] = {}
        self._kept_at = _kept_at(directory) if history.whole else None
        self.kept: tuple[int, dict[str, torch.Tensor]] | None = None
        """The update whose weights the run has kept, and its center, where they are the best and not the last."""
        for path in sorted((directory / "checkpoints").glob("[0-9]*")):
            self._checkpoints[int(path.name)] = path
        if not self._checkpoints and not (history.whole and self._model.exists()):
            raise UsageError(
                f"The run in {directory} has left neither a model nor a checkpoint: there is nothing to compare a replay with."
            )

    def compare(self, center: Center) -> None:
        """Called with the center after every update."""
        if center.clock == self._kept_at:
            self.kept = center.clock, {name: tensor.clone() for name, tensor in center.model().items()}
        path = self._checkpoints.pop(center.clock, None)
        if path is None:
            return
        try:
            theirs = checkpoint.load(path).tensors
        except checkpoint.Damaged as error:
            self._notes.append(f"Checkpoint {path.name} is damaged ({error}) and was not compared.")
            return
        mine = center.snapshot().tensors()
        # What each worker was last given changes when one joins, too: it goes by arrivals, and not by updates.
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(("answer.", PENDING))}
        self.compared.append(_compared(f"checkpoints/{path.name}", center.clock, mine, theirs))

    def compare_model(self, learner: Learner, clock: int) -> None:
        """The model at the end of a run."""
        try:
            theirs = load_file(self._model)
        except (OSError, SafetensorError) as error:
            self._notes.append(f"{self._model.name} cannot be read ({error}) and was not compared.")
            return
        self.compared.append(_compared(self._model.name, clock, named_tensors(learner)[0], theirs))

    def note_what_was_not_reached(self) -> None:
        """Checkpoints that the replay did not come to."""
        for path in self._checkpoints.values():
            self._notes.append(f"Checkpoint {path.name} is of an update that the replay did not make: it was not compared.")


def _kept_at(directory: Path) -> int | None:
    """The update whose weights a run has kept, where they are the best; None: the last."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads((directory / "summary.json").read_text(encoding="utf-8"))["kept"]
        return int(kept["clock"]) if kept["weights"] == "best" else None
    return None


def _compared(what: str, clock: int, mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> Compared:
    pairs = [_difference(mine.get(name), tensor) for name, tensor in theirs.items()]
    return Compared(
        what=what,
        clock=clock,
        equal=all(equal for equal, _, _ in pairs),
        largest=max((largest for _, largest, _ in pairs), default=0.0),
        relative=max((relative for _, _, relative in pairs), default=0.0),
    )


def _difference(mine: torch.Tensor | None, theirs: torch.Tensor) -> tuple[bool, float, float]:
    """Whether two tensors are equal to the bit, and by how much they differ, absolutely and as a share of the largest value."""
    if mine is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return False, float("inf"), float("inf")
    if not theirs.numel():
        return True, 0.0, 0.0
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (mine, theirs)]
    if torch.equal(*bits):
        return True, 0.0, 0.0
    largest = float((mine.double() - theirs.double()).abs().max())
    scale = float(theirs.double().abs().max())
    return False, largest, largest / scale if scale else float("inf")


# -- what was given, and whether it is that of the run ------------------------------------------------------------------


def _read(directory: Path) -> tuple[dict[str, Any], History]:
    file = record.file_of(directory)
    settings = options.read_config(directory / "run.toml")
    history = read_history(record.read(file))
    if not history.attempts:
        raise UsageError(f"The record in {str(directory)!r} does not say how its run began: there is nothing to replay.")
    first = history.attempts[0].start
    for attempt in history.attempts:
        for key in ("loss", *SETTINGS):
            began, went_on = first.get(key), attempt.start.get(key)
            if went_on != began:
                raise UsageError(
                    f"The run in {directory} began with {key} {began!r} and went on with {went_on!r}: such a run cannot be "
                    "replayed."
                )
    return settings, history


def _own(kind: str, given: Any, recorded: str, table: options.Table, directory: Path) -> Any:
    """The scheme or codec of the run: by its name, or as it was given, where it is one of the user's own."""
    name = options.parse_fields(recorded)[0]
    if given is None and name not in [known.lower() for known in table.names()]:
        raise UsageError(
            f"The run in {directory} was made with {kind} {recorded!r}, which is none of paragrad's: give {kind}=."
        )
    mine = options.parse(recorded, kind, table) if given is None else given
    if options.describe(mine) != recorded:
        raise UsageError(f"{kind}={options.describe(mine)!r}, but the run in {directory} was made with {recorded!r}.")
    return mine


def _notes(history: History) -> list[str]:
    notes = []
    last = history.attempts[-1].start
    if not _bits(history):
        notes.append(
            f"The run was made on engine {last['engine']!r}, and is repeated one worker after another on this CPU: the last "
            f"bits may differ, and differences grow with the run (allowed: {TOLERANCE:g})."
        )
    if last["torch"] != torch.__version__:
        notes.append(f"The run was made with torch {last['torch']}, this is {torch.__version__}: the last bits may differ.")
    if last["threads"] > usable_cores():
        notes.append(f"The run's workers had {last['threads']} threads each, here are {usable_cores()} cores: it takes longer.")
    if history.ended is None:
        notes.append("The run has not ended, or was cut off: it is repeated as far as its record goes.")
    elif not history.whole:
        notes.append(f"The run came to no model ({history.ended}): it is compared with its checkpoints.")
    return notes


def _bits(history: History) -> bool:
    """Whether the run was computed as its replay is: the same bits are then expected."""
    engine, fields = options.split_fields(history.attempts[-1].start["engine"])
    alone = engine == "local" or fields.get("mode") == "loop"
    return alone and fields.get("device", "cpu") == "cpu"


def _given(key: str, given: Any, settings: Mapping[str, Any], directory: Path) -> Any:
    """What was given, or what run.toml says."""
    value = settings.get(key) if given is None else given
    if isinstance(value, str) and value.startswith("python:"):
        also = {"model": "", "schedule": ", optimizer=pg.Optimizer(...)"}.get(key, f", {key}=...")
        call = f"pg.replay(directory, model, data{also})"
        raise UsageError(
            f"The {key} of the run in {directory} was made in Python ({value}), which a run.toml cannot repeat: call {call} in "
            f"Python, with the {key} that was given to pg.train."
        )
    return value


def _from_recipe(
    settings: Mapping[str, Any], data: Any, holdout: float | None, directory: Path
) -> tuple[nn.Module, load.Split]:
    for key in ("model", "loss", "optimizer", "schedule"):
        _given(key, None, settings, directory)
    changed = {key: value for key, value in (("data", data), ("holdout", holdout)) if value is not None}
    model, rows = recipe.build({"loss": None, **settings, **changed})
    wanted = {"holdout": rows.get("holdout"), "seed": settings["seed"], "loss": settings.get("loss")}
    return model, read_rows(model, rows["data"], **wanted)


def _source(settings: Mapping[str, Any], model: Any, data: Any, holdout: float | None, loss: Any) -> load.Split:
    if data is None:
        data = recipe.data_of(settings)
        if isinstance(data, str) and data != "digits" and not (isinstance(model, toys.Toy) or Path(data).exists()):
            raise UsageError(f"The run was trained on {data!r}, which is no file here: give data=, as to pg.train.")
    holdout = settings.get("holdout") if holdout is None else holdout
    wanted = settings.get("loss") if loss is None else loss
    return read_rows(model, data, holdout=holdout, seed=settings["seed"], loss=wanted)


def _check_data(train: Any, start: Mapping[str, Any], directory: Path) -> None:
    mine = load.fingerprint(train)
    if mine != start["fingerprint"] or len(train) != start["rows"]:
        raise UsageError(
            f"The data is not that of the run in {directory}: {len(train):,} rows with the fingerprint {mine}, but the run had "
            f"{start['rows']:,} with {start['fingerprint']}. Give the data (and holdout) as they were then."
        )


def _check_model(learner: Learner, start: Mapping[str, Any], directory: Path) -> None:
    if learner.weights.numel() != start["parameters"]:
        raise UsageError(
            f"The model has {learner.weights.numel():,} parameters, but that of the run in {directory} had "
            f"{start['parameters']:,}. Give the model of the run."
        )
    mine = digest(learner.weights)
    if mine != start["weights"]:
        raise UsageError(
            f"The model does not begin from the weights that the run in {directory} began from (digest {mine}, and was "
            f"{start['weights']}). Give the model as it was before the run, made with the same seed."
        )
