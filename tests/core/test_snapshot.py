"""Snapshots of the center: the same after they were written to a file and read again."""

from __future__ import annotations

import json

import pytest
import torch

import paragrad as pg
from paragrad.core.snapshot import CenterNumbers, CenterSnapshot, OwedReply, Presence
from tests.schemes.golden import serial


def numbers(**changed) -> CenterNumbers:
    plain = {"clock": 3, "ledger": [1, 2], "leases": {}, "counts": {}, "arrivals": 5, "commits": [1, 2]}
    return CenterNumbers(**plain, speeds=[0.5, 0.0], sitting=[], **changed)


def test_numbers_survive_json_with_who_is_owed_what():
    presence = Presence(
        live=[0, 1],
        incarnations=[0, 2],
        refusals=[0, 0],
        rejected=[0, 3],
        owed={1: OwedReply(4, own=True, version=2, progress=0.25)},
        resting={0: OwedReply(-1, own=False, version=0, sits_out=3)},
        given=[None, OwedReply(3, own=False, version=1, applied=False)],
        looked_ahead=[False, True],
        gone_on=[(0, (7, 8))],
        forgotten=[9],
    )
    for given in (numbers(), numbers(presence=presence)):
        assert CenterNumbers.read(json.loads(json.dumps(given.plain()))) == given


def test_tensors_have_names_in_a_file_and_are_found_again():
    snapshot = CenterSnapshot(
        numbers(),
        value=torch.ones(2),
        buffers=torch.zeros(1),
        integers=torch.zeros(0, dtype=torch.int64),
        slots={"velocity": torch.ones(2)},
        answers={0: torch.ones(2), 11: torch.zeros(2)},
        optimizer={"0.exp_avg": torch.ones(2), "0.step": torch.tensor(3.0)},
        residuals={1: torch.ones(2)},
        workers={0: {"optimizer.0.step": torch.tensor(1.0), "counters": torch.zeros(7)}, 10: {}},
    )
    tensors = snapshot.tensors()
    assert {"value", "slot.velocity", "answer.11", "optimizer.0.exp_avg", "residual.1", "worker.0.counters"} <= set(tensors)
    again = CenterSnapshot.read({**tensors, "pending.0.value": torch.ones(2)}, snapshot.numbers)
    assert again.tensors().keys() == tensors.keys()
    assert again.answers.keys() == {0, 11}
    assert again.workers.keys() == {0}, "a worker without tensors has no state in a file"


@pytest.mark.parametrize("scheme", [pg.AGN(window=2), pg.DCASGD(), pg.DiLoCo(window=2), pg.AEASGD(window=2)])
def test_a_snapshot_is_a_copy(scheme):
    run = serial(scheme, 2)
    run.run(commits=3)
    snapshot = run.center.snapshot()
    before = {name: tensor.clone() for name, tensor in snapshot.tensors().items()}
    plain = json.dumps(snapshot.numbers.plain())
    run.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot.tensors().items())
    assert json.dumps(snapshot.numbers.plain()) == plain
