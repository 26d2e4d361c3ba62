"""Every format: what was written is what is read, every row once and in order, whatever the pieces are."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import polars
import pytest
import uproot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paragrad as pg
from paragrad.config import extras
from paragrad.data import progress
from paragrad.data.formats import SUFFIXES, csv, file, open_file
from paragrad.data.formats.file import Column, Jagged, even, gathered
from paragrad.data.formats.frame import Frame, columns_of
from paragrad.data.load import split
from paragrad.data.table import Table
from paragrad.data.transforms.scales import Standardise
from paragrad.errors import UsageError
from tests.data.written import WRITERS, as_csv, as_hdf5, as_npy, as_parquet, as_tree

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def columns(rows: int, seed: int = 0) -> dict[str, Any]:
    """One column of each kind; float32 of every size."""
    draw = np.random.default_rng(seed)
    return {
        "f": (draw.standard_normal(rows) * 10.0 ** draw.integers(-30, 30, rows)).astype(np.float32),
        "d": draw.standard_normal(rows),
        "i": draw.integers(-1000, 1000, rows).astype(np.int32),
        "t": np.array(["signal", "background, or not", 'a "b"'], dtype=object)[draw.integers(0, 3, rows)],
    }


def everything(found: Any, names: list[str]) -> dict[str, np.ndarray]:
    parts = [found.read(piece, names) for piece in range(len(found.lengths))]
    assert tuple(len(part[names[0]]) for part in parts) == tuple(found.lengths)
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(file, "ROWS", 16)
    monkeypatch.setattr(csv, "ROWS", 16)
    return monkeypatch


@pytest.mark.parametrize("kind", WRITERS)
@few
@given(rows=st.integers(1, 100), cut=st.integers(1, 40), seed=st.integers(0, 9))
def test_what_was_written_is_what_is_read(kind: str, tmp_path: Path, small_pieces: Any, rows: int, cut: int, seed: int) -> None:
    suffix, write = WRITERS[kind]
    told = columns(rows, seed)
    if kind == "npy":
        told["t"] = np.array([text[:9] for text in told["t"]], dtype=object)
    path = write(tmp_path / f"{rows}-{cut}-{seed}{suffix}", told, cut)
    opened = pickle.loads(pickle.dumps(open_file(path)))
    assert sum(opened.lengths) == rows
    assert set(opened.columns) == set(told)
    found = everything(opened, list(told))
    for name, values in told.items():
        exact = values.astype(np.float64) if kind == "csv" and values.dtype.kind in "if" else values
        assert found[name].dtype == opened.columns[name].dtype == exact.dtype
        # Text has the digits that a float32 needs: read as float32 it is the number that was written.
        assert found[name].astype(values.dtype).tolist() == values.tolist()
    opened.close()


@few
@given(lengths=st.lists(st.integers(0, 30)), size=st.integers(1, 40))
def test_small_pieces_are_gathered_without_loss(lengths: list[int], size: int) -> None:
    groups = gathered(lengths, size)
    assert [place for group in groups for place in group] == [place for place, length in enumerate(lengths) if length]
    for group in groups:
        assert len(group) == 1 or sum(lengths[place] for place in group) <= size


@few
@given(total=st.integers(0, 100), size=st.integers(1, 40))
def test_even_pieces_add_up(total: int, size: int) -> None:
    lengths = even(total, size)
    assert sum(lengths) == total
    assert all(0 < length <= size for length in lengths)


@few
@given(
    lines=st.lists(st.sampled_from(["1,a", '2,"b\nc"', "", '3,"""\n"', "-4.5,d"]), max_size=40),
    end=st.sampled_from(["\n", "\r\n"]),
    block=st.integers(1, 50),
    closed=st.booleans(),
)
def test_rows_of_a_csv_are_found_wherever_blocks_end(
    tmp_path: Path, small_pieces: Any, lines: list[str], end: str, block: int, closed: bool
) -> None:
    small_pieces.setattr(csv, "BLOCK", block)
    small_pieces.setattr(csv, "MOST", 4 * block)
    path = tmp_path / "a.csv"
    path.write_bytes((end.join(["number,text", *lines]) + end * closed).encode())
    small_pieces.setattr(csv, "_head", lambda name: (["number", "text"], ",", len("number,text" + end)))
    filled = [line for line in lines if line]
    found = open_file(path)
    assert sum(found.lengths) == len(filled)
    if filled:
        read = everything(found, ["number", "text"])
        assert read["number"].tolist() == [float(line.partition(",")[0]) for line in filled]
        assert [str(text).replace("\r", "") for text in read["text"]] == [
            line.partition(",")[2].removeprefix('"').removesuffix('"').replace('""', '"') for line in filled
        ]
    found.close()


def test_a_csv_of_numbers_alone_has_columns_by_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1.0,2.5\n0.0,3.5\n")
    found = open_file(tmp_path / "a.csv")
    assert list(found.columns) == ["0", "1"]
    assert everything(found, ["1"])["1"].tolist() == [2.5, 3.5]


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_a_csv_tells_by_itself_what_stands_between_values(tmp_path: Path, sign: str) -> None:
    (tmp_path / "a.csv").write_text(f"a{sign}b\n1{sign}true\n{sign}false\n")
    found = open_file(tmp_path / "a.csv")
    assert {name: str(column) for name, column in found.columns.items()} == {"a": "float64", "b": "bool"}
    read = everything(found, ["a", "b"])
    assert read["b"].tolist() == [True, False]
    assert read["a"][0] == 1
    assert np.isnan(read["a"][1]), "what is missing is NaN"


@pytest.mark.parametrize("kind", ["parquet", "hdf5", "ttree", "rntuple"])
def test_lists_of_different_lengths_are_padded_and_cut(tmp_path: Path, small_pieces: Any, kind: str) -> None:
    suffix, write = WRITERS[kind]
    lists = [np.arange(row % 4, dtype=np.float32) + row for row in range(40)]
    lists[0] = np.empty(0, np.float32)
    found = open_file(write(tmp_path / f"a{suffix}", {"jet": lists}, 7))
    assert found.columns["jet"] == Column(np.dtype(np.float32), jagged=True)
    parts = [found.read(piece, ["jet"])["jet"] for piece in range(len(found.lengths))]
    for length in (1, 2, 5):
        padded = np.concatenate([part.padded(length) for part in parts])
        expected = [np.pad(values[:length], (0, max(0, length - len(values)))).tolist() for values in lists]
        assert padded.tolist() == expected


@pytest.mark.parametrize("kind", ["parquet", "hdf5", "compound", "ttree", "npz", "npy"])
def test_a_column_may_hold_several_numbers_in_each_row(tmp_path: Path, small_pieces: Any, kind: str) -> None:
    suffix, write = WRITERS[kind]
    values = np.arange(120, dtype=np.float64).reshape(40, 3)
    found = open_file(write(tmp_path / f"a{suffix}", {"v": values}, 7))
    assert found.columns["v"] == Column(np.dtype(np.float64), (3,))
    assert everything(found, ["v"])["v"].tolist() == values.tolist()


def test_a_matrix_in_an_npy_is_as_many_columns_and_images_are_one(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12.0).reshape(4, 3))
    np.save(tmp_path / "b.npy", np.zeros((4, 2, 2), np.uint8))
    found = open_file(tmp_path / "a.npy")
    assert list(found.columns) == ["0", "1", "2"]
    assert everything(found, ["2"])["2"].tolist() == [2, 5, 8, 11]
    assert open_file(tmp_path / "b.npy").columns == {"x": Column(np.dtype(np.uint8), (2, 2))}


def test_what_is_as_long_as_no_other_is_set_aside(tmp_path: Path) -> None:
    for found in (
        open_file(as_hdf5(tmp_path / "a.h5", {"a": np.zeros(9), "b": np.ones(9), "names": np.zeros(3)}, 4)),
        open_file(_saved(tmp_path / "a.npz", a=np.zeros(9), b=np.ones(9), names=np.zeros(3))),
    ):
        assert list(found.columns) == ["a", "b"]
        assert "3 rows" in found.aside["names"]


def _saved(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_a_group_of_an_hdf5_file_may_be_chosen(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as made:
        made["train/x"], made["train/y"] = np.zeros((5, 2)), np.zeros(5)
        made["test/x"], made["test/y"] = np.ones((3, 2)), np.ones(3)
    assert sum(open_file(tmp_path / "a.h5", "test").lengths) == 3
    assert list(open_file(tmp_path / "a.h5", "train").columns) == ["x", "y"]
    with pytest.raises(UsageError, match=r"a.h5: 'tset'. Did you mean 'test'"):
        open_file(tmp_path / "a.h5", "tset")
    with pytest.raises(UsageError, match=r"Unknown group in .*a.h5: 'train/x'"):
        open_file(tmp_path / "a.h5", "train/x")


FRAMES = {
    "pandas": lambda told: pandas.DataFrame(told),
    "polars": lambda told: polars.DataFrame(
        {name: list(values) if values.dtype == object else values for name, values in told.items()}
    ),
}


@pytest.mark.parametrize("library", FRAMES)
def test_frames_are_read_as_they_are(library: str, small_pieces: Any) -> None:
    told = columns(50)
    found = Frame(columns_of(FRAMES[library](told)), "the frame")
    assert len(found.lengths) > 1
    for name, values in everything(found, list(told)).items():
        assert values.dtype == told[name].dtype
        assert values.tolist() == told[name].tolist()


def test_gaps_and_lists_in_frames() -> None:
    for frame in (
        pandas.DataFrame({"i": pandas.array([1, None, 3], dtype="Int64"), "v": [[1.0], [2.0, 3.0], []]}),
        polars.DataFrame({"i": [1, None, 3], "v": [[1.0], [2.0, 3.0], []]}),
    ):
        found = Frame(columns_of(frame), "the frame").read(0, ["i", "v"])
        assert np.array_equal(found["i"], [1, np.nan, 3], equal_nan=True)
        assert isinstance(found["v"], Jagged)
        assert found["v"].padded(2).tolist() == [[1, 0], [2, 3], [0, 0]]


# -- files that cannot be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "hdf5", "compound", "ttree", "rntuple", "npz", "npy"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.95])
def test_a_file_cut_short_is_named(kind: str, kept: float, tmp_path: Path) -> None:
    suffix, write = WRITERS[kind]
    whole = write(
        tmp_path / f"whole{suffix}", {"a": np.random.default_rng(0).random(3000), "b": np.arange(3000)}, 300
    ).read_bytes()
    path = tmp_path / f"short{suffix}"
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(UsageError, match=f"short{suffix} cannot be read as .* It may be truncated"):
        everything(open_file(path), ["a", "b"])


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix not in (".csv", ".tsv")])
def test_a_file_of_another_kind_is_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text("pt,eta\n1,2\n" * 100)
    with pytest.raises(UsageError, match=f"a{suffix} cannot be read as"):
        open_file(path)


def test_a_csv_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(as_parquet(tmp_path / "a.parquet", {"a": np.arange(9)}, 9).read_bytes())
    with pytest.raises(UsageError, match=r"a\.csv"):
        open_file(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(UsageError, match=r"b\.csv cannot be read as CSV .*Expected 2 columns, got 1"):
        open_file(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("a,a\n1,2\n")
    with pytest.raises(UsageError, match=r"c\.csv has two columns called 'a'"):
        open_file(tmp_path / "c.csv")


def test_text_that_comes_late_in_a_csv_is_named_with_its_row(tmp_path: Path, small_pieces: Any) -> None:
    path = as_csv(tmp_path / "a.csv", {"a": np.arange(50.0), "b": np.arange(50)}, 1)
    path.write_text(path.read_text().replace("\n37.0,37\n", "\n37.0,n/b\n"))
    with pytest.raises(UsageError, match=r"Column 'b' of .*a\.csv holds numbers, but 'n/b' in row 37"):
        everything(open_file(path), ["a", "b"])


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", a=np.array([[1], [2, 3]], dtype=object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UsageError, match=f"{name} holds pickled Python objects"):
            open_file(tmp_path / name)


def test_a_root_file_without_the_tree_says_which_there_are(tmp_path: Path) -> None:
    path = as_tree(tmp_path / "a.root", {"pt": np.arange(4.0)}, 4)
    with pytest.raises(UsageError, match=r"Unknown tree in .*a.root: 'event'. Did you mean 'events'?"):
        open_file(path, "event")
    with uproot.recreate(tmp_path / "b.root") as made:
        made.mktree("signal", {"pt": np.float64})
        made.mktree("background", {"pt": np.float64})
    with pytest.raises(UsageError, match=r"b.root has several trees: signal, background. Choose one: --tree signal"):
        open_file(tmp_path / "b.root")
    with uproot.recreate(tmp_path / "c.root") as made:
        made["counts"] = np.histogram(np.arange(9))
    with pytest.raises(UsageError, match=r"c.root has no TTree and no RNTuple.*counts \(TH1D\)"):
        open_file(tmp_path / "c.root")


def test_an_unknown_ending_and_a_file_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.xlsx ends in '\.xlsx', but a table is a file that ends in \.csv"):
        open_file(tmp_path / "a.xlsx")
    with pytest.raises(UsageError, match=r"a\.csv does not exist"):
        open_file(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("suffix", "library", "extra"),
    [(".parquet", "pyarrow", "parquet"), (".csv", "pyarrow", "parquet"), (".h5", "h5py", "hdf5"), (".root", "uproot", "root")],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    suffix: str, library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"a{suffix}").write_text("a,b\n1,2\n")
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(UsageError, match=re.escape(extras.command(extra))):
        open_file(tmp_path / f"a{suffix}")


def test_a_file_system_that_is_away_for_a_moment_is_not_taken_for_a_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = open_file(as_npy(tmp_path / "a.npy", {"a": np.arange(3.0)}, 1))
    assert everything(found, ["a"])["a"].tolist() == [0, 1, 2]
    for error in (
        OSError(5, "Input/output error"),
        OSError("Can't read data (errno = 116, error message = 'Stale file handle')"),
    ):
        with pytest.raises(OSError) as caught:
            file.refuse("a.h5", "HDF5", error)
        assert caught.value is error

        def fails(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(np, "load", fails)
        found.close()
        with pytest.raises(OSError) as caught:
            found.read(0, ["a"])
        assert caught.value is error


def test_numbers_of_a_csv_are_read_with_all_their_digits(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n0.1,0\n0.12345678901,1\n16777217,0\n1700000000.5,1\n")
    assert pg.Table(tmp_path / "a.csv").open().raw(0)["x"].tolist() == [0.1, 0.12345678901, 16777217.0, 1700000000.5]


def pickled(value: Any) -> np.bytes_:
    """As PyTables writes what pandas says of a frame."""
    return np.bytes_(pickle.dumps(value, 0))


def as_frame_table(file: Any, key: str, columns: dict[str, np.ndarray], blocks: list[list[str]]) -> None:
    """What ``frame.to_hdf(..., format="table")`` leaves: a field for all columns of a type, the index, and a search tree."""
    rows = len(next(iter(columns.values())))
    kinds = [("index", "<i8")]
    kinds += [(f"values_block_{k}", columns[names[0]].dtype, (len(names),)) for k, names in enumerate(blocks)]
    table = np.empty(rows, dtype=kinds)
    table["index"] = np.arange(rows)[::-1]
    for k, names in enumerate(blocks):
        for place, name in enumerate(names):
            table[f"values_block_{k}"][:, place] = columns[name]
    group = file.create_group(key)
    group.attrs["pandas_type"] = np.bytes_("frame_table")
    group.attrs["index_cols"] = pickled([(0, "index")])
    made = group.create_dataset("table", data=table, chunks=(3,))
    for k, names in enumerate(blocks):
        made.attrs[f"values_block_{k}_kind"] = pickled(names)
    tree = group.create_group("_i_table/index")
    for name, shape in (("abounds", (0,)), ("bounds", (0, 127)), ("mbounds", (0,)), ("mranges", (0,)), ("zbounds", (0,))):
        tree.create_dataset(name, shape, np.int64, maxshape=(None, *shape[1:]), chunks=(8, *shape[1:]))


PANDAS = {
    "pt": np.linspace(0, 1, 10),
    "eta": np.linspace(5, 6, 10),
    "y": np.arange(10) % 2,
    "kind": np.array([b"g", b"hh"] * 5),
}


def test_a_frame_that_pandas_wrote_as_a_table_is_read_by_its_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        as_frame_table(file, "df", PANDAS, [["pt", "eta"], ["y"], ["kind"]])
    found = open_file(tmp_path / "a.h5")
    assert (list(found.columns), found.index) == (["index", "pt", "eta", "y", "kind"], ("index",))
    read = [found.read(piece, list(PANDAS)) for piece in range(len(found.lengths))]
    for name, values in PANDAS.items():
        both = np.concatenate([part[name] for part in read]).tolist()
        assert both == [value.decode() if isinstance(value, bytes) else value for value in values.tolist()]
    table = Table(tmp_path / "a.h5", exclude=["kind"])
    assert table.open().features == ("pt", "eta")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        as_frame_table(file, "df", PANDAS, [["pt", "eta"]])
        as_frame_table(file, "other", {"z": np.zeros(4)}, [["z"]])
    with pytest.raises(UsageError, match=r"holds several pandas frames: df, other\. Choose one: --tree df"):
        open_file(tmp_path / "b.h5")
    assert list(open_file(tmp_path / "b.h5", "other").columns) == ["index", "z"]


def test_a_frame_that_pandas_wrote_as_it_is_is_read_by_its_columns(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("df")
        group.attrs["pandas_type"], group.attrs["nblocks"] = np.bytes_("frame"), 2
        group["axis0"], group["axis1"] = np.array([b"pt", b"kind", b"eta"]), np.arange(10)
        group["block0_items"], group["block1_items"] = np.array([b"pt", b"eta"]), np.array([b"kind"])
        group["block0_values"] = np.stack([PANDAS["pt"], PANDAS["eta"]], 1)
        group.create_dataset("block1_values", (1,), h5py.vlen_dtype(np.uint8))
    found = open_file(tmp_path / "a.h5")
    assert (list(found.columns), found.index) == (["index", "pt", "eta"], ("index",))
    assert "format='table'" in found.aside["kind"]
    assert found.read(0, ["eta"])["eta"].tolist() == PANDAS["eta"].tolist()


def test_what_names_the_columns_of_a_frame_runs_no_code(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        as_frame_table(file, "df", PANDAS, [["pt", "eta"]])
        file["df/table"].attrs["values_block_0_kind"] = np.bytes_(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(UsageError, match=r"named by os.system, which is not read"):
        open_file(tmp_path / "a.h5")
    assert not Path("hacked").exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_whoever_watches_is_told_how_far_reading_has_come(tmp_path: Path, suffix: str, capsys: Any) -> None:
    path = tmp_path / f"a{suffix}"
    frame = pandas.DataFrame({"a": np.arange(1_000) / 1_000, "y": np.arange(1_000) % 2})
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path, index=False, row_group_size=300)
    seen: list[progress.Progress] = []
    with progress.watched(seen.append):
        split(Table(path, select="a > 0.1", transforms=[Standardise()]))
    kinds = {step.what.split()[0] for step in seen}
    assert kinds - {"scanning"} == {"selecting", "fitting", "reading", "looking"}
    for what in {step.what for step in seen}:
        done = [step.done for step in seen if step.what == what]
        assert done == sorted(done) or what.startswith("fitting")
        assert done[-1] == next(step.total for step in seen if step.what == what)
    count = len(seen)
    split(path)
    assert len(seen) == count
    assert capsys.readouterr() == ("", "")
