"""check_engine: laws that every engine must obey, tested on small runs that can be compared with a plain loop."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file
from torch import nn

from paragrad.analysis.staleness import balance
from paragrad.data.plan import Plan
from paragrad.engines.engine import Engine
from paragrad.errors import ParagradError, UsageError, WorkerError
from paragrad.jobs import named
from paragrad.laws.bowl import Faulty
from paragrad.laws.scheme import enforce
from paragrad.laws.trials import OPTIMIZER, Trial, Trials
from paragrad.replay.compare import replay
from paragrad.rundir.record import batches_used, effective

CLOSE = 1e-9
"""Largest difference between a run in float64 and the plain loop, which adds in another order."""
ASIDE = {"directory", "checkpoint"}
"""Events that callbacks receive, but that are not in the record, or not in virtual time."""


@runtime_checkable
class KnowsAlone(Protocol):
    """An engine with more than one field that depends on the number of workers."""

    def alone(self) -> Any:
        """Return the same engine with one worker."""


def check_engine(engine: Engine | str) -> tuple[str, ...]:
    """Test every law on an engine through ``pg.train``; return their names, or raise ``LawBroken`` with all broken laws.

    The engine is tested as given, and with one worker, on small models and data. The runs are written to a temporary directory.
    It takes seconds, and may run beside other processes, because no law depends on speed.
    """
    engine = named.engine(engine)
    if not is_dataclass(engine):
        raise UsageError(f"check_engine changes the number of workers, but {engine!r} is not a dataclass: make it one.")
    try:
        alone = engine.alone() if isinstance(engine, KnowsAlone) else replace(engine, workers=1)
    except ParagradError as error:
        raise UsageError(
            f"One law needs a single worker, but {engine!r} cannot have workers=1 ({error}). Check an engine that can."
        ) from error
    with tempfile.TemporaryDirectory(prefix="paragrad-check-") as directory:
        enforce(LAWS, Trials(engine, alone, Path(directory)), f"{type(engine).__name__}(workers={engine.workers})")
    return tuple(law.__name__.replace("_", " ") for law in LAWS)


# -- the laws -------------------------------------------------------------------------------------------------------


def one_worker_is_plain_training(trials: Trials) -> None:
    """A single worker with Downpour ends where a plain loop ends."""
    _is_close(trials.alone.done().model, trials.plain(1), "one worker")


def a_round_is_the_large_batch(trials: Trials) -> None:
    """SyncSGD with n workers ends where one process with n times the batch ends, including the uneven end of an epoch."""
    workers = trials.engine.workers
    _is_close(trials.rounds.done().model, trials.plain(workers), f"SyncSGD with {workers} workers")


def a_window_in_flight_is_carried(trials: Trials) -> None:
    """With overlap, a single worker is also plain training: its movement while a commit is in flight is not lost."""
    _is_close(trials.alone_ahead.done().model, trials.plain(1), "one worker with overlap")


def every_row_is_used_once_per_epoch(trials: Trials) -> None:
    """According to the record, with any scheme."""
    for trial in (trials.alone, trials.rounds, trials.rounds_ahead, trials.busy):
        trial.done()
        _used_once(trial, trials.plan)


def steps_and_rows_are_conserved(trials: Trials) -> None:
    """The steps of each commit are the number of its mini-batches, and the summary has their sum."""
    for trial in (trials.rounds, trials.busy):
        summary, plan, commits = trial.done().summary, trials.plan, effective(trial.record)
        for commit in commits:
            batches = list(batches_used([commit]))
            steps, worker = commit.data["steps"], commit.data["worker"]
            assert steps == len(batches), f"a commit of worker {worker} has {steps} steps, but {len(batches)} mini-batches"
        made, samples = sum(commit.data["steps"] for commit in commits), summary["samples"]
        assert made == summary["steps"] == plan.positions, (
            f"{plan.positions} steps were planned, commits have {made}, and the summary has {summary['steps']}"
        )
        assert samples == plan.rows * plan.epochs, f"{plan.rows * plan.epochs} rows were planned, and the summary has {samples}"


def the_clock_counts_updates(trials: Trials) -> None:
    """The clock counts from 1 without gaps, and the summary counts the applied commits."""
    for trial in (trials.rounds, trials.busy):
        summary, commits = trial.done().summary, effective(trial.record)
        clocks = list(dict.fromkeys(commit.data["clock"] for commit in commits))
        assert clocks == list(range(1, len(clocks) + 1)), f"the clock does not count one by one: {clocks[:12]}"
        assert len(commits) == summary["commits"], f"{len(commits)} commits were applied, the summary has {summary['commits']}"
        if trial is trials.busy:
            assert len(commits) == len(clocks), f"{len(commits)} commits were applied one by one, in {len(clocks)} updates"


def staleness_counts_the_updates_of_others(trials: Trials) -> None:
    """Both sides of the law of staleness are equal; no worker waited, so that a window began from the last answer."""
    trials.busy.done()
    record = trials.busy.record
    for commit in effective(record):
        data = commit.data
        assert data["staleness"] == data["clock"] - 1 - data["version"] >= 0, f"update {data['clock']} has a wrong staleness"
    found = balance(record)
    assert found.holds, f"the staleness of all commits is {found.staleness}, but updates of others explain {found.explained}"
    lost = any(event.kind in ("lost", "leave") for event in record)
    assert lost or not found.elsewhere, (
        f"windows began {abs(found.elsewhere)} updates {'later' if found.elsewhere > 0 else 'earlier'} than with the answer to "
        "their worker's last commit: commits do not contain the version that their window began from"
    )


def nan_never_enters(trials: Trials) -> None:
    """The center rejects a commit that is not finite and does not change by a bit, and the rows are trained again."""
    trial = trials.poisoned
    result = trial.done()
    refused = [event for event in trial.record if event.kind == "refused"]
    assert refused, "workers committed NaN, and no commit was rejected"
    assert len(refused) == result.summary["refused_commits"], "summary and record differ in the number of rejected commits"
    assert not trial.moved_by_refused, f"a rejected commit moved the center, at update {trial.moved_by_refused[0]}"
    weights = load_file(trial.directory / "model.safetensors")["weights"]
    assert bool(weights.isfinite().all()), "NaN is in the model"
    _used_once(trial, trials.plan)


def a_workers_exception_reaches_the_caller(trials: Trials) -> None:
    """The caller gets a WorkerError with rank and traceback, and the record has an event ``end``."""
    trial = trials.failing
    error = trial.error
    assert error is not None, "workers raised an exception, and the run ended as if nothing had happened"
    got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    assert isinstance(error, WorkerError), f"a worker raised ValueError, and the caller got {got}"
    assert 0 <= error.rank < trials.engine.workers, f"it names worker {error.rank}, of {trials.engine.workers}"
    assert "Traceback" in error.reason, f"the error has no traceback: {got}"
    assert Faulty.MESSAGE in error.reason, f"the message of the worker is missing: {got}"
    assert trial.record[-1].kind == "end", "the record of a run that failed has no end"


def a_stopped_run_can_be_resumed(trials: Trials) -> None:
    """It resumes from its checkpoint: the clock continues, and every row is used once over both halves."""
    first, second = trials.halves
    stopped, ended = first.done(), second.done()
    assert stopped.stopped == "callback", f"a callback asked the run to stop, but it ended as {stopped.stopped!r}"
    before = max(event.data["clock"] for event in first.events if event.kind == "commit")
    resumed = [event.data["clock"] for event in second.events if event.kind == "resume"]
    assert resumed == [before], f"it was stopped at update {before}, and resumes from {resumed or 'nowhere'}"
    after = [event.data["clock"] for event in second.events if event.kind == "commit"]
    assert after == list(range(before + 1, before + 1 + len(after))), "the clock does not continue where the run was stopped"
    assert ended.summary["commits"] == before + len(after), "the summary of a resumed run does not count all its commits"
    _used_once(second, trials.plan)


def the_record_can_be_replayed(trials: Trials) -> None:
    """A replay in one process, in the recorded order, gives the same bits, or a result within its tolerance."""
    for trial in (trials.rounds, trials.rounds_ahead, trials.busy, trials.halves[1]):
        trial.done()
        made = replay(trial.directory, trials.model(), trials.rows, optimizer=OPTIMIZER)
        assert made.within, f"the replay of {trial.directory.name!r} ends {made.largest:.1e} away from the run"


def the_run_directory_is_complete(trials: Trials) -> None:
    """run.toml, model.json, record, summary, checkpoint and model exist and match the result of the caller."""
    trial = trials.busy
    result = trial.done()
    for name in ("run.toml", "model.json", "record.jsonl", "summary.json", "model.safetensors"):
        assert (trial.directory / name).is_file(), f"{name} is missing from the run directory"
    assert any((trial.directory / "checkpoints").iterdir()), "the run left no checkpoint"
    summary = json.loads((trial.directory / "summary.json").read_text(encoding="utf-8"))
    assert summary == json.loads(json.dumps(result.summary)), "summary.json differs from result.summary"
    saved = load_file(trial.directory / "model.safetensors")
    state = result.model.state_dict()
    assert saved.keys() == state.keys(), f"the saved model has {sorted(saved)}, the trained one {sorted(state)}"
    other = [name for name, tensor in state.items() if not torch.equal(saved[name], tensor)]
    assert not other, f"{other[0]} of the saved model differs from the trained one"


def callbacks_receive_what_is_recorded(trials: Trials) -> None:
    """Callbacks receive every event once, in the order of the record: start, go, commits, end; time does not go back."""
    trial = trials.busy
    trial.done()
    received = [event for event in trial.events if event.kind not in ASIDE]
    kinds, written = [event.kind for event in received], [event.kind for event in trial.record if event.kind not in ASIDE]
    assert kinds == written, f"callbacks received {len(kinds)} events, the record has {len(written)}, or in another order"
    assert (kinds[0], kinds[-1]) == ("start", "end"), f"a run begins with {kinds[0]!r} and ends with {kinds[-1]!r}"
    assert kinds.count("go") == 1, f"the start barrier was passed {kinds.count('go')} times"
    assert kinds.index("go") < kinds.index("commit"), "a commit came before the start barrier was passed"
    times = [event.time for event in received]
    assert times == sorted(times), "an event has an earlier time than the one before it"


LAWS: Sequence[Callable[[Trials], None]] = (
    one_worker_is_plain_training,
    a_round_is_the_large_batch,
    a_window_in_flight_is_carried,
    every_row_is_used_once_per_epoch,
    steps_and_rows_are_conserved,
    the_clock_counts_updates,
    staleness_counts_the_updates_of_others,
    nan_never_enters,
    a_workers_exception_reaches_the_caller,
    a_stopped_run_can_be_resumed,
    the_record_can_be_replayed,
    the_run_directory_is_complete,
    callbacks_receive_what_is_recorded,
)


def _is_close(mine: nn.Module, plain: nn.Module, who: str) -> None:
    pairs = zip(mine.parameters(), plain.parameters(), strict=True)
    gap = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    assert gap < CLOSE, f"{who} ends {gap:.1e} away from the plain loop"


def _used_once(trial: Trial, plan: Plan) -> None:
    used = batches_used(effective(trial.record))
    never = [position for position in range(plan.positions) if not used[position]]
    again = [position for position, times in used.items() if times > 1 or position >= plan.positions]
    name = trial.directory.name
    assert not never, f"in the run {name!r}, {len(never)} of {plan.positions} mini-batches were never used"
    assert not again, f"in the run {name!r}, mini-batch {again[0]} was used {used[again[0]]} times"
