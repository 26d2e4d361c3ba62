"""Keras models: import of the library, checks before training, tensors and files."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from paragrad.config.extras import command
from paragrad.errors import UsageError
from paragrad.models.builtin import is_keras
from paragrad.types import Vector

Named: TypeAlias = list[tuple[str, torch.Tensor]]


def library() -> Any:
    """Import and return Keras, which must run on torch."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")
    try:
        import keras
    except (ImportError, ValueError) as error:
        if isinstance(error, ImportError) and error.name == "keras":
            raise UsageError(f"Keras models need Keras 3, which is missing: {command('keras')}") from error
        raise UsageError(
            f"Keras could not be imported on backend {os.environ['KERAS_BACKEND']!r}: {error}. {_remedy()}"
        ) from error
    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras runs on {keras.backend.backend()} here, but paragrad trains Keras models on torch. {_remedy()}"
        )
    return keras


def _remedy() -> str:
    return (
        "Before the first `import keras`, write: import os; os.environ['KERAS_BACKEND'] = 'torch' (or start Python with "
        'KERAS_BACKEND=torch python ..., or put "backend": "torch" into ~/.keras/keras.json). Models made on another backend '
        "can be saved there as .keras and loaded here."
    )


def refuse(model: Any) -> None:
    """Raise if this is not a Keras model, or if several workers cannot train it as it is compiled."""
    library()
    if not is_keras(model):
        raise UsageError(f"The model is a {type(model).__name__}, but it must be a compiled keras.Model.")
    name = type(model).__name__
    if not getattr(model, "compiled", False) or getattr(model, "optimizer", None) is None:
        raise UsageError(
            f"The Keras model ({name}) is not compiled, so it has no loss and no optimiser: call "
            "model.compile(optimizer='adam', loss='sparse_categorical_crossentropy', metrics=['accuracy']) or similar."
        )
    if model.jit_compile:
        raise UsageError(
            "The model was compiled with jit_compile=True, but torch.compile cannot follow weights that are exchanged: "
            "compile it with jit_compile=False."
        )
    if model.steps_per_execution > 1:
        raise UsageError(
            f"The model was compiled with steps_per_execution={model.steps_per_execution}, which Keras does not support on "
            "torch: leave it out."
        )
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if getattr(optimizer, "use_ema", False):
        raise UsageError(
            f"{type(optimizer).__name__} has use_ema=True, but each worker would compute its own average and lose it: leave "
            "use_ema out. (EASGD and AEASGD average the workers themselves.)"
        )


def is_custom(model: Any) -> bool:
    """Return whether the model defines its own training step."""
    return type(model).train_step is not library().Model.train_step


# -- tensors --------------------------------------------------------------------------------------------------------


def seeds(model: Any) -> list[torch.Tensor]:
    """Return the states of the model's seed generators, from which dropout and other layers draw random numbers."""
    found: dict[int, torch.Tensor] = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            found.setdefault(id(generator.state), generator.state.value)
    return list(found.values())


def global_seed() -> torch.Tensor:
    """Return the state of the generator that ``keras.random`` uses if it is given no seed."""
    state: torch.Tensor = sys.modules["keras.src.random.seed_generator"].global_seed_generator().state.value
    return state


def tensors(model: Any) -> tuple[Named, Named, Named]:
    """Return trained tensors, untrained floating-point state (batch-norm statistics) and integer state, by name.

    Frozen weights are in none of them, nor are the states of seed generators, which are drawn again for each mini-batch.
    """
    trained = [variable for variable in model.trainable_variables if variable.value.is_floating_point()]
    if not trained:
        raise UsageError("The model has no trainable weights: there is nothing to train. Set trainable=True for some layers.")
    state, apart = [], {id(tensor) for tensor in seeds(model)}
    for layer in model._flatten_layers():
        state += [variable for variable in layer._non_trainable_variables if id(variable.value) not in apart]
    known = {id(variable.value) for variable in model.variables}
    # A wrapped torch module has buffers that Keras does not know.
    further = {
        id(buffer): (f"{layer.path}/{name}", buffer)
        for layer in model._flatten_layers()
        for name, buffer in layer.named_buffers()
        if id(buffer) not in known
    }
    mine = [*_named(state), *further.values()]
    floating = [(name, tensor) for name, tensor in mine if tensor.is_floating_point()]
    integer = [(name, tensor) for name, tensor in mine if not tensor.is_floating_point() and not tensor.is_complex()]
    return _named(trained), floating, integer


def _named(variables: list[Any]) -> Named:
    """Return each tensor once, with its path; append a number to a path that several variables share."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    used: dict[str, int] = {}
    for variable in variables:
        if id(variable.value) not in found:
            count = used[variable.path] = used.get(variable.path, 0) + 1
            found[id(variable.value)] = (variable.path if count == 1 else f"{variable.path}#{count}", variable.value)
    return list(found.values())


@torch.no_grad()
def fill(model: Any, weights: Vector, buffers: Vector, integers: Vector) -> None:
    """Write a learner's vectors into a model; the inverse of ``Flat`` on its tensors."""
    for named, vector in zip(tensors(model), (weights, buffers, integers), strict=True):
        start = 0
        for _, tensor in sorted(named, key=lambda item: str(item[1].dtype)):
            tensor.copy_(vector[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def device_of(model: Any) -> torch.device:
    """Return the device of a model's variables; if it has none yet, the device on which Keras would make them."""
    found: torch.device = (model.variables[0].value if model.variables else library().ops.zeros(())).device
    return found


def move(model: Any, device: torch.device) -> None:
    """Move a model, its metrics and its optimiser to a device."""
    for variable in (*model.variables, *model.metrics_variables, *model.optimizer.variables):
        variable.value.data = variable.value.data.to(device)
    for module in {inner for layer in model._flatten_layers() for inner in layer.modules()}:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def losses(model: Any) -> list[Any]:
    """Return the losses that the model was compiled with."""
    return [loss for loss in library().tree.flatten(model.loss) if loss is not None]


# -- files ----------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Any:
    """Load the model from a .keras file."""
    keras, file = library(), Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"model={str(path)!r}, but there is no file {file}.")
    try:
        with quiet():
            return keras.saving.load_model(file)
    except Exception as error:
        raise UsageError(
            f"{file} cannot be loaded as a Keras model ({type(error).__name__}: {error}). It may be truncated, or it has "
            "custom classes: write a function that imports them and loads the file, and give FILE.py:FUNCTION."
        ) from error


def why_not_saved(model: Any) -> str | None:
    """Return why Keras cannot write the model as .keras; None if it can."""
    with quiet():
        try:
            library().saving.serialize_keras_object(model)
        except Exception as error:
            # Keras adds a long explanation with an example; the error comes before it.
            return f"{type(error).__name__}: {' '.join(str(error).partition('Example')[0].split())}"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings: Keras warns about everything it does not save, such as the state of an unused optimiser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
