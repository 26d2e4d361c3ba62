"""Lines that are slow, that break, and that nobody reads from: the worker comes back by itself, the others are not held up."""

from __future__ import annotations

import json
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

import paragrad as pg
from paragrad.engines.transport.connection import Connection, Placement, Replaced
from paragrad.engines.transport.endpoint import TOKEN, Endpoint
from paragrad.rundir.record import read
from tests.engines.net.kills import check_sound
from tests.engines.net.proxy import Proxy
from tests.engines.net.test_network import gated
from tests.engines.net.victim import Scene


def placement(incarnation: int) -> Placement:
    return Placement(0, incarnation, "start", "run", workers=1, window=1, answers=True, beat=0.0)


def test_the_end_of_an_earlier_placement_does_not_end_a_later_one():
    connection = Connection(Endpoint("127.0.0.1:1"), "t" * 20)
    earlier, connection.placement = placement(0), placement(1)
    assert connection._beat(earlier, repeat(0.0)) is None
    connection._heard(earlier, {"gone": True})
    connection._check_membership()
    assert connection._beat(connection.placement, repeat(0.0)) == {}
    connection._heard(connection.placement, {"gone": True})
    with pytest.raises(Replaced):
        connection._check_membership()


def commits_of(scene: Scene, rank: int) -> int:
    return sum(event.kind == "commit" and event.data["worker"] == rank for event in read(scene.out))


def behind(proxy: Proxy, scene: Scene) -> None:
    scene.join(where=proxy.address, token_file=scene.out / TOKEN, shared=False)


@pytest.mark.parametrize("how", ["dark", "broken"])
def test_after_a_cut_the_worker_comes_back_by_itself_and_the_others_never_wait(how, tmp_path):
    """As long as the tests of every day have time for; ``make chaos`` cuts for ten seconds."""
    cut_off(tmp_path, how, seconds=2.0, replace_after=1.0)


def cut_off(folder: Path, how: str, *, seconds: float, replace_after: float) -> dict[str, Any]:
    """A worker's line is cut for so long; what the others made of the time."""
    task = gated(folder, workers=2, batches=4000 if seconds > 5 else 800, engine={"replace_after": replace_after})
    with Scene(task, folder / "scene") as scene:
        scene.serve()
        with Proxy(scene.endpoint().address) as proxy:
            scene.join(shared=False)
            behind(proxy, scene)
            scene.until(lambda: {rank for rank, *_ in scene.acknowledged()} == {0, 1})
            (far,) = {rank for rank, *_ in map(json.loads, (scene.folder / "notes-1").read_text().splitlines())}
            proxy.dark = True
            if how == "broken":
                proxy.cut()
            before = commits_of(scene, 1 - far)
            time.sleep(seconds)
            meanwhile = commits_of(scene, 1 - far) - before
            proxy.dark = False
            told = len((scene.folder / "notes-1").read_text().splitlines())
            began = time.monotonic()
            scene.until(lambda: len((scene.folder / "notes-1").read_text().splitlines()) > told + 1)
            back = time.monotonic() - began
            scene.open_gate()
            scene.wait()
    check_sound(scene)
    assert meanwhile > 2
    assert any(event.kind == "lost" and event.data["rank"] == far for event in read(scene.out))
    return {"seconds": seconds, "commits of the other meanwhile": meanwhile, "seconds until it was back": round(back, 1)}


def test_a_slow_line_that_is_cut_in_the_middle_of_everything_loses_and_doubles_nothing(tmp_path):
    task = gated(tmp_path, workers=1, batches=60, counting=20_000, sleep=0.002, scheme=pg.AEASGD(window=1))
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        with Proxy(scene.endpoint().address) as proxy:
            proxy.delay, proxy.cut_after = 0.001, 1_500_000
            behind(proxy, scene)
            scene.open_gate()
            scene.wait()
    check_sound(scene)
    assert sum(event.kind in ("lost", "repeated") for event in read(scene.out)) > 0


def test_a_worker_that_stops_reading_holds_up_neither_the_others_nor_the_end(tmp_path):
    task = gated(tmp_path, workers=2, counting=2_000_000, batches=60, sleep=0.05, engine={"replace_after": 1.0})
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        with Proxy(scene.endpoint().address) as proxy:
            scene.join()
            behind(proxy, scene)
            scene.until(lambda: {rank for rank, *_ in scene.acknowledged()} == {0, 1})
            proxy.deaf = True
            scene.open_gate()
            began = time.monotonic()
            deaf = scene.workers.pop()
            scene.wait(60)
            print(f"the run ended {time.monotonic() - began:.1f} s after its worker had stopped to read")
            deaf.kill()
            deaf.join()
    check_sound(scene)
