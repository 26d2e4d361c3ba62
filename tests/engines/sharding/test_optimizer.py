"""Real runs whose center holds the optimiser and is spread: its state is cut, killed, gathered and taken on as the value is."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.load import split
from paragrad.engines.sharding import coordinator
from paragrad.engines.sharding.process import ShardService
from paragrad.engines.transport.message import Malformed
from paragrad.laws.bowl import Bowl
from paragrad.rundir import checkpoint
from paragrad.rundir.record import read
from tests.conftest import Watch, every_batch_once, stop_after, train

pytest.importorskip("pyarrow.flight")
ADAM = pg.Optimizer("adam:lr=0.01", schedule="cosine:warmup=0.1")
TOTAL = 50 * 2


@pytest.fixture
def wide() -> nn.Module:
    """Of few, large tensors: the optimiser of one center sees them, and not one flat vector."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4096, bias=False), nn.Tanh(), nn.Linear(4096, 8, bias=False))


def weights(result: pg.Result) -> torch.Tensor:
    return torch.cat([t.flatten().double() for t in result.model.state_dict().values()])


def over(shards: int, **options: Any) -> pg.Network:
    return pg.Network(workers=2, here=2, shards=shards, threads=1, **options)


def stepped(model: Any, rows: Any, out: Any, engine: Any, watch: Any = None, **options: Any) -> pg.Result:
    settings = {"scheme": pg.SyncSGD(), "optimizer": ADAM, "epochs": 2} | options
    return train(model, (rows[0], rows[1]), out, watch, engine=engine, **settings)


def kill_a_shard(watch: Watch, event: pg.Event) -> None:
    os.kill(next(e.data["pid"] for e in watch.events if e.kind == "shard"), signal.SIGKILL)


def test_synchronous_steps_of_a_spread_center_end_on_the_same_bits_also_where_a_shard_is_killed(model, rows, tmp_path):
    whole = stepped(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1))
    watch = Watch(at=31, act=kill_a_shard)
    result = stepped(model, rows, tmp_path / "spread", over(2), watch)
    assert watch.kinds()["shard"] == 2
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(result.directory, TOTAL)
    assert not list(result.directory.glob("shard-*.json"))
    assert result.summary["commits"] == whole.summary["commits"] == TOTAL


@pytest.mark.parametrize("scheme", [pg.SoftSync(), pg.DCASGD(adaptive=True), pg.BackupWorkers()], ids=repr)
def test_no_row_is_lost_where_the_center_steps_and_a_shard_and_a_worker_are_killed(scheme, model, rows, tmp_path):
    def kill(watch: Watch, event: pg.Event) -> None:
        kill_a_shard(watch, event)
        watch.signal(1 - event.data["worker"], signal.SIGKILL)

    result = stepped(model, rows, tmp_path / "run", over(2), Watch(at=20, act=kill), scheme=scheme)
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["samples"] == 400 * 2


def test_a_checkpoint_does_not_depend_on_how_many_shards_there_are(wide, rows, tmp_path):
    whole = stepped(wide, rows, tmp_path / "whole", pg.Local(workers=2, threads=1))
    engines = [pg.Local(workers=2, threads=1), over(3), over(2), pg.Local(workers=2, threads=1)]
    for number, engine in enumerate(engines):
        last = number == len(engines) - 1
        run = {"resume": number > 0, "callbacks": () if last else (stop_after(22),), "checkpoint_every": None}
        result = pg.train(
            wide,
            (rows[0], rows[1]),
            scheme=pg.SyncSGD(),
            optimizer=ADAM,
            batch_size=8,
            epochs=2,
            engine=engine,
            run=pg.Run(out=tmp_path / "parts", **run),
        )
        assert result.stopped == ("finished" if last else "callback")
        found, _ = checkpoint.newest(tmp_path / "parts" / "checkpoints")
        assert found is not None
        state = {name: tuple(t.shape) for name, t in found.tensors.items() if name.startswith("optimizer.")}
        shapes = enumerate([(4096, 8), (8, 4096)])
        assert state == {
            f"optimizer.{i}.{key}": () if key == "step" else shape
            for i, shape in shapes
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(tmp_path / "parts", TOTAL)


SCRIPT = """
    import os, signal, sys, torch
    import paragrad as pg
    from torch import nn

    class Kill:
        commits = 0
        def __call__(self, event):
            self.commits += event.kind == "commit"
            if self.commits == 27:
                os.kill(os.getpid(), signal.SIGKILL)

    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4096, bias=False), nn.Tanh(), nn.Linear(4096, 8, bias=False))
    run = pg.Run(out=sys.argv[1], callbacks=(Kill(),), checkpoint_every=None)
    pg.train(model, (x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()), batch_size=8, epochs=2, scheme=pg.SyncSGD(),
             optimizer=pg.Optimizer("adam:lr=0.01", schedule="cosine:warmup=0.1"),
             engine=pg.Network(workers=2, here=2, shards=3, threads=1), run=run)
"""


def test_what_killed_processes_have_left_of_the_optimiser_is_gone_on_from(wide, rows, tmp_path):
    out = tmp_path / "killed"
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(out)]
    done = subprocess.run(script, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    whole = stepped(wide, rows, tmp_path / "whole", pg.Local(workers=2, threads=1))
    result = stepped(wide, rows, out, over(3), run={"resume": True})
    assert any(event.kind == "restart" and event.data["clock"] >= 12 for event in read(out / "record.jsonl"))
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(out, TOTAL)


def test_a_shard_that_is_started_by_hand_learns_of_the_optimiser_in_words(model, rows, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "paragrad", "shard", str(out), "--index", "1"]
    by_hand = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        result = stepped(model, rows, out, over(2, shards_elsewhere=1))
        said, _ = by_hand.communicate(timeout=60)
    finally:
        by_hand.kill()
        by_hand.communicate()
    assert by_hand.returncode == 0, said
    whole = stepped(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1))
    assert torch.equal(weights(result), weights(whole))


def test_an_optimiser_that_cannot_be_cut_is_refused_with_the_reason(model, rows, tmp_path):
    refused = {
        "clip_norm needs the norm of the whole gradient": pg.Optimizer("adam", clip_norm=1.0),
        "Adafactor is not known to work element by element": "adafactor",
        r"fused=True rounds .* Use shards=1": "adam:fused=true",
        "takes the model": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    for message, optimizer in refused.items():
        with pytest.raises(pg.UsageError, match=f"cannot be cut into slices: .*{message}"):
            stepped(model, rows, tmp_path / "never", over(2), optimizer=optimizer)
    for optimizer in (functools.partial(torch.optim.Adam, lr=0.01), pg.Optimizer("adam", schedule=lambda progress: 1.0)):
        with pytest.raises(pg.UsageError, match="made in Python, and a shard that is started by hand"):
            stepped(model, rows, tmp_path / "never", over(2, shards_elsewhere=1), optimizer=optimizer)
    assert not (tmp_path / "never").exists()


def test_a_factory_will_do_where_the_center_starts_all_shards(model, rows, tmp_path):
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    whole = stepped(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1), optimizer=adam, epochs=1)
    result = stepped(model, rows, tmp_path / "spread", over(2), optimizer=adam, epochs=1)
    assert torch.equal(weights(result), weights(whole))


class LongBowl(Bowl):
    """A learner of somebody's own, whose optimiser at the center is none of torch's."""

    def __init__(self) -> None:
        super().__init__(weights=torch.zeros(100, dtype=torch.float64))


def test_a_learner_with_an_optimiser_of_its_own_is_refused(rows):
    parts = split(rows, None, None, 0)
    job = Job(pg.SyncSGD(), lambda device: LongBowl(), parts.train, None, None, 8)  # type: ignore[arg-type]
    with pytest.raises(pg.UsageError, match=r"not an optimiser of torch.optim \(_Descent\)"):
        coordinator.check(job, LongBowl(), 2)


def test_a_keras_model_is_refused_where_the_center_steps(rows, tmp_path):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(pg.UsageError, match=r"not an optimiser of torch.optim \(KerasCenter\)"):
        stepped(model, rows, tmp_path / "never", over(2), optimizer=None)


def test_a_shard_without_an_optimiser_keeps_no_room_for_one(tmp_path):
    keeper = ShardService(pg.AGN(), tmp_path, 1, "a life")
    keeper.make(2, 5, torch.float32, lambda held: None)
    assert keeper.held is not None
    assert not [name for name in keeper.held.segment.layout if "optimizer" in name]
    keeper.discard()


def test_no_room_is_made_for_a_slice_that_no_machine_holds(tmp_path):
    keeper = ShardService(pg.AGN(), tmp_path, 1, "a life")
    for vectors in ([["value", "float32", 1 << 50]], [["value", "float32", 10], ["answer.0", "float32", 1 << 50]], []):
        with pytest.raises(Malformed, match="cannot be"):
            keeper.exchange("somebody").begin({"op": "load", "start_id": "a life", "vectors": vectors})
