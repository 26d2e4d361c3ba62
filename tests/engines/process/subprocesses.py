"""A launcher of the tests' own: workers as plain subprocesses, of which the center knows neither a number nor a descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle

from paragrad.engines.process.payload import File
from paragrad.engines.process.task import Task

PROGRAM = "import cloudpickle, sys; cloudpickle.load(sys.stdin.buffer).run()"


@dataclass
class Started:
    """A process as a scheduler would show it: somewhere else."""

    popen: subprocess.Popen[bytes]
    lost: str | None = None
    pid: int | None = None
    sentinel: int | None = None

    @property
    def exitcode(self) -> int | None:
        return self.popen.poll()

    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()

    def join(self) -> None:
        self.popen.wait()


@dataclass(frozen=True)
class Subprocesses:
    """Starts each worker with its task on standard input."""

    started: list[Started] = field(default_factory=list, compare=False)

    def storage(self, directory: Path) -> File:
        return File(directory / "job.payload")

    def start(self, task: Task, on_exit: Callable[[], None]) -> Started:
        (task.directory / "logs").mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with (task.directory / "logs" / f"{task.name}.log").open("ab") as log:
            popen = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=-1, stdout=log, stderr=log, env=environment)
        process = Started(popen)
        self.started.append(process)
        popen.stdin.write(cloudpickle.dumps(task))
        popen.stdin.close()
        threading.Thread(target=lambda: (popen.wait(), on_exit()), daemon=True).start()
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.join()
