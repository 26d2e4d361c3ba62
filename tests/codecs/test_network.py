"""Coded commits over a network: fewer bytes on the wire, the same run, and what no codec makes is turned away."""

from __future__ import annotations

import copy

import pytest
import torch

import paragrad as pg
from paragrad.engines.transport.header import CODED, rooms_for
from paragrad.engines.transport.message import Malformed, declare
from paragrad.rundir.record import read
from tests.conftest import every_batch_once, train


@pytest.mark.parametrize("shared", [False, True], ids=["away", "beside"])
@pytest.mark.parametrize("codec", [pg.TopK(0.1), pg.Threshold(0.5)], ids=repr)
def test_workers_over_a_network_send_what_the_codec_makes_and_a_replay_repeats_it(shared, codec, model, rows, tmp_path):
    engine = pg.Network(workers=2, here=2, shared=shared, threads=1)
    result = train(copy.deepcopy(model), rows, tmp_path / "run", engine=engine, codec=codec, scheme=pg.AGN(window=3), epochs=2)
    assert every_batch_once(tmp_path / "run", 100)
    sent = [event.data["bytes"] for event in read(tmp_path / "run") if event.kind == "commit"]
    assert sum(sent) == result.summary["bytes_sent"] < 4 * 178 * len(sent)
    assert pg.replay(tmp_path / "run", copy.deepcopy(model), rows).equal


@pytest.mark.parametrize(
    "coded",
    [
        {},
        {"positions": torch.zeros(11, dtype=torch.int32), "values": torch.zeros(10)},
        {"positions": torch.zeros(10, dtype=torch.int64), "values": torch.zeros(10)},
        {"positions": torch.zeros(10, dtype=torch.int32)},
    ],
    ids=["nothing", "more", "another type", "a part"],
)
def test_no_room_is_made_for_what_the_codec_does_not_make(coded):
    head = {"vectors": declare({CODED + name: tensor for name, tensor in coded.items()})}
    with pytest.raises(Malformed, match="same codec and model"):
        rooms_for(head, pg.TopK(0.1), 100)
