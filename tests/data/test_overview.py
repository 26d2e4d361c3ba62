"""What is said of rows before training: the columns, the classes; and warnings that fire where they must, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paragrad as pg
from paragrad.data.load import split
from paragrad.data.stream import Streamed

DATA = next((p / "shared" / "data" for p in Path(__file__).resolve().parents if (p / "shared" / "data").is_dir()), None)
needs_data = pytest.mark.skipif(DATA is None, reason="there is no folder shared/data beside the repository")


def blurred(rows: int = 600, seed: int = 0) -> pandas.DataFrame:
    """Two classes that overlap, rows sorted by class as measured and then shuffled: the index tells the class."""
    draw = np.random.default_rng(seed)
    kind = np.repeat(["g", "h"], [rows * 2 // 3, rows - rows * 2 // 3])
    frame = pandas.DataFrame({name: draw.normal(size=rows) + (kind == "g") for name in ("length", "width", "size")})
    frame["class"] = kind
    return frame.sample(frac=1, random_state=1)


def told(data: Any, **options: Any) -> tuple[list[str], list[str]]:
    found = split(data, **options)
    return list(found.notes), list(found.warnings)


# -- the index of a frame ---------------------------------------------------------------------------------------


def stored(frame: pandas.DataFrame, folder: Path) -> dict[str, Any]:
    frame.to_csv(folder / "a.csv")
    frame.to_parquet(folder / "a.parquet")
    frame.rename_axis("event").to_parquet(folder / "named.parquet")
    return {
        "csv": folder / "a.csv",
        "parquet": folder / "a.parquet",
        "named": folder / "named.parquet",
        "read again": pandas.read_csv(folder / "a.csv"),
    }


def test_the_index_of_a_frame_is_no_feature_by_any_door(tmp_path: Path) -> None:
    frame = blurred()
    expected = split(pg.Table(frame, label="class"))
    for name, door in stored(frame, tmp_path).items():
        found = split(pg.Table(door, label="class"))
        assert found.opened.features == ("length", "width", "size"), name
        assert found.notes[0] == "Features (3): length, width, size; label: class (g 400, h 200)." == expected.notes[0]
        assert any("is an index that only names or numbers the rows. It is left out" in note for note in found.notes), name
        assert found.warnings == ()


def test_an_index_that_is_named_as_a_feature_is_taken_and_warned_of(tmp_path: Path) -> None:
    doors = stored(blurred(), tmp_path)
    for name, index in (("csv", ""), ("parquet", "__index_level_0__"), ("named", "event"), ("read again", "Unnamed: 0")):
        found = split(pg.Table(doors[name], label="class", features=[index, "length", "width"]))
        assert found.opened.features == (index, "length", "width")
        assert any(f"Column {index!r} alone predicts the label" in text for text in found.warnings), name
        matched = split(pg.Table(doors[name], label="class", features=["*"]))
        assert index not in matched.opened.features


def test_an_unnamed_column_that_does_not_number_rows_stays(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",y\n0.5,0\n0.5,1\n0.7,0\n")
    assert split(tmp_path / "a.csv").opened.features == ("",)


# -- one feature alone ------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 200), classes=st.integers(2, 5), width=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_a_feature_that_numbers_rows_sorted_by_class_is_named(seed: int, classes: int, width: int) -> None:
    draw = np.random.default_rng(seed)
    y = np.sort(draw.integers(0, classes, 1_000))
    x = np.column_stack([draw.normal(size=(1_000, width)), np.arange(1_000) / 1_000]).astype(np.float32)
    order = draw.permutation(1_000)
    warnings = told((x[order], y[order]), seed=seed)[1]
    assert [text for text in warnings if f"Input {width} alone predicts the label" in text]
    assert not told((x[order][:, :-1], y[order]), seed=seed)[1]


def test_ordinary_rows_are_not_warned_of() -> None:
    x, y = load_digits(return_X_y=True)
    assert told((x, y))[1] == []
    assert told("digits")[1] == []
    assert told(pg.Table(blurred(), label="class"))[1] == []


@needs_data
@pytest.mark.parametrize("name", ["higgs_uci/higgs_uci.npz", "mnist/mnist.npz"])
def test_real_rows_are_not_warned_of(name: str) -> None:
    assert told(DATA / name)[1] == []


def test_a_rare_class_must_be_told_to_be_warned_of() -> None:
    draw = np.random.default_rng(0)
    y = (draw.random(2_000) < 0.01).astype(np.int64)
    x = draw.normal(size=(2_000, 3)).astype(np.float32)
    assert told((x, y))[1] == []
    x[:, 1] = y + 0.01 * x[:, 1]
    assert "Input 1 alone predicts the label of 100 % of the rows" in told((x, y))[1][0]


# -- classes ----------------------------------------------------------------------------------------------------


def test_a_class_of_a_few_rows_and_one_class_alone_are_warned_of_by_every_door(tmp_path: Path) -> None:
    frame = blurred()
    frame.iloc[:3, -1] = "G"
    frame.to_csv(tmp_path / "a.csv", index=False)
    x, y = frame[["length", "width", "size"]].to_numpy(), frame["class"].to_numpy()
    expected = "Class 'G' has only 3 rows of 600. Is it 'g', spelt otherwise?"
    streamed = pg.Table(tmp_path / "a.csv", label="class", stream=True)
    for door in ((x, y), pg.Table(frame, label="class"), pg.Table(tmp_path / "a.csv", label="class"), streamed):
        assert told(door)[1] == [expected]
    alone = (x, np.full(600, "g"))
    assert told(alone)[1] == ["All 600 rows are of one class, 'g': there is nothing to distinguish it from."]
    rows = TensorDataset(torch.tensor(x), torch.zeros(600, dtype=torch.int64))
    for door in (rows, DataLoader(rows, 8)):
        assert told(door)[1] == ["All 600 rows are of one class, 0: there is nothing to distinguish it from."]


def test_small_classes_that_are_all_small_are_not_warned_of() -> None:
    draw = np.random.default_rng(0)
    assert told((draw.normal(size=(40, 3)), np.arange(40) % 10))[1] == []


# -- scales -----------------------------------------------------------------------------------------------------


def test_columns_that_need_scaling_are_named_with_the_option_until_they_are_scaled(tmp_path: Path) -> None:
    frame = blurred()
    frame["size"] *= 5_000
    frame.to_csv(tmp_path / "a.csv", index=False)
    for door in (frame, tmp_path / "a.csv"):
        (text,) = told(pg.Table(door, label="class"))[1]
        assert text.startswith("Column 'size' goes to 1.")
        assert "--transform standardise" in text
        assert "pg.Standardise()" in text
        assert told(pg.Table(door, label="class", transforms=[pg.Standardise()]))[1] == []
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (300, 12)).astype(np.uint8)
    for x in (raw, raw.astype(np.float32), raw.reshape(300, 3, 4).astype(np.float32)):
        assert "--transform standardise" in told((x, np.arange(300) % 2))[1][0]
    assert told((raw.reshape(300, 3, 4), np.arange(300) % 2))[1] == []


# -- every kind of rows -----------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


def test_every_kind_of_rows_is_described() -> None:
    x = np.random.default_rng(0).standard_normal((700, 2)).astype(np.float32)
    y = np.arange(700) % 2
    assert told((x, y))[0] == ["Features (2); label (0 350, 1 350)."]
    assert told(Rows(x[:500], y[:500]))[0] == ["Features (2); label (0 250, 1 250)."]
    assert told(Rows(x, y))[0][0].startswith("Features (2); label (of 512 rows looked at: 0 2")
    assert told((x, x[:, 0]))[0] == ["Features (2); label (float32)."]
    assert told(({"a": x, "b": x[:, :1]}, y))[0] == ["Inputs: (2,) and (1,) in each row; label (0 350, 1 350)."]
    assert told((x.reshape(700, 1, 2), np.zeros((700, 3), np.int64)))[0] == [
        "Features of shape (1, 2); label (int64 of shape (3,))."
    ]
    assert told(x)[0] == ["Features (2)."]
    assert told((x, np.arange(700) % 35))[0] == ["Features (2); label (35 classes of 20 rows)."]
    assert told(pg.Weighted((x, y), np.ones(700)))[0] == ["Features (2); label (0 350, 1 350)."]
    assert told(pg.Weighted(x, np.ones(700)))[0] == ["Features (2)."]
    assert told(pg.Generated(lambda: iter([(x, y)] * 9), rows=700))[0][0] == "Features (2); label (int64)."

    class Pieces:
        lengths = (300, 0, 400)

        def read(self, piece: int) -> Any:
            return (x[:300], y[:300]) if piece == 0 else (x[300:], y[300:])

    assert told(Streamed(Pieces()))[0] == ["Features (2); label (int64)."]
    wide = pandas.DataFrame({f"c{k}": x[:, 0] for k in range(30)} | {"y": y})
    assert told(wide)[0][0] == "Features (30): c0, c1, c2, c3, c4, ..., c29; label: y (0 350, 1 350)."
