"""A client that says what it should not, word by word."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import torch

from paragrad.engines.exchange.worker import warm_learner
from paragrad.engines.net.worker import same_as
from paragrad.engines.transport.connection import Connection
from paragrad.engines.transport.endpoint import TOKEN, Endpoint, read_token
from paragrad.engines.transport.flight import SCHEMA, FlightChannel
from paragrad.engines.transport.message import PROTOCOL, encode
from paragrad.join import _job
from paragrad.types import COMMIT, Commit
from tests.engines.net.victim import Task


class Intruder:
    """Knows the token, and has a place if it wants one."""

    def __init__(self, out: Path, task: Task) -> None:
        self.endpoint = Endpoint.read(out)
        self.token = read_token(out / TOKEN)
        pem = None if self.endpoint.certificate is None else self.endpoint.certificate.encode()
        self.client = FlightChannel(self.endpoint.address, self.token, pem)
        connection = Connection(self.endpoint, self.token)
        job = _job(connection.about(), task.model(), task.rows(), None, task.loss, task.optimizer, task.scheme, None, ())
        connection.close()
        learner = warm_learner(job, "cpu")
        self.same = same_as(job, learner)
        self.length = learner.weights.numel()
        self.me: dict[str, Any] = {}

    def join(self, **changed: Any) -> dict[str, Any]:
        """Ask for a place, with some of it said otherwise."""
        head = {"protocol": PROTOCOL, "key": "an intruder", "host": "elsewhere", "pid": 1, **self.same, **changed}
        told = self.client.ask("join", head)
        if "rank" in told:
            self.me = {name: told[name] for name in ("rank", "incarnation", "start_id")}
        return told

    def leave(self) -> None:
        """The place is free again."""
        self.client.ask("leave", {"protocol": PROTOCOL, "early": True, **self.me})

    def begin(self) -> dict[str, Any]:
        """The first answer: what is to be done."""
        value = torch.empty(self.length)
        back = self.client.exchange({"op": "begin", **self.me}, {}, lambda back: {"value": value}, timeout=20)
        return {**back, "value": value}

    def commit(self, like: dict[str, Any], value: torch.Tensor, **changed: Any) -> dict[str, Any]:
        """A commit of what the last answer asked for, with some of it said otherwise."""
        sequence, steps, version = max(like["sequence"], like["last"], 0) + 1, len(like["batches"]), like["version"]
        sound = Commit(0, sequence, version, value, steps, rows=8 * steps, saw=version, loss=0.5, lr=1.0, seconds=0.1)
        head = {"op": "commit", **COMMIT.header(sound), "batches": like["batches"], **changed}
        answer = torch.empty(self.length)
        back = self.client.exchange({**head, **self.me}, {"value": value}, lambda back: self._room(back, answer), timeout=30)
        return {**back, "value": answer}

    @staticmethod
    def _room(back: dict[str, Any], answer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"value": answer} if "sequence" in back else {}

    def raw(self, head: dict[str, Any] | bytes, *pieces: pa.RecordBatch, schema: pa.Schema = SCHEMA) -> None:
        """An exchange of Flight's own, whatever is in it; raises what Flight does."""
        command = head if isinstance(head, bytes) else encode({**head, **self.me})
        client = self.client._client
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(command), self.client._options(10.0))
        try:
            writer.begin(schema)
            for piece in pieces:
                writer.write_batch(piece)
            writer.done_writing()
        except OSError:
            pass  # what went wrong is known to the other direction
        try:
            reader.read_chunk()
        finally:
            reader.cancel()
            with contextlib.suppress(OSError, pa.ArrowException):
                writer.close()


def piece(data: bytes) -> pa.RecordBatch:
    """Bytes as they travel."""
    return pa.RecordBatch.from_arrays([pa.array(list(data), pa.uint8())], schema=SCHEMA)
