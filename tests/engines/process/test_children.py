"""Processes that are watched: their notes are read, their end is handled once, and nothing is left open."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paragrad.engines.process.children import Child, Children, Poller, kill_if_stopped, wake_by
from paragrad.engines.process.launcher import describe_exit, is_stopped
from paragrad.engines.process.payload import Bytes, pack
from paragrad.engines.process.task import Task


@dataclass(frozen=True)
class Says:
    """A role that reports, and then ends in some way."""

    how: str

    def __call__(self, job, report) -> None:
        assert report.carries_errors
        report("warning", "on its way")
        report("found", {"threads": torch.get_num_threads()})
        if self.how == "raises":
            raise ValueError("a mistake")
        if self.how == "killed":
            os.kill(os.getpid(), 9)
        if self.how == "stays":
            time.sleep(600)


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path)
    yield made
    made.children.close()
    for fd in made.fds:
        os.close(fd)


class Scene:
    def __init__(self, directory: Path) -> None:
        self.fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poller = Poller()
        self.poller.add(self.fds[0], lambda: os.read(self.fds[0], 4096))
        self.children = Children(self.poller, wake_by(self.fds[1]))
        self.directory = directory
        self.notes: list[tuple[str, Any]] = []
        self.exits: list[Child] = []

    def start(self, how: str, launcher: Any = None) -> Child:
        from paragrad.core.job import Job

        job = Job.__new__(Job)
        for name in ("train", "validation"):
            object.__setattr__(job, name, None)
        task = Task("mine", pack(job, Bytes()), Says(how), self.directory, threads=1)
        note = lambda kind, what: self.notes.append((kind, what))  # noqa: E731
        return self.children.start(task, on_exit=self.exits.append, on_note=note, launcher=launcher, incarnation=4)

    def until(self, condition) -> None:
        until = time.monotonic() + 30
        while not condition() and time.monotonic() < until:
            self.poller.wait(0.1)
            self.children.attend()
        assert condition()


@pytest.mark.parametrize(
    ("how", "words"), [("ends", "exited with status 0"), ("raises", "exited with status 1"), ("killed", "was ended by SIGKILL")]
)
def test_notes_come_before_the_end_and_the_end_comes_once(scene, how, words):
    child = scene.start(how)
    scene.until(lambda: scene.exits)
    assert scene.notes == [("warning", "on its way"), ("found", {"threads": 1})]
    assert scene.exits == [child]
    assert describe_exit(child.process).startswith(words)
    assert (child.error is not None) == (how == "raises")
    if child.error is not None:
        assert "ValueError: a mistake" in child.error["text"]
        assert "ValueError: a mistake" in (scene.directory / "logs" / "mine.log").read_text()
    assert scene.children.running == []
    scene.children.end(child)
    assert scene.exits == [child]


def test_closing_ends_what_still_runs_and_handles_no_exit(scene):
    child = scene.start("stays")
    scene.until(lambda: len(scene.notes) == 2)
    scene.children.close()
    assert not child.process.is_alive()
    assert scene.exits == []


def test_a_stopped_process_is_killed_after_a_while(scene):
    child = scene.start("stays")
    scene.until(lambda: len(scene.notes) == 2)
    os.kill(child.process.pid, 19)
    scene.until(lambda: is_stopped(child.process))
    kill_if_stopped(child, 10.0, after=5.0)
    kill_if_stopped(child, 14.0, after=5.0)
    assert child.process.is_alive()
    kill_if_stopped(child, 15.5, after=5.0)
    scene.until(lambda: scene.exits)


class Elsewhere:
    """A launcher whose processes have no descriptor; an exit is reported by a thread, also before ``start`` returns."""

    def __init__(self, when: str) -> None:
        self.when = when
        self.ends: Any = None
        self.pid = self.sentinel = self.lost = None
        self.exitcode = 0

    def start(self, task, on_exit):
        self.ends = on_exit
        if self.when == "before":
            thread = threading.Thread(target=on_exit)
            thread.start()
            thread.join()
        return self

    def is_alive(self) -> bool:
        return False

    def kill(self) -> None:
        pass

    join = kill


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exit_that_a_launcher_reports_is_handled_by_the_loop(scene, when):
    launcher = Elsewhere(when)
    child = scene.start("ends", launcher)
    if when == "after":
        assert scene.exits == []
        threading.Thread(target=launcher.ends).start()
    scene.until(lambda: scene.exits == [child])
    launcher.ends()  # reported twice
    scene.children.attend()
    assert scene.exits == [child]


def test_an_exit_reported_after_the_end_touches_no_descriptor(scene):
    launcher = Elsewhere("after")
    scene.start("ends", launcher)
    scene.children.close()
    with contextlib.suppress(BlockingIOError):
        os.read(scene.fds[0], 4096)
    launcher.ends()
    with pytest.raises(BlockingIOError):
        os.read(scene.fds[0], 4096)


def test_a_descriptor_that_was_closed_by_an_earlier_call_is_not_read(tmp_path):
    poller, calls = Poller(), []
    first, second = os.pipe(), os.pipe()
    poller.add(first[0], lambda: (calls.append("first"), poller.drop(second[0])))
    poller.add(second[0], lambda: calls.append("second"))
    for _, end in (first, second):
        os.write(end, b"x")
    poller.wait(0)
    assert calls in (["first"], ["second", "first"])
    for fd in (*first, *second):
        os.close(fd)
