"""The driver of a worker's loop: every request is answered by the ports, and an answer may come later."""

from __future__ import annotations

from typing import Any

import pytest

from paragrad.core import worker as loops
from paragrad.core.worker import WAIT, Driver, Ports


class Recorded(Ports):
    """Answers at once, but for what is to be waited for."""

    def __init__(self, *waits: str) -> None:
        self.waits = waits
        self.asked: list[str] = []

    def _answer(self, name: str, answer: Any = None) -> Any:
        self.asked.append(name)
        return WAIT if name in self.waits else answer

    def window(self, request):
        return self._answer("window", "done")

    def pull(self):
        return self._answer("pull", "pulled")

    def send(self, commit):
        return self._answer("send")

    def receive(self):
        return self._answer("receive", "reply")

    def scatter(self):
        self._answer("scatter")

    def recover(self):
        self._answer("recover")

    def restore(self, optimizer):
        self._answer("restore")

    def keep(self):
        self._answer("keep")


def loop(requests, answers):
    for request in requests:
        answers.append((yield request))


NAMES = ["receive", "scatter", "restore", "window", "pull", "send", "receive", "recover", "keep"]
TAKING = {"restore": {}, "window": loops.Window((0,)), "send": "a commit"}
REQUESTS = [loops.Request(name, TAKING.get(name)) for name in NAMES]


def test_every_request_is_answered_by_its_port_in_order():
    ports, answers = Recorded(), list[Any]()
    driver = Driver(loop(REQUESTS, answers), ports)
    assert driver.go_on() is False
    assert ports.asked == NAMES
    assert answers == ["reply", None, None, "done", "pulled", None, "reply", None, None]
    assert driver.request is None


@pytest.mark.parametrize("name", ["window", "pull", "send", "receive"])
def test_the_loop_rests_where_an_answer_is_waited_for_and_goes_on_with_it(name):
    ports, answers = Recorded(name), list[Any]()
    driver = Driver(loop(REQUESTS, answers), ports)
    going, waited = driver.go_on(), 0
    while going:
        waited += 1
        assert ports.asked[-1] == name
        going = driver.go_on("later")
    assert waited == NAMES.count(name)
    assert answers.count("later") == waited
    assert ports.asked == NAMES


def test_what_a_port_raises_is_raised_and_not_taken_for_the_end_of_the_loop():
    class Broken(Recorded):
        def pull(self):
            raise StopIteration

    with pytest.raises(StopIteration):
        Driver(loop([loops.PULL], []), Broken()).go_on()


def test_progress_counts_the_workers_own_steps():
    window = loops.Window((0, 1), progress=0.5, ahead=3)
    assert [window.progress_at(step, 10) for step in (0, 1, 9)] == [0.8, 0.9, 1.0]
