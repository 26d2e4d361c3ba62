"""The benchmarks' arithmetic; what they measure is not tested, since a loaded machine would fail it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from benchmarks import cluster, measure, stream, table
from benchmarks.watch import Watched
from torch import nn

import paragrad as pg
from paragrad import schemes
from paragrad.config import options
from paragrad.core.center import Center


def test_a_rate_is_exact_for_equal_steps_wherever_the_warm_up_ends() -> None:
    stamps = {rank: [(0.37 * rank + 0.25 * k, 128) for k in range(40)] for rank in range(3)}
    for seconds in (1.0, 5.0, 9.9):
        assert measure.rate(stamps, seconds) == pytest.approx(3 * 128 / 0.25)


def test_a_rate_leaves_the_warm_up_out() -> None:
    slow, fast = [(0.1 * k, 1) for k in range(10)], [(1 + 0.01 * k, 1) for k in range(500)]
    assert measure.rate({0: slow + fast}, 5.0) == pytest.approx(100)


def test_a_rate_of_too_few_steps_is_refused() -> None:
    with pytest.raises(RuntimeError, match="more --seconds"):
        measure.rate({0: [(9.0, 1), (9.5, 1)]}, 10.0)


def test_a_ratio_is_formed_within_each_repeat(tmp_path: Path) -> None:
    report = measure.Report("exchange", argparse.Namespace(out=str(tmp_path / "exchange.json")))
    report.figures = [{"a": 1.0, "b": 2.0}, {"a": 30.0, "b": 10.0}, {"a": 4.0, "b": None}]
    assert report.ratios("a", "b") == [0.5, 3.0]


def test_every_claim_of_a_result_is_a_row_of_the_table(tmp_path: Path) -> None:
    report = measure.Report("exchange", argparse.Namespace(out=str(tmp_path / "exchange.json")))
    report.claims = [
        measure.Claim.over("share", [0.5, 0.7, 0.6], target=">= 0.5"),
        measure.Claim.over("start", [1.0], unit="s"),
    ]
    report.write()
    written = json.loads((tmp_path / "exchange.json").read_text(encoding="utf-8"))
    assert written["machine"]["torch"]
    text = table.markdown(table.load(tmp_path))
    assert "| share | 0.60 (0.50-0.70) | >= 0.5 |" in text
    assert "| start | 1.00 s (1.00-1.00) | - |" in text


@pytest.mark.parametrize(("scheme", "updates"), [(pg.SyncSGD(), 4), (pg.Downpour(), 8)])
def test_a_watched_center_is_seen_once_at_each_update_and_at_its_virtual_second(
    tmp_path: Path, scheme: pg.Scheme, updates: int
) -> None:
    seen: list[tuple[int, float]] = []

    def look(center: Center, seconds: float) -> None:
        seen.append((center.clock, seconds))

    engine = Watched(workers=2, threads=1, cluster=pg.Cluster(speeds=(1.0, 1.0)), look=look)
    data = (torch.rand(16, 3), torch.randint(0, 2, (16,)))
    run = pg.Run(out=tmp_path / "run", validate_every=None, checkpoint_every=None)
    pg.train(nn.Linear(3, 2), data, scheme=scheme, engine=engine, optimizer="sgd:lr=0.1", batch_size=2, run=run)
    commits = 8 // updates
    assert seen == [(k + 1, float(k * commits // 2 + 1)) for k in range(updates)]


def test_the_best_setting_is_the_one_that_reaches_the_target_most_often_and_then_soonest() -> None:
    def runs(scheme: str, times: list[float | None], accuracy: float) -> list[dict[str, object]]:
        return [{"scheme": scheme, "optimizer": "adam", "to_target": t, "accuracy": accuracy} for t in times]

    once, slow, fast = runs("once", [1.0, None], 0.99), runs("slow", [9.0, 9.0], 0.99), runs("fast", [8.0, 9.0], 0.9)
    assert cluster.best(once + slow + fast) == ("fast", "adam")
    assert cluster.best(runs("a", [None], 0.5) + runs("b", [None], 0.6)) == ("b", "adam")


def test_a_target_that_was_missed_is_counted() -> None:
    assert cluster.cell([{"to_target": 3.0}, {"to_target": 5.0}, {"to_target": None}]) == "4 (3-5) 1 of 3 did not"
    assert cluster.cell([{"to_target": None}]) == "1 of 1 did not"


def test_every_scheme_is_tried_with_six_settings() -> None:
    for name in cluster.FIELDS:
        grid = cluster.grid(name, "digits")
        assert len(set(grid)) == 6
        for scheme, _ in grid:
            options.parse(scheme, "scheme", schemes)


def test_choosing_says_what_the_results_of_the_clusters_say() -> None:
    result = json.loads((measure.RESULTS / "cluster.json").read_text(encoding="utf-8"))
    assert cluster.markdown(result) in cluster.PAGE.read_text(encoding="utf-8"), "run: benchmarks/cluster.py --page"


@pytest.mark.parametrize("kind", stream.FORMATS)
def test_a_file_to_be_streamed_holds_the_rows_that_are_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "GROUP", 40)
    path = tmp_path / f"rows.{kind}"
    stream.FORMATS[kind](path, 100)
    x, y = (torch.cat([torch.from_numpy(stream.group(k, n)[part]) for k, n in enumerate((40, 40, 20))]) for part in (0, 1))
    found = stream.table_of(path).open().load()
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], y)
    assert stream.decoded(stream.table_of(path), 0.01) > 0
