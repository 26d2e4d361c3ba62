"""``import paragrad`` is light, and everything public is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paragrad as pg
from paragrad import schemes


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["paragrad", "paragrad.cli.main"])
def test_importing_does_not_load_torch(module: str) -> None:
    assert python(f"import sys, {module}; print([m for m in ('torch', 'numpy', 'sklearn') if m in sys.modules])") == "[]"


@pytest.mark.parametrize("name", pg.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(pg, name) is not None
    assert name in dir(pg)


def test_every_scheme_is_a_public_name() -> None:
    for name in schemes.names():
        assert getattr(pg, name) is schemes.load(name)
        assert issubclass(schemes.load(name), pg.Scheme)


def test_every_file_of_schemes_stands_in_the_table() -> None:
    folder = Path(schemes.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "scheme"} == set(schemes.TABLE.values())


@pytest.mark.parametrize("package", [schemes, pg])
def test_type_checkers_see_the_same_schemes(package: ModuleType) -> None:
    tree = ast.parse(Path(package.__file__ or "").read_text())
    seen = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(schemes.names()) <= seen


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        pg.Nonsense  # noqa: B018


@pytest.mark.parametrize("first", ["import paragrad.train", "from paragrad.train import train", "import paragrad.cli.main"])
def test_the_module_train_does_not_hide_the_function(first: str) -> None:
    assert python(f"{first}; import paragrad as pg; print(type(pg.train).__name__)") == "function"
