"""Built-in models by name, and models from a user's file."""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.errors import UsageError, unknown
from paragrad.models import ownfile, toys

CATALOGUE: dict[str, str] = {
    "linear": "one linear layer: softmax, logistic or linear regression, by the loss",
    "mlp": "fully connected layers with ReLU; hidden sizes as in mlp:1000-2000-1000, by default 128",
    "cnn": "two convolutions and two linear layers, for images; flat squares (64, 784) are treated as images",
    "resnet8": "three residual blocks of 16, 32 and 64 channels with batch-norm, for images",
    **toys.CATALOGUE,
    "FILE.py:FUNCTION": "your own: a function that returns a torch.nn.Module, or a compiled Keras model; it may take inputs= "
    "and outputs=",
    "FILE.keras": "a saved, compiled Keras model",
}
"""Values of ``model`` on the command line, with a one-line description."""


def is_keras(thing: Any) -> bool:
    """Return whether this is a Keras model, without importing Keras: if it is not imported, there is no Keras model."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(thing, getattr(keras, "Model", ()))


@dataclass(frozen=True)
class Built:
    """Arguments from which a model was built and can be built again."""

    spec: str
    inputs: tuple[int, ...]
    outputs: int
    seed: int


def build(spec: str, inputs: tuple[int, ...], outputs: int, seed: int = 0) -> nn.Module:
    """Build the model that a text names, for rows of the shape ``inputs``; ``seed`` alone determines its weights.

    A toy problem has its own start and size, whatever the rows.
    """
    if toys.is_toy(spec):
        return toys.build(spec)
    make = _maker(spec, inputs, outputs)
    before = random.getstate()
    random.seed(seed)  # Keras's initialisers take their seeds from this generator
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = make()
    finally:
        random.setstate(before)
    # The module keeps its arguments, also in a user's program, so that a run can be used without its training data.
    again = ownfile.absolute(spec) if ownfile.is_named(spec) else spec
    module.paragrad_built = Built(again, tuple(inputs), outputs, seed)  # type: ignore[assignment]
    return module


def _maker(spec: str, inputs: tuple[int, ...], outputs: int) -> Callable[[], nn.Module]:
    if ownfile.is_named(spec):
        return lambda: _from_file(spec, inputs, outputs)
    if spec.endswith(".py"):
        raise UsageError(f"model={spec!r} names a file only: name its function too, as {spec}:build.")
    name, colon, sizes = spec.partition(":")
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: _mlp(inputs, [], outputs),
        "mlp": lambda: _mlp(inputs, _sizes(spec, sizes) if colon else [128], outputs),
        "cnn": lambda: _cnn(_image(spec, inputs), outputs),
        "resnet8": lambda: _resnet8(_image(spec, inputs), outputs),
    }
    if name.lower() not in makers:
        raise _no_file(spec, name, sizes) if sizes.isidentifier() else unknown("model", name, CATALOGUE)
    if colon and name.lower() != "mlp":
        raise UsageError(f"model={spec!r}, but {name} takes no sizes; only mlp does, as mlp:1000-2000-1000.")
    return makers[name.lower()]


def _no_file(spec: str, name: str, function: str) -> UsageError:
    """Return the error for ``mine:build``, which probably means ``mine.py:build``."""
    path = Path(name.replace(".", "/") + ".py")
    here = f"{path} exists here" if path.is_file() else f"there is no {path} in {Path.cwd()}"
    return UsageError(
        f"Unknown model {spec!r}. Write your own model as FILE.py:FACTORY, such as {path}:{function} ({here}). "
        f"Built in: {', '.join(known for known in CATALOGUE if not known.startswith('FILE'))}."
    )


class Image(nn.Module):
    """Reshape rows of any shape to images of (channels, height, width)."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        return str(self.shape)


class Residual(nn.Module):
    """Two 3x3 convolutions with batch-norm, and a shortcut (He et al. 2016)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = 1 if inside == outside else 2
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _mlp(inputs: tuple[int, ...], hidden: list[int], outputs: int) -> nn.Module:
    sizes = [math.prod(inputs), *hidden]
    layers: list[nn.Module] = [] if len(inputs) == 1 else [nn.Flatten()] if inputs else [nn.Unflatten(0, (-1, 1))]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def _cnn(shape: tuple[int, int, int], outputs: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        Image(shape),
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


def _resnet8(shape: tuple[int, int, int], outputs: int) -> nn.Module:
    return nn.Sequential(
        Image(shape),
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16),
        Residual(16, 32),
        Residual(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, outputs),
    )


def _sizes(spec: str, text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split("-")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UsageError(f"model={spec!r}, but hidden sizes must be whole numbers of at least 1, as in mlp:1000-2000-1000.")
    return sizes


def _image(spec: str, inputs: tuple[int, ...]) -> tuple[int, int, int]:
    side = math.isqrt(inputs[0]) if len(inputs) == 1 else 0
    shape = (1, side, side) if side * side == math.prod(inputs) else (1, *inputs) if len(inputs) == 2 else inputs
    if len(shape) != 3:
        raise UsageError(
            f"model={spec!r} needs images, but a row has the shape {inputs}, which is neither (channels, height, width) nor "
            "(height, width) nor a flat square such as 784 = 28 x 28. Reshape the rows, or choose mlp."
        )
    if shape[0] > 4 and shape[2] in (1, 3, 4):
        raise UsageError(
            f"model={spec!r}, but rows of the shape {inputs} look like (height, width, channels). Put the channels first: "
            "x.transpose(0, 3, 1, 2)."
        )
    if min(shape[1:]) < 4:
        raise UsageError(f"model={spec!r} needs images of at least 4 x 4, but a row has the shape {inputs}: choose mlp.")
    return shape[0], shape[1], shape[2]


def _from_file(spec: str, inputs: tuple[int, ...], outputs: int) -> nn.Module:
    factory, named = ownfile.load(spec, "model"), Path(spec).name
    parameters = inspect.signature(factory).parameters
    rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    offered: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
    try:
        model = factory(**{key: value for key, value in offered.items() if rest or key in parameters})
    except Exception as error:
        raise UsageError(f"{named} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module) and not is_keras(model):
        raise UsageError(
            f"{named} returned a {type(model).__name__}, but it must return a torch.nn.Module, or a compiled Keras model."
        )
    return model  # type: ignore[no-any-return]
