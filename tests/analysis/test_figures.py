"""Figures are written, small, and without matplotlib the remedy is named."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from paragrad.analysis import figures
from paragrad.analysis.momentum import Momentum
from paragrad.analysis.stability import edge
from paragrad.analysis.staleness import Sample
from paragrad.errors import UsageError

PNG = b"\x89PNG"


def commits(workers: int, *, distance: bool) -> list[Sample]:
    dice = random.Random(0)
    moved = [dice.random() if distance else None for _ in range(300)]
    return [Sample(dice.randrange(workers), k, 0.1 * k, dice.randrange(2 * workers), moved[k]) for k in range(300)]


def test_staleness_is_counted_in_whole_updates_and_no_point_is_on_the_edge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = pytest.importorskip("matplotlib.figure")
    made = []
    monkeypatch.setattr(library.Figure, "savefig", lambda figure, path: made.append(figure))
    for top in (0, 2):
        figures.staleness(tmp_path / "staleness.png", [Sample(k % 2, k, 0.1 * k, k % (top + 1), None) for k in range(9)])
    for figure, top in zip(made, (0, 2), strict=True):
        left, right = figure.axes
        low, high = right.get_ylim()
        assert low < 0 <= top < high
        for tick in (*left.get_xticks(), *right.get_yticks()):
            assert tick == round(tick)


@pytest.mark.parametrize("workers", [1, 4, 20])
@pytest.mark.parametrize("distance", [False, True])
def test_staleness_is_drawn(tmp_path: Path, workers: int, distance: bool) -> None:
    pytest.importorskip("matplotlib")
    figures.staleness(tmp_path / "new" / "staleness.png", commits(workers, distance=distance))
    assert (tmp_path / "new" / "staleness.png").read_bytes()[:4] == PNG


def test_the_studies_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    readings = {n: figures.Reading(Momentum(1 - 1 / n, 0.01 * (n > 1), 1 / n, 0.1), 0.2, 1 - 1.1 / n) for n in (1, 2, 4, 8)}
    networks = {name: {n: Momentum(1 - 1 / n, 0.02, 1 / n, 0.1) for n in (1, 2, 4)} for name in ("linear", "mlp")}
    figures.momentum(tmp_path / "momentum.png", readings, networks)
    figures.momentum(tmp_path / "alone.png", readings)
    figures.stability(tmp_path / "stability.png", {n: edge(n) for n in range(1, 5)})
    for name in ("momentum.png", "alone.png", "stability.png"):
        written = (tmp_path / name).read_bytes()
        assert written[:4] == PNG
        assert len(written) < 100_000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'matplotlib>=3.8'"):
        figures.stability(tmp_path / "stability.png", {1: 2.0})


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no applied commit"):
        figures.staleness(tmp_path / "staleness.png", [])


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "taken").touch()
    with pytest.raises(UsageError, match="taken"):
        figures.stability(tmp_path / "taken" / "stability.png", {1: 2.0, 2: 1.0})
