"""The display of a run: a live view in a terminal, plain lines in a pipe, nothing if quiet."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paragrad.data import progress
from paragrad.data.progress import Progress
from paragrad.errors import counted
from paragrad.rundir.record import is_virtual

if TYPE_CHECKING:
    from paragrad.types import Event

REFRESH = 0.25
"""Seconds between two updates of the live view."""
LINE = 5.0
"""Seconds between two plain lines."""
SOON = 1.0
"""Seconds after a line without a line for a validation: epochs may be short."""
ROWS = 16
"""Workers shown in rows; the others are only counted."""
HEADINGS = f"{'worker':>6}{'pid':>10}{'commits':>10}{'samples/s':>13}{'loss':>11}{'staleness':>12}   state"
ENDS = {"seconds": "time limit", "target": "target reached", "patience": "no better"}
STATES = {"warming up": "yellow", "running": "green", "lost": "bold red", "done": "dim"}


@dataclass(slots=True)
class _Worker:
    pid: int = 0
    incarnation: int = 0
    commits: int = 0
    rows: int = 0
    loss: float = math.nan
    staleness: int = 0
    state: str = "warming up"
    rate: float = 0.0
    rows_before: int = 0


class Display:
    """A callback for the events of a run; call ``close`` at the end, also after an error, to restore the terminal.

    A commit only changes a few numbers (microseconds). The callback redraws at most four times per second.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, lines: bool = False, max_seconds: float | None = None
    ) -> None:
        plain = lines or _in_a_notebook()
        self.console = console or Console(highlight=False, force_terminal=False if plain else None)
        self._quiet = quiet
        self._max_seconds = max_seconds
        self._live: Live | None = None
        self._workers: dict[int, _Worker] = {}
        self._start: dict[str, Any] = {}
        self._directory = ""
        self._time = self._began = self._wall_began = self._drawn = 0.0
        self._next = math.inf
        self.commits = 0
        """Commits applied since the run started or was resumed."""
        self._rows = self._staleness = self._refused = 0
        self._rows_planned = self._rows_resumed = self._rows_before = 0
        self._rate = 0.0
        self._loss = math.nan
        self._validation: dict[str, Any] = {}
        self._ended = ""

    def __call__(self, event: Event) -> None:
        if self._quiet:
            return
        try:
            self._time = event.time
            if hook := getattr(self, f"_on_{event.kind}", None):
                hook(event.data)
            if (now := time.monotonic()) >= self._next:
                self._tick(now)
        except OSError:  # the disk is full, or the reader of the pipe is gone: that must not end a run
            self._quiet, self._live = True, None

    def close(self) -> None:
        """Draw once more and restore the terminal; it may be called twice."""
        live, self._live = self._live, None
        if live is not None:
            self._rates(time.monotonic())
            live.update(self.picture())
            live.stop()

    @contextmanager
    def reads(self) -> Iterator[None]:
        """Inside ``with``, show the progress of reading files: one changing line in a terminal, else one every few seconds."""
        line = Live(console=self.console, auto_refresh=False, transient=True)
        every, last = (REFRESH if self.console.is_terminal else LINE), time.monotonic()

        def show(step: Progress) -> None:
            nonlocal last
            if self._quiet or time.monotonic() < last + every:
                return
            last = time.monotonic()
            size = f"{step.total / 1e6:,.0f} MB" if step.unit == "bytes" else counted(step.total, "row")
            text = f"{step.what[:1].upper()}{step.what[1:]}: {step.done / max(step.total, 1):.0%} of {size}"
            try:
                if self.console.is_terminal:
                    line.start()
                    line.update(Text(text), refresh=True)
                else:
                    self._print(text)
            except OSError:  # as in __call__
                self._quiet = True

        with progress.watched(show):
            try:
                yield
            finally:
                line.stop()

    def note(self, message: str) -> None:
        """Print a message that the user should know."""
        if not self._quiet:
            self._print(message)

    def warn(self, message: str) -> None:
        """Print a message that the user must not miss."""
        if self._quiet:
            return
        if self.console.is_terminal:
            width = min(self.console.width, 100)
            panel = Panel(Text(message), title="warning", title_align="left", border_style="bold yellow", width=width)
            self.console.print(panel)
        else:
            self._print(f"WARNING: {message}")

    def _on_commit(self, data: Any) -> None:
        worker = self._workers.get(data["worker"]) or self._workers.setdefault(data["worker"], _Worker())
        rows, loss, staleness = data["rows"], data["loss"], data["staleness"]
        worker.commits += 1
        worker.rows += rows
        worker.staleness = staleness
        worker.state = "running"
        self.commits += 1
        self._rows += rows
        self._staleness += staleness
        if loss is not None and math.isfinite(loss):
            worker.loss = loss
            if math.isnan(self._loss):
                self._loss = loss
            else:
                self._loss += (loss - self._loss) * max(1 / self.commits, 0.2 / len(self._workers))

    def _on_directory(self, data: Any) -> None:
        self._directory = data["path"]

    def _on_start(self, data: Any) -> None:
        self._start = dict(data)
        self._rows_planned = data["rows"] * data["epochs"]
        self._drawn = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(self.picture(), console=self.console, auto_refresh=False, vertical_overflow="crop")
            self._live.start(refresh=True)
            self._next = self._drawn + REFRESH
        else:
            size = f"{counted(data['parameters'], 'parameter')}, {counted(data['rows'], 'row')}"
            length = f"{counted(data['epochs'], 'epoch')}, batches of {data['batch_size']}, seed {data['seed']}"
            how = f"{data['scheme']} on {data['engine']}" + (f", sent as {data['codec']}" if "codec" in data else "")
            self._print(f"{how}: {counted(data['workers'], 'worker')}, {size}, {length}")
            self._next = self._drawn + LINE

    def _on_worker(self, data: Any) -> None:
        worker = self._workers.setdefault(data["rank"], _Worker())
        worker.pid, worker.incarnation, worker.state = data["pid"], data["incarnation"], "warming up"

    def _on_listening(self, data: Any) -> None:
        if data["here"] != data["workers"]:
            self.note(f"The center listens at {data['address']}. Workers join with: paragrad join {data['directory']}")

    def _on_waiting(self, data: Any) -> None:
        self._print(f"Waiting for workers: {data['joined']} of {data['needed']} have joined.")

    def _on_restart(self, data: Any) -> None:
        self._print(f"The center continues at update {data['clock']}; its workers reconnect by themselves.")

    def _on_go(self, data: Any) -> None:
        self._began = self._time
        self._wall_began = time.monotonic()
        for worker in self._workers.values():
            worker.state = "running"

    def _on_lost(self, data: Any) -> None:
        self._workers.setdefault(data["rank"], _Worker()).state = "lost"
        if not self._simulated:  # a simulated worker is lost because the cluster asks for it
            where = f" on {data['host']}" if "host" in data else "" if data["pid"] is None else f" (pid {data['pid']})"
            self._print(f"Worker {data['rank']}{where} was lost: {data['reason']}", style="red")

    def _on_refused(self, data: Any) -> None:
        if data["why"] == "late":  # part of the scheme, not a fault
            return
        self._refused += 1
        if self._refused <= 3:  # later ones are only counted
            self._print(f"Commit {data['sequence']} of worker {data['worker']} was rejected: {data['why']}", style="red")

    def _on_validation(self, data: Any) -> None:
        self._validation = dict(data)
        now = time.monotonic()
        if self._live is None and self._share < 1 and not self._simulated and now - self._drawn >= SOON:
            self._tick(now)  # not for the last one: it is in the line at the end

    def _on_resume(self, data: Any) -> None:
        self._rows_resumed = int(data.get("rows", 0))

    def _on_note(self, data: Any) -> None:
        self.note(data["message"])

    def _on_warning(self, data: Any) -> None:
        self.warn(data["message"])

    def _on_end(self, data: Any) -> None:
        self._ended = ENDS.get(data["reason"], data["reason"])
        for worker in self._workers.values():
            if worker.state != "lost":
                worker.state = "done"
        if self._live is None:
            self._rates(time.monotonic())
            self._print(f"{self._line()}  ended: {self._ended}" if self.commits else f"Nothing was trained: {self._ended}.")
        self._next = math.inf
        self.close()

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style), soft_wrap=True)

    def _tick(self, now: float) -> None:
        self._rates(now)
        if self._live is not None:
            self._next = now + REFRESH
            self._live.update(self.picture(), refresh=True)
        else:
            self._next = now + LINE
            self._print(self._line())

    def _rates(self, now: float) -> None:
        """Update samples per second: smoothed over about two seconds, or the mean of the run once it has ended."""
        gone, self._drawn = now - self._drawn, now
        for worker in self._workers.values():
            worker.rate = self._smoothed(worker.rate, worker.rows, worker.rows_before, gone)
            worker.rows_before = worker.rows
        self._rate = self._smoothed(self._rate, self._rows, self._rows_before, gone)
        self._rows_before = self._rows

    def _smoothed(self, rate: float, rows: int, before: int, gone: float) -> float:
        if self._ended:
            return rows / self._elapsed if self._elapsed > 0 else 0.0
        if gone <= 0:
            return rate
        fresh = (rows - before) / gone
        return fresh if rate == 0 else rate + (fresh - rate) * -math.expm1(-gone / 2.0)

    @property
    def _simulated(self) -> bool:
        return is_virtual(self._start)

    @property
    def _elapsed(self) -> float:
        """Seconds of real time since the start barrier."""
        return time.monotonic() - self._wall_began if self._simulated else self._time - self._began

    @property
    def _clock(self) -> str:
        return duration(self._time) + " virtual" * self._simulated

    @property
    def _share(self) -> float:
        return min(1.0, (self._rows + self._rows_resumed) / self._rows_planned) if self._rows_planned else 0.0

    def _time_left(self) -> str:
        gone = self._elapsed
        if self._ended or not self._rows or gone <= 0:
            return ""
        left = (self._rows_planned - self._rows_resumed - self._rows) * gone / self._rows
        if self._max_seconds is not None and not self._simulated:
            left = min(left, self._max_seconds - gone)
        return f"{duration(max(0.0, left))} left"

    def _figures(self) -> list[tuple[str, str]]:
        figures = [("samples/s", f"{self._rate:,.0f}"), ("training loss", number(self._loss))]
        measured = next((name for name in ("accuracy", "loss") if name in self._validation), None)
        if measured is not None:
            figures.append((f"test {measured}", number(self._validation[measured])))
        mean = self._staleness / self.commits if self.commits else 0.0
        figures += [("commits", f"{self.commits:,}"), ("mean staleness", f"{mean:.2f}")]
        if self._refused:
            figures.append(("rejected", f"{self._refused:,}"))
        return figures

    def _epoch(self) -> str:
        epochs = self._start.get("epochs", 0)
        return f"epoch {min(epochs, int(self._share * epochs) + 1)}/{epochs}"

    def _line(self) -> str:
        figures = "  ".join(f"{name} {value}" for name, value in self._figures())
        left = self._time_left()
        return f"{self._clock}  {self._epoch()} ({self._share:.0%})  {figures}" + (f"  {left}" if left else "")

    def picture(self) -> RenderableType:
        """Return the live view of the present state."""
        width = min(self.console.width, 100)
        scheme, engine = str(self._start.get("scheme", "")), self._start.get("engine", "")
        return Panel(
            Group(self._bar(width - 4), self._headline(), Text(), self._table()),
            title=Text.assemble(("paragrad", "bold"), "  ", (scheme, "bold cyan"), f"  on {engine}"),
            title_align="left",
            subtitle=Text(self._directory, "dim"),
            subtitle_align="right",
            border_style="cyan",
            width=width,
        )

    def _bar(self, width: int) -> RenderableType:
        if self.commits or self._ended:
            remark = self._ended or self._time_left()
            after = f" {self._share:4.0%}  {self._clock}" + (f", {remark}" if remark else "")
        else:
            after = "   workers warm up"
        epoch = f"{self._epoch()}  "
        grid = Table.grid()
        room = max(10, width - cell_len(epoch) - 34)
        bar = ProgressBar(total=1.0, completed=self._share, width=room, complete_style="cyan", finished_style="green")
        grid.add_row(Text(epoch, "bold"), bar, Text(after))
        return grid

    def _headline(self) -> RenderableType:
        parts: list[Any] = []
        for name, value in self._figures():
            parts += [(value, "bold"), (f" {name}", "dim"), "  "]
        return Padding(Text.assemble(*parts[:-1], no_wrap=True, overflow="ellipsis"), (1, 0, 0, 0))

    def _table(self) -> RenderableType:
        # Fixed columns, because a rich Table of sixteen rows takes four times as long.
        lines: list[Any] = [(HEADINGS, "dim")]
        for rank in sorted(self._workers)[:ROWS]:
            worker = self._workers[rank]
            age = str(worker.staleness) if worker.commits else "–"
            figures = f"{worker.commits:>10,}{worker.rate:>13,.0f}{number(worker.loss):>11}{age:>12}   "
            lines += [f"\n{rank:>6}{worker.pid:>10}", figures, (f"● {worker.state}", STATES[worker.state])]
            if worker.incarnation:
                lines.append((f"  (replaced {worker.incarnation}×)", "dim"))
        if len(self._workers) > ROWS:
            lines.append((f"\n   … and {len(self._workers) - ROWS} more", "dim"))
        return Text.assemble(*lines, no_wrap=True, overflow="ellipsis")


def _in_a_notebook() -> bool:
    # A cell with !paragrad train has a terminal that cannot move the cursor: each update of a live view would add a copy.
    # Jupyter and its kernel set these environment variables.
    return "JPY_PARENT_PID" in os.environ or "inline" in os.environ.get("MPLBACKEND", "")


def number(value: float | None) -> str:
    """Return a number with four digits, or a dash if it is missing."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours, whichever reads best."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
