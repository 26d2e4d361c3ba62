"""Copies of a Keras model for the workers, and the learning rate that the copies follow."""

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
"""Attribute of a copy that holds the rate it follows; it is pickled with the copy."""
TRACKING = "keras.src.utils.tracking"
"""Keras's module of lists and dicts that track their items, and of the trackers they report to."""
NODES = "_nodes_by_depth"
"""Attribute in which a functional model keeps its graph; the model also knows the nodes by ``id``."""


@dataclass(frozen=True)
class Packed:
    """A pickled model: classes that workers cannot import are pickled by value, and the optimiser includes its state."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    """An array, so that all workers can map a large model instead of copying it."""

    def open(self) -> Any:
        """Return a new copy of the model."""
        library()
        model, known = cloudpickle.loads(self.data.tobytes())
        for thing in known:
            _renew_ids(thing)
        return model


def pack(model: Any) -> Packed:
    """Pickle the model as it is.

    Keras itself would write a .keras archive. That leaves out objects without ``get_config`` (lambdas, closures, many
    subclasses) and needs every class registered. Here objects are pickled, and tables that Keras keeps by ``id`` are renewed.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump((model, pickler.known))
    except Exception as error:
        raise UsageError(
            f"The Keras model ({type(model).__name__}) cannot be copied to the workers: {type(error).__name__}: {error}. "
            "One of its attributes (a lock, a generator, a connection) cannot be pickled: make it in call() or build()."
        ) from error
    return Packed(np.frombuffer(buffer.getbuffer(), dtype=np.uint8))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        keras = library()
        self.known: list[Any] = []
        """Objects with tables by ``id``; pickled last, when the list is complete."""
        self._saveable = next(kind for kind in keras.Model.__mro__ if kind.__name__ == "KerasSaveable")
        self._optimizer = keras.optimizers.Optimizer

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.nn.Parameter):
            # A view of the flat vector would take the whole vector with it.
            return torch.nn.Parameter, (thing.detach().cpu().clone(), thing.requires_grad)
        if isinstance(thing, self._saveable):
            if isinstance(thing, self._optimizer) or NODES in vars(thing):
                self.known.append(thing)
            return _bare, (type(thing),), dict(vars(thing)), None, None, _set_attributes
        if type(thing).__name__ == "DynamicBackend":
            # Preprocessing layers (Normalization, Rescaling) have one; its __getattr__ looks up every missing attribute.
            return type(thing), (thing.name,)
        if type(thing).__module__ == TRACKING:
            for kind in (list, dict, set):
                if isinstance(thing, kind):
                    return _bare, (type(thing),), (kind(thing), dict(vars(thing))), None, None, _set_items
            if hasattr(thing, "stored_ids"):
                self.known.append(thing)
        return super().reducer_override(thing)


def _renew_ids(thing: Any) -> None:
    """Replace the ids of the originals by those of the copies."""
    if type(thing).__module__ == TRACKING:
        thing.stored_ids = {name: {id(value) for value in store} for name, (_, store) in thing.config.items()}
    elif NODES in vars(thing):
        key = sys.modules["keras.src.ops.function"].make_node_key
        nodes = [node for nodes in vars(thing)[NODES].values() for node in nodes]
        thing._nodes = {key(node.operation, node.operation._inbound_nodes.index(node)) for node in nodes}
    else:
        thing._trainable_variables_indices = {id(value): i for i, value in enumerate(thing._trainable_variables)}


def _bare(kind: type) -> Any:
    base = next((known for known in (list, dict, set) if issubclass(kind, known)), object)
    return base.__new__(kind)


def _set_attributes(thing: Any, state: dict[str, Any]) -> None:
    # Keras's own __setattr__ would track every value again.
    thing.__dict__.update(state)


def _set_items(thing: Any, state: tuple[Any, dict[str, Any]]) -> None:
    values, attributes = state
    add = list.extend if isinstance(thing, list) else dict.update if isinstance(thing, dict) else set.update
    add(thing, values)
    thing.__dict__.update(attributes)


class Rate:
    """A learning rate that the trainer sets and its workers read: eight bytes of a shared file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._cell = np.memmap(path, dtype=np.float64, mode="r+", shape=(1,))

    def __reduce__(self) -> tuple[type[Rate], tuple[str]]:
        return type(self), (self._path,)

    @property
    def value(self) -> float:
        """Current rate."""
        return float(self._cell[0])

    @value.setter
    def value(self, rate: float) -> None:
        self._cell[0] = rate


@contextlib.contextmanager
def followed(model: Any) -> Iterator[tuple[Any, Rate | None]]:
    """Yield a copy of the model, and the rate that all copies of it use; None if the optimiser has a schedule."""
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
    """Return the rate that a model follows, if any."""
    found: Rate | None = vars(model).get(RATE)
    return found
