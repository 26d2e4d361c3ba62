"""Tables: which columns become what, whichever way rows are given; and what is said of those that cannot be trained on."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import polars
import pyarrow.parquet
import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.data import load, memory
from paragrad.data.load import split
from paragrad.data.source import Arrays, leaves
from tests.conftest import SHARED_DATA
from tests.data.written import WRITERS, as_csv, as_hdf5, as_parquet, as_tree

ROWS = 60
NAMES = ("pt", "eta", "phi")


def events(rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """Three features, a label that goes by them, and weights of which some are negative."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, 3)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(np.int64)
    return {**{name: x[:, k] for k, name in enumerate(NAMES)}, "label": y, "w": draw.normal(1, 1, rows).astype(np.float32)}


def matrix(told: dict[str, Any]) -> np.ndarray:
    return np.stack([told[name] for name in NAMES], axis=1)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return as_parquet(tmp_path / "events.parquet", events(), 16)


# -- one table, many ways to give it ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_tensors(kind: str, tmp_path: Path) -> None:
    suffix, write = WRITERS[kind]
    told = events()
    opened = pg.Table(write(tmp_path / f"a{suffix}", told, 16), features=NAMES, label="label", weight="w").open()
    tree = pickle.loads(pickle.dumps(opened)).load()
    assert isinstance(tree, pg.Weighted)
    (x, y), weight = tree.rows, tree.weight
    assert (x.dtype, y.dtype, weight.dtype) == (torch.float32, torch.int64, torch.float32)
    assert x.numpy().tobytes() == matrix(told).tobytes()
    assert y.tolist() == told["label"].tolist()
    assert weight.numpy().tobytes() == told["w"].tobytes()
    assert opened.names == NAMES
    assert len(opened) == sum(opened.lengths) == ROWS
    assert opened.row_bytes == 3 * 4 + 8 + 4


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrays", "pair"])
def test_frames_and_arrays_give_the_same_tensors(kind: str) -> None:
    told = {name: values for name, values in events().items() if name != "w"}
    given = {
        "pandas": lambda: pandas.DataFrame(told),
        "polars": lambda: polars.DataFrame(told),
        "arrays": lambda: told,
        "pair": lambda: (matrix(told).astype(np.float64), told["label"]),
    }[kind]()
    opened = pg.Table(given).open()
    x, y = opened.load()
    assert x.numpy().tobytes() == matrix(told).tobytes()
    assert y.tolist() == told["label"].tolist()
    assert opened.names == (("0", "1", "2") if kind == "pair" else NAMES)


@pytest.mark.parametrize("kind", ["csv", "parquet", "hdf5", "ttree", "rntuple", "npy"])
def test_syncsgd_comes_to_the_same_model_from_every_format(kind: str, tmp_path: Path) -> None:
    suffix, write = WRITERS[kind]
    told = events(200)
    path = write(tmp_path / f"a{suffix}", told, 50)
    states = []
    for data in (
        pg.Table(path, features=NAMES, label="label", weight="w"),
        pg.Weighted((matrix(told), told["label"]), told["w"]),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        engine = pg.Local(workers=2) if kind == "parquet" else pg.Vector(workers=2)
        done = pg.train(
            model, data, scheme=pg.SyncSGD(), engine=engine, optimizer="adam:lr=0.01", holdout=0.2, epochs=2, seed=3
        )
        states.append(done.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_transformed_rows_are_the_same_from_every_format(tmp_path: Path) -> None:
    told = events(200)
    told["pt"][::7] = -999.0
    made = (pg.Missing(value=-999.0, columns=("pt",), flag=True), pg.Log(columns=("pt",)), pg.Standardise())
    found = set()
    for kind in ("csv", "parquet", "hdf5", "compound", "ttree", "rntuple"):
        suffix, write = WRITERS[kind]
        path = write(tmp_path / f"{kind}{suffix}", told, 50)
        parts = split(pg.Table(path, features=NAMES, label="label", weight="w", transforms=made), holdout=0.25, seed=3)
        found.add(
            b"".join(leaf.numpy().tobytes() for source in (parts.train, parts.validation) for leaf in leaves(source.tree))
        )
    assert len(found) == 1


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="there is no folder shared/data beside the repository")
def test_higgs_rows_are_the_same_from_every_format(tmp_path: Path) -> None:
    archive = np.load(SHARED_DATA / "higgs_uci" / "higgs_uci.npz")
    told = {str(name): archive["x_train"][:3000, k] for k, name in enumerate(archive["feature_names"])}
    told["label"] = archive["y_train"][:3000]
    names = [name for name in told if name != "label"]
    for kind in ("csv", "parquet", "hdf5", "compound", "ttree", "rntuple"):
        suffix, write = WRITERS[kind]
        x, y = pg.Table(write(tmp_path / f"{kind}{suffix}", told, 700), features=names).open().load()
        assert x.numpy().tobytes() == archive["x_train"][:3000].tobytes()
        assert y.tolist() == archive["y_train"][:3000].tolist()


def test_lists_globs_and_directories_are_one_table(tmp_path: Path) -> None:
    told = events()
    for part in range(3):
        as_parquet(
            tmp_path / f"part-{part}.parquet", {name: values[20 * part : 20 * part + 20] for name, values in told.items()}, 7
        )
    paths = [tmp_path / f"part-{part}.parquet" for part in range(3)]
    for source in (tmp_path, str(tmp_path / "part-*.parquet"), paths, [str(paths[0]), str(tmp_path / "part-[12].parquet")]):
        found = split(source)
        assert torch.equal(found.train.tree[0][:, :3], torch.from_numpy(matrix(told)))
        assert found.opened is not None
        assert len(found.opened.files) == 3


def test_the_class_may_come_from_the_file(tmp_path: Path) -> None:
    told = {name: values for name, values in events().items() if name in NAMES}
    for name in ("sig1", "sig2", "bkg"):
        as_tree(tmp_path / f"{name}.root", told, 30)
    opened = pg.Table({"signal": str(tmp_path / "sig*.root"), "background": tmp_path / "bkg.root"}).open()
    x, y = opened.load()
    assert opened.classes == ("signal", "background")
    assert y.tolist() == [0] * 2 * ROWS + [1] * ROWS
    assert x.shape == (3 * ROWS, 3)
    with pytest.raises(pg.UsageError, match="label='pt', but the source gives the files of each class"):
        pg.Table({"signal": "a.root", "background": "b.root"}, label="pt")


# -- columns ----------------------------------------------------------------------------------------------------


def test_features_by_name_by_glob_and_by_default(parquet: Path) -> None:
    def names(**options: Any) -> tuple[str, ...]:
        return pg.Table(parquet, **options).open().names

    assert names() == (*NAMES, "w")
    assert names(weight="w") == NAMES
    assert names(features=["phi", "pt"], label="label") == ("phi", "pt")
    assert names(features=["p*"]) == ("pt", "phi")
    assert names(features=["*"], weight="w") == NAMES
    assert names(features=["phi", "p*"]) == ("phi", "pt")
    assert names(label="pt") == ("eta", "phi", "label", "w")


def test_rows_without_label_and_weight_are_for_prediction(tmp_path: Path, parquet: Path) -> None:
    told = events()
    bare = as_parquet(tmp_path / "bare.parquet", {name: told[name] for name in NAMES}, 16)
    for path in (parquet, bare):
        x = pg.Table(path, features=NAMES, label="label", weight="w").open(labelled=False).load()
        assert torch.equal(x, torch.from_numpy(matrix(told)))
    assert pg.Table(parquet, weight="w").open(labelled=False).names == NAMES, "a column called label is no feature"


@pytest.mark.parametrize(
    ("label", "dtype", "expected"),
    [
        (np.array([0.0, 1.0, 1.0]), torch.int64, [0, 1, 1]),
        (np.array([True, False, True]), torch.int64, [1, 0, 1]),
        (np.array([7, 3, 200], np.uint8), torch.int64, [7, 3, 200]),
        (np.array([0.5, 1.0, -2.0]), torch.float32, [0.5, 1.0, -2.0]),
        (np.array(["b", "s", "b"], dtype=object), torch.int64, [0, 1, 0]),
        (np.array([[0.0, 1.5], [1.0, 2.0], [0.0, 1.0]]), torch.float32, [[0.0, 1.5], [1.0, 2.0], [0.0, 1.0]]),
    ],
)
def test_labels_become_what_they_look_like(label: np.ndarray, dtype: torch.dtype, expected: list[Any]) -> None:
    opened = pg.Table({"x": np.arange(3.0), "y": label}).open()
    y = opened.load()[1]
    assert y.dtype == dtype
    assert y.tolist() == expected
    assert opened.classes == (("b", "s") if label.dtype == object else None)


def test_one_label_that_is_no_whole_number_makes_all_of_them_real(tmp_path: Path) -> None:
    label = np.zeros(40)
    label[33] = 0.25
    opened = pg.Table(as_parquet(tmp_path / "a.parquet", {"x": np.arange(40.0), "y": label}, 8)).open()
    assert opened.read(0)[1].dtype == torch.float32


def test_matrices_lie_side_by_side_and_images_keep_their_shape() -> None:
    pair = {"a": np.ones((4, 2)), "b": np.zeros(4, np.int16), "y": np.arange(4)}
    assert pg.Table(pair).open().load()[0].tolist() == [[1, 1, 0]] * 4
    images = np.arange(4 * 6, dtype=np.uint8).reshape(4, 1, 2, 3)
    x = pg.Table({"image": images, "y": np.arange(4)}).open().load()[0]
    assert x.shape == (4, 1, 2, 3)
    assert torch.equal(x, torch.from_numpy(images).float() / 255)
    with pytest.raises(pg.UsageError, match=r"'image' has the shape \(1, 2, 3\) in each row: use it as the only feature"):
        pg.Table({"image": images, "b": np.arange(4.0), "y": np.arange(4)}).open().load()


def test_jagged_branches_are_padded_to_the_length_that_is_stated(tmp_path: Path) -> None:
    jets = [np.arange(row % 4, dtype=np.float32) + 1 for row in range(20)]
    path = as_tree(tmp_path / "a.root", {"jet": jets, "y": np.arange(20) % 2}, 7)
    table = pg.Table(path, features=["jet"], pad=2)
    x = table.open().load()[0]
    assert x.tolist() == [np.pad(jet[:2], (0, max(0, 2 - len(jet)))).tolist() for jet in jets]
    assert torch.equal(pg.Table(path, features=["jet"], pad={"jet": 2}).open().load()[0], x)
    for pad in (None, {"njet": 2}):
        with pytest.raises(
            pg.UsageError, match=r"'jet' of .*a\.root holds lists of different lengths, the longest of 3.*pad=3"
        ):
            pg.Table(path, features=["jet"], pad=pad).open()
    for wrong in (0, -1, 2.5, {"jet": 0}):
        with pytest.raises(pg.UsageError, match="pad="):
            pg.Table(path, pad=wrong)


def test_many_files_are_not_all_open_at_once(tmp_path: Path) -> None:
    for part in range(30):
        as_hdf5(tmp_path / f"{part:02}.h5", {"x": np.full(3, part, np.float32), "y": np.arange(3)}, 3)
    opened = pg.Table(tmp_path).open()
    assert opened.load()[0].reshape(-1).tolist() == [part for part in range(30) for _ in range(3)]
    for piece in range(30):
        opened.read(piece)
    before = len(list(Path("/proc/self/fd").iterdir()))
    opened.close()
    assert before - len(list(Path("/proc/self/fd").iterdir())) <= 16


@pytest.mark.parametrize("kind", ["csv", "parquet", "hdf5", "ttree", "npz"])
def test_threads_may_read_at_once(kind: str, tmp_path: Path) -> None:
    suffix, write = WRITERS[kind]
    told = {"x": np.arange(400, dtype=np.float32), "y": np.arange(400) % 2}
    for part in range(20):
        write(tmp_path / f"{part:02}{suffix}", {name: values[20 * part : 20 * part + 20] for name, values in told.items()}, 20)
    opened = pg.Table(tmp_path).open()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            read = list(pool.map(opened.read, range(20)))
            assert torch.cat([x for x, _ in read]).reshape(-1).tolist() == told["x"].tolist()


# -- parts ------------------------------------------------------------------------------------------------------


class Shifted:
    """A transformation as the tests need one: less the mean of the rows it is fitted on; a column of text becomes two."""

    columns = ()

    def __init__(self, pieces: Any) -> None:
        parts = list(pieces())
        assert all("label" not in part and "w" not in part for part in parts), "only features are given"
        self.means = {name: np.concatenate([part[name] for part in parts]).mean(dtype=np.float64) for name in parts[0]}
        self.rows = sum(len(part["pt"]) for part in parts)

    def apply(self, columns: dict[str, Any], where: str = "") -> dict[str, Any]:
        assert where.endswith(("events.parquet", "the arrays"))
        return {f"{name}-": values - self.means[name] for name, values in columns.items()}


def test_transformations_are_fitted_on_the_rows_that_are_trained_on(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.transforms, "fit", lambda transforms, pieces, apart: Shifted(pieces))
    table = pg.Table(parquet, weight="w", transforms=(Shifted,))
    found = split(table, holdout=0.25, seed=5)
    assert found.opened.fitted.rows == 45
    train, held = (source.tree.rows[0] for source in (found.train, found.validation))
    assert train.mean(0).abs().max() < 1e-6
    assert held.mean(0).abs().max() > 1e-3
    assert found.opened.names == tuple(f"{name}-" for name in NAMES)
    again = found.opened.load()
    assert sorted(torch.cat([train, held]).tolist()) == sorted(again.rows[0].tolist())
    other = split(table, validation=parquet)
    assert torch.equal(other.validation.tree.rows[0], other.train.tree.rows[0])
    told = events()
    arrays = split(table, validation=pg.Weighted((matrix(told), told["label"]), told["w"]))
    for mine, theirs in zip(leaves(arrays.validation.tree), leaves(other.validation.tree), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(pg.UsageError, match="The rows have 2 columns, but the run was trained on"):
        split(table, validation=(matrix(told)[:, :2], told["label"]))
    with pytest.raises(
        pg.UsageError, match="The table given as validation has transformations, which are fitted on the rows to train"
    ):
        split((matrix(told), told["label"]), validation=table)


def test_weights_are_scaled_by_those_of_the_training_part(parquet: Path) -> None:
    told = events()
    for data in (pg.Table(parquet, weight="w"), pg.Weighted((matrix(told), told["label"]), told["w"])):
        found = split(data, holdout=0.25, seed=5)
        weights = [source.tree.weight for source in (found.train, found.validation)]
        assert float(weights[0].abs().mean()) == pytest.approx(1)
        assert float(weights[0].min()) < 0
        factor = float(torch.cat(weights).double().sum()) / float(told["w"].astype(np.float64).sum())
        assert sorted((torch.cat(weights) / factor).tolist()) == pytest.approx(sorted(told["w"].tolist()), rel=1e-5)
        assert any("Weights are divided by" in note for note in found.notes)
    arrays = pg.Weighted((matrix(told), told["label"]), told["w"])
    mixed = split(pg.Table(parquet, weight="w"), validation=arrays)
    assert torch.equal(mixed.validation.tree.weight, mixed.train.tree.weight)
    with pytest.raises(pg.UsageError, match="weight of every row to train on is 0"):
        split(pg.Weighted((matrix(told), told["label"]), np.zeros(ROWS)))
    with pytest.raises(pg.UsageError, match=r"data\[0\] has 60 rows, but data.weight has 59"):
        split(pg.Weighted((matrix(told), told["label"]), np.ones(ROWS - 1)))


def test_files_to_validate_on_are_read_as_those_to_train_on(tmp_path: Path) -> None:
    def text(name: str, labels: list[str]) -> Path:
        columns = {"x": np.arange(4.0), "kind": np.array(labels, dtype=object), "extra": np.arange(4.0)}
        return as_csv(tmp_path / name, columns, 4)

    table = pg.Table(text("a.csv", ["e", "mu", "tau", "e"]), features=["x"], label="kind")
    found = split(table, validation=text("b.csv", ["tau", "tau", "mu", "mu"]))
    assert found.validation.tree[1].tolist() == [2, 2, 1, 1]
    assert found.validation.tree[0].shape == (4, 1)
    with pytest.raises(pg.UsageError, match=r"Label 'kind' in row 2 of .*c\.csv: Unknown class 'muon'.*Available: e, mu, tau"):
        split(table, validation=text("c.csv", ["e", "mu", "muon", "e"]))


def test_rows_that_do_not_fit_are_streamed(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(split(pg.Table(parquet, stream=True)).train, pg.Streamed)
    monkeypatch.setattr(memory, "available", lambda: 2 * ROWS * 24 - 1)
    assert isinstance(split(parquet).train, pg.Streamed)
    assert isinstance(split(pg.Table(parquet, stream=False)).train, Arrays)
    monkeypatch.setattr(memory, "available", lambda: 2 * ROWS * 24)
    assert isinstance(split(parquet).train, Arrays)


def test_streamed_rows_are_those_that_are_loaded(parquet: Path) -> None:
    loaded, streamed = (split(pg.Table(parquet, weight="w", stream=stream)) for stream in (False, True))
    rows = np.random.default_rng(0).permutation(ROWS)
    assert len(streamed.train) == ROWS
    for one, other in zip(leaves(loaded.train.batch(rows)), leaves(streamed.train.batch(rows)), strict=True):
        assert torch.equal(one, other)
    assert any("read while training" in note for note in streamed.notes)


def test_transformations_and_weights_of_streamed_rows_are_fitted_on_those_that_are_trained_on(parquet: Path) -> None:
    found = split(pg.Table(parquet, weight="w", transforms=(pg.Standardise(),), stream=True), holdout=0.25, seed=5)
    train = found.train.batch(np.arange(len(found.train)))
    assert len(found.train) == 45
    assert isinstance(found.validation, Arrays)
    assert train.rows[0].mean(0).abs().max() < 1e-6
    assert train.rows[0].std(0, correction=0) == pytest.approx(np.ones(len(NAMES)), abs=1e-5)
    assert float(train.weight.abs().mean()) == pytest.approx(1)
    assert found.validation.tree.rows[0].mean(0).abs().max() > 1e-3
    held = [tuple(row) for row in found.validation.tree.rows[0].tolist()]
    assert len(set(held) | {tuple(row) for row in train.rows[0].tolist()}) == ROWS


def test_memory_is_what_the_machine_has_and_the_control_group_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    50 kB\n")
    (tmp_path / "cgroup").write_text("0::/user/one\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert memory.available() == 50 * 1024
    one = tmp_path / "user" / "one"
    one.mkdir(parents=True)
    (one / "memory.max").write_text("max\n")
    (one / "memory.current").write_text("1000\n")
    assert memory.available() == 50 * 1024
    (one.parent / "memory.max").write_text("20000\n")
    (one.parent / "memory.current").write_text("9000\n")
    (one.parent / "memory.stat").write_text("anon 5\ninactive_file 4000\n")
    assert memory.available() == 15000


# -- bad input --------------------------------------------------------------------------------------------------


def refused(source: Any, message: str, **options: Any) -> None:
    with pytest.raises(pg.UsageError, match=message):
        split(pg.Table(source, **options))


def test_a_column_that_is_not_there_is_named_with_the_near_match(parquet: Path) -> None:
    refused(parquet, r"Unknown column of .*events\.parquet: 'etta'. Did you mean 'eta'\?", features=["pt", "etta"])
    refused(parquet, r"Unknown column of .*events\.parquet: 'jet_\*'", features=["jet_*"])
    refused(parquet, r"Unknown column of .*events\.parquet: 'lable'. Did you mean 'label'\?", label="lable")
    refused(parquet, r"Unknown column of .*events\.parquet: 'weight'", weight="weight")
    refused(parquet, "'label' is among the features and is the label", features=["pt", "label"])
    refused(parquet, "'w' is among the features and is the weight", features=["pt", "w"], weight="w")
    refused(parquet, r"features='pt' is one text, but it must be a list: write features=\['pt'\]", features="pt")


def test_no_label_lists_the_columns(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "a.parquet", {"pt": np.arange(3.0), "is_signal": np.arange(3)}, 3)
    refused(path, r"No label is given for .*a\.parquet, and none of its .*: give label= \(--label\). It has: pt, is_signal")
    refused(as_parquet(tmp_path / "b.parquet", {"y": np.arange(3.0)}, 3), "b.parquet has no column besides its label")


def test_text_where_numbers_are_due_is_named(tmp_path: Path) -> None:
    told = {"x": np.array(["1", "2.5", "high", "4"], dtype=object), "y": np.arange(4)}
    for kind in ("csv", "parquet", "hdf5", "ttree"):
        suffix, write = WRITERS[kind]
        refused(write(tmp_path / f"a{suffix}", told, 4), rf"Column 'x' of .*a\{suffix} holds text \('high' in row 2\)")
    refused(told, r"Column 'x' of the arrays holds text \('high' in row 2\)")
    refused({"x": np.arange(4.0), "y": np.arange(4), "w": told["x"]}, r"Column 'w' .*holds text", weight="w")


def test_nan_is_named_with_its_file_column_and_row(tmp_path: Path) -> None:
    told = events()
    told["eta"] = told["eta"].copy()
    told["eta"][41] = np.nan
    as_parquet(tmp_path / "a.parquet", events(), 16)
    as_parquet(tmp_path / "b.parquet", told, 16)
    refused(tmp_path, r"Column 'eta' of .*b\.parquet has NaN or infinity in row 41")
    refused({"x": np.array([1.0, 1e300]), "y": np.arange(2)}, "Column 'x' of the arrays has NaN or infinity in row 1")
    refused({"x": np.arange(2.0), "y": np.array([0.0, np.nan])}, "label 'y' is NaN or infinite in row 1 of the arrays")
    refused(
        {"x": np.arange(2.0), "y": np.arange(2), "w": np.array([1.0, np.inf])}, "Column 'w' .*infinity in row 1", weight="w"
    )
    (tmp_path / "gap.csv").write_text("x,y\n1,0\n,1\n")
    refused(tmp_path / "gap.csv", r"Column 'x' of .*gap\.csv has NaN or infinity in row 1")


def test_a_label_that_is_missing_is_named(tmp_path: Path) -> None:
    kinds = ["e", "mu", None, "e"]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": np.arange(4.0), "y": kinds}), path)
    refused(path, r"The label 'y' is missing in row 2 of .*a\.parquet")
    refused(
        pandas.DataFrame({"x": np.arange(4.0), "y": kinds}),
        "'y' in the frame cannot be used as a column, because it holds .* in row 2, which is not text",
        label="y",
    )


def test_files_with_other_columns_or_types_are_both_named(tmp_path: Path) -> None:
    told = events()
    first = as_parquet(tmp_path / "a.parquet", told, 16)

    def other(**changes: Any) -> list[Path]:
        columns = {name: values for name, values in {**told, **changes}.items() if values is not None}
        return [first, as_parquet(tmp_path / "b.parquet", columns, 16)]

    refused(other(eta=None), r"a\.parquet has a column 'eta', but .*b\.parquet has none")
    refused(other(more=told["w"]), r"b\.parquet has a column 'more', but .*a\.parquet has none.*name the features")
    refused(other(eta=told["eta"].astype(np.float64)), r"Column 'eta' is float32 in .*a\.parquet, but float64 in .*b\.parquet")
    refused(
        other(eta=np.ones((ROWS, 2), np.float32)), r"Column 'eta' is float32 in .*a\.parquet, but float32 x 2 in .*b\.parquet"
    )
    assert len(split(pg.Table(other(more=told["w"]), features=NAMES)).train) == 2 * ROWS


def test_an_empty_file_among_many_is_passed_over_aloud(tmp_path: Path) -> None:
    told = events()
    as_parquet(tmp_path / "a.parquet", told, 16)
    as_parquet(tmp_path / "b.parquet", {name: values[:0] for name, values in told.items()}, 16)
    (tmp_path / "c.parquet").touch()
    found = split(tmp_path)
    assert len(found.train) == ROWS
    assert sum("is skipped" in note for note in found.notes) == 2
    refused(tmp_path / "c.parquet", r"c.parquet has no rows. .*c\.parquet is empty and is skipped")
    refused(tmp_path / "b.parquet", r"b\.parquet has no rows")
    (tmp_path / "d.csv").write_text("x,y\n")
    refused(tmp_path / "d.csv", r"d\.csv has no rows")


def test_ragged_arrays_are_refused(tmp_path: Path) -> None:
    refused(
        {"x": [[1.0], [2.0, 3.0]], "y": [0, 1]}, "Column 'x' of the arrays holds lists of different lengths, the longest of 2"
    )
    refused({"x": np.arange(3.0), "y": np.arange(2)}, "Column 'x' of the arrays has 3 rows, but 'y' has 2")
    with h5py.File(tmp_path / "a.h5", "w") as made:
        made["x"], made["y"], made["names"] = np.zeros((5, 2)), np.zeros(5), np.zeros(3)
    message = "'names' in .*a.h5 cannot be used as a column, because it has 3 rows, but the table has 5"
    refused(tmp_path / "a.h5", message, label="names")


def test_paths_that_lead_nowhere_are_named(tmp_path: Path, parquet: Path) -> None:
    refused(tmp_path / "gone.parquet", r"gone\.parquet does not exist")
    refused(str(tmp_path / "*.root"), r"No file matches .*\*\.root")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "The directory .*empty has no table")
    refused([parquet, str(parquet)], r"events\.parquet is given twice")
    refused(3, r"Table\(source=int\), but rows come from")


def test_a_weighted_table_needs_one_number_a_row(tmp_path: Path) -> None:
    refused({"x": np.arange(3.0), "y": np.arange(3), "w": np.ones((3, 2))}, "The weight 'w' has the shape", weight="w")


def test_leaves_and_targets_of_weighted_rows() -> None:
    x, y, w = torch.zeros(3, 2), torch.arange(3), torch.ones(3)
    assert [leaf.shape for leaf in leaves(pg.Weighted((x, y), w))] == [x.shape, y.shape, w.shape]
    base = load.fingerprint(split(pg.Weighted((x, y), w)).train)
    assert base != load.fingerprint(split(pg.Weighted((x, y), torch.tensor([1.0, 0.5, 1.5]))).train)
    assert base != load.fingerprint(split((x, y)).train)


def test_one_class_alone_is_refused(parquet: Path) -> None:
    with pytest.raises(pg.UsageError, match="Only one class is given, 'signal': there is nothing to distinguish it from"):
        split(pg.Table({"signal": parquet}, features=NAMES))
    told = pg.Table({"signal": parquet}, features=NAMES).open(classes=("signal", "background"))
    assert told.load()[1].unique().tolist() == [0]


def test_the_same_numbers_are_transformed_to_the_same_bits_however_they_are_stored(tmp_path: Path) -> None:
    """A CSV and a float64 Parquet of one pandas frame came to models that differed in the fourth digit of their accuracy."""
    drawn = np.random.default_rng(0)
    short = {name: np.round(drawn.normal(40, 20, 500), 4) for name in "ab"}
    labels = drawn.integers(0, 2, 500)
    frame = pandas.DataFrame({**short, "y": labels})
    frame.to_csv(tmp_path / "text.csv", index=False)
    frame.to_parquet(tmp_path / "double.parquet", index=False)
    frame.astype({"a": "float32", "b": "float32"}).to_parquet(tmp_path / "single.parquet", index=False)
    arrays = np.stack(list(short.values()), axis=1)
    sources = [*tmp_path.iterdir(), frame, {**short, "y": labels}, (arrays, labels), (arrays.astype(np.float32), labels)]
    assert len(sources) == 7
    for chain in [(pg.Standardise(),), (pg.MinMax(),), (pg.Log(), pg.Standardise()), (pg.Clip(low=0), pg.Standardise())]:
        found = [leaves(split(pg.Table(source, transforms=chain)).train.tree)[0] for source in sources]
        for other in found[1:]:
            assert torch.equal(found[0], other)


def test_a_column_that_float32_does_not_hold_is_transformed_with_all_its_digits(tmp_path: Path) -> None:
    times = 1_700_000_000 + np.arange(100) / 8
    (tmp_path / "a.csv").write_text("t,y\n" + "".join(f"{time!r},{row % 2}\n" for row, time in enumerate(times.tolist())))
    for source in (tmp_path / "a.csv", {"t": times, "y": np.arange(100) % 2}):
        x = leaves(split(pg.Table(source, transforms=(pg.Standardise(),))).train.tree)[0]
        assert torch.allclose(x[:, 0].double(), torch.from_numpy((times - times.mean()) / times.std()), atol=1e-6)
