"""What the tests share: small data, real data where it lies beside the repository, and a run looked at from outside."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad import schemes
from paragrad.rundir.record import batches_used, read

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # How long an example takes is a matter of what else the machine does.
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")

SLOW = (
    "test_docs",
    "test_local_life",
    "net/test_network",
    "test_convergence",
    "codecs/test_shards",
    "sharding/test_shards",
    "exchange/test_kills",
    "test_full_disk",
    "engines/net/",
    "engines/transport/",
    "cli/",
)
"""Parts of the names of files that take long, the longest first: they are begun with, so that none is left for the end."""
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first."""
    items.sort(key=lambda item: next((k for k, name in enumerate(SLOW) if name in str(item.path)), len(SLOW)))


def pytest_configure(config: pytest.Config) -> None:
    """Tests train on problems so small that schemes warn of the settings, and on rows made up so that one column tells the
    label, or none is scaled. That advice, and no other warning, is not an error; ``pytest.warns`` sees it all the same."""
    of_rows = "(Column|Input) .* (alone predicts|goes to)|All .* are of one class"
    for known in (f"({'|'.join(schemes.names())})\\b", of_rows):
        config.addinivalue_line("filterwarnings", f"ignore:{known}:paragrad.errors.ParagradWarning")


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without ``out`` go below the working directory: let that be a temporary one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two easy classes in eight dimensions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


@pytest.fixture
def model() -> nn.Module:
    """A small network for those rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


class Watch:
    """A callback that keeps events and acts on the k-th commit."""

    def __init__(self, at: int = 0, act: Callable[[Watch, pg.Event], None] | None = None) -> None:
        self.at = at
        self.act = act
        self.events: list[pg.Event] = []
        self.pids: dict[int, int] = {}
        self.commits = 0

    def __call__(self, event: pg.Event) -> None:
        self.events.append(event)
        if event.kind == "worker":
            self.pids[event.data["rank"]] = event.data["pid"]
        if event.kind == "commit":
            self.commits += 1
            if self.act is not None and self.commits == self.at:
                self.act(self, event)

    def kinds(self) -> Counter[str]:
        """How many events there were of each kind."""
        return Counter(event.kind for event in self.events)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker."""
        os.kill(self.pids[rank], number)


def every_batch_once(directory: Path, total: int) -> bool:
    """Whether the record of a run says that each mini-batch was used exactly once."""
    used = batches_used(read(directory / "record.jsonl"))
    return used == Counter(range(total))


def kill(process: BaseProcess) -> None:
    """End a process at once, stopped or not, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.join()


def stop_after(commits: int) -> Callable[[pg.Event], bool]:
    """A callback that stops a run."""
    seen = 0

    def stop(event: pg.Event) -> bool:
        nonlocal seen
        seen += event.kind == "commit"
        return seen >= commits

    return stop


def train(model: Any, data: Any, out: Path, watch: Callable[[pg.Event], Any] | None = None, **options: Any) -> pg.Result:
    """``pg.train`` with a run directory and a watch."""
    run = pg.Run(out=out, callbacks=(watch,) if watch else (), **options.pop("run", {}))
    settings: dict[str, Any] = {
        "optimizer": "sgd:lr=0.1",
        "batch_size": 8,
        "epochs": 4,
        "engine": pg.Local(workers=3),
    } | options
    return pg.train(model, data, run=run, **settings)
