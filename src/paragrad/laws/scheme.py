"""check_scheme: laws that every scheme must obey, tested on a problem that is small enough to be exact."""

from __future__ import annotations

import pickle
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from dataclasses import replace as changed
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch

from paragrad.core import update
from paragrad.core.job import Job
from paragrad.core.replica import Replica
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial, same
from paragrad.errors import ParagradError, UsageError
from paragrad.jobs import named
from paragrad.laws.bowl import SIZE, Bowl
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_shared

ROWS = 42
"""11 mini-batches, which no tested number of workers divides evenly."""
BATCH = 4
EPOCHS = 3
MOST = 8
"""Schemes that need more workers than this cannot be checked."""


T = TypeVar("T")


class LawBroken(ParagradError, AssertionError):
    """A scheme or an engine does not obey a law."""


def check_scheme(scheme: Scheme | str, *, plain: bool = False) -> None:
    """Test every law on a scheme; raise ``LawBroken`` with all broken laws.

    ``plain``: also test that one worker is plain training, within a tolerance. This holds for schemes whose center adds the
    movement of a single worker unchanged (Downpour, model averaging), not for elastic or normalised ones. Windows are limited
    to 8 steps, because the problem is small and must contain several of them. The laws are tested with 1 to 4 workers, or with
    the least number above that the quorum of the scheme allows.
    """
    scheme = named.scheme(scheme)
    it_is_a_frozen_dataclass(scheme)
    scheme = changed(scheme, window=min(scheme.window, 8))
    enforce([*LAWS, *([one_worker_is_plain_training] if plain else [])], scheme, repr(scheme))


def enforce(laws: Sequence[Callable[[T], None]], given: T, who: str) -> None:
    """Test every law; raise ``LawBroken`` with all broken laws and the reasons."""
    broken: dict[str, list[str]] = {}  # reason -> laws, because one mistake may break nearly all laws
    for law in laws:
        try:
            law(given)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError | ParagradError) else _describe(error)
            broken.setdefault(reason, []).append(law.__name__.replace("_", " "))
    if broken:
        lines = [f"- {first}{f' (and {len(more)} more)' if more else ''}: {why}" for why, (first, *more) in broken.items()]
        count = sum(map(len, broken.values()))
        raise LawBroken(f"{who} breaks {count} of {len(laws)} laws:\n" + "\n".join(lines))


def _describe(error: Exception) -> str:
    """Return an error with its last line in a file of the scheme."""
    ours, torchs = Path(__file__).parents[1], Path(torch.__file__).parent
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if torchs not in file.parents and (ours not in file.parents or ours / "schemes" in file.parents):
            place = f" (in {frame.name}, {file.name} line {frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"


# -- the laws -------------------------------------------------------------------------------------------------------


def it_is_a_frozen_dataclass(scheme: Scheme) -> None:
    """Annotated attributes are fields: without @dataclass they would be neither arguments nor part of run.toml."""
    known = {field.name for field in fields(scheme)}
    for cls in type(scheme).__mro__:
        wild = [n for n, kind in vars(cls).get("__annotations__", {}).items() if n not in known and "ClassVar" not in str(kind)]
        if wild:
            raise LawBroken(
                f"{cls.__name__} has {wild[0]!r}, which is not a field: write @dataclass(frozen=True) above the class."
            )


def it_rejects_a_window_of_0(scheme: Scheme) -> None:
    """A ``__post_init__`` calls that of the base class."""
    try:
        changed(scheme, window=0)
    except UsageError:
        return
    raise AssertionError("window=0 was accepted: call super().__post_init__() in __post_init__")


def it_can_be_pickled_and_hashed(scheme: Scheme) -> None:
    """A pickled copy is equal, and the scheme can be a key of a dictionary."""
    assert pickle.loads(pickle.dumps(scheme)) == scheme, "it differs from its own pickled copy; write it as a frozen dataclass"
    hash(scheme)


def the_same_order_gives_the_same_bits(scheme: Scheme) -> None:
    """A scheme is not random, and keeps no state from an earlier run."""
    first, second = _run(scheme, 3), _run(scheme, 3)
    assert same(first.center.value, second.center.value), "two runs in the same order end at different centers"


def every_row_is_used_once(scheme: Scheme) -> None:
    """In any order, with rows dealt or stolen, also if workers crash."""
    for workers in (1, 2, 3):
        for stolen in (False, True):
            for crashes in (0, 4):
                serial = _run(scheme, workers, stolen=stolen, seed=workers, crashes=crashes)
                _used_once(serial)


def steps_are_conserved(scheme: Scheme) -> None:
    """Steps run = steps in applied, dropped and rejected commits, including the last short window."""
    serial = _serial(scheme, 3)
    rejected: list[int] = []
    serial.center.refused = lambda commit, why: rejected.append(commit.steps)
    serial.run()
    applied = sum(commit.steps for commit in serial.applied)
    assert serial.steps_run == applied + sum(rejected), (
        f"{serial.steps_run} steps were run, but {applied} were applied and {sum(rejected)} rejected"
    )


def the_clock_counts_updates(scheme: Scheme) -> None:
    """Staleness is a number of updates and never negative."""
    serial = _run(scheme, 3, seed=5)
    rounds = len({id(commit) for commit in serial.applied}) if _quorum(scheme, 3) == 1 else None
    clock = serial.center.clock
    assert rounds is None or clock == rounds, f"{rounds} commits were applied, but the clock is {clock}"
    assert all(0 <= commit.staleness <= clock for commit in serial.applied), "a commit has an impossible staleness"
    assert clock >= 1


def mean_staleness_is_the_number_of_others(scheme: Scheme) -> None:
    """n equal workers that do not wait and adopt every answer: τ = n - 1 once all have started (overlap: 2n - 1)."""
    if _quorum(scheme, 3) != 1 or scheme.early or scheme.late == "drop" or is_shared(scheme):
        return
    if type(scheme).steps is not Scheme.steps or scheme.bound is not None:
        return
    serial = _serial(scheme, 3, stolen=True)
    serial.run(commits=9)
    found, expected = {commit.staleness for commit in serial.applied[6:]}, 5 if scheme.overlap else 2
    if type(scheme).adopt is Scheme.adopt:
        assert found == {expected}, f"with 3 workers in turn every staleness must be {expected}, but they are {sorted(found)}"


def every_commit_changes_the_center(scheme: Scheme) -> None:
    """If one worker commits other values, the center ends at another point."""
    if is_shared(scheme) or scheme.late == "drop":
        return
    ends = []
    for odd in (None, 0, 1, 2):
        serial = _serial(scheme, 3)
        serial.start()
        if odd is not None:
            serial.actors[odd].learner.curvature *= 1.01  # type: ignore[attr-defined]
        serial.run(commits=15)
        ends.append(serial.center.value.clone())
    ignored = [worker for worker in range(3) if same(ends[0], ends[1 + worker])]
    assert not ignored, f"the commits of worker {ignored[0]} do not change the center"


def commits_and_answers_are_read_only(scheme: Scheme) -> None:
    """The center does not write into the value of a commit, nor a worker into an answer."""
    serial = _run(scheme, 3)
    assert not serial.meddled, serial.meddled[0]


def no_worker_waits_for_one_that_left(scheme: Scheme) -> None:
    """If a worker leaves in the middle, perhaps with a commit in an open round, the others use all rows."""
    for seed in range(6):
        dice = random.Random(seed)
        serial = _serial(scheme, 3, stolen=bool(seed % 2))
        serial.choose = dice.choice
        serial.start()
        for _ in range(dice.randrange(1, 12)):
            if serial.ready:
                serial.step(dice.choice(serial.ready))
        serial.leave(dice.randrange(3))
        serial.run()
        _used_once(serial)


def a_synchronous_round_does_not_depend_on_the_order_of_arrival(scheme: Scheme) -> None:
    """With quorum n, the speeds of the workers do not change the result."""
    if _quorum(scheme, 3) != _allowed(scheme, 3) or not scheme.held:
        return
    ends = [_run(scheme, 3, seed=seed).center.value for seed in (None, 1, 2)]
    assert all(same(ends[0], end) for end in ends), "the center depends on the order of arrival"


def blocks_give_the_same_result(scheme: Scheme) -> None:
    """An element-wise scheme gives the same result block by block as on the whole vector."""
    if not scheme.elementwise:
        return
    whole = _run(scheme, 2).center.value
    # The optimiser of these laws has no state, so that it may step on blocks, like the optimisers of shards.
    with patch.object(update, "BLOCK", 3), patch.object(update, "in_blocks", lambda center: True):
        blocks = _run(scheme, 2).center.value
    assert same(whole, blocks), "elementwise = True, but blocks of 3 elements give another center"


def commit_changes_only_slots(scheme: Scheme) -> None:
    """``commit`` does not change the weights, the anchor or the center."""
    if is_shared(scheme):
        return
    me = Replica(torch.linspace(1, 2, SIZE, dtype=torch.float64), slots=scheme.worker_slots)
    me.anchor = me.center = torch.linspace(0, 1, SIZE, dtype=torch.float64)
    me.steps, me.lr = 2, 0.1
    me.gradient.fill_(0.5)
    before = (me.local.clone(), me.anchor.clone(), me.center.clone())
    scheme.commit(me)
    after = (me.local, me.anchor, me.center)
    assert all(same(b, a) for b, a in zip(before, after, strict=True)), "commit() changed the weights, the anchor or the center"


def a_repeated_commit_changes_nothing(scheme: Scheme) -> None:
    """The center answers a commit that it gets again, but does not apply it again."""
    serial = _serial(scheme, 1)
    serial.run(commits=2)
    sent = serial.actors[0].sent
    assert sent is not None
    before, clock = serial.center.value.clone(), serial.center.clock
    serial.center.receive(sent)
    assert serial.center.clock == clock, "a repeated commit was applied again"
    assert same(before, serial.center.value), "a repeated commit moved the center"


def nan_never_enters(scheme: Scheme) -> None:
    """The center rejects a commit that is not finite, and its rows are trained again."""
    if is_shared(scheme):
        return
    serial = _serial(scheme, 2)
    serial.run(commits=2)
    sent = serial.actors[0].sent
    assert sent is not None
    before = serial.center.value.clone()
    bad = changed(
        sent, sequence=sent.sequence + 1, value=torch.full_like(sent.value, float("nan")), version=serial.center.clock
    )
    serial.actors[0].reply = None
    serial.deliver(serial.center.receive(bad))
    assert same(before, serial.center.value), "NaN moved the center"
    for rank in [rank for rank in serial.ready if rank != 0]:
        serial.step(rank)  # in a round, NaN may be found only when the others have committed
    assert bool(torch.isfinite(serial.center.value).all()), "NaN entered the center"
    reply = serial.actors[0].reply
    assert reply is not None, "a rejected worker got no answer"
    assert not reply.applied, "a rejected commit was reported as applied"


def a_restored_center_continues(scheme: Scheme) -> None:
    """After a restore from a snapshot the clock continues, and every row is used once over both halves."""
    for commits in (1, 4, 10, 11, 12):
        first = _serial(scheme, 2)
        first.run(commits=commits)
        second = _serial(scheme, 2)
        second.center.restore(first.center.snapshot())
        assert same(second.center.value, first.center.value), "the restored center differs"
        clock = second.center.clock
        second.applied = list(first.applied)
        second.start()
        second.run()
        finished = first.center.leases.used == first.center.leases.total
        assert finished or second.center.clock > clock, "the clock does not advance after a restore"
        _used_once(second)
        if _is_repeatable(scheme):
            unbroken = _run(scheme, 2).center.value
            assert same(second.center.value, unbroken), "a restored synchronous run differs from an uninterrupted one"


def crashes_do_not_change_a_synchronous_run(scheme: Scheme) -> None:
    """If workers keep no state between rounds, and nothing is in flight, a replacement repeats exactly the lost work."""
    if _is_repeatable(scheme):
        unbroken = _run(scheme, 3).center.value
        for seed in range(8):
            broken = _run(scheme, 3, seed=seed, crashes=5).center.value
            assert same(broken, unbroken), "crashed and replaced workers change the result"


def _is_repeatable(scheme: Scheme) -> bool:
    everyone = all(_quorum(scheme, workers) == _allowed(scheme, workers) for workers in (2, 3))
    return everyone and scheme.held and scheme.ships == "gradient" and not (scheme.worker_slots or scheme.overlap)


def it_descends(scheme: Scheme) -> None:
    """With a small learning rate, the loss of the bowl decreases with 1, 2 and 4 workers."""
    source = _rows()
    for workers in (1, 2, 4):
        serial = _serial(scheme, workers, epochs=12)
        start = Bowl().evaluate(source, ROWS)["loss"]
        best = Bowl(weights=source.tree.mean(0)).evaluate(source, ROWS)["loss"]
        serial.run()
        end = Bowl(weights=serial.center.value).evaluate(source, ROWS)["loss"]
        assert end - best < 0.7 * (start - best), (
            f"with {workers} workers the loss went from {start:.3f} to {end:.3f} (best {best:.3f})"
        )


def one_worker_is_plain_training(scheme: Scheme) -> None:
    """Within a tolerance, because a + (w - a) is rounded."""
    plan, source, bowl = _plan(), _rows(), Bowl()
    for position in range(plan.positions):
        bowl.step(source.batch(plan.rows_of(position)))
    serial = _run(scheme, 1)
    gap = float((serial.center.value - bowl.weights).abs().max())
    assert gap < 1e-12, f"one worker ends {gap:.1e} away from plain training"


LAWS: list[Callable[[Scheme], None]] = [
    it_can_be_pickled_and_hashed,
    it_rejects_a_window_of_0,
    the_same_order_gives_the_same_bits,
    every_row_is_used_once,
    steps_are_conserved,
    the_clock_counts_updates,
    every_commit_changes_the_center,
    commits_and_answers_are_read_only,
    no_worker_waits_for_one_that_left,
    mean_staleness_is_the_number_of_others,
    a_synchronous_round_does_not_depend_on_the_order_of_arrival,
    blocks_give_the_same_result,
    commit_changes_only_slots,
    a_repeated_commit_changes_nothing,
    nan_never_enters,
    a_restored_center_continues,
    crashes_do_not_change_a_synchronous_run,
    it_descends,
]


# -- the problem ----------------------------------------------------------------------------------------------------


def _rows() -> Arrays:
    return Arrays(torch.randn(ROWS, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def _plan(epochs: int = EPOCHS) -> Plan:
    return Plan(rows=ROWS, batch_size=BATCH, epochs=epochs, seed=0)


def _allowed(scheme: Scheme, workers: int) -> int:
    """Return the number of workers, or the least number above that the scheme allows."""
    for count in range(workers, MOST):
        try:
            scheme.quorum(count)
        except UsageError:
            continue
        return count
    scheme.quorum(MOST)
    return MOST


def _quorum(scheme: Scheme, workers: int) -> int:
    return scheme.quorum(_allowed(scheme, workers))


def _serial(scheme: Scheme, workers: int, *, stolen: bool = False, epochs: int = EPOCHS) -> Serial:
    return Serial(
        Job(scheme, lambda device: Bowl(), _rows(), None, _plan(epochs), ROWS), _allowed(scheme, workers), stolen=stolen
    )


def _run(scheme: Scheme, workers: int, *, stolen: bool = False, seed: int | None = None, crashes: int = 0) -> Serial:
    """Make a whole run; with a seed in random order, and with crashes between exchanges."""
    serial = _serial(scheme, workers, stolen=stolen)
    if seed is None:
        serial.run()
        return serial
    dice = random.Random(seed)
    serial.choose = dice.choice
    serial.start()
    for _ in range(crashes):
        for _ in range(dice.randrange(1, 9)):
            if serial.ready:
                serial.step(dice.choice(serial.ready))
        if serial.center.live:
            serial.crash(dice.choice(sorted(serial.center.live)))
    serial.run()
    return serial


def _used_once(serial: Serial) -> None:
    used = Counter(position for commit in serial.applied for position in commit.batches)
    total = serial.job.plan.positions
    never = total - len(used)
    twice = [position for position, times in used.items() if times > 1]
    assert not never, f"{never} of {total} mini-batches were never used"
    assert not twice, f"mini-batches {twice[:5]} were used more than once"
