"""Rows that do not fit into memory: read piece by piece, each once per epoch, and shuffled in blocks of bounded size."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from paragrad.data.arena import Arena, picked, private
from paragrad.data.formats.file import is_temporary
from paragrad.data.plan import BUFFER, BlockPlan, Plan, Rows
from paragrad.data.source import Arrays, joined, leaves, mapped, row_types
from paragrad.data.trees import batch_of
from paragrad.errors import UsageError

BUFFER_BYTES = 64 << 20
"""Default limit for the bytes of rows that are shuffled together."""
AHEAD = 2
"""Pieces that are read ahead of training."""
STALLED = 30.0
"""Seconds after which a slow read is reported, and the interval of further reports."""
GIVEN_UP = 900.0
"""Seconds for which a failing read is retried."""
SAMPLE = 1_000
"""Rows that a fingerprint includes."""


@runtime_checkable
class Pieces(Protocol):
    """Rows on disk in pieces, each of which is read at once: row groups of a Parquet file, chunks of an HDF5 file, or files.

    Every process opens files itself: the object is pickled, and must leave out its open files. An optional method
    ``name(piece)`` returns the name of the file for messages.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Number of rows of each piece; 0 is allowed."""

    def read(self, piece: int) -> Any:
        """Return all rows of a piece: tensors or NumPy arrays, nested in tuples and dicts to any depth, the target last."""


@dataclass(frozen=True)
class Part:
    """A share of the rows of each piece, drawn by (seed, piece): the rows that are held out, or the others."""

    # The repr is part of fingerprints: do not rename the fields.
    share: float
    seed: int
    held: bool

    def counts(self, lengths: Rows) -> Rows:
        """Return the number of rows of each piece that belong to the part."""
        ends = np.ceil(np.cumsum(lengths) * self.share - 1e-9).astype(np.int64)
        held_out: Rows = np.minimum(np.diff(ends, prepend=0), lengths)
        return held_out if self.held else lengths - held_out

    def rows(self, piece: int, length: int, count: int) -> Rows:
        """Return the rows of a piece that belong to the part, in order."""
        order = np.random.default_rng((self.seed, 2, piece)).permutation(length)
        return np.sort(order[:count] if self.held else order[length - count :])


class Streamed:
    """A source over pieces. Any rows can be read, but in the order of its own plan each piece is read once per epoch.

    buffer    least number of rows that are shuffled together; by default 262,144, or as many as fit into 64 MiB
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
            raise UsageError(f"buffer={buffer}, but it must be at least 1 row.")
        self._row: Any = None
        self._reset()

    def _reset(self) -> None:
        """Reset the state that belongs to one process."""
        self.report: Callable[[str], None] = _to_stderr
        self._arena: Arena | None = None
        self._planned: BlockPlan | None = None
        self._next = 0
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Any]] = {}
        self._messages: deque[str] = deque()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("pieces", "buffer", "stalled", "part", "lengths", "starts", "_whole", "_length", "_row")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __len__(self) -> int:
        return self._length

    @property
    def longest(self) -> int:
        """Rows of the longest piece."""
        return int(self.lengths.max())

    @property
    def row(self) -> Any:
        """One row, which shows nesting, shapes and types."""
        if self._row is None:
            self._row = mapped(self.load(int(np.argmax(self.lengths > 0))), lambda leaf: leaf[:1].clone())
        return self._row

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves(self.row))

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> BlockPlan:
        """Return the order in which to train on its rows."""
        buffer = self.buffer or min(BUFFER, max(1, BUFFER_BYTES // self.row_bytes))
        # A mini-batch then spans at most two blocks.
        buffer = max(buffer, int(batch_size))
        return BlockPlan.over(self.lengths.tolist(), batch_size=batch_size, epochs=epochs, seed=seed, buffer=buffer)

    def hold_out(self, share: float, seed: int) -> tuple[Streamed, Streamed]:
        """Return the rows to train on, and the rows that are held out."""
        train, held_out = (
            Streamed(self.pieces, buffer=self.buffer, stalled=self.stalled, part=Part(share, seed, held))
            for held in (False, True)
        )
        return train, held_out

    def example(self, rows: int) -> Any:
        """Return a mini-batch of ``rows`` typical rows, to warm up on."""
        return mapped(self.row, lambda leaf: leaf.expand(rows, *leaf.shape[1:]).clone())

    def fingerprint(self) -> str:
        """Return a short text that changes with the data: a hash of the lengths of all pieces and of the first rows."""
        found = hashlib.sha256(self.lengths.tobytes())
        found.update(repr((self.buffer, self.part)).encode())
        rows = np.arange(min(SAMPLE, int(self.lengths[np.argmax(self.lengths > 0)])), dtype=np.int64)
        for leaf in leaves(self.batch(rows)):
            found.update(f"{tuple(leaf.shape)} {leaf.dtype};".encode())
            found.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def name(self, piece: int) -> str:
        """Return the name of a piece for messages."""
        named = getattr(self.pieces, "name", None)
        return str(named(piece)) if callable(named) else f"piece {piece} of {type(self.pieces).__name__}"

    def batch(self, rows: Rows) -> Any:
        """Return these rows, in this order, as one mini-batch. Pieces that are not in memory are read."""
        if self._arena is None:
            self._arena = self._make_arena(2 * self.longest)
        return self._gather(rows)

    def at(self, plan: Plan, position: int) -> Any:
        """Return the mini-batch at a position, and start to read the following pieces."""
        rows = plan.rows_of(position)
        if not isinstance(plan, BlockPlan):
            return self.batch(rows)
        if self._planned is not plan:
            self._planned, self._next = plan, 0
            self._arena = self._make_arena(2 * plan.longest_block + 2 * self.longest)
        batch = self._gather(rows)
        self._read_ahead(plan, position)
        return batch

    def located(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the piece of each row, and its number in that piece."""
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
        """Return rows of pieces of which some are not in the arena. Read those, and put them there if ``keep``."""
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

    def load(self, piece: int) -> Any:
        """Return all rows of a piece. Wait for a read that hangs or is retried, and report it."""
        future = self._fetch(piece)
        del self._ahead[piece]
        began, reports = time.monotonic(), 1
        while True:
            done = wait([future], timeout=min(self.stalled, 0.5)).done
            while self._messages:
                self.report(self._messages.popleft())
            if done:
                return future.result()
            waited = time.monotonic() - began
            if waited >= reports * self.stalled:
                reports += 1
                self.report(f"Still reading {self.name(piece)} after {waited:.0f} s: waiting.")

    def all(self) -> Arrays:
        """Return all rows in memory."""
        return Arrays(joined([self.load(piece) for piece in np.flatnonzero(self.lengths).tolist()]))

    def _fetch(self, piece: int) -> Future[Any]:
        """Start to read a piece. One thread reads all pieces, because not every library is thread-safe."""
        if piece not in self._ahead:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="paragrad-read")
            self._ahead[piece] = self._thread.submit(self._read, piece)
        return self._ahead[piece]

    def _read_ahead(self, plan: BlockPlan, position: int) -> None:
        assert self._arena is not None
        for piece in [piece for piece, future in self._ahead.items() if future.done()]:
            self._arena.put(piece, self.load(piece))
        first, end = plan.pieces_of(position)
        # As many further pieces as the current block has: about the next block.
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
                if not is_temporary(error) or time.monotonic() - began > GIVEN_UP:
                    raise UsageError(
                        f"{self.name(piece)} could not be read ({type(error).__name__}: {error}). Check that the file exists "
                        "and is complete, then resume the run."
                    ) from error
                self._messages.append(f"Reading {self.name(piece)} failed ({error}). Trying again.")
                time.sleep(pause)
                pause = min(2 * pause, 5.0)

    def _checked(self, piece: int, found: Any) -> Any:
        tree = batch_of(found, self.name(piece))
        length = int(self._whole[piece])
        for leaf in leaves(tree):
            if len(leaf) != length:
                raise UsageError(
                    f"{self.name(piece)} returned {len(leaf):,} rows, but {length:,} were expected: the file has changed since "
                    "the run began. Start a new run."
                )
        if self.part is not None:
            tree = picked(tree, self.part.rows(piece, length, int(self.lengths[piece])))
        if self._row is not None and row_types(tree) != row_types(self._row):
            raise UsageError(
                f"The rows of {self.name(piece)} are {row_types(tree)}, but those before it were {row_types(self._row)}: all "
                "pieces must have the same shapes and types."
            )
        return tree


def _to_stderr(message: str) -> None:
    print(f"WARNING: {message}", file=sys.stderr, flush=True)
