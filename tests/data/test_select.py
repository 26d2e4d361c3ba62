"""Which rows are used: an expression that is computed column by column, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paragrad as pg
from paragrad.data.load import split
from paragrad.data.select import Selection
from paragrad.data.source import leaves
from paragrad.errors import UsageError

COLUMNS: dict[str, Any] = {
    "pt": np.array([10.0, 25.0, np.nan, 60.0], np.float32),
    "n": np.array([1, 2, 3, 200], np.uint8),
    "kind": np.array(["e", "mu", "mu", "tau"], dtype=object),
    "ok": np.array([True, True, False, True]),
    "Jet.PT": np.array([1, 2, 3, 4]),
    "odd name": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pt > 20", [0, 1, 0, 1]),
        ("20 < pt <= 25", [0, 1, 0, 0]),
        ("not pt > 20", [1, 0, 1, 0]),
        ("pt == pt", [1, 1, 0, 1]),
        ("pt > 20 and kind != 'tau'", [0, 1, 0, 0]),
        ("(pt > 20) & (n >= 2) | (n == 1)", [1, 1, 0, 1]),
        ("~ok or n == 1", [1, 0, 1, 0]),
        ("n + n > 300", [0, 0, 0, 1]),
        ("n + 1 > 300 - 100", [0, 0, 0, 1]),
        ("-n ** 2 / 2 < -1.5 * 1", [0, 1, 1, 1]),
        ("n % 2 == 0 and n // 2 == 1", [0, 1, 0, 0]),
        ("Jet.PT >= 3", [0, 0, 1, 1]),
        ("`odd name` > 0.1", [0, 1, 1, 1]),
        ("`odd name` == 0.3", [0, 0, 1, 0]),
        ("kind == 'mu'", [0, 1, 1, 0]),
        ("ok", [1, 1, 0, 1]),
    ],
)
def test_an_expression_says_which_rows(text: str, expected: list[int]) -> None:
    assert Selection(text).mask(COLUMNS, "a.csv").tolist() == [bool(value) for value in expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').system('true') == 0", r"contains \"__import__.*may only contain comparisons"),
        ("pt.__class__ == 1", "Unknown column|no column"),
        ("abs(pt) > 1", r"contains 'abs\(pt\)'"),
        ("[pt] == 1", r"contains '\[pt\]'"),
        ("pt if n else n", "may only contain"),
        ("(lambda: pt)() > 1", "may only contain"),
        ("f'{pt}' == 'a'", "may only contain"),
        ("pt in (1, 2)", "may only contain"),
        ("pt > ", "is not an expression"),
        ("1 < 2", "names no column"),
        ("", "is not an expression"),
        ("pt + 1", "not true or false for each row"),
        ("pt and n", "and, or, not need"),
        ("kind > 3", "text is compared with a number"),
        ("kind + 1 > 3", "arithmetic needs numbers"),
        ("pt > 9 ** 9 ** 9 ** 9", "cannot be computed"),
        ("(" * 500 + "pt" + ")" * 500, "is not an expression"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pg.Table(COLUMNS, features=["pt"], label="n", select=text).open()


@given(rows=st.integers(1, 300), cut=st.integers(1, 80), low=st.floats(-1, 1), seed=st.integers(0, 9), streamed=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_rows_that_are_left_are_those_of_the_mask_however_they_are_read(tmp_path_factory, rows, cut, low, seed, streamed):
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame({"a": draw.normal(size=rows), "b": draw.normal(size=rows), "y": draw.integers(0, 2, rows)})
    path = tmp_path_factory.mktemp("select") / "a.parquet"
    frame.to_parquet(path, index=False, row_group_size=cut)
    kept = frame[frame["a"] > low]
    table = pg.Table(path, features=["b"], select=f"a > {low}", stream=streamed)
    if not len(kept):
        with pytest.raises(UsageError, match="leaves none of the"):
            split(table)
        return
    found = split(table)
    assert f"leaves {len(kept):,} of {rows:,} rows" in " ".join(found.notes)
    x, y = leaves(found.train.batch(np.arange(len(kept))))
    assert torch.equal(x[:, 0], torch.from_numpy(kept["b"].to_numpy(np.float32)))
    assert y.tolist() == kept["y"].tolist()


def test_a_bad_value_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,y\n1,1,0\n0,,1\n1,2,1\n1,,0\n")
    assert len(split(pg.Table(tmp_path / "a.csv", select="b == b")).train) == 2
    with pytest.raises(UsageError, match=r"Column 'b' of .* has NaN or infinity in row 3\. Leave such rows out"):
        split(pg.Table(tmp_path / "a.csv", select="a > 0"))
    with pytest.raises(UsageError, match=r"in row 1 and in 1 more of the 4 rows that were read with it\."):
        split(tmp_path / "a.csv")


def test_a_selection_is_made_of_rows_to_validate_on_and_to_judge_but_not_to_predict(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": draw.normal(size=200), "b": draw.normal(size=200), "y": np.arange(200) % 2})
    frame[:120].to_csv(tmp_path / "train.csv", index=False)
    frame[120:].to_csv(tmp_path / "test.csv", index=False)
    kept = int((frame["a"][120:] > 0).sum())
    table = pg.Table(tmp_path / "train.csv", select="a > 0", exclude=["a"])
    run = pg.Run(out=tmp_path / "run")
    result = pg.train(
        torch.nn.Linear(1, 2), table, validation=tmp_path / "test.csv", engine=pg.Vector(workers=1), batch_size=8, run=run
    )
    assert 'select = "a > 0"' in (tmp_path / "run" / "run.toml").read_text()
    loaded = pg.load(result.directory, model=torch.nn.Linear(1, 2))
    assert loaded.evaluate(tmp_path / "test.csv")["rows"] == kept
    assert loaded.evaluate(tmp_path / "test.csv")["accuracy"] == pytest.approx(result.accuracy)
    assert len(loaded.predict(tmp_path / "test.csv")) == 80
    given_rows = loaded.given(tmp_path / "test.csv", labelled=False)
    assert "select 'a > 0' of the training is not applied: every row gets a prediction." in given_rows.notes


def test_columns_are_left_out_by_name_and_by_pattern() -> None:
    frame = pandas.DataFrame({"id_a": [1.0, 2], "id_b": [1.0, 2], "x": [1.0, 2], "y": [0, 1]})
    assert split(pg.Table(frame, exclude=["id_*"])).opened.features == ("x",)
    assert split(pg.Table(frame, features=["id_*", "x"], exclude=["id_b"])).opened.features == ("id_a", "x")
    with pytest.raises(UsageError, match=r"Unknown column of the frame to exclude: 'idd'"):
        split(pg.Table(frame, exclude=["idd"]))
    with pytest.raises(UsageError, match="leaves none of the features"):
        split(pg.Table(frame, features=["x"], exclude=["x"]))
    with pytest.raises(UsageError, match=r"exclude='x' is one text"):
        pg.Table(frame, exclude="x")
