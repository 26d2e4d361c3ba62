"""replay(...): repeat a run from its record in one process, and compare the centers."""

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
from paragrad.learners.learner import Learner, Saves
from paragrad.models import toys
from paragrad.models.builtin import is_keras
from paragrad.optim.choice import SETTINGS, Optimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.replay.engine import Replay
from paragrad.replay.history import History
from paragrad.replay.history import read as read_history
from paragrad.rundir import checkpoint, record
from paragrad.rundir.directory import named_tensors, read_tensors
from paragrad.rundir.outcome import bring, trained
from paragrad.rundir.snapshots import PENDING
from paragrad.schemes.scheme import Scheme
from paragrad.train import digest

TOLERANCE = 1e-3
"""Largest difference allowed if the run was computed in another way than its replay: rounding errors grow with a run."""


@dataclass(frozen=True)
class Compared:
    """Comparison of a center of the run with that of the replay."""

    what: str
    """File of the run."""
    clock: int
    equal: bool
    """True if equal to the bit."""
    largest: float
    """Largest absolute difference."""
    relative: float
    """Largest difference relative to the largest value of its tensor."""


@dataclass(frozen=True)
class Replayed:
    """Result of a replay."""

    directory: Path
    clock: int
    """Number of repeated updates."""
    commits: int
    """Number of repeated commits."""
    compared: tuple[Compared, ...]
    """One comparison per checkpoint, and one for the model if the run finished."""
    tolerance: float
    """Largest absolute difference that is allowed."""
    strayed: str | None
    """First commit whose loss differs from the record, if any."""
    notes: tuple[str, ...]
    seconds: float
    model: Any
    """Model that the replay trained."""

    @property
    def equal(self) -> bool:
        """True if every center is equal to the bit."""
        return all(pair.equal for pair in self.compared)

    @property
    def largest(self) -> float:
        """Largest absolute difference in any center."""
        return max((pair.largest for pair in self.compared), default=0.0)

    @property
    def relative(self) -> float:
        """Largest difference relative to the largest value of its tensor."""
        return max((pair.relative for pair in self.compared), default=0.0)

    @property
    def within(self) -> bool:
        """True if all differences are within the tolerance."""
        return self.equal or self.largest <= self.tolerance

    def __repr__(self) -> str:
        """Return one line, without the model, for notebooks."""
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
    """Repeat the run in a directory: the same windows, commits and answers, in the order in which they reached the center.

    directory   of a run, finished or not; a resumed run is repeated from its beginning
    model       as given to ``pg.train``, untrained; None: the model that run.toml names
    data        as given to ``pg.train``; None: the data that run.toml names
    holdout, loss, optimizer    as given to ``pg.train``; None: from run.toml
    scheme, codec   only if user-defined
    tolerance   largest absolute difference that still counts as equal (``Replayed.within``); None: 0 for runs whose workers
                were computed one after another on the CPU, which gives the same bits, else ``TOLERANCE``
    """
    directory = Path(directory)
    settings, history = _read(directory)
    start = history.attempts[0].start
    mine: Scheme = _resolve("scheme", None if scheme is None else named.scheme(scheme), start["scheme"], schemes, directory)
    codec = None if "codec" not in start else _resolve("codec", named.codec(codec), start["codec"], codecs, directory)
    notes = _notes(history)
    model, source = _model_and_rows(model, data, holdout, loss, settings, directory)
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

    files = _Files(directory, history, notes)
    repetition = Replay(job, learner, history, updated=files.compare)
    began = time.perf_counter()
    center = repetition.run()
    seconds = time.perf_counter() - began
    clock, tensors = files.kept or (center.clock, center.model())
    bring(learner, tensors)
    final = trained(model, learner, center)
    if history.whole:
        files.compare_model(learner, clock)
    files.note_missing_updates()
    return Replayed(
        directory=directory,
        clock=center.clock,
        commits=repetition.commits,
        compared=tuple(files.compared),
        tolerance=(0.0 if _expects_same_bits(history) else TOLERANCE) if tolerance is None else tolerance,
        strayed=None if repetition.strayed is None else f"arrival {repetition.strayed.number} ({repetition.strayed})",
        notes=tuple(notes + repetition.notes),
        seconds=seconds,
        model=final,
    )


class _Files:
    """Checkpoints and model of a run, compared with the centers of its replay."""

    def __init__(self, directory: Path, history: History, notes: list[str]) -> None:
        self.compared: list[Compared] = []
        self._model = directory / "model.safetensors"
        self._notes = notes
        self._checkpoints = {int(path.name): path for path in sorted((directory / "checkpoints").glob("[0-9]*"))}
        self._kept_at = _kept_at(directory) if history.whole else None
        self.kept: tuple[int, dict[str, torch.Tensor]] | None = None
        """Update and center of the weights that the run kept, if they are the best and not the last."""
        if not self._checkpoints and not (history.whole and self._model.exists()):
            raise UsageError(
                f"The run in {directory} has neither a model nor a checkpoint: there is nothing to compare a replay with."
            )

    def compare(self, center: Center) -> None:
        """Compare the center after an update with the checkpoint of that update, if there is one."""
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
        # Answers depend on joins as well as on updates, so that they may differ at the same update.
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(("answer.", PENDING))}
        self.compared.append(_compared(f"checkpoints/{path.name}", center.clock, mine, theirs))

    def compare_model(self, learner: Learner, clock: int) -> None:
        """Compare the final model."""
        try:
            theirs, _ = read_tensors(self._model)
        except (OSError, SafetensorError, ValueError) as error:
            self._notes.append(f"{self._model.name} cannot be read ({error}) and was not compared.")
            return
        mine, _ = named_tensors(learner)
        if isinstance(learner, Saves) and len(mine) == len(theirs):  # names of Keras layers differ from model to model
            theirs = dict(zip(mine, theirs.values(), strict=True))
        self.compared.append(_compared(self._model.name, clock, mine, theirs))

    def note_missing_updates(self) -> None:
        """Add a note on each checkpoint of an update that the replay did not make."""
        for path in self._checkpoints.values():
            self._notes.append(f"Checkpoint {path.name} was not compared, because the replay did not make its update.")


def _kept_at(directory: Path) -> int | None:
    """Return the update of the weights that a run kept, if they are the best; None for the last."""
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
    """Return whether two tensors are equal to the bit, and their largest absolute and relative difference."""
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


# -- arguments, and whether they match the run --------------------------------------------------------------------------


def _read(directory: Path) -> tuple[dict[str, Any], History]:
    file = record.file_of(directory)
    settings = options.read_config(directory / "run.toml")
    history = read_history(record.read(file))
    if not history.attempts:
        raise UsageError(f"The record in {str(directory)!r} has no event start: there is nothing to replay.")
    first = history.attempts[0].start
    for attempt in history.attempts:
        for key in ("loss", *SETTINGS):
            before, after = first.get(key), attempt.start.get(key)
            if after != before:
                raise UsageError(
                    f"The run in {directory} was started with {key} {before!r} and resumed with {after!r}. Such a run cannot "
                    "be replayed."
                )
    return settings, history


def _resolve(kind: str, given: Any, recorded: str, table: options.Table, directory: Path) -> Any:
    """Return the scheme or codec of the run: by its name, or as given if it is user-defined."""
    name = options.parse_fields(recorded)[0]
    if given is None and name not in [known.lower() for known in table.names()]:
        raise UsageError(f"The run in {directory} was made with {kind} {recorded!r}, which is user-defined: give {kind}=.")
    mine = options.parse(recorded, kind, table) if given is None else given
    if options.describe(mine) != recorded:
        raise UsageError(f"{kind}={options.describe(mine)!r}, but the run in {directory} was made with {recorded!r}.")
    return mine


def _notes(history: History) -> list[str]:
    notes = []
    last = history.attempts[-1].start
    if not _expects_same_bits(history):
        notes.append(
            f"The run was made on engine {last['engine']!r}, but the replay computes one worker after another on this CPU. The "
            f"last bits may differ, and differences grow with the run (allowed: {TOLERANCE:g})."
        )
    if last["torch"] != torch.__version__:
        notes.append(f"The run was made with torch {last['torch']}, this is {torch.__version__}: the last bits may differ.")
    if last["threads"] > usable_cores():
        notes.append(f"The run had {last['threads']} threads per worker, but here are {usable_cores()} cores: it takes longer.")
    if history.ended is None:
        notes.append("The run has not ended, or was killed: it is repeated up to the end of its record.")
    elif not history.whole:
        notes.append(f"The run has no model ({history.ended}): only its checkpoints are compared.")
    return notes


def _expects_same_bits(history: History) -> bool:
    """Return whether the run was computed like its replay, which then gives the same bits."""
    engine, fields = options.split_fields(history.attempts[-1].start["engine"])
    alone = engine == "local" or fields.get("mode") == "loop"
    return alone and fields.get("device", "cpu") == "cpu"


def _given(key: str, given: Any, settings: Mapping[str, Any], directory: Path) -> Any:
    """Return an argument or, without one, the setting in run.toml; raise if that was made in Python."""
    value = settings.get(key) if given is None else given
    if isinstance(value, str) and value.startswith("python:"):
        also = {"model": "", "schedule": ", optimizer=pg.Optimizer(...)"}.get(key, f", {key}=...")
        call = f"pg.replay(directory, model, data{also})"
        raise UsageError(
            f"The {key} of the run in {directory} was made in Python ({value}), which a run.toml cannot repeat: call {call} in "
            f"Python, with the {key} that was given to pg.train."
        )
    return value


def _model_and_rows(
    model: Any, data: Any, holdout: float | None, loss: Any, settings: Mapping[str, Any], directory: Path
) -> tuple[Any, load.Split]:
    """Return the model and the rows: as given, or as run.toml names them."""
    if model is None:
        for key in ("model", "loss", "optimizer", "schedule"):
            _given(key, None, settings, directory)
        changed = {key: value for key, value in (("data", data), ("holdout", holdout)) if value is not None}
        model, rows = recipe.build({"loss": None, **settings, **changed})
        data, loss = rows["data"], None
    elif data is None:
        data = recipe.data_of(settings)
        if isinstance(data, str) and data != "digits" and not (isinstance(model, toys.Toy) or Path(data).exists()):
            raise UsageError(f"The run was trained on {data!r}, which is not a file here: give data= as for pg.train.")
    holdout = settings.get("holdout") if holdout is None else holdout
    loss = settings.get("loss") if loss is None else loss
    return model, read_rows(model, data, holdout=holdout, seed=settings["seed"], loss=loss)


def _check_data(train: Any, start: Mapping[str, Any], directory: Path) -> None:
    mine = load.fingerprint(train)
    if mine != start["fingerprint"] or len(train) != start["rows"]:
        raise UsageError(
            f"The data differs from that of the run in {directory}: {len(train):,} rows with fingerprint {mine}, but the run "
            f"had {start['rows']:,} with {start['fingerprint']}. Give the data (and holdout) of the run."
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
            f"The model does not have the initial weights of the run in {directory} (digest {mine} instead of "
            f"{start['weights']}). Give the model as it was before the run, made with the same seed."
        )
