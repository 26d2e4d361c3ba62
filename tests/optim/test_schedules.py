"""Learning-rate schedules: their shapes, and the text that makes them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.config import options
from paragrad.optim import schedules
from paragrad.optim.schedules import FIRST, Cosine, Exponential, Falling, Linear, Schedule, Step, Warmup

SHARE = st.floats(0.0, 1.0)
MADE = st.one_of(
    st.builds(Cosine, floor=SHARE, warmup=st.floats(0.0, 0.9)),
    st.builds(Linear, floor=SHARE, warmup=st.floats(0.0, 0.9)),
    st.builds(Exponential, floor=st.floats(1e-6, 1.0), warmup=st.floats(0.0, 0.9)),
    st.builds(
        Step,
        at=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4, unique=True).map(lambda found: tuple(sorted(found))),
        factor=st.floats(0.01, 1.0),
        warmup=st.floats(0.0, 0.9),
    ),
    st.builds(Warmup, warmup=st.floats(0.0, 0.9)),
)


@given(MADE, st.lists(SHARE, min_size=2, max_size=8))
def test_a_schedule_stays_between_0_and_1_rises_in_its_warm_up_and_then_never_rises(
    made: Schedule, points: list[float]
) -> None:
    points.sort()
    factors = [made(point) for point in points]
    assert all(0 <= factor <= 1 for factor in factors)
    for (one, first), (other, second) in zip(zip(points, factors), zip(points[1:], factors[1:]), strict=False):  # noqa: B905
        if other < made.warmup:
            assert first <= second
        elif one >= made.warmup:
            assert second <= first + 1e-12


@given(MADE)
def test_the_rate_is_whole_after_the_warm_up_and_comes_to_its_floor(made: Schedule) -> None:
    assert made(made.warmup) == 1.0
    assert made(1.5) == made(1.0)
    if isinstance(made, Falling):
        assert math.isclose(made(1.0), made.floor, abs_tol=1e-12)


@given(MADE)
def test_no_step_of_a_warm_up_is_made_in_vain(made: Schedule) -> None:
    assert made(0.0) > 0
    if made.warmup:
        assert made(0.0) == FIRST


@given(MADE)
def test_the_text_of_a_schedule_makes_the_same(made: Schedule) -> None:
    text = options.describe(made)
    again = schedules.build(text)
    assert again == made


@pytest.mark.parametrize(
    ("text", "at", "factor"),
    [
        ("cosine", 0.5, 0.5),
        ("cosine:warmup=0.5,floor=0.2", 0.75, 0.6),
        ("linear", 0.25, 0.75),
        ("linear:floor=0.5", 1.0, 0.5),
        ("step:at=0.5+0.75,factor=0.1", 0.49, 1.0),
        ("step:at=0.5+0.75,factor=0.1", 0.5, 0.1),
        ("step:at=0.5+0.75,factor=0.1", 0.9, 0.01),
        ("step:at=(0.5,0.75)", 0.6, 0.1),
        ("step:at=0.3,factor=0.5", 0.3, 0.5),
        ("exponential:floor=0.01", 0.5, 0.1),
        ("warmup", 0.025, 0.505),
        ("warmup:warmup=0.1", 0.9, 1.0),
        ("COSINE", 1.0, 0.0),
    ],
)
def test_a_schedule_by_its_text(text: str, at: float, factor: float) -> None:
    assert pg.Optimizer("adam", schedule=text).factor(at) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cosin", "Unknown schedule 'cosin'. Did you mean 'cosine'"),
        ("cosine:flor=0.1", "Unknown field of schedule 'cosine': 'flor'. Did you mean 'floor'"),
        ("cosine:warmup=1", "0 <= warmup < 1"),
        ("cosine:floor=2", "0 <= floor <= 1"),
        ("cosine:floor=x", "floor=x in 'cosine:floor=x', but floor must be a number"),
        ("exponential:floor=0", "never reaches 0"),
        ("step:at=0.75+0.5", "rising order"),
        ("step:at=a+b", "rising order"),
        ("step:at=1.5", "rising order"),
        ("step:factor=0", "0 < factor <= 1"),
        (0.5, "neither a name nor a function"),
        (lambda done: math.nan, "returns nan for progress 0;"),
        (lambda done: -done, "returns -0.5 for progress 0.5;"),
        (lambda done: None, "returns None"),
    ],
)
def test_what_is_no_schedule_is_refused(given: object, message: str) -> None:
    with pytest.raises(pg.UsageError, match=message):
        pg.Optimizer("adam", schedule=given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_norm": 0.0}, r"clip_norm=0\.0, but gradients are clipped to a number above 0"),
        ({"clip_value": -1}, "clip_value=-1"),
        ({"clip_norm": "1"}, "clip_norm='1'"),
        ({"clip_norm": math.inf}, "clip_norm=inf"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "give one of them"),
        ({"optimizer": pg.Optimizer("sgd")}, "another pg.Optimizer"),
    ],
)
def test_bad_clipping_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(pg.UsageError, match=message):
        pg.Optimizer(**fields)
