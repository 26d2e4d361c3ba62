"""Rows that do not fit into memory: read piece by piece, each once an epoch, mixed in blocks of a bounded size."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from paragrad.data.arena import Arena, picked, private
from paragrad.data.formats.file import PASSING
from paragrad.data.plan import BUFFER, BlockPlan, Plan, Rows
from paragrad.data.source import leaves, mapped
from paragrad.data.trees import batch_of
from paragrad.errors import UsageError

BUFFER_BYTES = 64 << 20
"""Of rows that are wide, fewer are mixed with each other: no more than this."""
AHEAD = 2
"""Pieces that are read while others are trained on."""
STALLED = 30.0
"""Seconds after which a read is reported, and again after each further so many."""
GIVEN_UP = 900.0
"""Seconds for which a read that fails is tried again."""
SAMPLE = 1_000
"""Rows that a fingerprint looks at."""


@runtime_checkable
class Pieces(Protocol):
    """Rows on disk, in pieces that are read at once: row groups of a Parquet file, chunks of an HDF5 one, files.

    Every process opens files for itself: an object of this kind travels by pickle, and must leave its handles behind.
    ``name(piece)``, where there is one, says in messages which file it is.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """How many rows each piece has; 0 is allowed."""

    def read(self, piece: int) -> Any:
        """All rows of a piece: tensors or NumPy arrays, nested in tuples and dicts as you like, the target last."""


@dataclass(frozen=True)
class Part:
    """Of each piece a share of its rows, drawn by (seed, piece): those held out, or the others."""

    share: float
    seed: int
    held: bool

    def counts(self, lengths: Rows) -> Rows:
        """How many rows of each piece belong to it."""
        ends = np.ceil(np.cumsum(lengths) * self.share - 1e-9).astype(np.int64)
        held = np.minimum(np.diff(ends, prepend=0), lengths)
        found: Rows = held if self.held else lengths - held
        return found

    def rows(self, piece: int, length: int, count: int) -> Rows:
        """Which rows of a piece belong to it, in order."""
        order = np.random.default_rng((self.seed, 2, piece)).permutation(length)
        return np.sort(order[:count] if self.held else order[length - count :])


class Streamed:
    """A source over pieces: any rows can be had, but in the order of its own plan each piece is read once an epoch.

    buffer    rows that are mixed with each other, at least; by default 262,144, or as many as fit into 64 MiB
    stalled   seconds after which a read that hangs is reported
    """

    def __init__(
        self, pieces: Pieces, *, buffer: int | None = None, stalled: float = STALLED, part: Part | None = None
    ) -> None:
        self.pieces = pieces
        self.buffer = buffer
        self.stalled = stalled
        self.part = part
        self._whole = np.asarray(pieces.lengths, dtype=np.int64)
        self.lengths: Rows = self._whole if part is None else part.counts(self._whole)
        self.starts: Rows = np.cumsum(self.lengths) - self.lengths
        self._length = int(self.lengths.sum())
        if not self._length:
            raise UsageError(f"The {len(self._whole):,} pieces of {type(pieces).__name__} have no rows.")
        if buffer is not None and buffer < 1:
            raise UsageError(f"buffer={buffer}, but at least 1 row must be kept to be mixed.")
        self._row: Any = None
        self._forget()

    def _forget(self) -> None:
        """What belongs to one process."""
        self.report: Callable[[str], None] = _to_stderr
        self._arena: Arena | None = None
        self._planned: BlockPlan | None = None
        self._next = 0
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Any]] = {}
        self._said: deque[str] = deque()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("pieces", "buffer", "stalled", "part", "lengths", "starts", "_whole", "_length", "_row")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return self._length

    # -- what it is made of -----------------------------------------------------------------------------------------

    @property
    def longest(self) -> int:
        """Rows of the longest piece."""
        return int(self.lengths.max())

    @property
    def row(self) -> Any:
        """One row, to tell what rows are made of."""
        if self._row is None:
            self._row = mapped(self.load(int(np.argmax(self.lengths > 0))), lambda leaf: leaf[:1].clone())
        return self._row

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves(self.row))

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> BlockPlan:
        """In which order its rows are to be trained on."""
        buffer = self.buffer or min(BUFFER, max(1, BUFFER_BYTES // self.row_bytes))
        # A mini-batch then lies in two blocks at most.
        buffer = max(buffer, int(batch_size))
        return BlockPlan.over(self.lengths.tolist(), batch_size=batch_size, epochs=epochs, seed=seed, buffer=buffer)

    def hold_out(self, share: float, seed: int) -> tuple[Streamed, Streamed]:
        """The rows to train on, and those held out."""
        made = [
            Streamed(self.pieces, buffer=self.buffer, stalled=self.stalled, part=Part(share, seed, held))
            for held in (False, True)
        ]
        return made[0], made[1]

    def example(self, rows: int) -> Any:
        """So many rows like those that will come, to warm up on."""
        return mapped(self.row, lambda leaf: leaf.expand(rows, *leaf.shape[1:]).clone())

    def fingerprint(self) -> str:
        """A short text that changes with the data: the lengths of all pieces, and the first rows."""
        found = hashlib.sha256(self.lengths.tobytes())
        found.update(repr((self.buffer, self.part)).encode())
        rows = np.arange(min(SAMPLE, int(self.lengths[np.argmax(self.lengths > 0)])), dtype=np.int64)
        for leaf in leaves(self.batch(rows)):
            found.update(f"{tuple(leaf.shape)} {leaf.dtype};".encode())
            found.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def name(self, piece: int) -> str:
        """A piece in words."""
        named = getattr(self.pieces, "name", None)
        return str(named(piece)) if callable(named) else f"piece {piece} of {type(self.pieces).__name__}"

    # -- rows -------------------------------------------------------------------------------------------------------

    def batch(self, rows: Rows) -> Any:
        """These rows, in this order, as one mini-batch; pieces that are not at hand are read."""
        if self._arena is None:
            self._arena = self._make_arena(2 * self.longest)
        return self._gather(rows)

    def at(self, plan: Plan, position: int) -> Any:
        """The mini-batch at a position; what comes after it is read meanwhile."""
        rows = plan.rows_of(position)
        if not isinstance(plan, BlockPlan):
            return self.batch(rows)
        if self._planned is not plan:
            self._planned, self._next = plan, 0
            self._arena = self._make_arena(2 * plan.longest_block + 2 * self.longest)
        batch = self._gather(rows)
        self._look_ahead(plan, position)
        return batch

    def located(self, rows: Rows) -> tuple[Rows, Rows]:
        """The piece of each row, and its place in it."""
        pieces = np.searchsorted(self.starts, rows, side="right") - 1
        return pieces, rows - self.starts[pieces]

    def _make_arena(self, capacity: int) -> Arena:
        capacity = min(capacity, self._length)
        return Arena(self.row, pieces=len(self.lengths), capacity=capacity, allocate=private)

    def _gather(self, rows: Rows) -> Any:
        assert self._arena is not None
        pieces, inside = self.located(rows)
        batch = self._arena.gather(pieces, inside)
        return batch if batch is not None else self.gather_missing(pieces, inside, self._arena)

    def gather_missing(self, pieces: Rows, inside: Rows, arena: Arena, *, keep: bool = True) -> Any:
        """Rows of pieces of which some are in the arena; the others are read, and kept there if ``keep``."""
        out = mapped(self.row, lambda leaf: torch.empty((len(pieces), *leaf.shape[1:]), dtype=leaf.dtype))
        for piece in np.unique(pieces).tolist():
            mine = np.flatnonzero(pieces == piece)
            found = arena.gather(pieces[mine], inside[mine])
            if found is None:
                tree = self.load(piece)
                if keep:
                    arena.put(piece, tree)
                found = picked(tree, inside[mine])
            for room, leaf in zip(leaves(out), leaves(found), strict=True):
                room[torch.from_numpy(mine)] = leaf
        return out

    # -- reading ----------------------------------------------------------------------------------------------------

    def load(self, piece: int) -> Any:
        """All rows of a piece. A read that hangs, or fails for the moment, is waited for and reported."""
        future = self._fetch(piece)
        del self._ahead[piece]
        began, told = time.monotonic(), 1
        while True:
            done = _wait(future, min(self.stalled, 0.5))
            while self._said:
                self.report(self._said.popleft())
            if done:
                return future.result()
            waited = time.monotonic() - began
            if waited >= told * self.stalled:
                told += 1
                self.report(f"Reading {self.name(piece)} has taken {waited:.0f} s: it is waited for.")

    def _fetch(self, piece: int) -> Future[Any]:
        """Begin to read a piece. One thread reads them all: not every library can bear two."""
        if piece not in self._ahead:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="paragrad-read")
            self._ahead[piece] = self._thread.submit(self._read, piece)
        return self._ahead[piece]

    def _look_ahead(self, plan: BlockPlan, position: int) -> None:
        assert self._arena is not None
        for piece in [piece for piece, future in self._ahead.items() if future.done()]:
            self._arena.put(piece, self.load(piece))
        first, end = plan.pieces_of(position)
        # As many pieces again as the present block has: about the next one.
        end = min(2 * end - first, plan.places)
        self._next = max(self._next, first)
        while len(self._ahead) < AHEAD and self._next < end:
            piece = plan.piece_at(self._next)
            if not self._arena.where[piece] and self.lengths[piece]:
                self._fetch(piece)
            self._next += 1

    def _read(self, piece: int) -> Any:
        began, pause = time.monotonic(), 0.05
        while True:
            try:
                return self._checked(piece, self.pieces.read(piece))
            except UsageError:
                raise
            except Exception as error:
                passing = isinstance(error, OSError) and _number(error) in PASSING
                if not passing or time.monotonic() - began > GIVEN_UP:
                    raise UsageError(
                        f"{self.name(piece)} could not be read ({type(error).__name__}: {error}). Is the file there, and "
                        "whole? The run can be resumed once it is."
                    ) from error
                self._said.append(f"Reading {self.name(piece)} failed ({error}): it is tried again.")
                time.sleep(pause)
                pause = min(2 * pause, 5.0)

    def _checked(self, piece: int, found: Any) -> Any:
        tree = batch_of(found, self.name(piece))
        length = int(self._whole[piece])
        for leaf in leaves(tree):
            if len(leaf) != length:
                raise UsageError(
                    f"{self.name(piece)} gave {len(leaf):,} rows, but was said to have {length:,}: the file has been changed "
                    "since the run began. Begin a new run."
                )
        if self.part is not None:
            tree = picked(tree, self.part.rows(piece, length, int(self.lengths[piece])))
        if self._row is not None:
            forms = [[(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves(each)] for each in (tree, self._row)]
            if forms[0] != forms[1]:
                raise UsageError(f"The rows of {self.name(piece)} are {forms[0]}, but those before it were {forms[1]}.")
        return tree


def _wait(future: Future[Any], seconds: float) -> bool:
    """Whether it is done, after so long at most."""
    from concurrent.futures import wait

    return bool(wait([future], timeout=seconds).done)


def _number(error: OSError) -> int | None:
    """The system's number of an error; libraries hide it in their text."""
    if error.errno is not None:
        return error.errno
    found = re.search(r"errno = (\d+)", str(error))
    return int(found.group(1)) if found else None


def _to_stderr(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr, flush=True)
