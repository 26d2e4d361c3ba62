"""FILE.py:NAME: a user-defined function or class, named on the command line or in a run.toml."""

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
    """Return whether a text names something in a file."""
    return spec.rpartition(":")[0].endswith(".py")


def load(spec: str, what: str) -> Any:
    """Return the object that a text names; ``what`` is its role, for messages."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{what}={spec}, but there is no file {path}.")
    module = _imported(path)
    found = getattr(module, name, None)
    if not callable(found):
        local = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        raise unknown(f"function in {path.name}:", name, [key for key, value in local.items() if callable(value)])
    return found


def is_gone(spec: str) -> bool:
    """Return whether a text names something in a file that no longer exists."""
    return is_named(spec) and not Path(spec.rpartition(":")[0]).expanduser().is_file()


def absolute(spec: str) -> str:
    """Return the text with an absolute path."""
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
        os.environ.setdefault("KERAS_BACKEND", "torch")  # paragrad needs torch if the file imports Keras
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    # Workers cannot import this module, so its classes are pickled with the model.
    cloudpickle.register_pickle_by_value(module)
    return module
