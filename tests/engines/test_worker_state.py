"""Workers' own optimiser state is checkpointed: a run that is stopped and resumed is the unbroken run."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core.center import Center
from paragrad.data.leases import Leases
from paragrad.engines import local
from paragrad.engines.exchange import statefiles
from paragrad.engines.exchange.statefiles import StateFiles
from paragrad.engines.transport.header import flat, most_bytes, put_state, rooms_for_state
from paragrad.engines.transport.message import Malformed, declare
from paragrad.rundir import checkpoint, session
from paragrad.rundir.record import read
from paragrad.types import Commit
from tests.conftest import Watch, stop_after

ENGINES = {
    "local": lambda n: pg.Local(workers=n, threads=1),
    "vector": lambda n: pg.Vector(workers=n),
    "one by one": lambda n: pg.Vector(workers=n, mode="loop"),
    "network": lambda n: pg.Network(workers=n, here=n, threads=1),
    "network, nothing shared": lambda n: pg.Network(workers=n, here=n, threads=1, shared=False),
    "network, spread": lambda n: pg.Network(workers=n, here=n, threads=1, shards=2),
}
ADAMW = pg.Optimizer("adamw:lr=0.01", schedule="cosine:warmup=0.2")
ROUNDS = [
    (pg.ModelAveraging(window=3), ADAMW),
    (pg.DiLoCo(window=4), ADAMW),
    (pg.EASGD(window=2), "sgd:lr=0.05,momentum=0.9"),
    (pg.EASGD(window=5, overlap=1), ADAMW),
]
ALONE = [
    (pg.AGN(window=3), "adam:lr=0.01"),
    (pg.AEASGD(window=3), ADAMW),
    (pg.EAMSGD(window=3), "sgd:lr=0.05"),
    (pg.GEM(window=2), "rmsprop:lr=0.01"),
    (pg.Downpour(window=2, overlap=1), "adagrad:lr=0.05"),
]
ROWS = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
DATA = ROWS, (ROWS[:, 0] + 0.5 * ROWS[:, 1] > 0).long()


def run(out: Path, scheme, optimizer, engine, stops=(None,), **options) -> pg.Result:
    """Train; stopped after so many commits (None: to the end), and again, and resumed each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))
    settings = {"scheme": scheme, "optimizer": optimizer, "engine": engine, "epochs": 1, "batch_size": 8, **options}
    for number, commits in enumerate(stops):
        watch = () if commits is None else (stop_after(commits),)
        result = pg.train(model, DATA, run=pg.Run(out=out, resume=number > 0, callbacks=watch), **settings)
    return result


def weights(result: pg.Result) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in result.model.parameters()])


def check(engine, scheme, optimizer, stops, **options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unbroken = run(Path(folder) / "whole", scheme, optimizer, engine, **options)
        resumed = run(Path(folder) / "run", scheme, optimizer, engine, [*stops, None], **options)
        assert torch.equal(weights(resumed), weights(unbroken))
        assert resumed.summary["commits"] == unbroken.summary["commits"]
        ours, theirs = (checkpoint.newest(Path(folder) / name / "checkpoints")[0].tensors for name in ("run", "whole"))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("engine", ["vector", "one by one"])
@pytest.mark.parametrize(("scheme", "optimizer"), ROUNDS, ids=lambda value: repr(value)[:40])
@given(stops=st.lists(st.integers(1, 12), min_size=1, max_size=2))
@settings(max_examples=3)
def test_simulated_rounds_that_are_stopped_anywhere_go_on_as_if_they_had_not_been(engine, scheme, optimizer, stops):
    check(ENGINES[engine](2), scheme, optimizer, stops)


@pytest.mark.parametrize("engine", ["vector", "one by one"])
@pytest.mark.parametrize(("scheme", "optimizer"), ALONE, ids=lambda value: repr(value)[:40])
@given(stops=st.lists(st.integers(1, 12), min_size=1, max_size=2))
@settings(max_examples=2)
def test_a_simulated_worker_that_is_stopped_anywhere_goes_on_as_if_it_had_not_been(engine, scheme, optimizer, stops):
    check(ENGINES[engine](1), scheme, optimizer, stops)


@pytest.mark.parametrize(("scheme", "optimizer"), ROUNDS, ids=lambda value: repr(value)[:40])
def test_rounds_of_processes_that_are_stopped_go_on_as_if_they_had_not_been(scheme, optimizer):
    check(ENGINES["local"](2), scheme, optimizer, [3, 7])


@pytest.mark.parametrize("engine", [name for name in ENGINES if name.startswith("network")])
@pytest.mark.parametrize(("scheme", "optimizer"), [ROUNDS[1], ROUNDS[3]], ids=lambda value: repr(value)[:40])
def test_rounds_over_a_network_that_are_stopped_go_on_as_if_they_had_not_been(engine, scheme, optimizer):
    check(ENGINES[engine](2), scheme, optimizer, [5], codec=None if scheme.overlap else pg.TopK(0.3))


@pytest.mark.parametrize(("scheme", "optimizer"), ALONE, ids=lambda value: repr(value)[:40])
def test_a_process_that_is_stopped_goes_on_as_if_it_had_not_been(scheme, optimizer):
    check(ENGINES["local"](1), scheme, optimizer, [5])


def test_a_commit_that_was_on_its_way_without_the_state_is_answered_so_that_the_next_brings_it(monkeypatch):
    first_asked: dict[int, int] = {}
    want = local._LocalLoop._want

    def want_late(loop, wanted: bool) -> None:
        """As for a worker that looked at the flag just before it was set."""
        if wanted and loop.center.clock == first_asked.setdefault(id(loop), loop.center.clock):
            return
        want(loop, wanted)

    monkeypatch.setattr(local._LocalLoop, "_want", want_late)
    monkeypatch.setattr(session, "PATIENCE", 5.0)
    for scheme, optimizer in (ALONE[0], ALONE[4]):
        first_asked.clear()
        check(ENGINES["local"](1), scheme, optimizer, [5])


@pytest.mark.parametrize(("scheme", "optimizer"), [ALONE[0], ALONE[4]], ids=lambda value: repr(value)[:40])
def test_a_simulated_commit_that_was_on_its_way_is_answered_too(scheme, optimizer, tmp_path):
    engine = pg.Vector(workers=2, cluster=pg.Cluster(speeds=(1.0, 1.3), latency=3.5))
    stopped = run(tmp_path / "run", scheme, optimizer, engine, [5])
    assert stopped.stopped == "callback"
    kept = checkpoint.newest(tmp_path / "run" / "checkpoints")[0].tensors
    assert {name.split(".")[1] for name in kept if name.startswith("worker.")} == {"0", "1"}


def events(out: Path, kind: str) -> list[dict]:
    return [dict(event.data) for event in read(out / "record.jsonl") if event.kind == kind]


def test_a_run_that_was_stopped_and_resumed_is_replayed_to_the_bit_workers_states_included(tmp_path):
    run(tmp_path / "run", pg.DiLoCo(window=4), "adam:lr=0.01", pg.Local(workers=2, threads=1), [2, 3, None])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))
    found = pg.replay(tmp_path / "run", model, DATA)
    assert found.equal
    kept = checkpoint.newest(tmp_path / "run" / "checkpoints")[0].tensors
    assert any(name.startswith("worker.1.optimizer.Adam.") for name in kept)
    assert {(join["incarnation"], join.get("state")) for join in events(tmp_path / "run", "join")} == {(0, None), (0, True)}


class Slow(nn.Linear):
    """A model whose run lasts until a replacement has started."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return super().forward(x)


def test_a_replacement_starts_with_none_and_the_record_says_so(tmp_path):
    watch = Watch()

    def kill_once(event: pg.Event) -> None:
        watch(event)
        if event.kind == "commit" and event.data["worker"] == 0 and not watch.at:
            watch.at = watch.commits
            watch.signal(0, signal.SIGKILL)

    pg.train(
        Slow(8, 2), DATA, scheme=pg.AGN(window=2), optimizer="adam:lr=0.01", engine=pg.Local(workers=2), epochs=8,
        batch_size=8, run=pg.Run(out=tmp_path / "run", callbacks=(kill_once,)),
    )  # fmt: skip
    joined = {(join["worker"], join["incarnation"]): join.get("state") for join in events(tmp_path / "run", "join")}
    assert joined == {(0, 0): None, (1, 0): None, (0, 1): False}


def test_a_checkpoint_of_an_older_version_without_workers_states_is_gone_on_from(tmp_path):
    engine, chosen = pg.Local(workers=2), (pg.DiLoCo(window=4), "adam:lr=0.01")
    folder = tmp_path / "two" / "checkpoints"
    first = run(tmp_path / "two", *chosen, engine, epochs=1)
    assert first.stopped == "finished"
    found, _ = checkpoint.newest(folder)
    older = {name: tensor for name, tensor in found.tensors.items() if not name.startswith("worker.")}
    assert len(older) < len(found.tensors)
    checkpoint.save(folder, older, found.numbers)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))
    pg.train(
        model, DATA, scheme=chosen[0], optimizer=chosen[1], engine=engine, epochs=2, batch_size=8,
        run=pg.Run(out=tmp_path / "two", resume=True),
    )  # fmt: skip
    assert [join.get("state") for join in events(tmp_path / "two", "join")] == [None, None, False, False]


@pytest.mark.parametrize("engine", [pg.Local(workers=1), pg.Vector(workers=1)], ids=["local", "vector"])
def test_the_state_of_another_optimiser_is_not_taken_and_that_is_said(engine, tmp_path):
    run(tmp_path / "run", pg.AGN(window=3), "adam:lr=0.01", engine)
    run_on = pg.Run(out=tmp_path / "run", resume=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))
    settings = {"scheme": pg.AGN(window=3), "engine": engine, "batch_size": 8, "epochs": 2}
    pg.train(model, DATA, optimizer="sgd:lr=0.01,momentum=0.9", run=run_on, **settings)
    said = [event["message"] for event in events(tmp_path / "run", "warning")]
    assert any("Worker 0 begins with a new optimiser state" in message for message in said)


def test_more_epochs_after_a_finished_run_on_another_engine_go_on_with_the_same_state(tmp_path):
    chosen = pg.AGN(window=5), "adam:lr=0.01"
    weights_of = []
    for name, engines in {"one": ("one by one", "one by one"), "two": ("vector", "local")}.items():
        run(tmp_path / name, *chosen, ENGINES[engines[0]](1))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 2))
        settings = {"scheme": chosen[0], "optimizer": chosen[1], "batch_size": 8, "epochs": 2}
        result = pg.train(model, DATA, engine=ENGINES[engines[1]](1), run=pg.Run(out=tmp_path / name, resume=True), **settings)
        weights_of.append(weights(result))
    torch.testing.assert_close(*weights_of, rtol=0, atol=1e-5)


def test_who_does_not_commit_in_time_is_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PATIENCE", -1.0)
    monkeypatch.setattr(session, "WINDOWS", -1)
    run(tmp_path / "run", pg.AGN(window=3), "adam:lr=0.01", pg.Local(workers=2), [5, None])
    assert events(tmp_path / "run", "checkpoint")[0]["without"] == [0, 1]
    assert any("lacks the state of workers 0, 1" in event["message"] for event in events(tmp_path / "run", "warning"))
    assert {join.get("state") for join in events(tmp_path / "run", "join")[2:]} == {False}


def test_a_rejected_commit_takes_its_state_with_it():
    learner = nn.Linear(3, 1)
    start = nn.utils.parameters_to_vector(learner.parameters()).detach()
    center = Center(pg.AGN(window=1), start, workers=1, leases=Leases(batches=9, epochs=1, workers=1, stolen=False))
    (reply,) = center.join(0)
    kept = {"counters": torch.ones(1)}
    center.receive(Commit(0, 1, reply.version, torch.ones(4), 1, batches=reply.batches, state=kept))
    assert center.private.states == {0: kept}
    (batch,) = center.leases.held(0)
    spoiled = Commit(0, 2, center.clock, torch.full((4,), torch.nan), 1, batches=(batch,), state={"counters": torch.zeros(1)})
    (answer,) = center.receive(spoiled)
    assert not answer.applied
    assert center.private.states == {0: kept}
    center.receive(Commit(0, 3, center.clock, torch.ones(4), 1, batches=answer.batches))
    assert center.private.states == {}, "of a commit that brought none nothing is known"


def test_a_disk_without_room_costs_the_state_and_not_the_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    files = StateFiles(tmp_path)
    assert files.put(0, 1, {"a": torch.ones(2)})
    monkeypatch.setattr(statefiles, "write_tensors", full)
    assert not files.put(0, 2, {"a": torch.ones(2)})
    assert torch.equal(files.take(0, 1)["a"], torch.ones(2))
    assert files.take(0, 1) == files.take(0, 2) == {}
    files.clear()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "head",
    [
        {"state": {"a": [5]}},
        {"state": [], "vectors": [["state.a", "float32", 4]]},
        {"state": {"a": [5]}, "vectors": [["state.a", "float32", 4]]},
        {"state": {"a": [2, -2]}, "vectors": [["state.a", "float32", 4]]},
        {"state": {"a": [1 << 40]}, "vectors": [["state.a", "float32", 1 << 40]]},
        {"state": {}, "vectors": [["state.a", "float32", 4]]},
    ],
)
def test_what_a_worker_elsewhere_declares_wrongly_or_too_large_gets_no_room(head):
    with pytest.raises(Malformed):
        rooms_for_state(head, most_bytes(100, 4))


def test_what_a_worker_brings_over_a_network_comes_back_in_its_shapes():
    state = {"step": torch.tensor(3.0), "moments": torch.arange(6.0).view(2, 3), "counters": torch.ones(2, dtype=torch.float64)}
    said, vectors = put_state(state, most_bytes(6, 4))
    rooms = rooms_for_state({**said, "vectors": declare(vectors)}, most_bytes(6, 4))
    for name, room in flat(rooms).items():
        room.copy_(vectors[name])
    assert all(torch.equal(rooms[name], tensor) for name, tensor in state.items())
    assert put_state(state, 3) == ({"state": {}}, {}), "more than may be sent is said to be none"
