"""Rows that one process reads for all workers: each once, whoever is killed, and the same as in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.source import Arrays, plan_of
from paragrad.engines.serial import Serial
from paragrad.errors import UsageError
from paragrad.schemes.traits import name_of
from tests.conftest import Watch, every_batch_once
from tests.engines.exchange.kills import Assassin
from tests.engines.exchange.victim import minus
from tests.engines.rowfeed.pieces import Logged, Numbered, Numbers, Tally

LENGTHS = [60, 0, 130, 90, 200, 1, 79, 240]
ROWS, BATCH = sum(LENGTHS), 10


def tally(data: Any, out: Path, *callbacks: Any, model: Tally | None = None, **options: Any) -> pg.Result:
    """Train a tally on numbered rows: afterwards each weight says how often its row was trained on."""
    run = pg.Run(out=out, callbacks=callbacks, checkpoint_every=None, validate_every=None, **options.pop("run", {}))
    settings: dict[str, Any] = {"scheme": pg.Downpour(window=2), "engine": pg.Local(workers=2), "epochs": 2} | options
    return pg.train(model or Tally(ROWS), data, loss=minus, optimizer=f"sgd:lr={BATCH}", batch_size=BATCH, run=run, **settings)


def check_each_row(result: pg.Result, times: int = 2, rows: int = ROWS) -> None:
    """Each row was trained on so often, and each position was used once."""
    counts = result.model.counts.detach()
    wrong = (counts - times).abs() > 1e-3
    assert not wrong.any(), f"rows {wrong.nonzero()[:, 0].tolist()} were trained on {counts[wrong].tolist()} times"
    assert every_batch_once(result.directory, -(-rows // BATCH) * (result.summary["samples"] // rows))


class Readers:
    """A callback that kills the reader at each of these commits."""

    def __init__(self, *at: int) -> None:
        self._at, self._commits = at, 0
        self.pids: list[int] = []

    def __call__(self, event: pg.Event) -> None:
        if event.kind == "reader":
            self.pids.append(event.data["pid"])
        if event.kind == "commit":
            self._commits += 1
            if self._commits in self._at:
                os.kill(self.pids[-1], signal.SIGKILL)


# -- the same rows --------------------------------------------------------------------------------------------------


def test_streamed_is_bit_equal_to_in_memory_with_the_same_plan(rows, model, tmp_path):
    class Halves:
        lengths = (150, 90, 160)

        def read(self, piece):
            start = sum(self.lengths[:piece])
            return tuple(leaf[start : start + self.lengths[piece]] for leaf in rows)

    source = pg.Streamed(Halves(), buffer=100)
    plan = plan_of(source, batch_size=8, epochs=2, seed=0)

    def weights(data, *, plan=plan):
        job = Job(
            pg.SyncSGD(), lambda device: pg.TorchLearner(model, torch.nn.CrossEntropyLoss(), "sgd:lr=0.1"), data, None, plan, 64
        )
        return Serial(job, workers=2).run().value

    options = {"scheme": pg.SyncSGD(), "optimizer": "sgd:lr=0.1", "batch_size": 8, "epochs": 2}
    expected = weights(Arrays(rows))
    assert torch.equal(weights(source), expected)
    for engine in (pg.Local(workers=2), pg.Vector(workers=2)):
        trained = pg.train(
            model, source, engine=engine, run=pg.Run(out=tmp_path / options.pop("out", type(engine).__name__)), **options
        )
        assert torch.equal(torch.cat([p.detach().reshape(-1) for p in trained.model.parameters()]), expected)
    assert pg.replay(tmp_path / "Local", model, source).equal


def test_a_vector_engine_says_that_streamed_rows_are_computed_one_after_another(tmp_path):
    watch = Watch()
    result = tally(pg.Streamed(Numbered(LENGTHS)), tmp_path / "run", watch, engine=pg.Vector(workers=3))
    check_each_row(result)
    assert any("the rows are streamed" in event.data["message"] for event in watch.events if event.kind == "warning")


@pytest.mark.parametrize("buffer", [20, 300, 10_000])
@pytest.mark.parametrize("scheme", [pg.Downpour(window=3), pg.ModelAveraging(window=2)], ids=name_of)
def test_each_piece_is_decoded_once_an_epoch_whatever_the_number_of_workers(buffer, scheme, tmp_path):
    log = tmp_path / "reads"
    source = pg.Streamed(Logged(LENGTHS, log), buffer=buffer)
    watch = Watch()
    result = tally(source, tmp_path / "run", watch, scheme=scheme, engine=pg.Local(workers=3))
    assert every_batch_once(result.directory, 2 * ROWS // BATCH)
    (reader,) = [event.data["pid"] for event in watch.events if event.kind == "reader"]
    reads = [line.split() for line in log.read_text().splitlines()]
    mine = [piece for pid, piece in reads if int(pid) == reader]
    assert len(mine) <= 2 * sum(1 for length in LENGTHS if length)
    if buffer == 10_000:  # everything fits: a second epoch reads nothing again
        assert len(mine) == sum(1 for length in LENGTHS if length)


def test_validation_rows_are_streamed_too(tmp_path):
    watch = Watch()
    result = tally(pg.Streamed(Numbered(LENGTHS)), tmp_path / "run", watch, holdout=0.25)
    assert result.summary["samples"] == 2 * 600
    assert watch.kinds()["validation"] == 1
    assert sorted(set(result.model.counts.detach().round().int().tolist())) == [0, 2]


# -- whoever is killed ----------------------------------------------------------------------------------------------


def test_every_row_once_with_readers_and_workers_killed(tmp_path):
    readers, watch = Readers(15, 40, 65), Watch(at=25, act=lambda watch, event: watch.signal(1, signal.SIGKILL))
    source = pg.Streamed(Numbered([20] * 40), buffer=20)  # blocks so small that workers wait for each new reader
    result = tally(source, tmp_path / "run", readers, watch)
    check_each_row(result)
    assert len(readers.pids) == 4
    assert result.summary["lost_workers"] == 1
    warnings = [event.data["message"] for event in watch.events if event.kind == "warning"]
    assert sum("reads the rows was ended by SIGKILL" in message for message in warnings) == 3


def test_a_reader_that_is_stopped_is_replaced(tmp_path):
    def stop(event: pg.Event) -> None:
        if event.kind == "reader" and not event.data["incarnation"]:
            os.kill(event.data["pid"], signal.SIGSTOP)

    engine = pg.Local(workers=2, replace_after=0.1)
    check_each_row(tally(pg.Streamed(Numbered([20] * 40), buffer=20), tmp_path / "run", stop, engine=engine))


def test_a_reader_that_dies_again_and_again_ends_the_run(tmp_path):
    def kill(event: pg.Event) -> None:
        if event.kind == "reader":
            os.kill(event.data["pid"], signal.SIGKILL)

    with pytest.raises(pg.ReadError, match="3 times without reading any"):
        tally(pg.Streamed(Numbered(LENGTHS)), tmp_path / "run", kill)


def test_a_worker_whose_block_has_made_way_reads_for_itself(tmp_path):
    """One worker is stopped while the other goes on for many blocks; afterwards it does what it holds. In one epoch: in another
    the same rows may just be there again."""

    stopped: list[int] = []

    def pause(event: pg.Event) -> None:
        if event.kind == "commit" and event.data["worker"] == 1 and not stopped:
            stopped.append(watch.commits)
            watch.signal(1, signal.SIGSTOP)  # it waits for its answer, which gives it rows of the present block
        elif event.kind == "commit" and stopped and watch.commits > stopped[0] + 15:
            watch.signal(1, signal.SIGCONT)

    log = tmp_path / "reads"
    watch = Watch()
    source = pg.Streamed(Logged([20] * 40, log), buffer=20)
    engine = pg.Local(workers=2, replace_after=60)
    result = tally(source, tmp_path / "run", watch, pause, engine=engine, epochs=1)
    check_each_row(result, times=1)
    assert result.summary["lost_workers"] == 0
    readers = {line.split()[0] for line in log.read_text().splitlines()}
    assert str(watch.pids[1]) in readers


# -- trouble with files ---------------------------------------------------------------------------------------------


def test_a_stalled_read_is_waited_for_and_reported(tmp_path):
    gate = tmp_path / "gate"
    told: list[str] = []

    def open_gate(event: pg.Event) -> None:
        if event.kind == "warning" and "Still reading" in event.data["message"]:
            told.append(event.data["message"])
            if len(told) == 2:
                gate.touch()

    source = pg.Streamed(Numbered(LENGTHS, hold=4, gate=gate), buffer=100, stalled=0.2)
    check_each_row(tally(source, tmp_path / "run", open_gate))
    assert all("Still reading part-4.parquet after" in message for message in told)
    assert len(told) >= 2


def test_a_file_that_vanishes_ends_the_run_with_its_name(tmp_path):
    with pytest.raises(UsageError, match=r"part-4\.parquet could not be read \(FileNotFoundError"):
        tally(pg.Streamed(Numbered(LENGTHS, lost=4), buffer=100), tmp_path / "run")


# -- generators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [pg.Downpour(window=2), pg.ModelAveraging(window=3)], ids=name_of)
def test_a_generators_rows_are_trained_on_once_each_with_workers_killed(scheme, tmp_path):
    assassin = Assassin(seed=4, kills=3, every=8, delay=0.004)
    source = pg.Generated(Numbers(7), rows=ROWS)
    result = tally(source, tmp_path / "run", assassin, model=Tally(2 * ROWS, sleep=0.002), scheme=scheme)
    assert assassin.done()
    assert result.summary["lost_workers"] == 3
    if isinstance(scheme, pg.Downpour):
        check_each_row(result, times=1)
    assert every_batch_once(result.directory, 2 * ROWS // BATCH)


def test_a_loader_is_read_by_one_process_and_every_row_is_trained_on_once_an_epoch(tmp_path):
    loader = DataLoader(TensorDataset(torch.arange(ROWS).float()[:, None]), batch_size=32, shuffle=True, collate_fn=stack)
    check_each_row(tally(loader, tmp_path / "run"))


def test_a_loader_may_have_processes_of_its_own(tmp_path):
    loader = DataLoader(TensorDataset(torch.arange(ROWS).float()[:, None]), batch_size=100, num_workers=1, collate_fn=stack)
    check_each_row(tally(loader, tmp_path / "run", epochs=1), times=1)


def stack(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row for (row,) in rows])


def test_a_generator_gives_the_same_model_wherever_it_is_read(tmp_path):
    found = []
    for engine in (pg.Local(workers=2), pg.Vector(workers=2)):
        result = tally(
            pg.Generated(Numbers(7), rows=ROWS), tmp_path / type(engine).__name__, engine=engine, scheme=pg.SyncSGD()
        )
        found.append(result.model.counts.detach())
    assert torch.equal(*found)


def test_a_generator_that_ends_early_ends_the_run(tmp_path):
    with pytest.raises(UsageError, match=r"generator Numbers ended in epoch 1, after 50 of 80 steps \(500 of 800 rows\)"):
        tally(pg.Generated(Numbers(10, total=500), steps=80), tmp_path / "run")


def test_a_generators_exception_is_shown(tmp_path):
    with pytest.raises(pg.ReadError, match="the detector is off"):
        tally(pg.Generated(Numbers(10, fail_at=300), rows=ROWS), tmp_path / "run")


def test_a_killed_reader_of_a_generator_cannot_be_replaced(tmp_path):
    with pytest.raises(pg.ReadError, match="are lost, so the run ends"):
        tally(pg.Generated(Numbers(7), rows=ROWS), tmp_path / "run", Readers(10), model=Tally(ROWS, sleep=0.002))


@pytest.mark.parametrize("generated", [False, True])
def test_a_resumed_run_ends_on_the_same_bits(generated, tmp_path):
    def data() -> Any:
        return pg.Generated(Numbers(7), rows=ROWS) if generated else pg.Streamed(Numbered(LENGTHS), buffer=100)

    def stop(event: pg.Event) -> bool:
        return event.kind == "commit" and event.data["clock"] == 50

    whole = tally(data(), tmp_path / "whole", scheme=pg.SyncSGD())
    tally(data(), tmp_path / "run", stop, scheme=pg.SyncSGD())
    watch = Watch()
    rest = tally(data(), tmp_path / "run", watch, scheme=pg.SyncSGD(), run={"resume": True})
    assert torch.equal(rest.model.counts, whole.model.counts)
    notes = [event.data["message"] for event in watch.events if event.kind == "note"]
    assert generated == any("read again from its beginning" in message for message in notes)


# -- memory ---------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
import h5py, numpy as np, torch, torch._dynamo
from torch import nn
import paragrad as pg
import paragrad.engines.rowfeed.reader, paragrad.train
from tests.engines.rowfeed.hdf5 import Hdf5

path, room = sys.argv[1], int(sys.argv[2])
with h5py.File(path) as file:
    rows, width = file["x"].shape
torch.zeros(1) @ torch.zeros(1)
limit = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024 + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    with h5py.File(path) as file:
        file["x"][:]
    print("it fits")
except MemoryError:
    print("does not fit")
engine = pg.Local(workers=2, threads=1)
run = pg.Run(validate_every=None, checkpoint_every=None)
result = pg.train(
    nn.Linear(width, 2), pg.Streamed(Hdf5(path), buffer=20_000), scheme=pg.AGN(), optimizer="sgd:lr=0.01",
    engine=engine, batch_size=2_000, run=run, verbose=0,
)
print(result.summary["samples"] == rows)
"""


def test_rows_are_trained_on_under_a_limit_of_memory_that_loading_them_would_break(tmp_path):
    import h5py

    path, rows, width = tmp_path / "rows.h5", 300_000, 256
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (rows, width), "float32", chunks=(10_000, width), compression="lzf")
        file.create_dataset("y", data=np.arange(rows) % 2, chunks=(10_000,))
        block = np.zeros((10_000, width), dtype=np.float32)
        for start in range(0, rows, 10_000):
            x[start : start + 10_000] = block + start / rows
    room = 150 << 20
    assert rows * width * 4 > 1.9 * room
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])}
    command = [sys.executable, "-c", LIMITED, str(path), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split("\n")[:2] == ["does not fit", "True"], done.stderr[-3000:]


def test_shared_memory_is_bounded_by_the_buffer_and_not_by_rows_or_workers(tmp_path):
    sizes = []
    for pieces, workers in ((30, 2), (120, 2), (120, 4)):
        earlier = segments()  # those of other runs in this process, which Python may not have collected yet

        def look(event: pg.Event, earlier: dict[int, int] = earlier) -> None:
            if event.kind == "go":
                sizes.append(max(size for inode, size in segments().items() if inode not in earlier))

        source = pg.Streamed(Numbered([50] * pieces), buffer=200)
        engine = pg.Local(workers=workers)
        tally(source, tmp_path / f"run{len(sizes)}", look, model=Tally(8), engine=engine, epochs=1, scheme=pg.AGN(window=5))
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 200_000  # what workers have for themselves


def segments() -> dict[int, int]:
    """Return the bytes of each shared segment that this process has open, by inode."""
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "memfd:paragrad (" in os.readlink(entry.path):
                status = os.stat(entry.path)
                found[status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return found
