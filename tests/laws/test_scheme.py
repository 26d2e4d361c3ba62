"""check_scheme says what is wrong with a scheme that a hasty person wrote, once, and where."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import paragrad as pg
from paragrad import schemes
from paragrad.core.rounds import check_quorum
from paragrad.laws.scheme import LawBroken
from tests.laws.table import TABLE
from tests.schemes.golden import center_of, send


@dataclass(frozen=True)
class NoSlot(pg.Scheme):
    def apply(self, center, commits):
        center.slots["momentum"].add_(commits[0].value)
        return center.value


@dataclass(frozen=True)
class NoComma(pg.Scheme):
    center_slots = "momentum"

    def scale(self, commit):
        return 1.0


@dataclass(frozen=True)
class NoAnswer(pg.Scheme):
    def apply(self, center, commits):
        for commit in commits:
            center.add(commit.value)


@dataclass(frozen=True)
class NoList(pg.Scheme):
    answers = "own"

    def apply(self, center, commits):
        for commit in commits:
            center.add(commit.value)
        return center.value


class NoDataclass(pg.Scheme):
    kappa: float = 4.0

    def scale(self, commit):
        return 1.0 / (1.0 + commit.staleness / self.kappa)


@dataclass(frozen=True)
class NoSuper(pg.Scheme):
    def __post_init__(self):
        pass

    def scale(self, commit):
        return 1.0


@dataclass(frozen=True)
class Nought(pg.Scheme):
    def scale(self, commit):
        return 1.0 / commit.staleness


@dataclass(frozen=True)
class Mistyped(pg.Scheme):
    def apply(self, center, commits):
        center.add(commits[0].val)
        return center.value


@dataclass(frozen=True)
class Mean(pg.Scheme):
    """Synchronous, and says so by its quorum alone."""

    def quorum(self, workers):
        return workers

    def apply(self, center, commits):
        center.add(center.mean(commits))
        return center.value


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (NoSlot(), "uses the slot 'momentum', but has declared none"),
        (NoComma(), "a comma is missing"),
        (NoAnswer(), "returned None; it must return center.value"),
        (NoList(), "must return a list"),
        (NoDataclass(), "write @dataclass\\(frozen=True\\) above the class"),
        (NoSuper(), r"call super\(\).__post_init__\(\)"),
        (Nought(), r"ZeroDivisionError: .* \(in scale, test_scheme.py line \d+\)"),
        (Mistyped(), r"AttributeError: .*'val'.* \(in apply, test_scheme.py line \d+\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_hasty_mistake_is_told_once(scheme, said):
    with pytest.raises(LawBroken, match=said) as caught:
        pg.check_scheme(scheme)
    assert len(str(caught.value).splitlines()) <= 3, "one mistake, told by every law"


def test_a_class_in_the_place_of_a_scheme_is_named():
    with pytest.raises(pg.UsageError, match=r"scheme=Mean is a class: give an instance, Mean\(\)"):
        pg.check_scheme(Mean)


def test_a_synchronous_scheme_takes_no_bound():
    with pytest.raises(pg.UsageError, match="is synchronous"):
        check_quorum(Mean(bound=2), 3)
    assert check_quorum(Mean(), 3) == 3
    assert check_quorum(pg.AGN(bound=2), 3) == 1


def test_the_mean_of_movements_is_in_the_centers_own_precision():
    center = center_of(Mean())
    send(center, 0, (0.1, 0.2, 0.3))
    send(center, 1, (0.5, 0.4, 0.3))
    expected = torch.tensor([1.3, 2.3, 3.3], dtype=torch.float64)
    assert torch.allclose(center.value, expected, atol=1e-15, rtol=0)
    pg.check_scheme(Mean())


def test_every_scheme_stands_in_the_table_of_the_laws():
    assert {type(scheme).__name__ for scheme, _ in TABLE} == set(schemes.names())


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "paragrad", "schemes", "agn"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "accumulated" in done.stdout.lower() or "d / λ" in done.stdout
