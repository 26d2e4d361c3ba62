"""The loader: what it takes, what it makes of it, and what it says of data that cannot be trained on."""

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paragrad.data.load import CATALOGUE, check_labels, fingerprint, split
from paragrad.data.source import Arrays, Items, Weighted, leaves
from paragrad.data.table import Table
from paragrad.data.transforms.scales import Standardise
from paragrad.errors import UsageError

DATA = next((p / "shared" / "data" for p in Path(__file__).resolve().parents if (p / "shared" / "data").is_dir()), None)
needs_data = pytest.mark.skipif(DATA is None, reason="there is no folder shared/data beside the repository")

X = np.arange(40, dtype=np.float32).reshape(10, 4)
Y = np.arange(10) % 3


class Squares(Dataset):
    def __init__(self, rows: int = 10) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(row), float(row**2)]), row


def everything(source) -> list[torch.Tensor]:
    return leaves(source.batch(np.arange(len(source))))


# -- good data --------------------------------------------------------------------------------------------------


def test_digits_are_scaled_and_a_hold_out_is_said_aloud() -> None:
    found = split("digits", holdout=0.2)
    x, y = everything(found.train)
    assert (found.name, len(found.train), len(found.validation)) == ("digits", 1437, 360)
    assert (x.dtype, y.dtype, x.shape[1:]) == (torch.float32, torch.int64, (64,))
    assert (float(x.min()), float(x.max()), int(y.max())) == (0.0, 1.0, 9)
    assert found.notes == (
        "Features (64); label (0 178, 1 182, 2 177, 3 183, 4 181, 5 182, 6 181, 7 179, 8 174, 9 180).",
        "No test part: 20 % of the rows (360 of 1,797, by seed 0) are held out for validation.",
    )
    assert found.warnings == ()


def test_nothing_is_held_out_unless_that_is_asked_for() -> None:
    found = split("digits")
    assert (len(found.train), found.validation, len(found.notes)) == (1797, None, 1)


def test_held_out_rows_are_a_partition_that_goes_by_the_seed() -> None:
    parts = [split((X, Y), holdout=0.3, seed=seed) for seed in (0, 0, 1)]
    for part in parts:
        rows = torch.cat([everything(part.train)[0], everything(part.validation)[0]])
        assert sorted(rows[:, 0].tolist()) == X[:, 0].tolist()
        assert len(part.validation) == 3
    held = [everything(part.validation)[0].tolist() for part in parts]
    assert held[0] == held[1] != held[2]


def test_arrays_in_python_are_not_split_unless_asked() -> None:
    found = split((X, Y))
    assert found.validation is None
    assert found.notes == ("Features (4); label (0 4, 1 3, 2 3).",)


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        {"y": Y, "x": X},
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X.astype(np.float64), Y.astype(np.uint8)),
        (X.astype(">f8"), Y.astype(">i4")),
        (X.tolist(), Y.tolist()),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Arrays((torch.from_numpy(X), torch.from_numpy(Y))),
    ],
)
def test_all_ways_to_give_arrays_are_one(given: object) -> None:
    batch = split(given).train.batch(np.array([9, 0]))
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.tolist() == X[[9, 0]].tolist()
    assert y.tolist() == Y[[9, 0]].tolist()


def test_arrays_of_any_layout_are_read_rightly() -> None:
    read_only = X.copy()
    read_only.flags.writeable = False
    wide = np.repeat(X, 2, axis=1)
    for x in (read_only, X[::-1][::-1], np.asfortranarray(X), wide[:, ::2], np.broadcast_to(X, X.shape)):
        assert torch.equal(everything(split((x, Y)).train)[0], torch.from_numpy(X))
    assert everything(split((X[::-1], Y[::-1])).train)[1].tolist() == Y[::-1].tolist()


def test_reading_does_not_change_or_copy_arrays_that_fit() -> None:
    x = X.copy()
    source = split((x, Y)).train
    assert source.tree[0].data_ptr() == x.ctypes.data


def test_tensors_keep_their_type_and_lose_their_graph() -> None:
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    leaf = everything(split((x * 2, torch.zeros(4))).train)[0]
    assert leaf.dtype == torch.float64
    assert not leaf.requires_grad


def test_types_that_torch_lacks_are_widened() -> None:
    found = split((np.array([1, 2**15 + 1], np.uint16), np.array([2**31 + 1, 0], np.uint32), np.array([True, False]))).train
    a, b, y = everything(found)
    assert (a.tolist(), b.tolist(), y.tolist()) == ([1, 2**15 + 1], [2**31 + 1, 0], [1, 0])
    assert y.dtype == torch.int64


def test_several_inputs_may_be_nested() -> None:
    found = split((({"a": X, "b": X[:, 0]}, X), Y)).train
    (inputs, other), y = found.batch(np.array([3]))
    assert inputs["b"].tolist() == [12.0]
    assert other.tolist() == X[[3]].tolist()
    assert y.tolist() == [0]


def test_a_single_array_is_its_own_target() -> None:
    images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    for given in (images, (images,), TensorDataset(torch.from_numpy(images))):
        batch = split(given).train.batch(np.array([1]))
        assert torch.equal(batch, torch.from_numpy(images[1:]).float() / 255)


def test_bytes_are_taken_from_arrays_as_from_files(tmp_path: Path) -> None:
    images = np.arange(10 * 16, dtype=np.uint8).reshape(10, 4, 4)
    for x in (images, images.reshape(10, 16)):
        np.savez(tmp_path / "parts.npz", x_train=x, y_train=Y)
        np.savez(tmp_path / "columns.npz", x=x, y=Y)
        doors = [(x, Y), (torch.from_numpy(x), torch.from_numpy(Y)), tmp_path / "parts.npz", tmp_path / "columns.npz"]
        doors += [Table(tmp_path / "parts.npz"), TensorDataset(torch.from_numpy(x), torch.from_numpy(Y))]
        expected = everything(split(doors[0]).train)[0]
        assert expected.dtype == torch.float32
        for door in doors:
            assert torch.equal(everything(split(door).train)[0], expected), door
    assert split((images, Y), keras=True).train.tree[0].dtype == torch.uint8


def test_text_labels_in_arrays_are_classes_with_names(tmp_path: Path) -> None:
    names = np.array(["h", "g"])[Y % 2]
    np.savez(tmp_path / "a.npz", x_train=X, y_train=names)
    for given in ((X, names), (X, names.tolist()), {"x": X, "y": names.astype(object)}, tmp_path / "a.npz"):
        found = split(given, validation=(X[:1], names[:1]))
        batch = found.train.batch(np.arange(10))
        assert found.classes == ("g", "h")
        assert leaves(batch)[1].tolist() == [int(name == "h") for name in names]
        assert everything(found.validation)[1].tolist() == [1]
    with pytest.raises(UsageError, match=r"Label validation\[1\] in row 1: Unknown class 'q'"):
        split((X, names), validation=(X[:2], np.array(["g", "q"])))


WHOLE = "The labels are stored as floats, but are 0 to 1"


def test_float_labels_mean_the_same_from_arrays_and_files(tmp_path: Path) -> None:
    y = np.array([0.0, 1.0] * 5)
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": y})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet", index=False)
    np.savez(tmp_path / "a.npz", x=X[:, :2], y=y)
    np.savez(tmp_path / "b.npz", x_train=X[:, :2], y_train=y)
    doors = [(X[:, :2], y), (X[:, :2], torch.from_numpy(y)), frame, *(tmp_path / f"a.{k}" for k in ("csv", "parquet", "npz"))]
    doors += [tmp_path / "b.npz"]
    for door in doors:
        for as_classes, kind in ((None, torch.int64), (True, torch.int64), (False, torch.float32)):
            found = split(door, as_classes=as_classes)
            target = everything(found.train)[1]
            assert (target.is_floating_point(), target.tolist()) == (kind.is_floating_point, y.tolist()), door
            assert any(WHOLE in note for note in found.notes) == (kind is torch.int64), door


@pytest.mark.parametrize("values", [[0.0, 2.0], [1.0, 2.0], [-1.0, 1.0], [0.0, 0.5, 1.0], [3.0], [250_000.0, 310_000.0]])
def test_floats_that_do_not_number_classes_are_numbers_from_arrays_and_files(values: list[float], tmp_path: Path) -> None:
    y = np.resize(np.array(values), 10)
    frame = pandas.DataFrame({"a": X[:, 0], "y": y})
    frame.to_csv(tmp_path / "a.csv", index=False)
    for door in ((X, y), frame, tmp_path / "a.csv"):
        assert everything(split(door).train)[1].is_floating_point()
    frame["y"] = frame["y"].astype(np.int64)
    frame.to_csv(tmp_path / "whole.csv", index=False)
    for door in ((X, frame["y"].to_numpy()), frame, tmp_path / "whole.csv"):
        assert not everything(split(door).train)[1].is_floating_point()


def test_rows_to_validate_on_are_labelled_as_those_to_train_on(tmp_path: Path) -> None:
    y = np.array([0.0, 1.0] * 5)
    (tmp_path / "one.csv").write_text("a,b,c,d,y\n1,2,3,4,1.0\n")
    for train in ((X, y), pandas.DataFrame(dict(zip("abcdy", (*X.T, y), strict=True)))):
        for held in ((X[:2], np.ones(2, np.float32)), tmp_path / "one.csv"):
            assert everything(split(train, validation=held).validation)[1].dtype == torch.int64
    numbers = split((X, y + 0.5), validation=(X[:2], np.array([0.0, 1.0])))
    assert everything(numbers.validation)[1].dtype == torch.float32


def test_a_dataset_is_asked_row_by_row() -> None:
    found = split(Squares(), holdout=0.2)
    assert isinstance(found.train, Items)
    assert (found.name, len(found.train), len(found.validation)) == ("Squares", 8, 2)
    both = sorted(everything(found.train)[1].tolist() + everything(found.validation)[1].tolist())
    assert both == list(range(10))


def test_validation_may_be_given_in_any_form() -> None:
    found = split((X, Y), validation=TensorDataset(torch.from_numpy(X[:2]), torch.from_numpy(Y[:2])))
    assert (len(found.train), len(found.validation)) == (10, 2)
    assert len(split((X, Y), validation=Squares()).validation) == 10


def test_the_test_part_of_a_file_is_for_validation(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3], names=np.array(["a", "b"]))
    for path in (file, str(file)):
        found = split(path)
        assert (found.name, len(found.train), len(found.validation), len(found.notes)) == ("a.npz", 10, 3, 1)
    assert len(split((X, Y), validation=file).validation) == 3
    assert len(split(file, validation=(X, Y)).validation) == 10
    own = split(file, holdout=0.2)
    assert (len(own.train), len(own.validation)) == (8, 2)
    assert own.notes[1].startswith("Holdout: 20 % of the rows (2 of 10, by seed 0)")
    assert own.notes[1].endswith("The test part of a.npz is not used.")


def test_an_archive_goes_through_transformations_with_its_test_part(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X[:3], y_test=Y[:3])
    found = split(Table(tmp_path / "a.npz", transforms=[Standardise()]))
    scaled = torch.from_numpy((X - X.mean(0)) / X.std(0))
    assert torch.allclose(everything(found.train)[0], scaled, atol=1e-6)
    assert torch.allclose(everything(found.validation)[0], scaled[:3], atol=1e-6)
    plain, table = split(tmp_path / "a.npz"), split(Table(tmp_path / "a.npz"))
    for part in ("train", "validation"):
        for one, other in zip(everything(getattr(plain, part)), everything(getattr(table, part)), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(UsageError, match=r"Unknown part of .*a.npz: 'tset'. Did you mean 'test'"):
        split(Table(tmp_path / "a.npz", tree="tset"))


def test_images_of_bytes_in_a_file_are_scaled_aloud(tmp_path: Path) -> None:
    images = np.arange(10 * 16, dtype=np.uint8).reshape(10, 4, 4)
    np.savez_compressed(tmp_path / "a.npz", x_train=images, y_train=Y.astype(np.uint8))
    found = split(tmp_path / "a.npz", holdout=0)
    x, y = everything(found.train)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.equal(x, torch.from_numpy(images).float() / 255)
    assert found.notes[1:] == ("The images of a.npz are bytes: they are scaled to float32 from 0 to 1.",)


@needs_data
def test_mnist_is_what_its_readme_says() -> None:
    found = split(DATA / "mnist" / "mnist.npz")
    x, y = found.train.tree
    assert (x.shape, y.shape, len(found.validation)) == ((60_000, 28, 28), (60_000,), 10_000)
    assert abs(float(x.mean()) - 0.13066) < 1e-4
    assert torch.bincount(y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    check_labels(found.train, 10)


@needs_data
def test_higgs_is_what_its_readme_says() -> None:
    found = split(DATA / "higgs_uci" / "higgs_uci.npz")
    x, y = found.train.tree
    assert (x.shape, len(found.validation)) == ((20_970, 28), 5_000)
    assert (found.notes, found.warnings) == (("Features (28); label (0 9,861, 1 11,109).",), ())
    assert torch.bincount(y).tolist() == [9861, 11109]


# -- bad data ---------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength(Dataset):
    def __getitem__(self, row: int) -> int:
        return row


def spoilt(row: int, value: float) -> np.ndarray:
    x = X.copy()
    x[row, 1] = x[-1, 0] = value
    return x


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("digit", "Did you mean 'digits'"),
        ("mnist", "Unknown data set 'mnist'"),
        ("no/such/file.npz", "does not exist"),
        (Path("/"), "The directory / has no table"),
        (None, "data is a NoneType"),
        (7, "data is a int"),
        ((X, Y[:9]), r"data\[0\] has 10 rows, but data\[1\] has 9"),
        ({"x": X, "y": Y[:9]}, r"data\['x'\] has 10 rows, but data\['y'\] has 9"),
        ((X[:0], Y[:0]), "has no rows"),
        ((X[:, :0], Y), "rows without a value"),
        ((), "data is empty"),
        ([], "no rows"),
        ({}, "data is empty"),
        (np.float32(3), "single number"),
        ((X, 3), "single number"),
        ((X, None), r"data\[1\] is a NoneType"),
        ((X, "abc"), r"data\[1\] is a str"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "ragged"),
        ((np.array([["a"]] * 10), Y), r"data\[0\] is of type <U1"),
        ((X.astype(object), Y), "of type object"),
        ((np.ma.masked_array(X), Y), "mask would be lost"),
        ((spoilt(4, np.nan), Y), r"data\[0\] has NaN or infinity in 2 of 10 rows, first in row 4"),
        ((X, spoilt(9, np.inf)), r"data\[1\] has NaN or infinity in 1 of 10 rows, first in row 9"),
        ((torch.full((2, 2), torch.inf, dtype=torch.bfloat16), torch.zeros(2)), "2 of 2 rows, first in row 0"),
        (Endless(), "Endless does not say how many rows make an epoch"),
        (NoLength(), "__len__"),
        (Squares(0), "has no rows"),
    ],
)
def test_bad_data_is_refused_with_the_reason(given: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split(given)


def test_a_finite_array_whose_sum_overflows_is_fine() -> None:
    parts = split((torch.full((4, 2), 6e4, dtype=torch.float16), torch.zeros(4)))
    assert len(parts.train) == 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_trian": X, "y_train": Y}, "no array 'x_train'. Rename 'x_trian'.* It has: x_trian, y_train"),
        ({"x_train": X}, "no array 'y_train'"),
        ({}, "none at all"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "x_test but no y_test"),
        ({"x_train": X, "y_train": Y, "y_test": Y}, "y_test but no x_test"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, r"shapes \[\(4,\), \(\)\], but .* \[\(3,\), \(\)\]"),
        ({"x_train": X, "y_train": Y[1:]}, r"a.npz\['x_train'\] has 10 rows, but a.npz\['y_train'\] has 9"),
        ({"x_train": X.astype(object), "y_train": Y}, "pickled"),
        ({"x_train": np.array([["a"]] * 10), "y_train": Y}, r"a.npz\['x_train'\] is of type <U1"),
        ({"x_train": spoilt(2, np.nan), "y_train": Y}, r"a.npz\['x_train'\] has NaN"),
    ],
)
def test_a_file_of_the_wrong_arrays_is_refused_with_what_it_has(tmp_path: Path, arrays, message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        split(tmp_path / "a.npz")


def test_a_file_that_is_cut_short_or_no_archive_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", x_train=np.random.default_rng(0).random((500, 20)), y_train=np.zeros(500))
    whole = (tmp_path / "whole.npz").read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :]
    for content in (whole[:half], whole[:-10], whole[:3], b"", b"a,b\n1,2\n", flipped):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UsageError, match=r"bad.npz cannot be read as an \.npz"):
            split(tmp_path / "bad.npz")
    np.save(tmp_path / "one.npy", X)
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(UsageError, match="one array only"):
        split(tmp_path / "one.npz")


@pytest.mark.parametrize("holdout", [-0.1, 1.0, 2.0, 0.999, float("nan")])
def test_a_share_that_leaves_no_rows_is_refused(holdout: float) -> None:
    with pytest.raises(UsageError, match=f"holdout={holdout}"):
        split((X, Y), holdout=holdout)


def test_validation_that_contradicts_is_refused() -> None:
    with pytest.raises(UsageError, match="both given"):
        split((X, Y), validation=(X, Y), holdout=0.5)
    with pytest.raises(UsageError, match="a row to validate on"):
        split((X, Y), validation=(X[:, :2], Y))
    with pytest.raises(UsageError, match=r"validation\[0\] has 10 rows"):
        split((X, Y), validation=(X, Y[:3]))


# -- labels and fingerprints ------------------------------------------------------------------------------------


def test_labels_without_an_output_are_named_with_their_row() -> None:
    source = split((X, np.array([0, 1, 2, -100, 4, 0, 0, 0, 0, -1]))).train
    check_labels(split((X, np.array([0, 1, 2, -100, 4, 0, 0, 0, 0, 1]))).train, 5)
    with pytest.raises(UsageError, match="label in row 4 is 4, but the model has 4 outputs, so labels must be 0 to 3"):
        check_labels(source, 4)
    with pytest.raises(UsageError, match="label in row 9 is -1"):
        check_labels(source, 5)
    with pytest.raises(UsageError, match=r"the model has 1 output, .* For two classes give loss='bce' \(--loss bce\)"):
        check_labels(source, 1)
    check_labels(split((X, X[:, 0])).train, 1)
    check_labels(split(Squares()).train, 1)


def test_a_fingerprint_changes_with_the_data_and_with_nothing_else() -> None:
    base = fingerprint(split((X, Y)).train)
    assert base == fingerprint(split((X.astype(np.float64), Y.astype(np.int32))).train)
    changed = X.copy()
    changed[9, 3] += 1
    others = [(changed, Y), (X[:9], Y[:9]), (X, X[:, 0]), {"x": X, "y": Y}, (X.astype(np.float16), Y), X]
    assert len({base, *(fingerprint(split(other).train) for other in others)}) == 7
    assert fingerprint(split(Squares()).train) == "Squares-10"
    many = np.zeros((100_000, 3), np.float32)
    first = fingerprint(split(many).train)
    many[-1, 0] = 1
    assert fingerprint(split(many).train) != first
    fingerprint(split((torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bool))).train)


def test_the_catalogue_names_what_is_taken() -> None:
    assert set(CATALOGUE) == {"digits", "noise", "FILE.npz", "FILE", "CLASS=FILE"}


def test_either_part_may_have_weights_without_the_other():
    weighted = Weighted((X, Y), np.linspace(0.5, 1.5, len(X), dtype=np.float32))
    assert isinstance(split(weighted, validation=(X, Y)).train.tree, Weighted)
    assert isinstance(split((X, Y), validation=weighted).validation.tree, Weighted)
    with pytest.raises(UsageError, match="A row to train on has the shapes"):
        split(weighted, validation=(X[:, :1], Y))
