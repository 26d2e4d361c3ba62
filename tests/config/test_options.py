"""Options as text: what is written parses back, what is wrong is named."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paragrad import engines, schemes
from paragrad.cluster import Cluster
from paragrad.config import options
from paragrad.engines.vector import Vector
from paragrad.errors import UsageError
from paragrad.schemes.aeasgd import AEASGD
from paragrad.schemes.agn import AGN


def values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_args(hint):
        return st.one_of([values(option) for option in get_args(hint)])
    made = {
        int: st.integers(1, 10**6),
        float: st.floats(1e-6, 1e6),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"])),
        type(None): st.none(),
    }
    return made[hint]


def changed(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Objects of a dataclass with some fields changed; those that the class refuses are left at their defaults."""
    hints = get_type_hints(cls)

    @st.composite
    def draw_one(draw: st.DrawFn) -> Any:
        made = cls()
        spelled = [f.name for f in fields(cls) if options.APART not in f.metadata]
        for field in draw(st.sets(st.sampled_from(spelled))):
            given_now = {f.name: getattr(made, f.name) for f in fields(cls)} | {field: draw(values(hints[field]))}
            try:
                made = cls(**given_now)
            except UsageError:
                continue
        return made

    return draw_one()


@pytest.mark.parametrize("name", schemes.names())
def test_a_scheme_described_parses_back(name: str) -> None:
    @given(changed(schemes.load(name)))
    def law(scheme: Any) -> None:
        assert options.parse(options.describe(scheme), "scheme", schemes) == scheme

    law()


@pytest.mark.parametrize("name", engines.names())
def test_an_engine_described_parses_back(name: str) -> None:
    @given(changed(engines.load(name)))
    def law(engine: Any) -> None:
        assert options.parse(options.describe(engine), "engine", engines) == engine

    law()


def test_what_has_an_option_of_its_own_is_no_part_of_the_text() -> None:
    assert options.describe(Vector(workers=3, cluster=Cluster(speeds=2.0))) == "vector:workers=3"
    with pytest.raises(UsageError, match="--cluster wan"):
        options.parse("vector:cluster=wan", "engine", engines)


def test_the_description_leaves_defaults_out() -> None:
    assert options.describe(AGN()) == "agn"
    assert options.describe(AEASGD(window=4, atomic=False)) == "aeasgd:window=4,atomic=false"


@pytest.mark.parametrize("text", ["agn:window=5", "AGN:window=5", " Agn: window = 5 "])
def test_names_are_read_in_any_case(text: str) -> None:
    assert options.parse(text, "scheme", schemes) == AGN(window=5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("agm", ["'agm'", "Did you mean 'agn'?"]),
        ("agn:windw=3", ["'windw'", "Did you mean 'window'?"]),
        ("agn:window=many", ["window=many", "a whole number"]),
        ("agn:window=1.5", ["window=1.5", "a whole number"]),
        ("aeasgd:alpha=", ["alpha=", "a number"]),
        ("aeasgd:atomic=perhaps", ["atomic=perhaps", "true or false"]),
        ("modelaveraging:starts=there", ["starts=there", "center, own"]),
        ("agn:window=0", ["window=0", "at least 1"]),
        ("agn:15", ["'15'", "field=value"]),
        ("agn:", ["'agn:'", "field=value"]),
        ("agn:window=1,window=2", ["'window'", "twice"]),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(text: str, named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        options.parse(text, "scheme", schemes)
    for part in named:
        assert part in str(caught.value)


def test_fields_of_an_optimizer_are_python_values() -> None:
    text = "adam:lr=1e-3,betas=(0.9, 0.99),amsgrad=True,foreach=none,mode=plain,eps=-1"
    assert options.parse_fields(text) == (
        "adam",
        {"lr": 1e-3, "betas": (0.9, 0.99), "amsgrad": True, "foreach": None, "mode": "plain", "eps": -1},
    )
    assert options.parse_fields("sgd") == ("sgd", {})


@pytest.mark.parametrize("text", ["adam:lr=0.0.1", "adam:betas=(0.9", "adam:lr=", "adam:lr=__import__('os')", "adam:lr=1;2"])
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="adam"):
        options.parse_fields(text)


def test_fields_are_told_with_type_default_and_meaning() -> None:
    told = {field.name: field for field in options.fields_of(AEASGD)}
    assert told["window"] == options.FieldHelp("window", "a whole number", "10", "Local steps before a commit.")
    assert told["bound"].type == "a whole number or none"
    assert told["atomic"].default == "true"


@dataclass(frozen=True)
class Crooked:
    """A class whose fields need quotes."""

    path: str | None = None
    speeds: tuple[float, ...] = (1.0,)


class Known:
    def names(self) -> tuple[str, ...]:
        return ("Crooked",)

    def load(self, name: str) -> type[Any]:
        return Crooked


@given(
    st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]))),
    st.lists(st.floats(allow_nan=False, allow_infinity=False)),
)
def test_any_text_and_tuple_survives(path: str | None, speeds: list[float]) -> None:
    thing = Crooked(path, tuple(speeds))
    assert options.parse(options.describe(thing), "thing", Known()) == thing


plain_values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


keys = st.text(st.characters(exclude_categories=["Cs"]))
nested_values = st.recursive(
    plain_values, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)), max_leaves=8
)


@given(st.dictionaries(keys, nested_values, max_size=6))
def test_what_is_written_as_toml_reads_back(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "written.toml"
    options.write_config(path, {**config, "a table": config})
    read = tomllib.loads(path.read_bytes().decode())
    assert read == {**config, "a table": config}


def test_a_config_reads_back(tmp_path: Any) -> None:
    config = {"data": "digits", "epochs": 3, "holdout": 0.5, "checkpoint_every": None, "scheme": "agn:window=5"}
    options.write_config(tmp_path / "run.toml", config | {"about": {"torch": "2.13"}})
    assert options.read_config(tmp_path / "run.toml") == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epoch = 3", ["'epoch'", "Did you mean 'epochs'?"]),
        ("epochs = 'three'", ["epochs = 'three'", "a whole number"]),
        ("epochs = true", ["epochs = True", "a whole number"]),
        ("data = 3", ["data = 3", "text"]),
        ("cluster = 3", ["cluster = 3", "text or a table"]),
        ("epochs = ", ["not TOML", "Invalid value"]),
    ],
)
def test_a_wrong_config_is_named_with_its_file(tmp_path: Any, text: str, named: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        options.read_config(path)
    for part in [*named, "mine.toml"]:
        assert part in str(caught.value)


def test_a_config_that_is_not_there_is_named(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        options.read_config(tmp_path / "nowhere.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        options.read_config(tmp_path)
