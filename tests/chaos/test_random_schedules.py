"""Ten thousand random schedules of crashes, lost and doubled messages, partitions, comings and goings: no law is broken.

Run with ``make chaos``; ``-s`` shows the figures. A few hundred of them are in the everyday suite.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from tests.engines.sim.schedules import check, schedules

pytestmark = pytest.mark.chaos

EACH = 2_600


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_no_schedule_of_thousands_breaks_a_law(number):
    totals: Counter[str] = Counter()

    @seed(number)
    @settings(max_examples=EACH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schedules())
    def any_schedule(schedule):
        totals.update(check(schedule))

    before, began = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(1)
    try:
        any_schedule()
    finally:
        torch.set_num_threads(before)
    figures = ", ".join(f"{count:,} {name}" for name, count in sorted(totals.items(), key=lambda item: -item[1]))
    print(f"seed {number}: laws broken 0, in {time.monotonic() - began:.0f} s: {figures}")
    assert totals["schedules"] >= 2_500
