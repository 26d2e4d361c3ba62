"""Every message on the page docs/troubleshooting.md is the one that a user sees: each is produced here."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from tests.conftest import Watch

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
ENTRIES = dict(re.findall(r"^### (.+?)\n+```text\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
ANYTHING = "…"
"""Stands on the page for text that differs from run to run."""


def typed(arguments: str) -> Callable[[], str]:
    """What the command line answers."""

    def run() -> str:
        result = CliRunner().invoke(app, arguments.split(), catch_exceptions=False)
        assert result.exit_code != 0
        return result.stderr

    return run


def raised(call: Callable[[], object], kind: type[BaseException] = pg.UsageError) -> Callable[[], str]:
    """What a call in Python raises."""

    def run() -> str:
        with pytest.raises(kind) as caught:
            call()
        return str(caught.value)

    return run


def rows(classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 8, generator=generator), torch.arange(64) % classes


def net(inputs: int = 8, outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def train(**options: object) -> pg.Result:
    settings = {"engine": pg.Vector(workers=2), "batch_size": 8, "optimizer": "sgd:lr=0.1", **options}
    return pg.train(settings.pop("model", net()), settings.pop("data", rows()), **settings)


def twice() -> None:
    for _ in range(2):
        train(run=pg.Run("runs/mine"))


def from_toml() -> str:
    train(run=pg.Run("runs/mine"))
    return typed("train runs/mine/run.toml")()


def noted(**options: object) -> Callable[[], str]:
    """What a run says aloud."""

    def run() -> str:
        watch = Watch()
        train(**options, run=pg.Run(callbacks=(watch,)))
        return "\n".join(e.data["message"] for e in watch.events if e.kind in ("note", "warning"))

    return run


class Breaks(nn.Module):
    """Fails at its third mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 2:
            raise KeyError("temperature")
        return self.layer(x)


def stopped() -> None:
    def stop(watch: Watch, event: pg.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    train(run=pg.Run("runs/mine", callbacks=(Watch(at=2, act=stop),)), epochs=50)


def diverging() -> None:
    x, _ = rows()
    train(optimizer="sgd:lr=1e38", loss="mse", data=(x, x[:, :2]))


def other_columns() -> str:
    np.savez("rows.npz", x_trian=np.zeros((4, 2)), y_train=np.zeros(4))
    return typed("train --data rows.npz")()


def of_files(arguments: str) -> Callable[[], str]:
    """What the command line answers where these files lie."""

    def run() -> str:
        Path("events.csv").write_text("pt,kind,is_signal\n1.5,muon,0\n2.5,jet,1\n3.5,jet,1\n")
        Path("gaps.csv").write_text("pt,label\n1.5,0\n,1\n3.5,1\n")
        return typed(arguments)()

    return run


def jets() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"jet_pt": [[1.0], [2.0, 3.0, 4.0], []], "label": [0, 1, 0]})
    parquet.write_table(table, "jets.parquet")
    train(data="jets.parquet")


def few() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for _ in range(3):
        yield np.zeros((8, 8), dtype=np.float32), np.zeros(8, dtype=np.int64)


def not_compiled() -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    train(model=keras.Sequential([keras.layers.Dense(2)]), optimizer=None)


MESSAGES: dict[str, Callable[[], str]] = {
    "Unknown column": of_files("train --data events.csv --label is_signall"),
    "No label column": of_files("train --data events.csv"),
    "Text instead of numbers": of_files("train --data events.csv --label is_signal"),
    "Missing values": of_files("train --data gaps.csv"),
    "Lists of different lengths": raised(jets),
    "A generator that ends too early": raised(lambda: train(data=pg.Generated(few, steps=10))),
    "A Keras model that is not compiled": raised(not_compiled),
    "Unknown name": typed("train --data digits --scheme agm"),
    "Unknown field": typed("train --data digits --optimizer adam:rate=0.001"),
    "No data to train on": typed("train --model mlp"),
    "Missing arrays in an .npz file": other_columns,
    "More workers than mini-batches": typed("train --data digits --workers 50 --batch-size 100"),
    "The model does not fit the rows": raised(lambda: train(model=net(inputs=9))),
    "Class labels, but one output": raised(
        lambda: train(model=net(outputs=1), data=(np.zeros((64, 8), "float32"), np.arange(64) % 2))
    ),
    "A label out of range": raised(lambda: train(data=rows(classes=3))),
    "A loss that is a sum instead of a mean": raised(lambda: train(loss=nn.CrossEntropyLoss(reduction="sum"))),
    "An optimiser object instead of a factory": raised(lambda: train(optimizer=torch.optim.Adam(net().parameters()))),
    "A line-search optimiser with a scheme that sends gradients": raised(lambda: train(optimizer="cg", scheme=pg.SyncSGD())),
    "A schedule without a learning rate": raised(lambda: train(optimizer=pg.Optimizer("cg", schedule="cosine"))),
    "A scheme for plain SGD with another optimiser": raised(lambda: train(optimizer="adam", scheme=pg.OrMo())),
    "A codec with a scheme that sends weights": raised(lambda: train(scheme=pg.AEASGD(), codec=pg.Int8())),
    "A target without validation rows": raised(lambda: train(run=pg.Run(stop=pg.Stop(accuracy=0.9)))),
    "Best weights without validation rows": raised(lambda: train(run=pg.Run(keep="best"))),
    "A validation interval without a unit": typed("train --data digits --validate-every 5.0"),
    "The loss explodes": noted(
        model=nn.Linear(8, 1), data=(rows()[0], rows()[0].sum(1, keepdim=True)), optimizer="sgd:lr=1.5", epochs=4
    ),
    "The run directory is already used": raised(twice),
    "Nothing to resume": typed("train --resume runs/nowhere"),
    "The run.toml of a run made in Python": from_toml,
    "An exception in a worker": raised(lambda: train(model=Breaks(), engine=pg.Local(workers=1)), pg.WorkerError),
    "Training diverges": raised(
        lambda: train(optimizer="sgd:lr=1e38", loss="mse", data=(rows()[0], rows()[0][:, :2])), pg.Diverged
    ),
    "A setting that is known to diverge": noted(scheme=pg.Downpour(window=5), engine=pg.Vector(workers=4)),
    "The run was stopped": raised(stopped, pg.Interrupted),
    "The vector engine computes workers one after another": noted(model=nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2))),
    "A cluster with an engine that does not simulate one": typed("train --data digits --cluster straggler"),
}


def same(text: str) -> str:
    """Without regard to where lines are broken."""
    return " ".join(text.split())


@pytest.mark.parametrize("entry", MESSAGES)
def test_the_message_on_the_page_is_the_one_that_is_seen(entry: str) -> None:
    assert entry in ENTRIES, f"docs/troubleshooting.md has no entry {entry!r}"
    pattern = ".*".join(re.escape(part) for part in same(ENTRIES[entry]).split(ANYTHING))
    seen = same(MESSAGES[entry]())
    assert re.search(pattern, seen), seen


def test_every_entry_of_the_page_is_produced() -> None:
    assert set(ENTRIES) == set(MESSAGES)
    assert all(set(same(text)) - {ANYTHING} for text in ENTRIES.values())
