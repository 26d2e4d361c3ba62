"""model.json in a run directory: everything that is needed to use the model without its training data."""

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
"""Meaning of the outputs, in this order: logits of classes, log-probabilities of classes, the logit of yes, the probability
of yes, scores of which the largest wins, probabilities of classes, numbers, the loss itself, or unknown, with a loss of
(model, batch)."""
FILE = "model.json"
READING = ("tree", "pad", "select")
"""Options of a table that decide how it is read."""


@dataclass(frozen=True)
class Card:
    """Description of a run's model."""

    kind: str
    """Class name of the module or the learner."""
    built: Built | None
    """Arguments to build it; None if it was made in Python."""
    rows: tuple[tuple[int, ...], ...]
    """Shapes of the inputs of one row; -1 for a length that may differ between mini-batches."""
    own_target: bool
    """True if a row is its own target, as for an autoencoder."""
    head: Head
    loss: str | None
    """Name of the loss; None if it is user-defined."""
    classes: tuple[str, ...] | None
    """Names of the classes, if they have any."""
    validation: str | None
    """Fingerprint of the validation rows, if any."""
    table: dict[str, Any] | None = None
    """For rows from a table: the columns of features (with the shape of a value), label and weight, and how to read them."""
    scale: float = 1.0
    """Factor of the row weights in training."""
    axis: int = 1
    """Axis of the outputs that holds the classes, if there are any."""
    positive: str | None = None
    """Class whose F1 the user asked for."""

    @property
    def label(self) -> str | None:
        """Column that is predicted, for rows from a table."""
        return None if self.table is None else self.table["label"]

    def to_json(self) -> str:
        """Return a text from which ``from_json`` makes an equal card."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Make a card from the text of ``to_json``."""
        card = json.loads(text)
        built = card["built"]
        card["built"] = None if built is None else Built(**{**built, "inputs": tuple(built["inputs"])})
        card["rows"] = tuple(tuple(shape) for shape in card["rows"])
        card["classes"] = None if card["classes"] is None else tuple(card["classes"])
        return cls(**card)

    @classmethod
    def read(cls, directory: Path) -> Card:
        """Read the card of a run."""
        file = directory / FILE
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"There is no {FILE} in {str(directory)!r}: it is not the directory of a run, or the run had not yet started."
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error


def card_of(model: Any, loss: Any, parts: load.Split, axis: int = 1, positive: str | None = None) -> Card:
    """Return the card of a model before its training on these rows; ``axis`` is the axis of the classes."""
    validation = None if parts.validation is None else load.fingerprint(parts.validation)
    if not isinstance(model, nn.Module):
        # A user-defined learner, whose rows may be anything.
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
        table=None if opened is None else opened.roles | {key: getattr(opened.table, key, None) for key in READING},
        scale=getattr(opened, "scale", 1.0),
        axis=axis,
        positive=positive,
    )


def transforms_of(parts: load.Split) -> Fitted | None:
    """Return the transformations of the columns, fitted on the training rows."""
    return None if parts.opened is None else parts.opened.fitted


def _shapes(batch: Any, source: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the inputs of one row; a collate function may pad rows to the longest of a mini-batch."""
    free = isinstance(source, Items) and not source.even
    found = [leaf.shape[1:] for leaf in leaves(split(batch)[0]) if isinstance(leaf, torch.Tensor)]
    return tuple((-1,) * len(shape) if free else tuple(shape) for shape in found)


def head_of(loss: Any, target: Any) -> Head:
    """Return the meaning that a loss gives to the outputs."""
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
    """Return the meaning of a compiled Keras model's outputs, by its loss."""
    loss = model.loss
    name = loss if isinstance(loss, str) else str(getattr(loss, "name", None) or getattr(loss, "__name__", ""))
    logits = bool(getattr(loss, "from_logits", False))
    if "categorical_crossentropy" in name:
        return "softmax" if logits else "probabilities"
    if "binary_crossentropy" in name:
        return "sigmoid" if logits else "probability"
    return "numbers"
