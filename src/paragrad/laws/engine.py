"""check_engine: the laws that every engine must obey, on runs small enough to be compared with a plain loop."""

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
"""How far a run in float64 may end from the plain loop: sums are made in another order."""
ASIDE = {"directory", "checkpoint"}
"""What callbacks are told, and the record does not hold, or not where time is virtual."""


@runtime_checkable
class KnowsAlone(Protocol):
    """An engine of which more than one field goes by the number of workers."""

    def alone(self) -> Any:
        """The same with one worker."""


def check_engine(engine: Engine | str) -> tuple[str, ...]:
    """Run every law on an engine, through ``pg.train``; raise ``LawBroken`` with all that do not hold, else name those that do.

    The engine is tried as it is given, and with one worker. Models and data are small and made here; the runs are written to a
    directory that is gone afterwards. It takes seconds, and needs no time to itself: no law is about speed.
    """
    engine = named.engine(engine)
    if not is_dataclass(engine):
        raise UsageError(f"check_engine changes the number of workers, but {engine!r} is no dataclass: write it as one.")
    try:
        alone = engine.alone() if isinstance(engine, KnowsAlone) else replace(engine, workers=1)
    except ParagradError as error:
        raise UsageError(
            f"One law is about a lone worker, but {engine!r} cannot be had with workers=1 ({error}). Check one that can."
        ) from error
    with tempfile.TemporaryDirectory(prefix="paragrad-check-") as directory:
        enforce(LAWS, Trials(engine, alone, Path(directory)), f"{type(engine).__name__}(workers={engine.workers})")
    return tuple(law.__name__.replace("_", " ") for law in LAWS)


# -- the laws -------------------------------------------------------------------------------------------------------


def one_worker_is_plain_training(trials: Trials) -> None:
    """A lone worker with Downpour and an optimiser of its own ends where a plain loop does."""
    _is_close(trials.alone.done().model, trials.plain(1), "one worker")


def a_round_is_the_large_batch(trials: Trials) -> None:
    """SyncSGD of n workers ends where one process does with n times the batch, the uneven end of an epoch included."""
    workers = trials.engine.workers
    _is_close(trials.rounds.done().model, trials.plain(workers), f"SyncSGD with {workers} workers")


def a_window_in_flight_is_carried(trials: Trials) -> None:
    """With overlap a lone worker is plain training as well: what it moved while its commit was in flight is not lost."""
    _is_close(trials.alone_ahead.done().model, trials.plain(1), "one worker with overlap")


def every_row_is_used_once_an_epoch(trials: Trials) -> None:
    """By the record, whatever the scheme."""
    for trial in (trials.alone, trials.rounds, trials.rounds_ahead, trials.busy):
        trial.done()
        _used_once(trial, trials.plan)


def steps_and_rows_are_conserved(trials: Trials) -> None:
    """What commits say they hold is what the mini-batches in them are, and the summary is their sum."""
    for trial in (trials.rounds, trials.busy):
        summary, plan, commits = trial.done().summary, trials.plan, effective(trial.record)
        for commit in commits:
            batches = list(batches_used([commit]))
            steps, worker = commit.data["steps"], commit.data["worker"]
            assert steps == len(batches), (
                f"a commit of worker {worker} says {steps} steps, and holds {len(batches)} mini-batches"
            )
        made, samples = sum(commit.data["steps"] for commit in commits), summary["samples"]
        assert made == summary["steps"] == plan.positions, (
            f"{plan.positions} steps were due, commits hold {made}, and the summary says {summary['steps']}"
        )
        assert samples == plan.rows * plan.epochs, f"{plan.rows * plan.epochs} rows were due, and the summary says {samples}"


def the_clock_counts_updates(trials: Trials) -> None:
    """One by one, from 1, and what the summary counts is what was applied."""
    for trial in (trials.rounds, trials.busy):
        summary, commits = trial.done().summary, effective(trial.record)
        clocks = list(dict.fromkeys(commit.data["clock"] for commit in commits))
        assert clocks == list(range(1, len(clocks) + 1)), f"the clock does not tick one by one: {clocks[:12]}"
        assert len(commits) == summary["commits"], f"{len(commits)} commits were applied, the summary says {summary['commits']}"
        if trial is trials.busy:
            assert len(commits) == len(clocks), f"{len(commits)} commits were applied one by one, in {len(clocks)} updates"


def staleness_is_what_others_did_meanwhile(trials: Trials) -> None:
    """Both sides of the law are equal; and nobody waited, so that a window began from the answer to the commit before."""
    trials.busy.done()
    record = trials.busy.record
    for commit in effective(record):
        data = commit.data
        assert data["staleness"] == data["clock"] - 1 - data["version"] >= 0, f"update {data['clock']} has a wrong staleness"
    found = balance(record)
    assert found.holds, f"the staleness of all commits is {found.staleness}, but others explain {found.explained}"
    lost = any(event.kind in ("lost", "leave") for event in record)
    assert lost or not found.elsewhere, (
        f"windows began {abs(found.elsewhere)} updates {'later' if found.elsewhere > 0 else 'earlier'} than with the answer to "
        "their worker's last commit: commits do not tell the version that their window began from"
    )


def nan_never_enters(trials: Trials) -> None:
    """A commit that is not finite is refused, the center is untouched to the bit, and the rows are done again."""
    trial = trials.poisoned
    result = trial.done()
    refused = [event for event in trial.record if event.kind == "refused"]
    assert refused, "workers committed NaN, and no commit was refused"
    assert len(refused) == result.summary["refused_commits"], "the summary counts other refused commits than the record"
    assert not trial.moved_by_refused, f"a refused commit moved the center, at update {trial.moved_by_refused[0]}"
    weights = load_file(trial.directory / "model.safetensors")["weights"]
    assert bool(weights.isfinite().all()), "NaN is in the model"
    _used_once(trial, trials.plan)


def a_workers_exception_reaches_the_caller(trials: Trials) -> None:
    """As a WorkerError that names the worker, with the traceback of what it raised; and the run is ended in its record."""
    trial = trials.failing
    error = trial.error
    assert error is not None, "workers raised an exception, and the run ended as if nothing had happened"
    told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    assert isinstance(error, WorkerError), f"a worker raised ValueError, and the caller got {told}"
    assert 0 <= error.rank < trials.engine.workers, f"it is said to be worker {error.rank}, of {trials.engine.workers}"
    assert "Traceback" in error.reason, f"there is no traceback in it: {told}"
    assert Faulty.MESSAGE in error.reason, f"what the worker raised is not in it: {told}"
    assert trial.record[-1].kind == "end", "the record of a run that failed has no end"


def a_stopped_run_goes_on(trials: Trials) -> None:
    """From its checkpoint: the clock counts on, and every row is used once over both halves."""
    first, second = trials.halves
    stopped, ended = first.done(), second.done()
    assert stopped.stopped == "callback", f"a callback asked the run to stop, but it ended as {stopped.stopped!r}"
    before = max(event.data["clock"] for event in first.heard if event.kind == "commit")
    resumed = [event.data["clock"] for event in second.heard if event.kind == "resume"]
    assert resumed == [before], f"it was stopped at update {before}, and goes on from {resumed or 'nowhere'}"
    after = [event.data["clock"] for event in second.heard if event.kind == "commit"]
    assert after == list(range(before + 1, before + 1 + len(after))), "the clock does not count on where the run was stopped"
    assert ended.summary["commits"] == before + len(after), "the summary of a resumed run does not count all its commits"
    _used_once(second, trials.plan)


def the_record_can_be_replayed(trials: Trials) -> None:
    """In one process, from the order of arrivals alone: to the bit, or within the tolerance that the replay states."""
    for trial in (trials.rounds, trials.rounds_ahead, trials.busy, trials.halves[1]):
        trial.done()
        made = replay(trial.directory, trials.model(), trials.rows, optimizer=OPTIMIZER)
        assert made.within, f"the replay of {trial.directory.name!r} ends {made.largest:.1e} away from the run"


def the_run_directory_is_whole(trials: Trials) -> None:
    """run.toml, model.json, record, summary, checkpoint and model are there, and say what the caller was given."""
    trial = trials.busy
    result = trial.done()
    for name in ("run.toml", "model.json", "record.jsonl", "summary.json", "model.safetensors"):
        assert (trial.directory / name).is_file(), f"{name} is missing from the run directory"
    assert any((trial.directory / "checkpoints").iterdir()), "the run left no checkpoint"
    summary = json.loads((trial.directory / "summary.json").read_text(encoding="utf-8"))
    assert summary == json.loads(json.dumps(result.summary)), "summary.json is not result.summary"
    saved = load_file(trial.directory / "model.safetensors")
    state = result.model.state_dict()
    assert saved.keys() == state.keys(), f"the saved model has {sorted(saved)}, the trained one {sorted(state)}"
    other = [name for name, tensor in state.items() if not torch.equal(saved[name], tensor)]
    assert not other, f"{other[0]} of the saved model is not that of the trained one"


def callbacks_hear_what_is_recorded(trials: Trials) -> None:
    """Every event once, in the order of the record: start, go, commits, end; and time does not go back."""
    trial = trials.busy
    trial.done()
    heard = [event for event in trial.heard if event.kind not in ASIDE]
    kinds, written = [event.kind for event in heard], [event.kind for event in trial.record if event.kind not in ASIDE]
    assert kinds == written, f"callbacks heard {len(kinds)} events and the record has {len(written)}, or in another order"
    assert (kinds[0], kinds[-1]) == ("start", "end"), f"a run begins with {kinds[0]!r} and ends with {kinds[-1]!r}"
    assert kinds.count("go") == 1, f"the start barrier was passed {kinds.count('go')} times"
    assert kinds.index("go") < kinds.index("commit"), "a commit came before the start barrier was passed"
    times = [event.time for event in heard]
    assert times == sorted(times), "the time of an event lies before that of the one before it"


LAWS: Sequence[Callable[[Trials], None]] = (
    one_worker_is_plain_training,
    a_round_is_the_large_batch,
    a_window_in_flight_is_carried,
    every_row_is_used_once_an_epoch,
    steps_and_rows_are_conserved,
    the_clock_counts_updates,
    staleness_is_what_others_did_meanwhile,
    nan_never_enters,
    a_workers_exception_reaches_the_caller,
    a_stopped_run_goes_on,
    the_record_can_be_replayed,
    the_run_directory_is_whole,
    callbacks_hear_what_is_recorded,
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
