"""Extras: the commands that messages name install what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from paragrad.config import extras

ROOT = Path(__file__).parents[2]


def test_the_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (files,) = declared["files"]
    parts = re.fullmatch(r"paragrad\[(.*)\]", files)
    assert parts is not None
    assert extras.EXTRAS["files"] == tuple(item for part in parts[1].split(",") for item in declared[part])
    for extra in extras.EXTRAS.keys() - {"files"}:
        assert extras.EXTRAS[extra] == tuple(declared[extra])
    assert declared.keys() - {"test", "lint", "bench"} == extras.EXTRAS.keys() == extras.USES.keys()


@pytest.mark.parametrize("folder", ["src", "docs", "benchmarks", "examples"])
def test_no_message_or_page_names_a_release_that_there_is_not(folder: str) -> None:
    files = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md"), ROOT / "README.md"]
    assert not [str(file) for file in files if "install 'paragrad[" in file.read_text()]


def test_a_command_names_every_library() -> None:
    assert extras.command("root") == "pip install 'uproot>=5.6' 'awkward>=2.6'"
