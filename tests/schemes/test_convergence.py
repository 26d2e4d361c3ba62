"""Every scheme comes to rest in the minimum of a quadratic, and learns the digits with real processes."""

from __future__ import annotations

import pytest
import torch
from benchmarks.choices import CHOICES

from paragrad import schemes
from paragrad.config import options
from paragrad.data.source import Arrays
from paragrad.models import builtin
from paragrad.types import SchemePlan
from tests.conftest import train
from tests.schemes.golden import serial

IDS = [spec for spec, _ in CHOICES]


def test_every_scheme_is_among_those_that_are_tried():
    assert {name.lower() for name in schemes.names()} == {spec.split(":")[0] for spec in IDS}


@pytest.mark.parametrize("spec", IDS)
@pytest.mark.parametrize("workers", [2, 4])
def test_it_comes_to_rest_in_the_minimum_of_a_quadratic(spec, workers):
    rows = 160
    scheme = options.parse(spec.replace("rate=0.02", "rate=0.5"), "scheme", schemes)  # Adagrad's steps shrink on the way
    rate = 0.02 if spec == "ormo" else 0.1  # it adds the gradients of all workers
    nought = Arrays(torch.zeros(rows, 7, dtype=torch.float64))
    run = serial(scheme, workers, rows=rows, epochs=80, batch=4, lr=rate, source=nought, stolen=scheme.quorum(workers) == 1)
    started = float(run.center.value.abs().max())
    run.run()
    rests = float(run.center.value.abs().max()) < 0.02 * started
    warned = spec.startswith("downpour") and scheme.warnings(SchemePlan(workers)) and not scheme.zealous
    assert rests or warned, "what does not come to rest must have been warned of"


@pytest.mark.parametrize(("spec", "optimizer"), CHOICES, ids=IDS)
def test_it_learns_the_digits(spec, optimizer, tmp_path):
    model = builtin.build("mlp", (64,), 10)
    scheme = options.parse(spec, "scheme", schemes)
    result = train(model, "digits", tmp_path / "run", scheme=scheme, optimizer=optimizer, holdout=0.2, epochs=8, batch_size=16)
    assert result.accuracy > 0.7
    assert result.summary["samples"] == 8 * 1437
