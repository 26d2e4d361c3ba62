"""What a run directory says of its model, in model.json: all that is needed to use it without the data it was trained on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from paragrad.data import load
from paragrad.data.source import Items, leaves, target_of
from paragrad.data.transforms import Fitted
from paragrad.errors import UsageError
from paragrad.learners.batch import has_target, split
from paragrad.learners.criterion import by_class
from paragrad.learners.objective import takes_model_and_batch
from paragrad.models import losses, toys
from paragrad.models.builtin import Built, is_keras

Head: TypeAlias = Literal[
    "softmax", "log_softmax", "sigmoid", "probability", "scores", "probabilities", "numbers", "value", "raw"
]
"""What the outputs are: logits of classes, their log-probabilities, the logit or the probability of yes, scores whose
largest is chosen, the probabilities of classes, numbers, the loss itself, or whatever a loss of (model, batch)
takes them for."""
FILE = "model.json"


@dataclass(frozen=True)
class Card:
    """What is known of a run's model."""

    kind: str
    """The class of the module, or of the learner."""
    built: Built | None
    """How to build it; None where it was made in Python."""
    rows: tuple[tuple[int, ...], ...]
    """The shapes of the inputs of one row; -1 for a length that may be another in each mini-batch."""
    own_target: bool
    """Whether a row is what is to be predicted from it, as for an autoencoder."""
    head: Head
    loss: str | None
    """The loss by name; None where it is one of the user's own."""
    classes: tuple[str, ...] | None
    """The names of the classes, where they have any."""
    validation: str | None
    """The fingerprint of the rows that it was validated on, if any."""
    table: dict[str, Any] | None = None
    """Of rows from a table: which columns are features (and the shape of a value of each), label and weight, and how they are
    read."""
    scale: float = 1.0
    """What the weights of rows were multiplied with in training."""
    axis: int = 1
    """The axis of the outputs that has a number for each class, where they are such."""
    positive: str | None = None
    """The class whose F1 was asked for."""

    @property
    def label(self) -> str | None:
        """The column that is predicted, of rows from a table."""
        return None if self.table is None else self.table["label"]

    def to_json(self) -> str:
        """A text that ``from_json`` turns into an equal card."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Card:
        """What ``to_json`` wrote."""
        card = json.loads(text)
        built = card["built"]
        card["built"] = None if built is None else Built(**{**built, "inputs": tuple(built["inputs"])})
        card["rows"] = tuple(tuple(shape) for shape in card["rows"])
        card["classes"] = None if card["classes"] is None else tuple(card["classes"])
        return cls(**card)

    @classmethod
    def read(cls, directory: Path) -> Card:
        """That of a run."""
        file = directory / FILE
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"There is no {FILE} in {str(directory)!r}: it is not the directory of a run, or of one that had not yet begun."
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error


def card_of(model: Any, loss: Any, parts: load.Split, axis: int = 1, positive: str | None = None) -> Card:
    """The card of a model that is about to be trained with a loss, on these rows; ``axis`` is the one of the classes."""
    validation = None if parts.validation is None else load.fingerprint(parts.validation)
    if not isinstance(model, nn.Module):
        # A learner of the user's own, whose rows may be anything.
        name = getattr(model, "__name__", type(model).__name__)
        return Card(name, None, (), False, "numbers", None, None, validation)
    batch = parts.train.batch(np.zeros(1, dtype=np.int64))
    if is_keras(model):
        loss = None
    built, opened = getattr(model, "paragrad_built", None), getattr(parts, "opened", None)
    if isinstance(model, toys.Toy):
        built = Built(model.spelled(), (model.size,), 1, 0)
    return Card(
        kind=type(model).__name__,
        built=built if isinstance(built, Built) else None,
        rows=_shapes(batch, parts.train) if has_target(batch) else (),
        own_target=has_target(batch) and len(leaves(batch)) == 1,
        head=head_of(loss, leaves(target_of(batch))[-1] if has_target(batch) else None),
        loss=losses.name_of(loss),
        classes=getattr(parts, "classes", None),
        validation=validation,
        table=None if opened is None else _columns(opened),
        scale=getattr(opened, "scale", 1.0),
        axis=axis,
        positive=positive,
    )


def transforms_of(parts: load.Split) -> Fitted | None:
    """What is done to the columns that the rows are from, as it was fitted on those to train on."""
    return None if parts.opened is None else parts.opened.fitted


def _shapes(batch: Any, source: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the inputs of one row; a collate function may pad rows to the longest of a mini-batch."""
    free = isinstance(source, Items) and not source.even
    found = [leaf.shape[1:] for leaf in leaves(split(batch)[0]) if isinstance(leaf, torch.Tensor)]
    return tuple((-1,) * len(shape) if free else tuple(shape) for shape in found)


def _columns(opened: Any) -> dict[str, Any]:
    return {**opened.roles, **{key: getattr(opened.table, key, None) for key in ("tree", "pad", "select")}}


def head_of(loss: Any, target: Any) -> Head:
    """What a loss takes the outputs for."""
    if isinstance(loss, losses.OwnLoss):
        return "softmax" if loss.shift == 0 and getattr(target, "ndim", 0) == 1 else "raw"
    if loss is not None and takes_model_and_batch(loss):
        return "raw"
    if isinstance(loss, nn.CrossEntropyLoss) or loss is nn.functional.cross_entropy:
        return "softmax"
    if isinstance(loss, losses.Value):
        return "value"
    if by_class(loss):
        return "log_softmax"
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss is nn.functional.binary_cross_entropy_with_logits:
        return "sigmoid"
    if isinstance(loss, nn.BCELoss) or loss is nn.functional.binary_cross_entropy:
        return "probability"
    whole = isinstance(target, torch.Tensor) and not target.is_floating_point() and not target.is_complex()
    return "scores" if whole and losses.is_own(loss) else "numbers"


def keras_head(model: Any) -> Head:
    """What the outputs of a compiled Keras model are, by its loss."""
    loss = model.loss
    name = loss if isinstance(loss, str) else str(getattr(loss, "name", None) or getattr(loss, "__name__", ""))
    logits = bool(getattr(loss, "from_logits", False))
    if "categorical_crossentropy" in name:
        return "softmax" if logits else "probabilities"
    if "binary_crossentropy" in name:
        return "sigmoid" if logits else "probability"
    return "numbers"
