"""Transformations: the same whatever the pieces, exact when read again, and clear about what they cannot do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import paragrad as pg
from paragrad.data import transforms
from paragrad.data.transforms import Fitted, Transform, statistics
from paragrad.errors import UsageError
from tests.conftest import SHARED_DATA

Columns = dict[str, np.ndarray[Any, Any]]
Pieces = Callable[[], Iterator[Columns]]


def cut(columns: Columns, sizes: Sequence[int]) -> Pieces:
    """The rows in pieces of these sizes, and then the rest."""

    def pieces() -> Iterator[Columns]:
        edges = np.minimum(np.cumsum([0, *sizes, 10**9]), len(next(iter(columns.values()))))
        for start, end in pairwise(edges):
            yield {name: values[start:end] for name, values in columns.items()}

    return pieces


def fit(columns: Columns, *chain: Transform) -> Fitted:
    return transforms.fit(chain, cut(columns, []))


def learned(fitted: Fitted, column: str = "x", step: int = -1) -> dict[str, Any]:
    return fitted.steps[step].learned[column]


NUMBERS = hnp.arrays(np.float64, st.integers(2, 60), elements=st.floats(-1e6, 1e6).map(lambda v: v if abs(v) > 1e-100 else 0.0))
SIZES = st.lists(st.integers(0, 20), max_size=8)


# -- what is learned does not depend on the pieces ------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(values=NUMBERS, sizes=SIZES, offset=st.sampled_from([0.0, 1e3, -1e9, 1e12]))
def test_mean_and_deviation_are_the_same_whatever_the_pieces(values, sizes, offset):
    column = {"x": values + offset}
    whole = learned(fit(column, pg.Standardise()))
    parts = learned(transforms.fit([pg.Standardise()], cut(column, sizes)))
    spread = max(float(np.ptp(column["x"])), 1e-300)
    assert abs(whole["mean"] - parts["mean"]) <= 1e-12 * spread + 4 * np.spacing(abs(whole["mean"]))
    assert parts["scale"] == pytest.approx(whole["scale"], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(values=NUMBERS)
def test_standardise_is_the_textbook_formula(values):
    found = learned(fit({"x": values}, pg.Standardise()))
    exact = [math.fsum(values) / len(values)]
    spread = math.sqrt(math.fsum((value - exact[0]) ** 2 for value in values) / len(values))
    assert found["mean"] == pytest.approx(exact[0], rel=1e-12, abs=1e-12 * (np.abs(values).max() + 1e-300))
    if np.ptp(values) > 1e-9 * np.abs(values).max():
        assert found["scale"] == pytest.approx(spread, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(values=NUMBERS, sizes=SIZES, share=st.floats(0, 100), kept=st.sampled_from([0, 3, 2**17]))
def test_quantiles_are_numpys_and_exact_whatever_the_pieces_and_the_memory(values, sizes, share, kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "COLLECTED", kept)
        found = learned(transforms.fit([pg.Clip(high=f"{share}%")], cut({"x": values}, sizes)))
    assert found["high"] == pytest.approx(np.quantile(values, share / 100), rel=1e-12, abs=1e-300)


@settings(max_examples=100, deadline=None)
@given(values=NUMBERS, gaps=st.integers(0, 10**6), sizes=SIZES, fill=st.sampled_from(["mean", "median"]))
def test_what_is_missing_is_filled_by_the_mean_or_median_of_the_rest(values, gaps, sizes, fill):
    hidden = np.random.default_rng(gaps).random(len(values)) < 0.4
    hidden[0] = False
    marked = np.where(hidden, -999.0, values)
    rest = marked[marked != -999.0]
    if not len(rest):
        return
    fitted = transforms.fit([pg.Missing(fill=fill, flag=True)], cut({"x": marked}, sizes))
    expected = getattr(np, fill)(rest)
    made = fitted.apply({"x": marked})
    assert made["x"][marked == -999.0] == pytest.approx(expected, rel=1e-9, abs=1e-9 * np.abs(rest).max())
    np.testing.assert_array_equal(made["x"][marked != -999.0], rest)
    if (marked == -999.0).any():
        np.testing.assert_array_equal(made["x_missing"], marked == -999.0)
    else:
        assert list(made) == ["x"]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(5, 60), sizes=SIZES, seed=st.integers(0, 999))
def test_a_whole_chain_is_the_same_in_pieces_and_applied_in_pieces(rows, sizes, seed):
    rng = np.random.default_rng(seed)
    columns: Columns = {
        "pt": rng.exponential(50, rows),
        "mass": np.where(rng.random(rows) < 0.2, -999.0, rng.normal(120, 5, rows)).astype(np.float32),
        "charge": rng.choice([-1, 1], rows),
        "kind": rng.choice(["e", "mu", "tau"], rows),
        "track": rng.normal(size=(rows, 3)),
    }
    columns["mass"][0] = 125.0
    chain = [
        pg.Missing(columns=("mass",), fill="median", flag=True),
        pg.Log(columns=("pt",)),
        pg.OneHot(columns=("kind", "charge")),
        pg.Clip(columns=("pt", "track"), low="5%", high="95%"),
        pg.MinMax(columns=("tr*",)),
        pg.Standardise(columns=("pt", "mass")),
    ]
    fitted, again = fit(columns, *chain), transforms.fit(chain, cut(columns, sizes))
    assert fitted.outputs == again.outputs
    one, other = fitted.apply(columns), again.apply(columns)
    for name in fitted.outputs:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-6, atol=1e-6)
    joined = [fitted.apply(piece) for piece in cut(columns, sizes)()]
    for name in fitted.outputs:
        np.testing.assert_array_equal(np.concatenate([part[name] for part in joined]), one[name])
    assert Fitted.from_json(fitted.to_json()) == fitted
    assert Fitted.from_json(fitted.to_json()).to_json() == fitted.to_json()
    read = Fitted.from_json(fitted.to_json()).apply(columns)
    for name in fitted.outputs:
        assert read[name].tobytes() == one[name].tobytes()
        assert read[name].dtype == one[name].dtype


# -- what each does -------------------------------------------------------------------------------------------------


def test_each_is_fitted_on_what_those_before_it_make():
    x = np.array([1.0, 3.0, -999.0, 5.0])
    fitted = fit({"x": x}, pg.Missing(), pg.Standardise())
    np.testing.assert_allclose(fitted.apply({"x": x})["x"], (np.array([1, 3, 3, 5]) - 3) / np.sqrt(2))


def test_numbers_in_a_row_are_scaled_each_for_itself():
    x = np.array([[0.0, 10.0], [2.0, 10.0], [4.0, 40.0]])
    made = fit({"x": x}, pg.MinMax()).apply({"x": x})["x"]
    np.testing.assert_allclose(made, [[0, 0], [0.5, 0], [1, 1]])
    clipped = fit({"x": x}, pg.Clip(high="50%")).apply({"x": x})["x"]
    np.testing.assert_allclose(clipped, [[0, 10], [2, 10], [2, 10]])


def test_one_hot_replaces_a_column_where_it_stood():
    columns: Columns = {"a": np.arange(3.0), "kind": np.array(["u", "d", "u"]), "z": np.arange(3)}
    made = fit(columns, pg.OneHot(columns="kind")).apply(columns)
    assert list(made) == ["a", "kind=d", "kind=u", "z"]
    np.testing.assert_array_equal(made["kind=u"], [1, 0, 1])
    np.testing.assert_array_equal(fit(columns, pg.LabelIndex(columns=("kind",))).apply(columns)["kind"], [1, 0, 1])


@pytest.mark.parametrize(
    "values",
    [np.array([3, 1, 3]), np.array([b"x", b"a", b"x"]), np.array(["x", "a", "x"], dtype=object), np.array([True, False, True])],
)
def test_kinds_may_be_numbers_bytes_objects_and_truth_values(values):
    np.testing.assert_array_equal(fit({"x": values}, pg.LabelIndex()).apply({"x": values})["x"], [1, 0, 1])
    fitted = fit({"x": values}, pg.OneHot())
    assert Fitted.from_json(fitted.to_json()).apply({"x": values}).keys() == fitted.apply({"x": values}).keys()


def test_log_keeps_the_sign_and_is_log1p_above_zero():
    x = np.array([-9.0, -0.0, 0.0, 9.0])
    np.testing.assert_allclose(fit({"x": x}, pg.Log()).apply({"x": x})["x"], [-np.log1p(9), 0, 0, np.log1p(9)])
    scaled = fit({"x": x}, pg.Log(offset=3)).apply({"x": x})["x"]
    np.testing.assert_allclose(scaled[3], np.log(9 + 3) - np.log(3))


def test_reshape_joins_columns_to_an_image():
    columns: Columns = {f"p{i}": np.full(5, float(i)) for i in range(6)} | {"other": np.zeros(5)}
    made = fit(columns, pg.Reshape(columns="p*", shape=(2, 3))).apply(columns)
    assert list(made) == ["p0..p5", "other"]
    np.testing.assert_array_equal(made["p0..p5"][2], [[0, 1, 2], [3, 4, 5]])
    flat = {"x": np.arange(12.0).reshape(2, 6)}
    assert fit(flat, pg.Reshape(shape=(3, 2))).apply(flat)["x"].shape == (2, 3, 2)


def test_nan_is_missing_whatever_the_value():
    x = np.array([1.0, np.nan, 3.0])
    np.testing.assert_array_equal(fit({"x": x}, pg.Missing(value=None)).apply({"x": x})["x"], [1, 2, 3])
    np.testing.assert_array_equal(fit({"x": x}, pg.Missing(fill=0)).apply({"x": x})["x"], [1, 0, 3])


def test_float32_and_whole_numbers_come_back_as_float32():
    for dtype in (np.float32, np.int64, np.uint8, bool):
        x = np.array([0, 1, 1], dtype=dtype)
        assert fit({"x": x}, pg.Standardise()).apply({"x": x})["x"].dtype == np.float32


def test_a_constant_column_is_said_and_becomes_zero():
    x = np.full(1000, 0.1)
    fitted = fit({"x": x}, pg.Standardise())
    assert not fitted.apply({"x": x})["x"].any()
    assert "'x' is 0.1 in every row" in fitted.notes[0]
    assert learned(fitted)["scale"] == 1.0
    assert "'x' is 0.1" in fit({"x": x}, pg.MinMax()).notes[0]


def test_columns_that_were_not_fitted_on_are_left_alone():
    fitted = fit({"x": np.arange(4.0)}, pg.Standardise())
    made = fitted.apply({"x": np.arange(4.0), "label": np.array(list("abcd"))})
    assert made["label"].tolist() == list("abcd")


def test_a_label_is_no_feature_and_may_be_absent_from_rows_to_predict():
    columns: Columns = {"x": np.array([1.0, 3.0]), "label": np.array(["s", "b"]), "w": np.array([2.0, 4.0])}
    chain = [pg.Standardise(), pg.LabelIndex(columns=("label",)), pg.MinMax(columns="*")]
    fitted = transforms.fit(chain, cut(columns, []), apart=("label", "w"))
    made = fitted.apply(columns)
    np.testing.assert_array_equal(made["label"], [1, 0])
    np.testing.assert_array_equal(made["w"], [2, 4])
    np.testing.assert_array_equal(made["x"], [0, 1])
    assert list(Fitted.from_json(fitted.to_json()).apply({"x": columns["x"]})) == ["x"]
    assert Fitted.from_json(fitted.to_json()) == fitted


def test_the_missing_values_of_the_higgs_challenge():
    file = SHARED_DATA / "higgs_atlas" / "higgs_atlas.npz"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    with np.load(file) as held:
        x, names = held["x_train"], [str(name) for name in held["feature_names"]]
    columns: Columns = {name: x[:, place] for place, name in enumerate(names)}
    fitted = transforms.fit([pg.Missing(fill="median", flag=True), pg.Standardise()], cut(columns, [1000, 1, 2500]))
    gaps = [name for name in names if (columns[name] == -999).any()]
    assert set(fitted.outputs) == {*names, *(f"{name}_missing" for name in gaps)}
    assert len(gaps) == 11
    for name in names:
        there = columns[name][columns[name] != -999].astype(np.float64)
        assert learned(fitted, name, step=0)["fill"] == pytest.approx(np.median(there), rel=1e-12)
    made = fitted.apply(columns)
    assert max(abs(float(made[name].mean(dtype=np.float64))) for name in names) < 1e-6
    assert {made[name].dtype for name in names} == {np.dtype(np.float32)}


# -- as text --------------------------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.sampled_from(["pt", "jet_*", "a b", "x=1", "y+z", "none", "1", "it's", 'q"', "(a", "a,b", "β"]), st.text(min_size=1)
)
COLUMNS = st.lists(NAMES, max_size=3).map(tuple)
FLOATS = st.floats(-1e9, 1e9)
ANY = st.one_of(
    st.builds(pg.Standardise, columns=COLUMNS),
    st.builds(pg.MinMax, columns=COLUMNS),
    st.builds(pg.OneHot, columns=COLUMNS, most=st.integers(1, 10**6)),
    st.builds(pg.LabelIndex, columns=COLUMNS),
    st.builds(
        pg.Missing,
        columns=COLUMNS,
        value=st.none() | FLOATS,
        fill=st.sampled_from(["mean", "median"]) | FLOATS,
        flag=st.booleans(),
    ),
    st.builds(pg.Clip, columns=COLUMNS, low=st.sampled_from(["1%", "2.5%", -1e30]), high=st.just("99.9%") | st.floats(0, 1e9)),
    st.builds(pg.Log, columns=COLUMNS, offset=st.floats(1e-9, 1e9)),
    st.builds(pg.Reshape, columns=COLUMNS, shape=st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple)),
)


@settings(max_examples=300, deadline=None)
@given(transform=ANY)
def test_a_transformation_is_the_same_when_its_text_is_read(transform):
    assert transforms.parse(transform.spelled()) == transform


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("standardise", pg.Standardise()),
        ("missing:value=-999,fill=mean", pg.Missing(value=-999.0, fill="mean")),
        ("clip:columns=pt+eta,low=0,high=100", pg.Clip(columns=("pt", "eta"), low=0.0, high=100.0)),
        ("clip:low=1%,high=99%", pg.Clip(low="1%", high="99%")),
        ("OneHot:columns=jet_*", pg.OneHot(columns=("jet_*",))),
        ("reshape:shape=(1,28,28)", pg.Reshape(shape=(1, 28, 28))),
        ("minmax:columns=('a b','c+d')", pg.MinMax(columns=("a b", "c+d"))),
    ],
)
def test_text_from_the_command_line(text, meant):
    assert transforms.parse(text) == meant


def test_every_transformation_is_a_public_name():
    for name in transforms.names():
        assert getattr(pg, name) is transforms.load(name)


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("standardize", ("Unknown transformation", "Did you mean 'standardise'?")),
        ("clip:columns=pt", ("needs low= or high=",)),
        ("clip:low=5,high=1", ("low must be below high",)),
        ("clip:low=200%", ("from 0% to 100%",)),
        ("clip:low=abc", ("a share of the rows such as 1%",)),
        ("clip:lo=1", ("field of transformation", "Did you mean 'low'?")),
        ("log:offset=0", ("above 0",)),
        ("missing:value=nan", ("value=none",)),
        ("missing:fill=mode", ("fill=mode", "mean, median")),
        ("missing:fill=inf", ("finite",)),
        ("onehot:most=0", ("at least 1",)),
        ("reshape", ("shape=(1,28,28)",)),
        ("reshape:shape=(0,3)", ("shape of one row",)),
    ],
)
def test_bad_text_is_explained(text, parts):
    with pytest.raises(UsageError) as error:
        transforms.parse(text)
    for part in parts:
        assert part in str(error.value)


TABLE: Columns = {
    "pt": np.array([1.0, 2.0, 3.0]),
    "kind": np.array(["e", "mu", "e"]),
    "hole": np.array([1.0, np.nan, 3.0]),
    "gone": np.full(3, -999.0),
    "late": np.array(["a", None, "b"], dtype=object),
    "pair": np.ones((3, 2)),
    "far": np.array([1.0, np.inf, 2.0]),
    "huge": np.array([-1.5e308, 1.5e308, 0.0]),
}


@pytest.mark.parametrize(
    ("transform", "parts"),
    [
        (pg.Standardise(columns="ptt"), ("'ptt'", "Did you mean 'pt'?")),
        (pg.Standardise(), ("'kind' holds text", "standardise needs numbers", "onehot:columns=kind")),
        (pg.Standardise(columns="hole"), ("'hole' has nan in row 1", "missing")),
        (pg.Standardise(columns="far"), ("'far' has inf in row 1",)),
        (pg.Standardise(columns="huge"), ("'huge'", "too large")),
        (pg.MinMax(columns="huge"), ("'huge'", "too large")),
        (pg.Clip(columns="kind", high=3), ("'kind' holds text",)),
        (pg.Missing(columns="gone"), ("'gone' has no value", "missing:fill=0")),
        (pg.Missing(columns="gone", fill="median"), ("no median",)),
        (pg.Missing(columns="far"), ("'far' has infinity",)),
        (pg.LabelIndex(columns="late"), ("'late' has None in row 1",)),
        (pg.OneHot(columns="hole"), ("'hole' has nan in row 1", "missing:columns=hole")),
        (pg.OneHot(columns="pair"), ("(2,) values in a row",)),
        (pg.OneHot(columns="pt", most=2), ("'pt' has more than 2 different values", "onehot:most=")),
        (pg.Reshape(columns="pt", shape=(2,)), ("1 numbers", "needs 2")),
        (pg.Reshape(columns="kind", shape=(1,)), ("reshape needs numbers",)),
        ("standardise", ("not a transformation", "parse(text)")),
    ],
)
def test_bad_columns_are_explained(transform, parts):
    with pytest.raises(UsageError) as error:
        fit(TABLE, transform)
    for part in parts:
        assert part in str(error.value)


def test_a_value_that_only_the_test_part_has_is_named_with_its_file():
    fitted = fit({"kind": np.array(["e", "mu"])}, pg.OneHot())
    with pytest.raises(
        UsageError, match=r"'kind' of test.csv has 'tau' in row 1, which the training part does not have .it has 'e', 'mu'"
    ):
        fitted.apply({"kind": np.array(["e", "tau"])}, where="test.csv")
    with pytest.raises(UsageError, match="holds numbers, but in the training part"):
        fitted.apply({"kind": np.array([1, 2])})


def test_a_column_that_is_not_there_is_named_with_its_file():
    fitted = fit({"pt": np.arange(3.0), "eta": np.arange(3.0)}, pg.Standardise())
    with pytest.raises(UsageError, match=r"of test.csv.*'pt'.*Available: eta"):
        fitted.apply({"eta": np.arange(3.0)}, where="test.csv")


def test_a_name_that_is_taken_is_refused():
    columns = {"x": np.array([1.0, -999.0]), "x_missing": np.zeros(2)}
    with pytest.raises(UsageError, match="'x_missing' of 'x', but that name is taken"):
        fit(columns, pg.Missing(columns="x", flag=True))


def test_pieces_with_other_columns_and_no_rows_are_refused():
    with pytest.raises(UsageError, match="Piece 1 of the rows has the columns y, but the first has x"):
        transforms.fit([pg.MinMax()], lambda: iter([{"x": np.ones(2)}, {"y": np.ones(2)}]))
    with pytest.raises(UsageError, match="no rows"):
        transforms.fit([pg.MinMax()], lambda: iter([]))
    with pytest.raises(UsageError, match="no rows"):
        transforms.fit([pg.MinMax()], lambda: iter([{"x": np.empty(0)}]))


@pytest.mark.parametrize("text", ["", "{}", '{"form": 2}', '{"form": 1, "steps": [{"transform": "nonsense"}], "inputs": []}'])
def test_damaged_transformations_are_refused(text):
    with pytest.raises(UsageError):
        Fitted.from_json(text)


def test_quantiles_of_a_wide_column_are_refused():
    wide = {"x": np.zeros((2, 300))}
    with pytest.raises(UsageError, match="300 numbers in a row"):
        fit(wide, pg.Clip(low="1%"))


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30),
    chain=st.permutations([pg.Standardise(columns="y"), pg.MinMax(columns="y"), pg.Log(columns="y", offset=3.0)]),
)
def test_scales_of_a_column_can_be_undone(values, chain):
    column = np.array(values)
    fitted = transforms.fit(chain, lambda: iter([{"y": column}]))
    back = Fitted.from_json(fitted.to_json()).invert("y", fitted.apply({"y": column})["y"])
    assert fitted.changes("y")
    assert not fitted.changes("x")
    np.testing.assert_allclose(back, column, rtol=1e-6, atol=1e-6 * max(1.0, np.abs(column).max()))
