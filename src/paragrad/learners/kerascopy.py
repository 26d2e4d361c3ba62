"""Copies of a Keras model that travel to the workers, and the learning rate that they follow."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from paragrad.errors import UsageError
from paragrad.learners.kerasmodel import library

RATE = "_paragrad_rate"
"""The attribute of a copy that says which rate it follows: it travels with the copy."""
TRACKING = "keras.src.utils.tracking"
"""Where Keras keeps the lists and dicts that note what is put into them, and the trackers that they tell."""

NODES = "_nodes_by_depth"
"""Where a functional model keeps its graph, whose nodes it also knows by ``id``."""


@dataclass(frozen=True)
class Packed:
    """A model as bytes: its classes by value where no worker could import them, its optimiser with all that it holds."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    """An array, so that large ones are mapped by all workers instead of copied to each."""

    def open(self) -> Any:
        """A model of its own."""
        library()
        model, known = cloudpickle.loads(self.data.tobytes())
        for thing in known:
            _renew(thing)
        return model


def pack(model: Any) -> Packed:
    """The model as it is.

    Keras's own way goes through a .keras archive, which leaves out what has no ``get_config`` (lambdas, closures, many
    subclasses) and needs every class registered. Here objects travel as they are; what Keras keeps by ``id`` is renewed.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump((model, pickler.known))
    except Exception as error:
        raise UsageError(
            f"The Keras model ({type(model).__name__}) cannot be copied to the workers: {type(error).__name__}: {error}. "
            "Something that it holds (a lock, a generator, a connection) cannot be pickled: make it in call() or build()."
        ) from error
    return Packed(np.frombuffer(buffer.getbuffer(), dtype=np.uint8))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        keras = library()
        self.known: list[Any] = []
        """Whatever keeps objects by their ``id``; pickled last, when it is complete."""
        self._saveable = next(kind for kind in keras.Model.__mro__ if kind.__name__ == "KerasSaveable")
        self._optimizer = keras.optimizers.Optimizer

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.nn.Parameter):
            # A view of the flat vector would take the whole vector with it.
            return _parameter, (thing.detach().cpu().clone(), thing.requires_grad)
        if isinstance(thing, self._saveable):
            if isinstance(thing, self._optimizer) or NODES in vars(thing):
                self.known.append(thing)
            return _bare, (type(thing),), dict(vars(thing)), None, None, _furnish
        if type(thing).__name__ == "DynamicBackend":
            # Layers that prepare inputs (Normalization, Rescaling) hold one, which asks itself for whatever it lacks.
            return type(thing), (thing.name,)
        if type(thing).__module__ == TRACKING:
            for kind in (list, dict, set):
                if isinstance(thing, kind):
                    return _bare, (type(thing),), (kind(thing), dict(vars(thing))), None, None, _furnish_collection
            if hasattr(thing, "stored_ids"):
                self.known.append(thing)
        return super().reducer_override(thing)


def _renew(thing: Any) -> None:
    """What is kept by ``id``: that of the copies."""
    if type(thing).__module__ == TRACKING:
        thing.stored_ids = {name: {id(value) for value in store} for name, (_, store) in thing.config.items()}
    elif NODES in vars(thing):
        key = sys.modules["keras.src.ops.function"].make_node_key
        nodes = [node for nodes in vars(thing)[NODES].values() for node in nodes]
        thing._nodes = {key(node.operation, node.operation._inbound_nodes.index(node)) for node in nodes}
    else:
        thing._trainable_variables_indices = {id(value): i for i, value in enumerate(thing._trainable_variables)}


def _parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=requires_grad)


def _bare(kind: type) -> Any:
    base = next((known for known in (list, dict, set) if issubclass(kind, known)), object)
    return base.__new__(kind)


def _furnish(thing: Any, state: dict[str, Any]) -> None:
    # Keras's own __setattr__ would track every value again.
    thing.__dict__.update(state)


def _furnish_collection(thing: Any, state: tuple[Any, dict[str, Any]]) -> None:
    values, attributes = state
    add = list.extend if isinstance(thing, list) else dict.update if isinstance(thing, dict) else set.update
    add(thing, values)
    thing.__dict__.update(attributes)


class Rate:
    """A learning rate that the trainer sets and its workers read: eight bytes of a file that they share."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._cell = np.memmap(path, dtype=np.float64, mode="r+", shape=(1,))

    def __reduce__(self) -> tuple[type[Rate], tuple[str]]:
        return type(self), (self._path,)

    @property
    def value(self) -> float:
        """The rate now."""
        return float(self._cell[0])

    @value.setter
    def value(self, rate: float) -> None:
        self._cell[0] = rate


@contextlib.contextmanager
def followed(model: Any) -> Iterator[tuple[Any, Rate | None]]:
    """A copy of the model, and the rate that all further copies of it train with; None where its optimiser has a schedule."""
    copy, keras = pack(model).open(), library()
    optimizer = getattr(copy.optimizer, "inner_optimizer", copy.optimizer)
    if not isinstance(optimizer._learning_rate, keras.Variable):
        yield copy, None
        return
    with tempfile.NamedTemporaryFile(prefix="paragrad-rate-") as file:
        file.truncate(8)
        rate = Rate(file.name)
        rate.value = float(optimizer.learning_rate)
        vars(copy)[RATE] = rate
        yield copy, rate


def rate_of(model: Any) -> Rate | None:
    """The rate that a model follows, if any."""
    found: Rate | None = vars(model).get(RATE)
    return found
