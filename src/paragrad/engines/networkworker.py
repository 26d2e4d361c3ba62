"""A worker that has joined a center over a network: drives the worker's loop, its exchanges over a line or a shared memory."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from paragrad.data.load import fingerprint
from paragrad.engines.heads import CODED, head_of
from paragrad.engines.line import Ended, Line, Place, Replaced
from paragrad.engines.localworker import Exchange, Post, Reader, drive, guarded, warm_learner
from paragrad.engines.memory import FAST
from paragrad.engines.processes import usable_cores
from paragrad.engines.residuals import Residuals
from paragrad.engines.shared import Segment
from paragrad.engines.slot import Slot
from paragrad.engines.spread import Pulls, Slices, sound
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.state import private
from paragrad.transport.message import Vectors
from paragrad.types import Commit, Reply, Vector


def guest_main(post: Post) -> None:
    """A child of the center's process that joins it like any other worker."""
    guarded(post, _join)


def _join(post: Post, job: Job) -> None:
    assert post.line is not None
    line = Line(post.line.directory, post.line.token, shared=post.line.shared, rank=post.rank, say=print)
    learner = warm_learner(job, post.device)
    try:
        work_on(job, learner, line, same_as(job, learner))
    except Ended as ended:
        print(f"The run is over: {ended}.")


def same_as(job: Job, learner: Learner) -> dict[str, Any]:
    """What must be the same here as at the center."""
    return {"layout": layout_of(learner), "data": fingerprint(job.train)}


def layout_of(learner: Learner) -> dict[str, Any]:
    """What two models must have in common to be one: how many numbers, of which type, under which names."""
    module = getattr(learner, "module", None)
    named = [] if module is None else [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    return {
        "parameters": learner.weights.numel(),
        "dtype": str(learner.weights.dtype).removeprefix("torch."),
        "buffers": learner.buffers.numel(),
        "integers": learner.integers.numel(),
        "names": f"{zlib.crc32(repr(named).encode()):08x}",
    }


def work_on(job: Job, learner: Learner, line: Line, same: dict[str, Any], *, shares_cores: bool = False) -> None:
    """Train until there are no rows left; a worker that was given up meanwhile begins again. ``shares_cores``: it computes
    with as many threads as its machine has for each worker that is on it."""
    while True:
        place = line.take_place(same)
        left = None if job.codec is None else Residuals(learner.weights, place.run, place.rank)
        aside, keep = ThreadPoolExecutor(1 + len(place.shards), "paragrad-exchange"), True
        try:
            exchange = _exchange_of(job, learner, line, place, left, aside)
            exchange.shares_cores = shares_cores
            drive(job, exchange, incarnation=place.incarnation)
            line.leave()
            keep = False
            return
        except Replaced:
            keep = False
        except Ended as ended:
            keep = left is not None and str(ended) != "finished" and not line.bring(left.after)
            raise
        finally:
            aside.shutdown(wait=False, cancel_futures=True)  # who is interrupted does not wait for an answer
            if left is not None:
                left.close(keep=keep)


def _exchange_of(
    job: Job, learner: Learner, line: Line, place: Place, left: Residuals | None, aside: ThreadPoolExecutor
) -> Joined:
    if place.file is not None:
        try:
            return Beside(job, learner, line, place, left, aside)
        except FileNotFoundError:  # the same machine, but another container
            place = line.unshare()
    return (Spread if place.shards else Away)(job, learner, line, place, left, aside)


class Joined(Exchange, ABC):
    """What both have in common: an exchange goes on in a thread of its own, so that a window may be computed meanwhile."""

    def __init__(self, line: Line, left: Residuals | None, aside: ThreadPoolExecutor, *arguments: Any, **keywords: Any) -> None:
        self._line = line
        self._left = left
        """What the codec leaves out of commits; None without one."""
        self._wanted = False
        """The center asks for it, with the next commit."""
        self._aside = aside
        self._commit: Commit | None = None
        self._given: Vector | None = None
        self.shares_cores = False
        self._neighbours = 1
        super().__init__(*arguments, **keywords)
        self._flight: Future[Any] = aside.submit(self._exchange)

    def send(self, commit: Commit) -> None:
        """Lay the commit out, and let it go."""
        super().send(commit)
        self._commit = commit
        if self._left is not None:
            self._left.sent(commit)
        self._flight = self._aside.submit(self._exchange)

    def receive(self) -> Reply:
        """Wait for the answer, and take it."""
        self._flight.result()
        reply = self._take()
        if self._left is not None:
            self._left.answered(reply, self._commit)
        return reply

    def _take(self) -> Reply:
        if self.shares_cores and self._line.neighbours != self._neighbours:
            self._neighbours = self._line.neighbours
            torch.set_num_threads(max(1, usable_cores() // self._neighbours))
        return super().receive()

    @abstractmethod
    def _exchange(self) -> None:
        """One exchange, to its answer."""

    def _head(self) -> dict[str, Any]:
        if self._commit is not None:
            return {"op": "commit", **head_of(self._commit)}
        return {"op": "begin"} if self._left is None else {"op": "begin", "kept": self._left.kept}

    def _brought(self) -> dict[str, torch.Tensor]:
        """What the codec has left out, where the center wants to know."""
        if self._commit is None or self._commit.residual is None or not self._wanted:
            return {}
        return {"residual": self._commit.residual}

    def _handed(self, back: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Room for what a newcomer is given of what its predecessor's commits have left out."""
        if self._left is None or not any(name == "residual" for name, *_ in back.get("vectors", ())):
            return {}
        self._given = torch.empty_like(self._left.rows[0])
        return {"residual": self._given}

    def _residual(self, back: dict[str, Any]) -> Vector | None:
        """What a newcomer goes on from: it is given, or lies here still; None: nothing is known of it."""
        self._wanted = bool(back.get("wanted"))
        if self._left is None or self._commit is not None:
            return None
        return self._left.of(back["last"]) if back.get("keep") else self._given


class Away(Joined):
    """Vectors go over the line, from and into memory of this worker's own."""

    def __init__(
        self, job: Job, learner: Learner, line: Line, place: Place, left: Residuals | None, aside: ThreadPoolExecutor
    ) -> None:
        like = learner.weights
        slot = Slot.make(private, place.rank, job, learner, window=place.window)
        slot.residuals = [] if left is None else left.rows
        super().__init__(
            line,
            left,
            aside,
            job,
            learner,
            slot,
            _Pulls(line, torch.empty_like(like)),
            workers=place.workers,
            incarnation=place.incarnation,
            answer=torch.empty_like(like),
            home=None,
        )

    def _exchange(self) -> None:
        back = self._line.exchange(self._head, self._vectors, self._room)
        slot = self._slot
        slot.put_reply(
            Reply(
                worker=slot.worker,
                sequence=back["sequence"],
                version=back["version"],
                value=slot.value,
                steps=back["steps"],
                batches=tuple(back["batches"]),
                applied=back["applied"],
                done=back["done"],
                last=back["last"],
                progress=back["progress"],
                residual=self._residual(back),
            )
        )

    def _vectors(self) -> Vectors:
        if self._commit is None:
            return {}
        slot, size, coded = self._slot, self._commit.value.numel(), self._commit.coded
        vectors = {"value": slot.value[:size]} if coded is None else {CODED + name: tensor for name, tensor in coded.items()}
        vectors |= {f"also.{name}": vector[:size] for name, vector in slot.also.items()}
        vectors |= {"buffers": slot.buffers, "integers": slot.integers, **self._brought()}
        return {name: vector for name, vector in vectors.items() if vector.numel() or name.startswith(CODED)}

    def _room(self, back: dict[str, Any]) -> Vectors:
        """Where the answer goes; nowhere, if it is none."""
        if "sequence" not in back:
            return {}
        assert self._answer is not None
        rooms = {"value": self._answer, "buffers": self._slot.reply_buffers, "integers": self._slot.reply_integers}
        return {name: room for name, room in rooms.items() if room.numel()} | self._handed(back)


class _Pulls:
    """The center as it is read over the line."""

    def __init__(self, line: Line, live: Vector) -> None:
        self._line = line
        self.live_value = live

    def pull(self, value: Vector) -> int:
        """Copy the center into ``value``; returns its clock."""
        back = self._line.exchange(lambda: {"op": "pull"}, dict, lambda back: {"value": value} if "clock" in back else {})
        return int(back["clock"])


class Spread(Away):
    """The center is spread over several processes: each has its slice of every vector."""

    def __init__(
        self, job: Job, learner: Learner, line: Line, place: Place, left: Residuals | None, aside: ThreadPoolExecutor
    ) -> None:
        self._slices = Slices(line, place, aside, job.codec)
        self._sound = True
        super().__init__(job, learner, line, place, left, aside)
        self._reader = Pulls(self._reader, self._slices)

    def _exchange(self) -> None:
        super()._exchange()
        assert self._answer is not None
        self._slices.fetch(self._answer, self._slot.get_reply(self._answer).version)

    def _head(self) -> dict[str, Any]:
        head = super()._head()
        if self._commit is None:
            return head
        vectors = super()._vectors()
        self._sound = sound({**vectors, "value": self._slot.value})  # where that is coded: as it will be decoded
        if not self._sound:
            return {**head, "staged": self._slices.life, "beside": 0}
        life = self._slices.put(vectors, self._commit.sequence)
        return {**head, "staged": life, "beside": self._slices.weight(vectors)}

    def _vectors(self) -> Vectors:
        vectors = super()._vectors()
        return self._slices.first(vectors) if self._sound else self._slices.spoiled(vectors)

    def _room(self, back: dict[str, Any]) -> Vectors:
        return self._slices.first(super()._room(back))


class Beside(Joined):
    """On the center's own machine: vectors lie in its memory, and only words go over the line."""

    def __init__(
        self, job: Job, learner: Learner, line: Line, place: Place, left: Residuals | None, aside: ThreadPoolExecutor
    ) -> None:
        self._place = place
        self._left = left
        slot, reader, answer = self._open(job, learner, place)
        super().__init__(
            line,
            left,
            aside,
            job,
            learner,
            slot,
            reader,
            workers=place.workers,
            incarnation=place.incarnation,
            answer=answer,
            home=None,
        )

    def _open(self, job: Job, learner: Learner, place: Place) -> tuple[Slot, Reader, Vector | None]:
        assert place.file is not None
        assert place.layout is not None
        segment = Segment(_opened(Path(place.file)), place.layout)
        slot = Slot.make(lambda name, *_: segment.tensor(name), place.rank, job, learner, window=place.window)
        slot.residuals = [] if self._left is None else self._left.rows
        return slot, Reader(segment), segment.tensor(f"answer{place.rank}") if place.answers else None

    def _exchange(self) -> None:
        back = self._line.exchange(self._moved_head, self._brought, self._handed)
        residual = self._residual(back)
        if self._left is not None and self._commit is None:
            self._slot.put_residual(residual)

    def _moved_head(self) -> dict[str, Any]:
        """The head; and before that, where the center was started again, its new memory, with the commit laid out there."""
        place = self._line.place
        assert place is not None
        if place.life != self._place.life:
            self._place = place
            commit = self._commit
            self._slot, self._reader, self._answer = self._open(self._job, self._learner, place)
            if commit is not None:
                self._slot.put_commit(commit)
            self.me.move(self._where_to_write())
        return self._head()

    def send(self, commit: Commit) -> None:
        """Lay the commit out, and let it go."""
        place = self._line.place
        if place is not None and place.life != self._place.life:
            self._moved_head()
        super().send(commit)


def _opened(path: Path) -> int:
    """The descriptor of a center's memory: a file of one's own, which no other may write to."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not path.name.endswith(".center"):
        os.close(fd)
        raise UsageError(f"{path} is not the memory of a center of yours (in {FAST} or the run directory): it is not opened.")
    return fd
