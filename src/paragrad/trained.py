"""load(...): the model of a run with its weights, its transformations and the names of its classes; to predict and to judge."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from paragrad import checkpoint as checkpoints
from paragrad import losses, models, options, recipe
from paragrad.card import Card, Head
from paragrad.data import load as loading
from paragrad.data.given import Given, given, of_source
from paragrad.data.source import Arrays, Weighted, leaves
from paragrad.data.transforms import Fitted
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.learners.keras import KerasLearner, arranged
from paragrad.learners.learner import Learner
from paragrad.learners.torch import Loss, TorchLearner, aligned, call, split, sums, weight_of
from paragrad.models import is_keras
from paragrad.outputs import BY_CLASS, Gathered, Means, as_numpy, scores_of
from paragrad.train import EVALUATION_BATCH

Array = np.ndarray[Any, Any]
KERAS = "model.keras"


@dataclass(frozen=True)
class Predicted:
    """What the model says of a few rows."""

    scores: Array
    """A probability for each class, or of yes; the numbers, where it predicts numbers."""
    target: Array | None
    """What was to be predicted, where the rows have it."""
    weight: Array | None


@dataclass(frozen=True)
class Trained:
    """A trained model, ready to be used."""

    module: Any
    """The module with its weights, in evaluation mode; for a learner of your own, the learner."""
    transforms: Fitted | None
    """What is done to the columns of a table, as it was fitted on the training part."""
    classes: tuple[str, ...] | None
    """The names of the classes, where they have any."""
    directory: Path
    loss: Loss | None
    """The loss that it was trained with; None where that is a function of your own."""
    head: Head
    """What its outputs are."""
    card: Card

    def __repr__(self) -> str:
        """A line: a notebook shows what a cell ends with."""
        return f"Trained({type(self.module).__name__}, head={self.head!r}, directory={str(self.directory)!r})"

    def predict(self, data: Any) -> Array:
        """What the model says of every row: the probability of each class, of yes, or the numbers themselves.

        ``data`` is what ``train`` takes, with or without targets, or a table.
        """
        return np.concatenate([part.scores for part in self.predictions(self.given(data, labelled=False))])

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        """Loss, accuracy, log loss, ROC AUC, F1 and confusion matrix, or errors of numbers; with weights also significance.

        ``data`` is what ``train`` takes, or a table; None: the rows that the run was validated on.
        """
        return self.judged(self.given(data, labelled=True))

    # -- rows ------------------------------------------------------------------------------------------------

    def given(self, data: Any, *, labelled: bool) -> Given:
        """What a user gives, as rows; None: those that the run was validated on."""
        if data is None:
            return self._own_rows()
        return given(data, labelled=labelled, transforms=self.transforms, classes=self.classes, columns=self.card.table)

    def _own_rows(self) -> Given:
        if self.card.validation is None:
            raise UsageError(f"The run in {self.directory} had no rows to be validated on: say which to take (--data, data=).")
        settings = options.read_config(self.directory / "run.toml")
        again = "say which rows to take (--data, data=)"
        try:
            parts = recipe.rows(settings)
        except UsageError as error:
            raise UsageError(
                f"The rows that the run in {self.directory} was validated on cannot be had again: {again}. {error}"
            ) from error
        if parts.validation is None or loading.fingerprint(parts.validation) != self.card.validation:
            raise UsageError(
                f"The rows that the run in {self.directory} was validated on are not those that its run.toml leads to now "
                f"(they were given in Python, or {settings['data']!r} has changed): {again}."
            )
        validation = parts.validation
        if isinstance(validation, Arrays) and isinstance(validation.tree, Weighted):
            # As the file has them: training scales weights, and counts of events are not scaled.
            validation = Arrays(Weighted(validation.tree.rows, validation.tree.weight / self.card.scale))
        return of_source(validation, f"the rows of {parts.name} that the run was validated on")

    # -- using it --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predictions(self, rows: Given) -> Iterator[Predicted]:
        """What the model says, a mini-batch at a time."""
        for batch in rows.batches(EVALUATION_BATCH):
            inputs, target, weight = self._parts(batch)
            yield Predicted(scores_of(self._output(inputs), self.head), as_numpy(target), as_numpy(weight))

    @torch.no_grad()
    def judged(self, rows: Given) -> dict[str, Any]:
        """What the predictions for these rows are worth."""
        gathered: Gathered | None = None
        totals = Means()
        for batch in rows.batches(EVALUATION_BATCH):
            inputs, target, weight = self._parts(batch)
            if target is None:
                raise UsageError(
                    f"{rows.name} has no labels, but to evaluate is to compare with them: name the label, or use predict."
                )
            output = self._output(inputs)
            target = target if self.head in BY_CLASS else aligned(output, target, self.loss)
            if is_keras(self.module):
                count = float(len(output))
                totals.add({"loss": (_keras_loss(self.module, inputs, target, output, weight, self.card.scale) * count, count)})
            elif self.loss is not None:
                totals.add(sums(self.loss, output, target, None if weight is None else weight * self.card.scale))
            if gathered is None:
                gathered = Gathered(self.head, output, target, self.classes)
            gathered.add(output, target, as_numpy(weight))
        if gathered is None:
            raise UsageError(f"{rows.name} has no rows.")
        return {"rows": rows.rows} | gathered.result() | totals.result()

    def _parts(self, batch: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """Inputs, target and weights of a mini-batch; the target is None where there is none."""
        weight = weight_of(batch)
        rows = batch.rows if isinstance(batch, Weighted) else batch
        labelled = self.card.own_target or len(leaves(rows)) > len(self.card.rows)
        inputs, target = split(rows) if labelled else (rows, None)
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in leaves(inputs))
        if self.card.rows and shapes != self.card.rows:
            raise UsageError(
                f"A row has the shape {_shown(shapes)}, but the run was trained on rows of {_shown(self.card.rows)}."
            )
        return inputs, target, weight

    def _output(self, inputs: Any) -> torch.Tensor:
        if not isinstance(self.module, nn.Module):
            raise UsageError(f"{self.card.kind} makes a learner of your own, which only you know how to ask: use .module.")
        try:
            if is_keras(self.module):
                output = self.module(arranged(self.module, inputs), training=False)
            else:
                output = call(self.module, inputs)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"The model does not take these rows: {type(error).__name__}: {error}") from error
        if not isinstance(output, torch.Tensor):
            raise UsageError(f"The model puts out a {type(output).__name__}, and not one tensor: call .module yourself.")
        return output


# -- loading --------------------------------------------------------------------------------------------------------


def load(
    run: str | Path,
    model: nn.Module | Callable[[], Learner] | None = None,
    *,
    loss: Loss | str | None = None,
    checkpoint: str | None = None,
) -> Trained:
    """The trained model of a run.

    run         the directory of a run
    model       as it was given to ``train``; only where it was made in Python (a module, a function that makes a learner)
    loss        as it was given to ``train``; only where it is a function of your own, and ``evaluate`` is to compute it
    checkpoint  ``"latest"``: the newest checkpoint, of a run that is not finished
    """
    directory = Path(run)
    if not directory.is_dir():
        raise UsageError(f"{str(directory)!r} is not the directory of a run.")
    if checkpoint not in (None, "latest"):
        raise UsageError(f"checkpoint={checkpoint!r}, but it is 'latest' or None.")
    card = Card.read(directory)
    saved = directory / KERAS
    if is_keras(model) or (model is None and checkpoint is None and saved.exists()):
        model = kerasmodel.load(saved) if model is None else _keras_filled(model, directory)
        return replace(_trained(card, model, directory, None), head=_keras_head(model))
    loss = losses.build(loss) if isinstance(loss, str) else loss
    if loss is None and card.loss is not None:
        loss = losses.build(card.loss)
    return _trained(card, _filled(_model(card, model, directory), directory, checkpoint), directory, loss)


def _trained(card: Card, module: Any, directory: Path, loss: Loss | None) -> Trained:
    transforms = directory / "transforms.json"
    return Trained(
        module=module,
        transforms=Fitted.from_json(transforms.read_text(encoding="utf-8")) if transforms.exists() else None,
        classes=card.classes,
        directory=directory,
        loss=loss,
        head=card.head,
        card=card,
    )


def _model(card: Card, model: Any, directory: Path) -> Any:
    """The model before it has its weights."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if callable(model):
        return model()
    if model is not None:
        raise UsageError(f"model={model!r} is neither a torch module nor a function that makes a learner.")
    if card.built is None:
        raise UsageError(
            f"The model of the run in {directory} ({card.kind}) was made in Python, which the directory cannot repeat: "
            f"give it, as pg.load({str(directory)!r}, model={card.kind}(...))."
        )
    try:
        return models.build(card.built.spec, card.built.inputs, card.built.outputs, card.built.seed)
    except UsageError as error:
        raise UsageError(
            f"The model of the run in {directory} cannot be built again: {error} Or give it: pg.load(run, model=...)."
        ) from error


def _filled(model: Any, directory: Path, checkpoint: str | None) -> Any:
    """The model with the weights of the run, in evaluation mode."""
    if checkpoint is not None:
        learner = model if not isinstance(model, nn.Module) else TorchLearner(model, _no_loss, _any_optimizer)
        _fill_from_checkpoint(learner, directory)
        return learner.module.eval() if isinstance(model, nn.Module) else model
    tensors = _tensors(directory)
    if isinstance(model, nn.Module):
        _check_tensors(model.state_dict(), tensors, directory)
        model.load_state_dict(tensors)
        return model.eval()
    if not isinstance(model, Learner):
        raise UsageError(
            f"The function given as model returned {type(model).__name__}, which is not a Learner (see pg.Learner)."
        )
    inner = getattr(model, "module", None)
    if inner is not None:
        _check_tensors(inner.state_dict(), tensors, directory)
        inner.load_state_dict(tensors)
        model.collect()
        return model
    for name in ("weights", "buffers"):
        _fill_vector(getattr(model, name), tensors[name], name, directory)
    model.spread()
    return model


def _fill_from_checkpoint(learner: Learner, directory: Path) -> None:
    found, _ = checkpoints.newest(directory / "checkpoints")
    if found is None:
        raise UsageError(f"The run in {directory} has no sound checkpoint.")
    for name, mine in (("value", learner.weights), ("buffers", learner.buffers), ("integers", learner.integers)):
        _fill_vector(mine, found.tensors[name], "weights" if name == "value" else name, found.path)
    learner.spread()


def _keras_filled(model: Any, directory: Path) -> Any:
    """A Keras model that was given, with the weights of the run: in their order, since names of layers are counted on."""
    learner = KerasLearner(model)
    _fill_from_checkpoint(learner, directory)
    return learner.copy()


def _keras_head(model: Any) -> Head:
    """What the outputs of a compiled Keras model are, by its loss."""
    loss = model.loss
    name = loss if isinstance(loss, str) else str(getattr(loss, "name", None) or getattr(loss, "__name__", ""))
    logits = bool(getattr(loss, "from_logits", False))
    if "categorical_crossentropy" in name:
        return "softmax" if logits else "probabilities"
    if "binary_crossentropy" in name:
        return "sigmoid" if logits else "probability"
    return "numbers"


def _keras_loss(model: Any, inputs: Any, target: Any, output: Any, weight: torch.Tensor | None, scale: float) -> float:
    model.eval()
    weight = None if weight is None else weight * scale
    return float(model.compute_loss(x=arranged(model, inputs), y=target, y_pred=output, sample_weight=weight, training=False))


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a finished run by name, tied ones under each of their names."""
    file = directory / "model.safetensors"
    if not file.exists():
        raise UsageError(
            f"The run in {directory} is not finished: it has no {file.name}. Take its newest checkpoint "
            f"(pg.load({str(directory)!r}, checkpoint='latest'), --checkpoint latest), or go on with it "
            f"(paragrad train --resume {directory})."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            aliases = json.loads((opened.metadata() or {}).get("aliases", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({type(error).__name__}: {error}): it is damaged.") from error
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def _check_tensors(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], directory: Path) -> None:
    again = "Give the model that was trained."
    for name, tensor in mine.items():
        if name not in theirs:
            there = ", ".join(list(theirs)[:6]) + ", ..." * (len(theirs) > 6)
            raise UsageError(f"The model has a tensor {name!r}, but the run in {directory} has none (it has {there}). {again}")
        if tensor.shape != theirs[name].shape or tensor.dtype != theirs[name].dtype:
            raise UsageError(
                f"{name!r} is {_kind(tensor)} in the model, but {_kind(theirs[name])} in the run in {directory}. {again}"
            )
    for name in theirs:
        if name not in mine:
            raise UsageError(f"The run in {directory} has a tensor {name!r}, but the model has none. {again}")


def _fill_vector(mine: torch.Tensor, theirs: torch.Tensor, name: str, where: Path) -> None:
    if mine.shape != theirs.shape:
        raise UsageError(
            f"The model has {mine.numel():,} numbers in its {name}, but {where} has {theirs.numel():,}: give the same model."
        )
    mine.copy_(theirs)


def _no_loss(output: Any, target: Any) -> torch.Tensor:
    raise AssertionError("a learner that only holds weights computes no loss")


def _any_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else " and ".join(map(str, shapes))
