"""Losses of (model, batch), and models that return their own loss."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paragrad as pg
from paragrad.data.plan import Plan
from paragrad.errors import UsageError
from paragrad.learners.objective import takes_model_and_batch
from paragrad.rundir.record import read

ROWS, LENGTH, WORDS = 64, 6, 11
ENGINES = {
    "local": lambda: pg.Local(workers=2),
    "vector": lambda: pg.Vector(workers=2),
}


@dataclass
class ModelOutput:
    """As Hugging Face's: attributes, of which some are None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class CausalLM(nn.Module):
    """Called as Hugging Face's causal language models are; the shift by one place is inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 16)
        self.body = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids=None, attention_mask=None, labels=None) -> ModelOutput:
        logits = self.head(self.body(self.embedding(input_ids))[0])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1), ignore_index=-100)
        return ModelOutput(loss, logits)


class Classifier(nn.Module):
    """Called as Hugging Face's sequence classifiers are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids=None, attention_mask=None, labels=None) -> ModelOutput:
        mask = attention_mask.unsqueeze(-1).float()
        logits = self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        return ModelOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


def language_rows(rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(0, WORDS, (rows, 1), generator=generator)
    words = (start + torch.arange(LENGTH)) % WORDS
    mask = torch.ones_like(words)
    labels = words.clone()
    labels[::3, -2:] = -100  # as padding is
    mask[::3, -2:] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def class_rows(rows: int = ROWS) -> dict[str, torch.Tensor]:
    words = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words[:, 0] % 3}


def notes_of(result: Any) -> list[str]:
    return [event.data["message"] for event in read(result.directory) if event.kind == "note"]


def plain_loop(model: nn.Module, rows: Any, loss: Any, *, batch_size: int, lr: float, order: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for index in order:
        optimizer.zero_grad()
        loss(model, {key: value[index] for key, value in rows.items()}).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_a_causal_language_model_is_trained_with_the_loss_that_it_returns(engine: str, tmp_path: Path) -> None:
    rows = language_rows()
    result = pg.train(
        CausalLM(),
        rows,
        validation=rows,
        optimizer="adam:lr=0.01",
        scheme=pg.SyncSGD(),
        engine=ENGINES[engine](),
        epochs=12,
        batch_size=8,
        run=pg.Run(out=tmp_path / "run"),
    )
    assert any(note.startswith("Loss: own") and "next target" in note for note in notes_of(result))
    model = result.model.eval()
    with torch.no_grad():
        output = model(**rows)
        right = (output.logits[:, :-1].argmax(-1) == rows["labels"][:, 1:])[rows["labels"][:, 1:] != -100]
    assert result.loss == pytest.approx(float(output.loss), rel=1e-5)
    assert result.accuracy == pytest.approx(float(right.float().mean()), rel=1e-5)
    assert result.accuracy > 0.9

    again = pg.load(result.directory, CausalLM())
    assert again.evaluate(rows)["loss"] == pytest.approx(float(output.loss), rel=1e-5)
    assert again.evaluate(rows)["accuracy"] == pytest.approx(result.accuracy, rel=1e-5)
    np.testing.assert_allclose(again.predict(rows), output.logits.numpy(), rtol=1e-5)
    unlabelled = {key: rows[key] for key in ("input_ids", "attention_mask")}
    np.testing.assert_allclose(again.predict(unlabelled), output.logits.numpy(), rtol=1e-5)
    assert pg.replay(result.directory, CausalLM(), rows).within


def test_a_classifier_that_returns_its_loss_predicts_probabilities(tmp_path: Path) -> None:
    rows = class_rows()
    result = pg.train(
        Classifier(), rows, holdout=0.25, engine=pg.Local(workers=2), scheme=pg.SyncSGD(), optimizer="adam:lr=0.05", epochs=30,
        batch_size=8, run=pg.Run(out=tmp_path / "run"),
    )  # fmt: skip
    again = pg.load(result.directory, Classifier())
    found = again.evaluate(rows)
    with torch.no_grad():
        output = result.model.eval()(**rows)
    assert found["loss"] == pytest.approx(float(output.loss), rel=1e-4)
    assert found["accuracy"] == pytest.approx(float((output.logits.argmax(1) == rows["labels"]).float().mean()))
    assert "auc" in found
    np.testing.assert_allclose(again.predict(rows).sum(1), 1.0, rtol=1e-5)


def own(model, batch):
    return model(**batch).loss


def by_hand(model, batch):
    """The same in other words, in reduced precision where that is asked for."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


def without_padding() -> dict[str, torch.Tensor]:
    """Then the mean over targets is the mean over rows."""
    rows = language_rows()
    return {**rows, "labels": rows["input_ids"].clone()}


@pytest.mark.parametrize("loss", [None, "own", own, by_hand])
@pytest.mark.parametrize("workers", [1, 2])
def test_sync_sgd_is_the_plain_loop_of_large_batches(loss: Any, workers: int) -> None:
    rows, size = without_padding(), 8
    result = pg.train(
        CausalLM(), rows, loss=loss, optimizer="sgd:lr=0.5", scheme=pg.SyncSGD(), engine=pg.Local(workers=workers), epochs=1,
        batch_size=size, seed=5,
    )  # fmt: skip
    plan = batches_of(ROWS, size, 5)
    order = [np.concatenate(plan[k : k + workers]) for k in range(0, len(plan), workers)]
    reference = plain_loop(CausalLM(), rows, own, batch_size=size, lr=0.5, order=order)
    for (name, mine), theirs in zip(result.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6, msg=lambda said, name=name: f"{name}: {said}")


def batches_of(rows: int, size: int, seed: int) -> list[Any]:
    plan = Plan(rows=rows, batch_size=size, epochs=1, seed=seed)
    return [plan.rows_of(position) for position in range(plan.positions)]


class Autocast(nn.Module):
    """Autocast inside ``forward``, and a body that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(checkpoint(self.body, x, use_reentrant=False)).float()


def autocast_loss(model, batch):
    x, y = batch
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x), y) + 0.01 * model.head.weight.square().mean()


@pytest.mark.parametrize("loss", ["crossentropy", autocast_loss])
@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_and_gradient_checkpointing_in_model_and_loss(loss: Any, engine: str) -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    result = pg.train(
        Autocast(), (x, (x[:, 0] > 0).long()), holdout=0.25, loss=loss,
        metrics={"outputs": lambda output, target: output.shape[1]},
        scheme=pg.SyncSGD(), optimizer="adam:lr=0.05", engine=ENGINES[engine](), epochs=10, batch_size=8,
    )  # fmt: skip
    assert result.loss < 0.4
    assert result.summary["metrics"]["outputs"] == 2


def test_a_hook_takes_batches_of_any_collate(tmp_path: Path) -> None:
    class Sentences(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, row: int):
            return {"words": torch.arange(2 + row % 5), "name": f"row {row}"}

    def collate(rows):
        padded = nn.utils.rnn.pad_sequence([row["words"] for row in rows], batch_first=True)
        return UserDict({"words": padded, "names": [row["name"] for row in rows]})

    def next_word(model, batch):
        assert len(batch["names"]) == len(batch["words"])
        logits = model(batch["words"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["words"][:, 1:].flatten())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    rows = pg.Items(Sentences(), collate=collate)
    for engine in (pg.Local(workers=2), pg.Vector(workers=2)):
        result = pg.train(
            model, rows, loss=next_word, validation=rows, scheme=pg.SyncSGD(), engine=engine, optimizer="adam:lr=0.05",
            epochs=8, batch_size=4,
        )  # fmt: skip
        assert result.loss < 0.8
        assert result.accuracy is None
    again = pg.load(result.directory, model, loss=next_word)
    assert again.evaluate(rows)["loss"] == pytest.approx(result.loss, rel=1e-5)
    with pytest.raises(UsageError, match=r"give it as pg\.load\(run, loss=\.\.\.\)"):
        pg.load(result.directory, model).evaluate(rows)


def test_parameters_names_say_what_a_loss_is_called_with() -> None:
    class Step(nn.Module):
        def forward(self, model, batch): ...

    def typed(net: nn.Module, batch): ...

    for loss in (own, Step(), typed, lambda module, batch: 0):
        assert takes_model_and_batch(loss)
    for loss in (nn.CrossEntropyLoss(), F.mse_loss, lambda output, target: 0, lambda a, b: 0, lambda *both: 0, torch.dist):
        assert not takes_model_and_batch(loss)
    for loss in (lambda net, batch: 0, lambda model, target: 0, lambda model: 0):
        with pytest.raises(UsageError, match=r"Name its parameters \(model, batch\)"):
            pg.train(nn.Linear(4, 1), (torch.zeros(8, 4), torch.zeros(8)), loss=loss, engine=pg.Local(workers=1))


def test_weights_of_rows_do_not_go_with_a_loss_for_all_of_them() -> None:
    x, y, rows = torch.zeros(8, 4), torch.zeros(8), class_rows(8)
    with pytest.raises(UsageError, match="Rows have weights, but whole gives one number for all of them"):
        pg.train(nn.Linear(4, 1), pg.Weighted((x, y), torch.ones(8)), loss=whole, engine=pg.Local(workers=1))
    with pytest.raises(UsageError, match="Rows have weights, but the model's own loss"):
        pg.train(Classifier(), pg.Weighted(rows, torch.ones(8)), loss="own", engine=pg.Local(workers=1))


def whole(model, batch):
    return model(batch[0]).mean()


def test_what_a_loss_cannot_be() -> None:
    x, y = torch.zeros(8, 4), torch.zeros(8)
    with pytest.raises(UsageError, match="without a loss"):
        pg.train(nn.PairwiseDistance(), (x, x), loss="own", engine=pg.Local(workers=1))
    with pytest.raises(UsageError, match="The loss has no gradient"):
        pg.train(
            nn.Linear(4, 1), (x, y), loss=lambda model, batch: model(batch[0]).mean().detach(), engine=pg.Vector(workers=1)
        )


def test_a_loss_may_use_names_that_torch_has_as_well() -> None:
    """torch.classes and torch.ops are modules of types of their own, which cloudpickle takes along by their names."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.ops = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.ops(self.classes(x))

    def loss(model, batch):
        return torch.square(model.ops(model.classes(batch[0])) - batch[1]).mean()

    result = pg.train(Named(), (torch.ones(16, 4), torch.ones(16, 1)), loss=loss, engine=pg.Local(workers=2), batch_size=4)
    assert result.summary["samples"] == 16
