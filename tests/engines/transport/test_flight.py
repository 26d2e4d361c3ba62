"""A center among clients that are wrong, rude or somebody else's: each is turned away in words, and the training goes on."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch

import paragrad as pg
from paragrad.engines.transport import endpoint
from paragrad.engines.transport.flight import FlightChannel, FlightTransport
from paragrad.engines.transport.message import HEAD, PROTOCOL, Malformed, Refused, TransportError
from paragrad.errors import UsageError
from paragrad.rundir.record import read
from paragrad.types import COMMIT, Commit
from tests.engines.net.intruder import Intruder, piece
from tests.engines.net.kills import check_sound
from tests.engines.net.victim import Scene, Task

SIZE = 2000
TOKEN = "t" * 20
TASK = Task(pg.AGN(window=2), workers=2, batches=400, counting=SIZE, sleep=0.01, engine={"min_workers": 1})


def memory_of(pid: int | None) -> int:
    """Bytes in memory of a process, and the most it ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def refused(
    words: str, head: dict[str, object] | bytes, intruder: Intruder, *pieces: pa.RecordBatch, **schema: pa.Schema
) -> None:
    with pytest.raises((fl.FlightServerError, fl.FlightInternalError), match=words):
        intruder.raw(head, *pieces, **schema)


def commit_head(**changed: object) -> dict[str, object]:
    sound = Commit(0, 1, 0, torch.empty(0), 1, rows=8, loss=0.0, lr=1.0, seconds=0.1)
    return {"op": "commit", **COMMIT.header(sound), "vectors": [["value", "float32", SIZE]], **changed}


def test_whoever_is_wrong_is_turned_away_and_the_training_goes_on(tmp_path):
    with Scene(TASK, tmp_path / "scene") as scene:
        scene.serve()
        address = scene.endpoint().address
        intruder = Intruder(scene.out, TASK)
        ask = intruder.client.ask

        # those who are not who they should be
        for token, words in (("x" * 40, "does not know the token"), ("", "does not know the token")):
            with pytest.raises(Refused, match=words):
                FlightChannel(address, token).ask("about", {"protocol": PROTOCOL})
        with pytest.raises(fl.FlightUnauthenticatedError, match="no token"):
            list(fl.connect(f"grpc://{address}").do_action(fl.Action("about", b"{}")))
        for protocol in (0, PROTOCOL + 1, None, "1"):
            with pytest.raises(Malformed, match="install the same version of paragrad on both sides"):
                ask("about", {"protocol": protocol})
        with pytest.raises(Malformed, match="Unknown question 'format'"):
            ask("format", {"protocol": PROTOCOL})
        with pytest.raises(Malformed, match="Every worker must build the same model"):
            intruder.join(layout={**intruder.same["layout"], "parameters": 7})
        with pytest.raises(Malformed, match="Give every worker the same data"):
            intruder.join(data="0" * 16)
        for key in (None, 7, "short"):
            with pytest.raises(Malformed, match="must send a key"):
                intruder.join(key=key)

        # those who have no place
        refused("Worker '9' is unknown: this run has workers 0 to 1", {"op": "begin", "rank": 9}, intruder)
        refused("Worker 'None' is unknown", {"op": "begin"}, intruder)
        refused("Worker", b'{"op":"begin","rank":-1}', intruder)

        scene.join()
        scene.until_commits(1)
        intruder.join(pid="many", host=["a", "list"], boot=None, uid={}, was=[[], {}])
        assert intruder.me["rank"] == 1
        with pytest.raises(Malformed, match="the one before it is not answered yet"):
            intruder.commit({"sequence": 0, "last": 0, "version": 0, "batches": [0]}, torch.zeros(SIZE))
        first = intruder.begin()

        # heads, and what they declare
        refused("is not JSON", b"\x00" * 100, intruder)
        refused("at most 1,048,576", b" " * (HEAD + 1), intruder)
        refused("Unknown operation 'format'", {"op": "format"}, intruder)
        before = memory_of(scene.center.pid)
        refused("1,073,741,824 values of float32", commit_head(vectors=[["value", "float32", 1 << 30]]), intruder)
        refused("549,755,813,888 values of float64", commit_head(vectors=[["value", "float64", 1 << 39]]), intruder)
        assert memory_of(scene.center.pid) - before < 64 << 20
        refused("nothing for 'value'", commit_head(vectors=[]), intruder)
        refused("is none of the vectors", commit_head(vectors=[["value", "float32", SIZE], ["more", "float32", 1]]), intruder)
        for name, bad in (("sequence", 0), ("sequence", "1"), ("version", -1), ("steps", True), ("rows", 1 << 70), ("part", 3)):
            refused("malformed", commit_head(**{name: bad}), intruder)
        for name, bad in (("weight", "much"), ("loss", [1]), ("batches", [0] * 99), ("pulls", "x"), ("lr", 10**400)):
            refused("malformed", commit_head(**{name: bad}), intruder)

        # bytes
        whole = bytes(4 * SIZE)
        refused("ended after 0 of 8,000 bytes", commit_head(), intruder)
        refused("ended after 100 of 8,000 bytes", commit_head(), intruder, piece(bytes(100)))
        refused("longer than was declared", commit_head(), intruder, piece(bytes(4 * SIZE + 1)))
        refused("More bytes came than were declared", commit_head(), intruder, piece(whole), piece(b"x"))
        floats = pa.schema([("bytes", pa.float64())])
        wrong = pa.RecordBatch.from_arrays([pa.array([1.0] * SIZE)], schema=floats)
        refused("is not a column of bytes", commit_head(), intruder, wrong, schema=floats)
        nothing = pa.schema([])
        refused(
            "is not a column of bytes", commit_head(), intruder, pa.RecordBatch.from_arrays([], schema=nothing), schema=nothing
        )

        # commits that are not what they say: one that is not finite is done again, another ends the worker's stay
        back = intruder.commit(first, torch.full((SIZE,), float("nan")))
        assert back["applied"] is False
        assert set(back["batches"]) == set(first["batches"])
        good = intruder.commit(back, torch.ones(SIZE), sequence=2)
        assert good["applied"] is True
        again = intruder.commit(back, torch.ones(SIZE), sequence=2)  # replayed: answered again, not applied again
        assert (again["applied"], again["sequence"], again["batches"]) == (True, 2, good["batches"])
        with pytest.raises(Refused, match="gone"):
            intruder.commit(again, torch.ones(SIZE), batches=[TASK.batches - 1])
        intruder.join()
        second = intruder.begin()
        with pytest.raises(Refused, match="gone"):
            intruder.commit(second, torch.ones(SIZE), version=1 << 40)

        # bytes that are no Flight at all: dropped before any code of ours sees them
        host, port = endpoint.split_address(address)
        for data in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + os.urandom(300), b""):
            with socket.create_connection((host, port), timeout=5) as rude:
                rude.sendall(data)
        with pytest.raises(Refused, match="does not encrypt, but a certificate was given: omit --cert"):
            FlightChannel(address, intruder.token, endpoint.self_signed(tmp_path)[0]).ask("about", {}, timeout=5)

        scene.join()
        scene.wait()
    check_sound(scene)
    summary = json.loads((scene.out / "summary.json").read_text())
    told = summary["rejected_clients"]
    assert told["a wrong token"] == 2
    assert told["no token"] == 1
    assert sum(told.values()) > 30
    assert [event.data["why"] for event in read(scene.out) if event.kind == "refused"] == ["not finite"]
    warnings = [event.data["message"] for event in read(scene.out) if event.kind == "warning"]
    assert any(message.startswith("Rejected") and "wrong token" in message for message in warnings)


class Broken:
    """A host with a mistake in it."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def ask(self, name: str, head: dict[str, object], peer: str) -> dict[str, object]:
        raise KeyError(name)

    def exchange(self, peer: str) -> object:
        raise UnboundLocalError("a name without a value")

    def rejected(self, peer: str, why: str) -> None:
        self.heard.append(why)


def test_a_mistake_on_the_other_side_is_said_to_both_and_not_tried_again(capfd):
    host = Broken()
    server = FlightTransport().listen(host, "127.0.0.1:0", TOKEN)
    client = FlightChannel(f"127.0.0.1:{server.port}", TOKEN)
    with pytest.raises(Malformed, match="The other side failed, with KeyError while it was answered: 'about'"):
        client.ask("about", {})
    with pytest.raises(Malformed, match=r"with UnboundLocalError while it was answered: a name without a value\. Its log"):
        client.exchange({}, {"value": torch.zeros(3)}, lambda head: {}, timeout=10)
    client.close()
    server.close()
    assert [why.split()[0] for why in host.heard] == ["KeyError", "UnboundLocalError"]
    assert "Traceback" in capfd.readouterr().err


def test_the_wrong_certificate_the_wrong_port_and_no_encryption_are_told_apart(tmp_path):
    task = Task(pg.AGN(window=2), workers=1, batches=20, counting=100, engine={"tls": "on"})
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        found = scene.endpoint()
        token = endpoint.read_token(scene.out / endpoint.TOKEN)
        assert "BEGIN CERTIFICATE" in found.certificate
        other, _ = endpoint.self_signed(tmp_path)
        ask = {"protocol": PROTOCOL}
        with pytest.raises(UsageError, match="a PEM file is needed"):
            FlightChannel(found.address, token, b"nonsense")
        with pytest.raises(Refused, match="shows another certificate than the trusted one: give --cert"):
            FlightChannel(found.address, token, other).ask("about", ask, timeout=5)
        with pytest.raises(TransportError, match=r"give its certificate"):
            FlightChannel(found.address, token).ask("about", ask, timeout=5)
        host, port = endpoint.split_address(found.address)
        for data in (os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64)):
            with socket.create_connection((host, port), timeout=5) as rude:
                rude.sendall(data)
        pem = tmp_path / "copy.pem"
        pem.write_text(found.certificate)
        scene.join(where=found.address, token_file=scene.out / endpoint.TOKEN, certificate=pem, shared=False)
        scene.wait()
    check_sound(scene)
