"""A center that is spread over processes is, bit for bit, the same center: whatever the cuts, the order, and who is killed."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core import update
from paragrad.core.center import Center
from paragrad.core.flat import Flat
from paragrad.data.leases import Leases
from paragrad.engines.process import mapped_file
from paragrad.engines.sharding.client import as_nan, cut, is_finite, is_sharded
from paragrad.engines.sharding.coordinator import ShardCoordinator, cuts
from paragrad.engines.sharding.process import ShardService
from paragrad.engines.transport.header import CODED
from paragrad.engines.transport.message import (
    PROTOCOL,
    Malformed,
    Refused,
    TransportError,
    Vectors,
    declare,
    decode,
    encode,
    expect,
)
from paragrad.optim import optimizer as optimizers
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.cut import CutOptimizer
from paragrad.types import COMMIT, Commit, Reply, VectorOptimizer

LENGTH, WORKERS, LIFE = 67, 3, "a life"
SCHEMES = [
    pg.AGN(window=2),
    pg.Downpour(window=1),
    pg.Downpour(window=1, bound=1),
    pg.DynSGD(window=2),
    pg.AEASGD(window=2),
    pg.EAMSGD(window=2),
    pg.ADAG(window=2),
    pg.ADAG(window=1, place="sends", form="eta"),
    pg.GEM(window=2),
    pg.AsyncDiLoCo(window=2),
    pg.EASGD(window=2),
    pg.ModelAveraging(window=2),
    pg.DiLoCo(window=2),
]
STEPPED = [
    (pg.SyncSGD(), pg.Optimizer("adam:lr=0.05")),
    (pg.SyncSGD(), pg.Optimizer("sgd:lr=0.1,momentum=0.9", schedule="cosine:warmup=0.2")),
    (pg.BackupWorkers(), pg.Optimizer("adagrad:lr=0.1")),
    (pg.BackupWorkers(), pg.Optimizer("adamw:lr=0.05", schedule="linear", clip_value=0.05)),
    (pg.SoftSync(), pg.Optimizer("sgd:lr=0.1,momentum=0.9")),
    (pg.SoftSync(splits=3), pg.Optimizer("adam:lr=0.05", schedule="linear")),
    (pg.StalenessAware(window=2), pg.Optimizer("adam:lr=0.05,amsgrad=true")),
    (pg.StalenessAware(), pg.Optimizer("sgd:lr=0.1,momentum=0.9,nesterov=true", schedule="step:at=0.5,factor=0.1")),
    (pg.DCASGD(), pg.Optimizer("adagrad:lr=0.1", schedule="cosine")),
    (pg.DCASGD(adaptive=True), pg.Optimizer("sgd:lr=0.1,momentum=0.9")),
    (pg.OrMo(), pg.Optimizer("sgd:lr=0.1")),
]
"""Schemes whose center holds the optimiser."""
ADDITIVE = [(pg.AGN(window=2), None), (pg.Downpour(window=1), None), (pg.DynSGD(window=2), None), STEPPED[0], STEPPED[6]]
"""Schemes that a codec can be used with."""
CODECS = [
    pg.FP16(),
    pg.BF16(),
    pg.Int8(block=3),
    pg.OneBit(block=12),
    pg.Threshold(0.1),
    pg.Threshold(0.1, values=False),
    pg.TopK(0.2),
    pg.TopK(0.9),
]


class Pieces(nn.Module):
    """A model of 67 parameters in tensors of several shapes, one of them without any."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(5, 8)), nn.Parameter(torch.zeros(()))
        self.c = nn.Parameter(torch.zeros(2, 13))


def whole_optimizer(optimizer: pg.Optimizer) -> CenterOptimizer:
    module = Pieces()
    return CenterOptimizer(optimizer, module, Flat(module.named_parameters()))


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    """Every shard that is killed here leaves mapped files, for which others would soon find no descriptors."""
    yield
    gc.collect()


class Direct:
    """A shard without a network: what is said travels as bytes, and it is killed before or after it has heard some of it."""

    def __init__(
        self,
        scheme: Any,
        directory: Path,
        index: int,
        fate: Callable[[], str],
        optimizer: pg.Optimizer | None = None,
        codec: pg.Codec | None = None,
    ) -> None:
        chosen = None if optimizer is None else optimizers.prepared(optimizer)
        self._make = lambda: ShardService(scheme, directory, index, LIFE, chosen, codec)
        self._fate = fate
        self.keeper = self._make()

    def revive(self) -> None:
        self.keeper = self._make()

    def ask(self, name: str, head: Mapping[str, Any], *, timeout: float = 0.0) -> dict[str, Any]:
        fate = self._fate()
        if fate == "before":
            raise TransportError("killed before it heard")
        back = self.keeper.ask(name, decode(encode(head)), "test")
        if fate == "after":
            raise TransportError("killed before it could say so")
        return decode(encode(back))

    def put(self, head: Mapping[str, Any], vectors: Vectors) -> None:
        """As a worker does it: again, until it is acknowledged."""
        while (fate := self._fate()) == "before":
            self.revive()
        self.exchange({"op": "put", "start_id": LIFE, **head}, vectors, lambda back: {})
        if fate == "after":
            self.revive()
            self.exchange({"op": "put", "start_id": LIFE, **head}, vectors, lambda back: {})

    def exchange(
        self, head: Mapping[str, Any], vectors: Vectors, into: Callable[[dict[str, Any]], Vectors], *, timeout: float = 0.0
    ) -> dict[str, Any]:
        told = decode(encode({**head, "vectors": declare(vectors)}))
        answer = self.keeper.exchange("test")
        rooms = answer.begin(told)
        expect(told, rooms)
        for name, room in rooms.items():
            with answer.filling():
                room.copy_(vectors[name])
        back, found = answer.finish(told)
        mine = into(back)
        expect({"vectors": declare(found)}, mine)
        for name, room in mine.items():
            room.copy_(found[name])
        return back


@dataclass
class Worker:
    rank: int
    incarnation: int = 0
    batches: tuple[int, ...] = ()
    version: int = 0
    last: int = 0
    answer: torch.Tensor | None = None
    waits: bool = True
    done: bool = False


class Both:
    """The same commits to a whole center and to one that is spread; every answer is compared."""

    def __init__(
        self,
        scheme: Any,
        where: list[int],
        directory: Path,
        fate: Callable[[], str] = lambda: "",
        optimizer: pg.Optimizer | None = None,
        codec: pg.Codec | None = None,
    ) -> None:
        start = torch.randn(LENGTH, generator=torch.Generator().manual_seed(1))
        self.codec = codec
        self.scheme, self.cuts, self.directory = scheme, where, directory
        stolen = scheme.quorum(WORKERS) == 1

        def center(value: torch.Tensor, *, rows: bool) -> Center:
            leases = Leases(batches=9, epochs=3, workers=WORKERS, stolen=stolen)
            steps: VectorOptimizer | None = None if optimizer is None else whole_optimizer(optimizer)
            if optimizer is not None and rows:
                steps = CutOptimizer(optimizer, value.numel(), value.dtype, whole=whole_optimizer(optimizer))
            return Center(scheme, value, workers=WORKERS, leases=leases, buffers=torch.zeros(2), optimizer=steps, rows=rows)

        self.whole = center(start, rows=False)
        self.lead = center(start[: where[1]], rows=True)
        self.peers = [Direct(scheme, directory, k, fate, optimizer, codec) for k in range(1, len(where) - 1)]
        self.shards = ShardCoordinator(self.lead, start, where, LIFE)
        self.lead.remote = self.shards
        self.values = {0: start}
        """What the whole center was at each clock."""
        self.shards.begin(self.peers, lambda k, error: self.revive(k))
        self.workers = [Worker(k) for k in range(WORKERS)]
        self.diverged = False

    def revive(self, k: int) -> None:
        """A shard that was killed still has what belongs to the first slice, should that be killed now."""
        self.peers[k].revive()
        held, (lo, hi) = self.peers[k].keeper.held, self.shards.slices[k]
        if held is not None and self.lead.clock in self.values:
            assert torch.equal(held.tensors(self.lead.clock)["value"], self.values[self.lead.clock][lo:hi])

    def hear(self, those: list[Reply], these: list[Reply]) -> None:
        """The answers are the same, to the bit, slice by slice."""
        assert [changed(reply) for reply in those] == [changed(reply) for reply in these]
        for reply, mine in zip(those, these, strict=True):
            slices = [p.keeper.held.answer(mine.worker, mine.version) for p in self.peers]
            assert torch.equal(torch.cat([mine.value, *slices]), reply.value)
            pulled = [p.keeper.held.center.copy_of(self.lead.clock) for p in self.peers]
            assert torch.equal(torch.cat([self.lead.value, *pulled]), self.whole.value)
            worker = self.workers[reply.worker]
            worker.waits, worker.done, worker.version, worker.last = False, reply.done, reply.version, reply.last
            worker.answer = reply.value.clone()
            waiting = {batch for commit in self.whole.round.commits if commit.worker == worker.rank for batch in commit.batches}
            worker.batches = tuple(batch for batch in self.whole.leases.held(worker.rank) if batch not in waiting)

    def join(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.waits = True
        self.hear(self.whole.join(rank, worker.incarnation), self.lead.join(rank, worker.incarnation))

    def replace(self, rank: int) -> None:
        self.workers[rank].incarnation += 1
        self.join(rank)

    def commit(self, rank: int, seed: int, kind: str, weight: float | None = None) -> bool:
        """What a worker commits; False where both centers say that the run has diverged."""
        worker = self.workers[rank]
        draw = torch.Generator().manual_seed(seed)
        window = min(self.scheme.window, len(worker.batches))
        vectors = {"value": torch.randn(LENGTH, generator=draw) * 0.1}
        if kind in ("bad", "huge"):
            vectors["value"][seed % LENGTH if kind == "bad" else -1] = math.nan if kind == "bad" else 3e38
        assert worker.answer is not None
        vectors |= {f"also.{name}": worker.answer for name in self.scheme.sends}
        told: dict[str, Any] = {
            "worker": rank,
            "incarnation": worker.incarnation,
            "sequence": worker.last + 1 + 10 * seed,
            "version": worker.version,
            "steps": window,
            "batches": worker.batches[:window],
            "weight": 1.0 + seed % 3 if weight is None else weight,
            "rows": window,
            "lr": 0.1,
            "seconds": 0.01 * (1 + seed % 5),
            "buffers": torch.full((2,), float(seed % 7)),
        }
        worker.waits = True
        sent = vectors
        if self.codec is not None:
            coded = self.codec.encode(vectors["value"])
            vectors["value"] = self.codec.decode(coded, torch.empty(LENGTH))
            sent = {CODED + name: tensor for name, tensor in coded.items()}
        for _ in range(1 + (kind == "again")):
            mine = self.first(cut(sent, 0, self.cuts[1], self.codec))
            if is_finite(vectors):
                for (lo, hi), peer in zip(self.shards.slices, self.peers, strict=True):
                    slices = cut(sent, lo, hi, self.codec)
                    peer.put({"rank": rank, **{key: told[key] for key in ("incarnation", "sequence")}}, slices)
            else:
                mine = self.first(as_nan(cut(sent, 0, self.cuts[1], self.codec), self.cuts[1], self.codec))
            those, these = received(self.whole, made(vectors, told)), received(self.lead, made(mine, told))
            self.values[self.whole.clock] = self.whole.value.clone()
            assert (those is None) == (these is None)
            if those is None or these is None:
                self.diverged = True
                return False
            self.hear(those, these)
        return True

    def first(self, sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the center's own process makes of its slice."""
        if self.codec is None:
            return sent
        coded = {name.removeprefix(CODED): tensor for name, tensor in sent.items()}
        return {"value": self.codec.of_slices.decode(coded, torch.empty(self.cuts[1]))}

    def compare(self) -> None:
        """All that a checkpoint holds is the same; put back, it is the same again; and in the end it is one center again."""
        for _ in range(2):
            whole, spread = self.whole.snapshot(), self.lead.snapshot()
            those, these = whole.tensors(), spread.tensors()
            if self.diverged:  # one center's optimiser has made the step that came to nothing, the first slice its answer
                moved = ("optimizer.", "answer.")
                those, these = ({n: t for n, t in found.items() if not n.startswith(moved)} for found in (those, these))
            assert those.keys() == these.keys()
            assert all(torch.equal(those[name], these[name]) for name in those)
            assert whole.numbers == spread.numbers
            if self.diverged:
                break
            self.lead.restore(replace(spread, numbers=self.lead.numbers(durable=True)))
        self.lead.reunite()
        assert torch.equal(self.lead.value, self.whole.value)
        if not self.diverged:
            assert same(self.lead.snapshot().tensors(), those)
        self.shards.close()


def same(these: Mapping[str, torch.Tensor], those: Mapping[str, torch.Tensor]) -> bool:
    return these.keys() == those.keys() and all(torch.equal(these[name], those[name]) for name in these)


def changed(reply: Reply) -> tuple[Any, ...]:
    return reply.worker, reply.sequence, reply.version, reply.steps, reply.batches, reply.applied, reply.done, reply.last


def received(center: Center, commit: Commit) -> list[Reply] | None:
    try:
        return center.receive(commit)
    except pg.Diverged:
        return None


def made(vectors: Mapping[str, torch.Tensor], told: dict[str, Any]) -> Commit:
    also = {name.removeprefix("also."): vector.clone() for name, vector in vectors.items() if name != "value"}
    assert all(map(is_sharded, vectors))
    return Commit(value=vectors["value"].clone(), also=also, **told)


@pytest.fixture(autouse=True)
def _beside_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "FAST", Path("/nowhere"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_shards_are_the_same_center_whatever_the_cuts_the_order_and_who_is_killed(scheme, data):
    drive(scheme, None, data)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_shards_of_coded_commits_are_the_same_center(codec, data):
    drive(*data.draw(st.sampled_from(ADDITIVE), "how"), data, codec)


@pytest.mark.parametrize("small", [0, 1 << 15], ids=["tensors", "flat"])
@pytest.mark.parametrize(("scheme", "optimizer"), STEPPED, ids=repr)
def test_shards_that_step_are_the_same_center(scheme, optimizer, small, monkeypatch):
    monkeypatch.setattr(optimizers, "SMALL", small)

    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def law(data):
        drive(scheme, optimizer, data)

    law()


def drive(scheme: Any, optimizer: pg.Optimizer | None, data: st.DataObject, codec: pg.Codec | None = None) -> None:
    """Commits in any order, to both kinds of center."""
    unit = 1 if codec is None else codec.unit
    cut_at = st.integers(1, (LENGTH - 1) // unit).map(lambda k: k * unit)
    inner = data.draw(st.lists(cut_at, min_size=1, max_size=3, unique=True), "cuts")
    fates = data.draw(st.lists(st.sampled_from(["", "", "", "before", "after"]), max_size=30), "fates")
    with tempfile.TemporaryDirectory() as directory:
        where = [0, *sorted(inner), LENGTH]
        both = Both(scheme, where, Path(directory), lambda: fates.pop() if fates else "", optimizer, codec)
        for rank in range(WORKERS):
            both.join(rank)
        strange = 0
        for turn in range(40):
            ready = [worker for worker in both.workers if not worker.waits and not worker.done]
            if not ready:
                break
            worker = data.draw(st.sampled_from(ready), "who")
            kind = data.draw(st.sampled_from(["good", "good", "good", "bad", "huge", "again", "lost"]), "what")
            strange += kind in ("bad", "huge")
            if kind == "lost":
                both.replace(worker.rank)
            elif not both.commit(worker.rank, turn, kind if strange < 5 else "good"):
                break
        both.compare()


@given(length=st.integers(1, 1000), shards=st.integers(1, 50))
def test_cuts_leave_nothing_out_and_slices_are_of_one_size_up_to_one(length, shards):
    where = cuts(length, shards)
    sizes = [hi - lo for lo, hi in pairwise(where)]
    assert (where[0], where[-1], len(sizes)) == (0, length, shards)
    assert max(sizes) - min(sizes) <= 1


@given(length=st.integers(1, 5000), shards=st.integers(1, 50), block=st.integers(1, 100))
def test_cuts_leave_blocks_whole_and_slices_are_of_one_size_up_to_two_blocks(length, shards, block):
    codec = pg.OneBit(block=block)
    where = cuts(length, shards, codec)
    sizes = [hi - lo for lo, hi in pairwise(where)]
    assert (where[0], where[-1], len(sizes)) == (0, length, shards)
    assert all(lo % codec.unit == 0 for lo in where[:-1] if lo < length)
    assert max(sizes) - min(sizes) < 2 * codec.unit


def filled(directory: Path, scheme: Any) -> Direct:
    """A shard of 4 numbers for two workers, at clock 3."""
    peer = Direct(scheme, directory, 1, lambda: "")
    head = {"op": "load", "start_id": LIFE, "clock": 3, "ledger": [1, 1], "versions": [3, 3]}
    peer.exchange(head, {"value": torch.arange(4.0)}, lambda back: {})
    return peer


def test_a_shard_takes_nothing_from_who_does_not_belong_here(tmp_path):
    peer = filled(tmp_path, pg.AGN())
    slice_of = {"value": torch.ones(4)}
    with pytest.raises(Refused, match="the center was restarted"):
        peer.put({"rank": 0, "incarnation": 0, "sequence": 2, "start_id": "another"}, slice_of)
    with pytest.raises(Malformed, match="Worker '7' is unknown"):
        peer.put({"rank": 7, "incarnation": 0, "sequence": 2}, slice_of)
    with pytest.raises(Malformed, match="sequence is 'two'"):
        peer.put({"rank": 0, "incarnation": 0, "sequence": "two"}, slice_of)
    with pytest.raises(Malformed, match="values of float32"):
        peer.put({"rank": 0, "incarnation": 0, "sequence": 2}, {"value": torch.ones(5)})
    with pytest.raises(Malformed, match="is not finite"):
        peer.put({"rank": 0, "incarnation": 0, "sequence": 2}, {"value": torch.full((4,), math.inf)})
    peer.put({"rank": 0, "incarnation": 1, "sequence": 2}, slice_of)
    with pytest.raises(Refused, match="rank of this worker has been given to another"):
        peer.put({"rank": 0, "incarnation": 0, "sequence": 2}, slice_of)
    with pytest.raises(Refused, match="clock 3, not 2"):
        peer.exchange({"op": "fetch", "start_id": LIFE, "rank": 0, "version": 2}, {}, lambda back: slice_of)
    with pytest.raises(Malformed, match="Unknown operation 'steal'"):
        peer.exchange({"op": "steal", "start_id": LIFE}, {}, lambda back: {})
    with pytest.raises(Malformed, match="at clock 3, but the request is for clock 8"):
        peer.ask("hand", {"protocol": PROTOCOL, "start_id": LIFE, "worker": 0, "clock": 8})
    with pytest.raises(Malformed, match="Unknown question 'sing'"):
        peer.ask("sing", {"protocol": PROTOCOL, "start_id": LIFE})
    with pytest.raises(Malformed, match="this shard uses"):
        peer.ask("flip", {"protocol": 0})
    assert peer.keeper.held.center.clock == 3


def test_a_later_exchange_of_a_worker_ends_an_earlier_one_that_still_fills(tmp_path):
    peer = filled(tmp_path, pg.AGN())
    head = {"op": "put", "start_id": LIFE, "rank": 0, "incarnation": 0, "sequence": 2, "vectors": []}
    slow, fast = peer.keeper.exchange("a"), peer.keeper.exchange("b")
    slow.begin(head)
    fast.begin(head)
    with fast.filling():
        pass
    with pytest.raises(Refused, match="later exchange"), slow.filling():
        pass
    with pytest.raises(Refused, match="later exchange"):
        slow.finish(head)


def prepare(peer: Direct, sequence: int, value: list[float], clock: int = 4) -> bool:
    """A commit of worker 0, laid down and prepared."""
    peer.put({"rank": 0, "incarnation": 0, "sequence": sequence}, {"value": torch.tensor(value)})
    head = COMMIT.header(Commit(0, sequence, 3, torch.empty(0), 1, lr=0.1))
    told = {"clock": clock, "commits": [head], "live": [0, 1], "working": [0, 1], "counts": [1, 1], "speeds": [0.0, 0.0]}
    return peer.ask("prepare", {"protocol": PROTOCOL, "start_id": LIFE, **told, "progress": 0.5})["finite"]


@pytest.mark.parametrize("killed", [False, True])
def test_an_update_that_came_to_nothing_leaves_what_workers_were_given(tmp_path, monkeypatch, killed):
    monkeypatch.setattr(update, "BLOCK", 2)  # the first block is sound, and its answer written, when the second is not
    given = torch.tensor([0.5, 1.0, 2.0, 2e38])
    peers = []
    for name in ("a", "b"):
        peer = Direct(pg.ADAG(window=1), tmp_path / name, 1, lambda: "")
        (tmp_path / name).mkdir()
        head = {"op": "load", "start_id": LIFE, "clock": 3, "ledger": [1, 1], "versions": [3, 3]}
        peer.exchange(head, {"value": torch.tensor([0.0, 1.0, 2.0, 2e38]), "answer.0": given}, lambda back: {})
        peers.append(peer)
    peer, fresh = peers
    assert not prepare(peer, 2, [0.1, 0.1, 0.1, 3e38])
    if killed:
        peer.revive()
    else:
        assert not torch.equal(peer.keeper.held.center.answers[0], given)
    assert torch.equal(peer.keeper.held.tensors(3)["answer.0"], given)
    assert prepare(peer, 3, [0.1, 0.2, 0.3, 0.4])
    assert prepare(fresh, 3, [0.1, 0.2, 0.3, 0.4])
    for one in peers:
        one.ask("flip", {"protocol": PROTOCOL, "start_id": LIFE, "clock": 4, "waiting": []})
    assert torch.equal(peer.keeper.held.center.value, fresh.keeper.held.center.value)
    assert torch.equal(peer.keeper.held.answer(0, 4), fresh.keeper.held.center.value)


MOMENTUM = pg.Optimizer("sgd:lr=0.1,momentum=0.9")


def test_a_mean_that_is_not_finite_in_one_slice_moves_no_optimiser(tmp_path):
    both = Both(pg.SyncSGD(), [0, 20, 50, LENGTH], tmp_path, optimizer=MOMENTUM)
    for rank in range(WORKERS):
        both.join(rank)

    def go_round(seed: int, kinds: list[str], weights: list[float]) -> bool:
        return all(both.commit(rank, seed + rank, kinds[rank], weights[rank]) for rank in range(WORKERS))

    assert go_round(1, ["good"] * 3, [1.0] * 3)
    before = {name: tensor.clone() for name, tensor in both.lead.snapshot().tensors().items()}
    # With weights below 0, as rows may have, the mean of numbers that are finite overflows, and only in the last slice.
    assert go_round(4, ["huge", "good", "good"], [3.0, -1.0, -1.0])
    assert both.whole.ledger.counts.refused == both.lead.ledger.counts.refused == 3
    assert same(both.lead.snapshot().tensors(), before)
    assert go_round(7, ["good"] * 3, [1.0] * 3)
    assert both.lead.clock == 2
    both.compare()


@pytest.mark.parametrize("killed", [False, True])
def test_a_step_that_was_prepared_and_not_flipped_to_is_forgotten(tmp_path, killed):
    peers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        peer = Direct(pg.StalenessAware(), tmp_path / name, 1, lambda: "", MOMENTUM)
        head = {"op": "load", "start_id": LIFE, "clock": 3, "ledger": [1, 1], "versions": [3, 3]}
        peer.exchange(head, {"value": torch.zeros(2)}, lambda back: {})
        peers.append(peer)
    peer, fresh = peers
    for clock, (first, second) in enumerate([([1.0, 2.0], [3.0, 4.0]), ([5.0, 6.0], [7.0, 8.0])], start=4):
        assert prepare(peer, 2 * clock, first, clock)
        if killed:
            peer.revive()
        for one in peers:
            assert prepare(one, 2 * clock + 1, second, clock)
            one.ask("flip", {"protocol": PROTOCOL, "start_id": LIFE, "clock": clock, "waiting": []})
    found, expected = peer.keeper.held.tensors(5), fresh.keeper.held.tensors(5)
    assert torch.equal(found["optimizer.0.momentum_buffer"], torch.tensor([9.7, 11.6]))
    assert same(found, expected)
    assert torch.equal(peer.keeper.held.tensors(4)["optimizer.0.momentum_buffer"], torch.tensor([3.0, 4.0]))


def test_what_a_worker_is_handed_after_an_update_came_to_nothing_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "BLOCK", 2)
    peer = Direct(pg.ADAG(window=1), tmp_path, 1, lambda: "")
    value = torch.tensor([0.0, 1.0, 2.0, 2e38])
    head = {"op": "load", "start_id": LIFE, "clock": 3, "ledger": [1, 1], "versions": [3, 3]}
    peer.exchange(head, {"value": value, "answer.0": value + 1}, lambda back: {})
    peer.keeper.held.center.answers[0].copy_(torch.tensor([0.5, 1.0, 2.0, 2e38]))
    assert not prepare(peer, 2, [0.1, 0.1, 0.1, 3e38])
    peer.ask("hand", {"protocol": PROTOCOL, "start_id": LIFE, "worker": 0, "clock": 3})
    for _ in range(2):
        assert torch.equal(peer.keeper.held.tensors(3)["answer.0"], value)
        peer.revive()


@pytest.mark.parametrize("killed", [False, True])
def test_a_shard_that_is_ahead_by_one_gives_what_it_held_before(tmp_path, killed):
    peer = filled(tmp_path, pg.AGN())
    before = {name: tensor.clone() for name, tensor in peer.keeper.held.tensors(3).items()}
    assert prepare(peer, 2, [1.0, 1.0, 1.0, 1.0])
    for _ in range(2):  # said again, it changes nothing twice
        peer.ask("flip", {"protocol": PROTOCOL, "start_id": LIFE, "clock": 4, "waiting": []})
        if killed:
            peer.revive()
    assert torch.equal(peer.keeper.held.tensors(4)["value"], before["value"] + 1)
    assert torch.equal(peer.keeper.held.tensors(3)["value"], before["value"])
    room = torch.empty(4)
    pull = {"op": "pull", "start_id": LIFE}
    assert peer.exchange({**pull, "clock": 3}, {}, lambda back: {"value": room}) == {}
    assert torch.equal(room, before["value"])
    assert prepare(peer, 3, [1.0, 1.0, 1.0, 1.0], clock=5)
    assert peer.exchange({**pull, "clock": 3}, {}, lambda back: {}) == {"passed": True}
    assert peer.exchange({**pull, "clock": 4}, {}, lambda back: {"value": room}) == {}
    assert torch.equal(room, before["value"] + 1)
    with pytest.raises(Malformed, match="no state of clock 2"):
        peer.keeper.held.tensors(2)
