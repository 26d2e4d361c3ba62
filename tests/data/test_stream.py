"""Laws of streamed rows: the same as in memory, whatever is asked for; a stalled read is waited for, a lost file is not."""

from __future__ import annotations

import errno
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paragrad as pg
from paragrad.data import load, stream
from paragrad.data.arena import Arena, private
from paragrad.data.source import Arrays, batch_at, leaves, plan_of
from paragrad.data.stream import Pieces, Streamed
from paragrad.errors import UsageError


class InMemory:
    """Pieces of a tensor whose rows say which they are; counts what is read of it."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.starts = np.cumsum([0, *lengths])
        self.reads: list[int] = []
        self.troubles: dict[int, list[Exception]] = {}

    def read(self, piece: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.reads.append(piece)
        if self.troubles.get(piece):
            raise self.troubles[piece].pop(0)
        rows = torch.arange(int(self.starts[piece]), int(self.starts[piece + 1]))
        return torch.stack([rows, -rows], 1).float(), {"y": rows % 3}

    def name(self, piece: int) -> str:
        return f"events-{piece}.h5"

    def all(self) -> Arrays:
        return Arrays(
            (torch.cat([self.read(p)[0] for p in range(len(self.lengths))]), {"y": torch.arange(sum(self.lengths)) % 3})
        )


def same(a: object, b: object) -> bool:
    return all(torch.equal(one, other) for one, other in zip(leaves(a), leaves(b), strict=True))


lengths = st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(sum)


@given(lengths, st.data())
@settings(max_examples=60, deadline=None)
def test_any_rows_are_those_of_the_same_arrays_in_memory(lengths, data):
    pieces = InMemory(lengths)
    source, whole = Streamed(pieces, buffer=5), pieces.all()
    assert len(source) == len(whole)
    for _ in range(4):
        rows = np.array(data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=30)))
        assert same(source.batch(rows), whole.batch(rows))


@given(lengths, st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_in_the_order_of_its_plan_each_piece_is_read_once_an_epoch(lengths, batch_size, buffer):
    pieces = InMemory(lengths)
    whole = pieces.all()
    source = Streamed(pieces, buffer=buffer)
    plan = plan_of(source, batch_size=batch_size, epochs=2, seed=3)
    assert source.row is not None
    pieces.reads.clear()
    for position in range(plan.positions):
        assert same(batch_at(source, plan, position), whole.batch(plan.rows_of(position)))
    assert max(pieces.reads.count(piece) for piece in range(len(lengths))) <= 2


@given(lengths, st.floats(0.01, 0.99), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_hold_out_parts_the_rows_of_each_piece(lengths, share, seed):
    pieces = InMemory(lengths)
    if not 0 < np.ceil(share * sum(lengths) - 1e-9) < sum(lengths):
        with pytest.raises(UsageError, match="held out"):
            load.split(pieces, holdout=share, seed=seed)
        return
    parts = load.split(pieces, holdout=share, seed=seed)
    seen = [
        source.batch(np.arange(len(source)))[0][:, 0].int().tolist()
        for source in (parts.train, parts.validation)
        if source is not None
    ]
    assert sorted(seen[0] + seen[1]) == list(range(sum(lengths)))
    assert len(seen[1]) == np.ceil(share * sum(lengths) - 1e-9)
    assert seen[1] == sorted(seen[1])


def test_a_source_travels_without_what_it_has_read():
    source = Streamed(InMemory([100] * 10))
    source.batch(np.arange(1000))
    travelled = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 10_000
    assert same(travelled.batch(np.arange(5)), source.batch(np.arange(5)))
    assert source.fingerprint() == travelled.fingerprint() != Streamed(InMemory([100] * 11)).fingerprint()
    assert isinstance(source.pieces, Pieces)


def test_memory_is_bounded_by_the_buffer_and_not_by_the_data():
    pieces = InMemory([100] * 200)
    source = Streamed(pieces, buffer=500)
    plan = plan_of(source, batch_size=10, epochs=1, seed=0)
    for position in range(plan.positions):
        batch_at(source, plan, position)
    assert source._arena is not None
    assert source._arena.capacity <= 2 * (500 + 100) + 200


def test_wide_rows_are_mixed_in_fewer():
    class Images(InMemory):
        def read(self, piece):
            return torch.zeros(self.lengths[piece], 1 << 20)

    assert plan_of(Streamed(Images([2] * 50)), batch_size=4, epochs=1, seed=0).buffer == stream.BUFFER_BYTES >> 22


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_an_arena_holds_what_it_says_and_lets_the_oldest_go(puts):
    arena = Arena(torch.zeros(1), pieces=10, capacity=25, allocate=private)
    held: dict[int, torch.Tensor] = {}
    for number, (piece, rows) in enumerate(puts):
        gone = {victim.piece for victim in arena.victims(rows)} - {piece}
        tree = torch.full((rows,), float(number))
        arena.put(piece, tree)
        held[piece] = tree
        assert gone >= {p for p in held if not arena.where[p]}
        for p in list(held):
            if not arena.where[p]:
                del held[p]
                continue
            inside = np.arange(len(held[p]))
            assert torch.equal(arena.gather(np.full(len(inside), p), inside), held[p])
        assert piece in held


# -- trouble ------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_for_the_moment_is_tried_again_and_reported():
    pieces = InMemory([4, 4])
    source, said = Streamed(pieces), []
    source.report = said.append
    assert source.row is not None
    hidden = OSError("Can't read data (file read failed: errno = 5, error message = 'Input/output error')")
    pieces.troubles = {1: [OSError(errno.ESTALE, "Stale file handle"), hidden]}
    assert same(source.batch(np.arange(8)), pieces.all().batch(np.arange(8)))
    assert len(said) == 2
    assert all("events-1.h5" in message and "Trying again" in message for message in said)


def test_a_read_that_hangs_is_waited_for_and_reported():
    going_on = threading.Event()

    class Stalled(InMemory):
        def read(self, piece):
            if piece == 1:
                going_on.wait()
            return super().read(piece)

    source = Streamed(Stalled([4, 4]), stalled=0.05)
    said: list[str] = []

    def report(message: str) -> None:
        said.append(message)
        if len(said) == 2:
            going_on.set()

    source.report = report
    assert source.batch(np.arange(8))[0][:, 0].tolist() == list(range(8))
    assert "Still reading events-1.h5 after" in said[0]


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "No such file"), OSError("Unable to open file (truncated file)"), ValueError("bad magic")],
)
def test_a_file_that_is_gone_or_cut_short_ends_it_with_its_name(error):
    pieces = InMemory([4, 4])
    source = Streamed(pieces)
    assert source.row is not None
    pieces.troubles = {1: [error]}
    with pytest.raises(UsageError, match=r"events-1\.h5 could not be read"):
        source.batch(np.arange(8))


def test_a_read_that_goes_on_failing_is_given_up(monkeypatch):
    monkeypatch.setattr(stream, "GIVEN_UP", 0.1)
    pieces = InMemory([4])
    pieces.troubles = {0: [OSError(errno.EIO, "Input/output error")] * 100}
    source = Streamed(pieces)
    source.report = lambda message: None
    with pytest.raises(UsageError, match="Input/output error"):
        source.batch(np.arange(4))


def test_a_piece_that_is_not_what_it_was_said_to_be_is_refused():
    pieces = InMemory([4, 4])
    source = Streamed(pieces)
    assert source.row is not None
    pieces.starts = np.array([0, 4, 7])
    with pytest.raises(UsageError, match=r"events-1\.h5 returned 3 rows, but 4 were expected"):
        source.batch(np.arange(8))

    class Other(InMemory):
        def read(self, piece):
            return torch.zeros(4, 2 + piece), torch.zeros(4)

    with pytest.raises(UsageError, match=r"events-1\.h5"):
        Streamed(Other([4, 4])).batch(np.arange(8))


def test_what_is_read_is_converted_and_checked_as_arrays_are():
    class Arrayed(InMemory):
        def read(self, piece):
            x = np.arange(8.0).reshape(4, 2)
            x[2, 0] = np.nan if piece else 0
            return x, np.arange(4, dtype=np.int8)

    source = Streamed(Arrayed([4, 4]))
    x, y = source.batch(np.arange(4))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    with pytest.raises(UsageError, match=r"events-1\.h5\[0\] has NaN or infinity in 1 of 4 rows, first in row 2"):
        source.batch(np.arange(8))


def test_pieces_without_a_row_are_refused():
    with pytest.raises(UsageError, match="have no rows"):
        pg.Streamed(InMemory([0, 0]))
    with pytest.raises(UsageError, match="buffer=0"):
        pg.Streamed(InMemory([1]), buffer=0)
