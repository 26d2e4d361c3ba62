"""FILE.py:NAME: a function or class of the user's own, named on the command line or in a run.toml."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from paragrad.errors import UsageError, unknown


def is_named(spec: str) -> bool:
    """Whether a text names something in a file."""
    return spec.rpartition(":")[0].endswith(".py")


def load(spec: str, what: str) -> Any:
    """What a text names; ``what`` it is taken for, for messages."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{what}={spec}, but there is no file {path}.")
    module = _imported(path)
    found = getattr(module, name, None)
    if not callable(found):
        raise unknown(f"function in {path.name}:", name, _functions(module))
    return found


def is_gone(spec: str) -> bool:
    """Whether a text names something in a file that is no longer there."""
    return is_named(spec) and not Path(spec.rpartition(":")[0]).expanduser().is_file()


def absolute(spec: str) -> str:
    """The same from every directory."""
    file, _, name = spec.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{name}"


def _imported(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")  # the one that paragrad trains on, if the file imports Keras
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    # Workers do not have this module: its classes travel to them with the model.
    cloudpickle.register_pickle_by_value(module)
    return module


def _functions(module: ModuleType) -> list[str]:
    return [
        name for name, thing in vars(module).items() if callable(thing) and getattr(thing, "__module__", "") == module.__name__
    ]
