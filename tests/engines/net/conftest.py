"""What the tests of the network share: memory of centers in a folder of its own, looked at afterwards."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from paragrad.engines.process import mapped_file


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, and no memory of a center of this process, outlives its test."""
    folder = tmp_path_factory.mktemp("fast")
    monkeypatch.setattr(mapped_file, "FAST", folder)
    before = set(multiprocessing.active_children())
    yield
    assert not list(folder.iterdir()), "a center's memory was left behind"
    assert not set(multiprocessing.active_children()) - before, "a process was left behind"
