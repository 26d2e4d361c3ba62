"""The child processes of the local engine: starting them, and noticing when one speaks or ends."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paragrad.engines import processes
from paragrad.engines.localworker import Post, evaluator_main, worker_main
from paragrad.engines.networkworker import guest_main
from paragrad.engines.notes import Notes
from paragrad.engines.processes import Fd
from paragrad.engines.reader import reader_main
from paragrad.engines.shard import shard_main

MAINS = {"worker": worker_main, "guest": guest_main, "evaluator": evaluator_main, "reader": reader_main, "shard": shard_main}
"""What a child does, by its role."""


@dataclass
class Child:
    """One child process and what is known of it."""

    process: BaseProcess
    notes: Notes
    incarnation: int = 0
    commits: int = 0
    deaths: int = 0
    ready: bool = False
    finished: bool = False
    lost_at: float | None = None
    stopped_at: float | None = None
    given_up: bool = False
    error: dict[str, Any] | None = None


class Watch:
    """Descriptors that something may come from, each with what it means and whose it is."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._what: dict[int, tuple[str, int]] = {}

    def add(self, fd: int, kind: str, rank: int = 0) -> None:
        """From now on ``wait`` tells when there is something to read."""
        self._what[fd] = (kind, rank)
        self._poll.register(fd, select.POLLIN)

    def drop(self, fd: int) -> None:
        """No longer."""
        if self._what.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, seconds: float) -> Iterator[tuple[int, str, int]]:
        """(descriptor, kind, rank) of each that has something, after at most so long."""
        due = [(fd, self._what.get(fd)) for fd, _ in self._poll.poll(max(1, seconds * 1000))]
        for fd, what in due:
            # Seeing to one may close the descriptor of another, and a replacement be given the same number.
            if what is not None and self._what.get(fd) is what:
                yield fd, *what


def start(
    fill: Callable[..., Post],
    rank: int,
    watch: Watch,
    logs: Path,
    *,
    incarnation: int = 0,
    role: str = "worker",
    name: str | None = None,
) -> Child:
    """Start a process, with a pipe and a log of its own; ``fill`` makes its post of them."""
    logs.mkdir(exist_ok=True)
    name = name or (f"worker-{rank}" if role in ("worker", "guest") else role)
    notes = Notes()
    log = os.open(logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    post = fill(rank=rank, incarnation=incarnation, notes=Fd(notes.mouth), log=Fd(log))
    process = processes.start(MAINS[role], post, name=f"paragrad-{name}")
    os.close(log)
    notes.seal()
    watch.add(process.sentinel, "death", rank)
    watch.add(notes.fd, "notes", rank)
    return Child(process, notes, incarnation=incarnation)
