"""What would fail in a validation fails before the run, in the caller; what fails later does not cost the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paragrad as pg
from paragrad.errors import UsageError
from paragrad.evaluation import metrics
from paragrad.rundir.record import read
from tests.conftest import train


class Language(nn.Module):
    """The next token by the one before it: outputs of (batch, time, tokens)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, 16)
        self.out = nn.Linear(16, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x))


def sentences(tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows a token is certain."""
    x = torch.randint(0, tokens, (200, length), generator=torch.Generator().manual_seed(0))
    return x, (x * 3 + 1) % tokens


def flat(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


LEARNS: dict[str, Any] = {"scheme": pg.SyncSGD(), "optimizer": "adam:lr=0.02", "holdout": 0.2}
ENGINES = [pg.Local(workers=2), pg.Vector(workers=2)]


@pytest.mark.parametrize("engine", ENGINES, ids=["local", "vector"])
@pytest.mark.parametrize(("tokens", "length"), [(7, 7), (11, 5)], ids=["T = V", "T < V"])
def test_accuracy_of_a_language_model_is_1_where_its_loss_is_0(tmp_path: Path, engine: Any, tokens: int, length: int) -> None:
    torch.manual_seed(0)
    data = sentences(tokens, length)
    result = train(
        Language(tokens),
        data,
        tmp_path / "run",
        validation=data,
        loss=flat,
        engine=engine,
        optimizer="adam:lr=0.05",
        epochs=12,
        metrics={"top": lambda output, target: (output.argmax(-1) == target).float().mean()},
    )
    assert result.loss is not None
    assert result.loss < 0.05
    assert result.accuracy == pytest.approx(1.0)
    assert result.summary["metrics"]["top"] == pytest.approx(1.0)
    loaded = pg.load(result.directory, model=Language(tokens), loss=flat)
    assert loaded.card.axis == 2
    found = loaded.evaluate(data)
    assert found["accuracy"] == pytest.approx(1.0)
    assert found["loss"] == pytest.approx(result.loss)
    assert len(found["confusion"]) == tokens
    assert loaded.predict(data).shape == (200, length, tokens)


def test_classes_that_are_not_where_torch_looks_for_them_are_said_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"output has the shape \(16, 5, 11\), the target \(16, 5\).*classes on axis 1"):
        train(Language(11), sentences(11, 5), tmp_path / "run", loss="crossentropy")
    assert not (tmp_path / "run").exists()


def test_a_loss_or_a_metric_that_raises_is_found_before_the_run(tmp_path: Path, model: nn.Module, rows: Any) -> None:
    def bad(output: Any, target: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(UsageError, match=r"The loss does not accept the output of the model: KeyError: 'mine'"):
        train(model, rows, tmp_path / "run", loss=bad)
    with pytest.raises(UsageError, match=r"The metric 'bad' raised KeyError: 'mine'"):
        train(model, rows, tmp_path / "run", holdout=0.2, metrics={"bad": bad})
    with pytest.raises(UsageError, match=r"The metric 'all' raised"):
        train(model, rows, tmp_path / "run", holdout=0.2, metrics={"all": lambda output, target: output})
    assert not (tmp_path / "run").exists()


def test_a_metric_that_needs_all_classes_is_tried_on_all_rows(tmp_path: Path, model: nn.Module, rows: Any) -> None:
    def strict(output: torch.Tensor, target: torch.Tensor) -> float:
        if len(target.unique()) < 2:
            raise ValueError("one class only")
        return metrics.roc_auc(output[:, 1].numpy(), target.numpy() == 1)

    order = rows[1].argsort()
    result = train(model, rows, tmp_path / "run", validation=(rows[0][order], rows[1][order]), metrics={"strict": strict})
    assert 0.5 < result.summary["metrics"]["strict"] <= 1


class Fails:
    """A metric, or a loss, that raises once weights have moved."""

    def __init__(self, begins: float) -> None:
        self.begins = begins

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        if not output.requires_grad and float(loss) < self.begins:
            raise ArithmeticError("no more")
        return loss


@pytest.mark.parametrize("engine", ENGINES, ids=["local", "vector"])
def test_a_metric_that_fails_later_costs_neither_the_run_nor_the_model(
    tmp_path: Path, model: nn.Module, rows: Any, engine: Any
) -> None:
    result = train(model, rows, tmp_path / "run", engine=engine, metrics={"late": Fails(0.5)}, **LEARNS)
    assert math.isnan(result.summary["metrics"]["late"])
    assert result.accuracy is not None
    assert (result.directory / "model.safetensors").exists()
    said = [event.data["message"] for event in read(result.directory) if event.kind == "warning"]
    assert any("The metric 'late' raised ArithmeticError: no more" in message for message in said)


def test_a_validation_that_fails_at_the_end_leaves_the_model(tmp_path: Path, model: nn.Module, rows: Any) -> None:
    run = {"validate_every": None}
    result = train(model, rows, tmp_path / "run", engine=pg.Vector(workers=2), loss=Fails(0.5), run=run, **LEARNS)
    assert result.summary["test_loss"] is None
    assert (result.directory / "model.safetensors").exists()
    assert json.loads((result.directory / "summary.json").read_text())["test_loss"] is None
    said = [event.data["message"] for event in read(result.directory) if event.kind == "warning"]
    assert any("The validation at the end failed (ArithmeticError: no more); the model is kept." in message for message in said)
