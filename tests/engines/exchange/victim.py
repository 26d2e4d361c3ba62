"""A model that counts and a worker that dies on cue: what the tests of kills train. Light to import, as every worker does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import paragrad
from paragrad.engines.exchange.worker import CenterReader
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Segment

PACKAGE = str(Path(paragrad.__file__).parent) + "/"
EXCHANGE = (
    f"core{os.sep}worker.py",
    f"core{os.sep}replica.py",
    f"core{os.sep}kernels.py",
    f"schemes{os.sep}",
    f"codecs{os.sep}",
    f"engines{os.sep}exchange{os.sep}worker.py",
    f"engines{os.sep}exchange{os.sep}slot.py",
)
"""The files whose lines make up the worker's side of an exchange."""

LIVES = 0
"""The rank that lives; all others die again and again."""

PACE = 12
"""Steps that another worker may make for each death, so that no machine is too slow for all of them to happen."""


def minus(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that falls by one for each one that every weight grows."""
    return -output.mean()


def rank() -> int | None:
    """The rank of the worker that this process is."""
    kind, _, number = multiprocessing.current_process().name.rpartition("-")
    return int(number) if kind == "paragrad-worker" else None


class Counting(nn.Module):
    """Every weight goes up by exactly one at each step of SGD with rate 1: whoever sees two different weights sees a tear."""

    def __init__(self, size: int, sleep: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(size))
        self.sleep = sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleep and self.training:
            time.sleep(self.sleep)
        return self.weights.sum().expand(len(x))


class Doomed(Counting):
    """Each incarnation of one worker kills itself at the next line of a list, counted from the end of its second window.

    ``deaths`` is a folder: a file in it is a death that has begun. Without ``lines`` the worker lives, and writes down
    how many lines each of its exchanges has.
    """

    def __init__(self, size: int, *, window: int, deaths: Path, lines: list[int] | None) -> None:
        super().__init__(size)
        self.armed_at = 1 + 2 * window  # the first call is the warm-up's
        self.window, self.deaths, self.lines = window, deaths, lines
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        me = rank()
        if self.training and me is not None:
            self.calls += 1
            if me == LIVES:
                self._keep_pace()
            elif self.lines is None:
                self._count(me)
            elif self.calls == self.armed_at and (line := self._next_line()) is not None:
                trace(Lines(die_at=line))
        return super().forward(x)

    def _next_line(self) -> int | None:
        for line in self.lines or ():
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.deaths / str(line), os.O_CREAT | os.O_EXCL))
                return line
        return None

    def _keep_pace(self) -> None:
        """Let the others die first, but never for long: under a synchronous scheme they may be waiting for this one."""
        end = time.monotonic() + 0.1
        while (begun := len(os.listdir(self.deaths))) < len(self.lines or ()) and self.calls > PACE * (begun + 1):
            if time.monotonic() > end:
                return
            time.sleep(0.002)

    def _count(self, me: int) -> None:
        if self.calls > self.armed_at and (self.calls - 2) % self.window == 0:
            sys.settrace(None)
            with (self.deaths / f"counted-{me}").open("a") as file:
                file.write(json.dumps(self.counted.seen) + "\n")
        if self.calls >= self.armed_at and (self.calls - 1) % self.window == 0:
            self.counted = Lines(die_at=0)
            trace(self.counted)


class Lines:
    """A trace function that counts the lines of the exchange, and ends the process at one of them."""

    def __init__(self, die_at: int) -> None:
        self.die_at = die_at
        self.seen: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if in_exchange(frame) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.seen.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}")
            if len(self.seen) == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def trace(lines: Lines) -> None:
    """Begin to count, in the functions that run already too."""
    frame = sys._getframe(1)
    while frame is not None:
        if in_exchange(frame):
            frame.f_trace = lines.line
        frame = frame.f_back
    sys.settrace(lines)


def in_exchange(frame: FrameType) -> bool:
    """Whether a function belongs to the exchange."""
    name = frame.f_code.co_filename
    return name.startswith(PACKAGE) and name.removeprefix(PACKAGE).startswith(EXCHANGE)


class DiesWarmingUp(Counting):
    """Dies at its very first call, in the process that gets to make the file."""

    def __init__(self, size: int, flag: Path) -> None:
        super().__init__(size)
        self.flag = flag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank() not in (None, LIVES) and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def pull_again_and_again(segment: Fd, layout: dict[str, tuple[int, int, torch.dtype]], until: int, out: Path) -> None:
    """A child that reads a center of which every weight equals the clock, and tells how often it did not."""
    torch.set_num_threads(1)
    reader = CenterReader(Segment(segment.open(), layout))
    value, pulls, torn, clock, clocks = torch.empty(layout["value0"][1]), 0, 0, 0, set()
    out.touch()
    while clock < until:
        clock = reader.pull(value)
        clocks.add(clock)
        low, high = value.aminmax()
        pulls += 1
        torn += not float(low) == float(high) == clock
    out.write_text(json.dumps({"pulls": pulls, "torn": torn, "clocks": len(clocks)}))
