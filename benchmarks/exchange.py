"""Pull + commit of 4.8M parameters: how many a second, as a share of plain memcpy by as many processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import peers
import torch

import paragrad as pg
from paragrad.engines.process.forkserver import Fd
from paragrad.learners.learner import Step

PARAMETERS = 4_798_010
"""Those of the MLP 784-1000-2000-1000-10."""

TARGETS = {"AGN(window=1)": ">= 0.5, aim 0.8"}


class Idle:
    """A learner whose step does next to nothing, so that only the exchange is left."""

    def __init__(self) -> None:
        self.weights = torch.zeros(PARAMETERS)
        self.buffers = torch.empty(0)
        self.integers = torch.empty(0, dtype=torch.int64)
        self.lr = 0.1
        self.aliasable = True

    def alias(self, vector: torch.Tensor) -> None:
        self.weights = vector

    def step(self, batch: Any) -> Step:
        self.weights[0] += 1e-3
        return Step(0.0, 1.0)

    def gradient(self, batch: Any, out: torch.Tensor, accumulate: float = 0.0) -> Step:
        return Step(0.0, 1.0)

    def evaluate(self, source: Any, batch_size: int) -> dict[str, float]:
        return {"loss": 0.0}

    def spread(self) -> bool:
        return False

    def collect(self) -> None: ...

    def check(self) -> None: ...

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load(self, state: Any) -> None: ...


def memcpy(workers: int, seconds: float) -> measure.Stamps:
    """The limit."""
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, PARAMETERS * 4 * (workers + 1))
        return measure.together(peers.memcpy, workers, Fd(fd), PARAMETERS, seconds=seconds)
    finally:
        os.close(fd)


def paragrad(scheme: pg.Scheme, workers: int, seconds: float) -> measure.Stamps:
    """The local engine."""
    data = torch.zeros(100_000, 1)
    return measure.trained(Idle, data, scheme, workers=workers, seconds=seconds, batch_size=1).stamps


def rpc(workers: int, seconds: float) -> measure.Stamps:
    """A parameter server of torch RPC."""
    with measure.folder() as folder:
        return measure.together(peers.rpc, workers + 1, str(folder / "meeting"), PARAMETERS, seconds=seconds)


def all_reduce(workers: int, seconds: float) -> measure.Stamps:
    """gloo."""
    with measure.folder() as folder:
        return measure.together(peers.all_reduce, workers, str(folder / "meeting"), PARAMETERS, seconds=seconds)


def ray_actor(workers: int, seconds: float) -> measure.Stamps | None:
    """A parameter server as a Ray actor."""
    return peers.ray_actor(workers, PARAMETERS, seconds)


CONTENDERS: dict[str, Callable[[int, float], measure.Stamps | None]] = {
    "memcpy": memcpy,
    "AGN(window=1)": partial(paragrad, pg.AGN(window=1)),
    "AEASGD(window=1)": partial(paragrad, pg.AEASGD(window=1)),
    "torch RPC (TCP)": rpc,
    "gloo all-reduce": all_reduce,
    "Ray actor": ray_actor,
}


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=4, repeats=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    options = parser.parse_args()
    report = measure.Report("exchange", options)
    for repeat in range(options.repeats):
        figures: dict[str, float | None] = {}
        for workers in options.workers:
            for name in measure.rotated(options.only, repeat):
                stamps = CONTENDERS[name](workers, options.seconds)
                figures[f"{name}, {workers} workers"] = None if stamps is None else measure.rate(stamps, options.seconds)
        report.figures.append(figures)
    for workers in options.workers:
        rows = []
        for name in options.only:
            key, limit = f"{name}, {workers} workers", f"memcpy, {workers} workers"
            shares = report.ratios(key, limit)
            missing = not report.column(key)
            rows.append([name, "not installed" if missing else measure.spread(report.column(key), 1), measure.spread(shares)])
            if shares and name != "memcpy":
                what = f"exchange of 4.8M parameters, {workers} workers, {name} / memcpy"
                report.claims.append(measure.Claim.over(what, shares, target=TARGETS.get(name, "")))
        title = f"Pull + commit of {PARAMETERS:,} float32, {workers} workers, {options.repeats} repeats: median (min-max)"
        measure.show(title, ["", "exchanges/s", "share of memcpy"], rows)
    if "Ray actor" in options.only and not any("Ray" in key for key in report.medians()):
        report.notes.append("Ray is not installed")
    report.write()


if __name__ == "__main__":
    main()
