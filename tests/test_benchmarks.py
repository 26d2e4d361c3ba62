"""The benchmarks' arithmetic; what they measure is not tested, since a loaded machine would fail it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from benchmarks import measure, table


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
