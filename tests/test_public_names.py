"""``import paragrad`` is light, and everything public is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paragrad as pg
from paragrad import codecs, engines, schemes


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


def test_every_file_of_schemes_is_in_the_table() -> None:
    folder = Path(schemes.__file__).parent
    defined = {schemes.load(name).__module__.rpartition(".")[2] for name in schemes.names()}
    assert {path.stem for path in folder.glob("*.py")} - {"__init__", "scheme", "traits"} == defined


def test_every_scheme_codec_and_engine_is_named_once() -> None:
    stub = (Path(pg.__file__).parent / "__init__.pyi").read_text()
    for package in (schemes, codecs, engines):
        assert not [name for name in package.names() if name in stub]
        assert set(package.names()) <= set(pg.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        pg.Nonsense  # noqa: B018


@pytest.mark.parametrize("first", ["import paragrad.train", "from paragrad.train import train", "import paragrad.cli.main"])
def test_the_module_train_does_not_hide_the_function(first: str) -> None:
    assert python(f"{first}; import paragrad as pg; print(type(pg.train).__name__)") == "function"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_than_linux_is_refused_in_one_sentence(platform: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import paragrad"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: paragrad needs Linux, and this is {platform}:")
    assert "During handling" not in done.stderr
