"""The collapses that were published, seen: un-normalised windows, many workers, a force from a stale center.

    .venv/bin/python benchmarks/collapse.py --mnist FILE.npz [--device cuda]
    .venv/bin/python benchmarks/collapse.py --mnist FILE.npz [--device cuda] --plain --out results/collapse_plain.json

An exact simulation (workers in turn, so that each commit is n - 1 updates stale) in the thesis's setting: MNIST, an MLP of
4.8M parameters, Adam 1e-3 (or SGD 0.1). Cases that the result file holds already are not run again. With --plain, Downpour
and AGN as a plain PyTorch loop without paragrad: if both collapse alike, it is the scheme that does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import measure
import torch
from torch import nn

import paragrad as pg
from paragrad.config.options import describe
from paragrad.core.job import Job
from paragrad.core.worker import Receive, Send
from paragrad.data import load
from paragrad.data.plan import Plan
from paragrad.engines.serial import Serial
from paragrad.learners.learner import Learner
from paragrad.learners.torch import TorchLearner
from paragrad.models import builtin
from paragrad.optim.optimizer import factory
from paragrad.schemes.traits import pulls_before_commit

LOOKS = 4
"""Looks at the center in each epoch."""

ADAM, SGD = "adam:lr=0.001", "sgd:lr=0.1"

CASES: list[tuple[pg.Scheme, str, int, int]] = [
    (pg.Downpour(window=10), ADAM, 4, 32),
    (pg.AGN(window=10), ADAM, 4, 32),
    (pg.Downpour(), ADAM, 10, 128),
    (pg.Downpour(), ADAM, 20, 128),
    (pg.Downpour(), ADAM, 40, 128),
    (pg.GEM(momentum=0.0), ADAM, 40, 128),
    (pg.GEM(), ADAM, 20, 128),
    (pg.Downpour(), SGD, 20, 128),
    (pg.GEM(), SGD, 20, 128),
    (pg.Downpour(window=10), ADAM, 10, 128),
    (pg.AGN(window=10), ADAM, 10, 128),
    (pg.ADAG(window=10), ADAM, 10, 128),
    (pg.GEM(window=10), ADAM, 10, 128),
    (pg.AGN(window=15), ADAM, 20, 128),
    (pg.ADAG(window=15), ADAM, 20, 128),
    (pg.AEASGD(window=10, alpha=0.5), ADAM, 10, 128),
    (pg.AEASGD(window=10, alpha=0.5, atomic=False), ADAM, 10, 128),
    (pg.AEASGD(window=10, alpha=0.1, atomic=False), ADAM, 10, 128),
]
"""Scheme, optimiser, workers, one worker's mini-batch."""

REFERENCE: list[tuple[int, bool, str, int, int]] = [
    (10, False, ADAM, 4, 32),
    (10, True, ADAM, 4, 32),
    (1, False, ADAM, 10, 128),
    (1, False, ADAM, 20, 128),
    (1, False, ADAM, 40, 128),
    (1, False, SGD, 20, 128),
    (10, False, ADAM, 10, 128),
    (10, True, ADAM, 10, 128),
]
"""Window, whether it is divided by its steps, optimiser, workers, mini-batch: the same in plain PyTorch."""


class Looks:
    """Test accuracy and loss along a run."""

    def __init__(self, learner: Learner, validation: Any, every: int) -> None:
        self.learner, self.validation, self.every, self.next = learner, validation, every, every
        self.found: list[dict[str, float]] = []

    def look(self, batches: int, rows: int, value: Callable[[], torch.Tensor], *, last: bool = False) -> None:
        """Evaluate the center if it is time."""
        if batches < self.next and not last:
            return
        self.next += self.every
        self.learner.weights.copy_(value())
        self.learner.spread()
        found = self.learner.evaluate(self.validation, 2000)
        self.found.append({"epochs": round(rows / 60_000, 2), **{k: round(v, 4) for k, v in found.items()}})


def simulate(
    scheme: pg.Scheme, optimizer: str, workers: int, batch: int, epochs: int, parts: load.Split, device: str
) -> list[Any]:
    """Run paragrad's own worker loop and center, workers in turn."""
    module = builtin.build("mlp:1000-2000-1000", (28, 28), 10)

    def make(_: str) -> Learner:
        return TorchLearner(module, nn.CrossEntropyLoss(), factory(optimizer), device=device)

    plan = Plan(len(parts.train), batch, epochs, 0)
    serial = Serial(Job(scheme, make, parts.train, parts.validation, plan, 2000), workers, stolen=True)
    looks = Looks(make(device), parts.validation, plan.batches // LOOKS)
    serial.start()
    pulls_apart = pulls_before_commit(scheme) and scheme.window > 1 and isinstance(scheme, pg.AEASGD)
    try:
        while serial.ready:
            if pulls_apart:
                everyone_pulls_then_everyone_commits(serial)
            else:
                serial.step(serial.ready[0])
            serial.applied.clear()
            counts = serial.center.ledger.counts
            looks.look(counts.steps, counts.rows, lambda: serial.center.value)
    except pg.Diverged as error:
        looks.found.append({"epochs": round(serial.center.ledger.counts.rows / 60_000, 2), "diverged": 1.0})
        print(f"  {str(error).partition('.')[0]}", flush=True)
        return looks.found
    looks.look(serial.center.ledger.counts.steps, serial.center.ledger.counts.rows, lambda: serial.center.value, last=True)
    return looks.found


def everyone_pulls_then_everyone_commits(serial: Serial) -> None:
    """The order that hurts the thesis's elastic form: all pull the same center before any of them commits."""
    ranks = list(serial.ready)
    waiting = []
    for rank in ranks:
        actor = serial.actors[rank]
        while actor.request is not None and not isinstance(actor.request, Send):
            if actor.reply is not None:
                answer: Any = actor.reply
                actor.reply = None
            elif isinstance(actor.request, Receive):
                break
            else:
                answer = serial.answer(actor, actor.request)
            try:
                actor.request = actor.loop.send(answer)
            except StopIteration:
                actor.request = None
        serial.ready.remove(rank)
        if isinstance(actor.request, Send):
            waiting.append(actor)
    for actor in waiting:
        assert isinstance(actor.request, Send)
        commit = changed(actor.request.commit, value=actor.request.commit.value.clone())
        actor.request = actor.loop.send(None)
        serial.deliver(serial.center.receive(commit))


def plain(
    window: int, divide: bool, optimizer: str, workers: int, batch: int, epochs: int, parts: load.Split, device: str
) -> list[Any]:
    """Downpour, or AGN, without paragrad."""

    def net() -> nn.Module:
        return builtin.build("mlp:1000-2000-1000", (28, 28), 10).to(device)

    def read(module: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    def write(module: nn.Module, vector: torch.Tensor) -> None:
        pieces = vector.split([p.numel() for p in module.parameters()])
        for parameter, piece in zip(module.parameters(), pieces, strict=True):
            parameter.data.copy_(piece.view_as(parameter))

    assert parts.validation is not None
    x, y = (tensor.to(device) for tensor in parts.train.batch(torch.arange(len(parts.train)).numpy()))
    xt, yt = (tensor.to(device) for tensor in parts.validation.batch(torch.arange(len(parts.validation)).numpy()))
    replicas, test, loss = [net() for _ in range(workers)], net(), nn.CrossEntropyLoss()
    optimizers = [factory(optimizer)(replica.parameters()) for replica in replicas]
    center = read(replicas[0])
    anchors = [center.clone() for _ in range(workers)]
    found: list[Any] = []
    every = len(x) // batch // LOOKS
    turn = done = 0
    torch.manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(x), device=device)
        batches = list(order.split(batch))
        while batches:
            replica, stepper = replicas[turn % workers], optimizers[turn % workers]
            taken, batches = batches[:window], batches[window:]
            for rows in taken:
                stepper.zero_grad(set_to_none=True)
                loss(replica(x[rows]), y[rows]).backward()
                stepper.step()
            center = center + (read(replica) - anchors[turn % workers]) / (len(taken) if divide else 1)
            anchors[turn % workers] = center
            write(replica, center)
            turn += 1
            if (done + len(taken)) // every > done // every:
                write(test, center)
                with torch.no_grad():
                    output = test(xt)
                right = (output.argmax(1) == yt).float().mean()
                seen = {"loss": round(float(loss(output, yt)), 4), "accuracy": round(float(right), 4)}
                found.append({"epochs": round((done + len(taken)) * batch / len(x), 2), **seen})
            done += len(taken)
    return found


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=1)
    parser.add_argument("--mnist", required=True, help="an .npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="the plain PyTorch loops instead of paragrad's schemes")
    options = parser.parse_args()
    report = measure.Report("collapse", options)
    parts = load.split(options.mnist, None, None, 0)
    options.mnist = Path(options.mnist).name
    if Path(options.out).exists():
        report.figures = json.loads(Path(options.out).read_text(encoding="utf-8"))["repeats"]
    had = {(case["case"], case["optimizer"], case["workers"]) for case in report.figures}
    setting = (options.epochs, parts, options.device)
    for scheme, optimizer, workers, batch in [] if options.plain else CASES:
        name = describe(scheme)
        if (name, optimizer, workers) not in had:
            note(report, name, optimizer, workers, batch, simulate(scheme, optimizer, workers, batch, *setting))
    for window, divide, optimizer, workers, batch in REFERENCE if options.plain else []:
        name = f"plain PyTorch, {'agn' if divide else 'downpour'}:window={window}"
        if (name, optimizer, workers) not in had:
            note(report, name, optimizer, workers, batch, plain(window, divide, optimizer, workers, batch, *setting))


BEGAN = time.monotonic()


def note(report: measure.Report, name: str, optimizer: str, workers: int, batch: int, found: list[Any]) -> None:
    """Keep and print what one case did; written after each, since a whole run is long."""
    report.figures.append({"case": name, "optimizer": optimizer, "workers": workers, "batch_size": batch, "looks": found})
    worst = max((look["loss"] for look in found if look.get("loss") is not None), default=float("nan"))
    last = found[-1].get("accuracy", float("nan"))
    seconds = time.monotonic() - BEGAN
    print(
        f"{seconds:5.0f} s  {name}, {optimizer}, {workers} workers: worst test loss {worst:.2f}, last accuracy {last:.4f}",
        flush=True,
    )
    report.write()


if __name__ == "__main__":
    main()
