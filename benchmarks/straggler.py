"""One of two workers slowed four times: rows a second of asynchronous schemes against SyncSGD."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import measure
import torch
from torch import nn

import paragrad as pg

WORKERS, BATCH, SLOWDOWN = 2, 32, 4
PAUSE = 0.02
"""Seconds that every step sleeps: it stands for the step's work, and leaves the cores free."""

SCHEMES = {"SyncSGD": pg.SyncSGD(), "AGN(window=5)": pg.AGN(window=5), "AEASGD(window=5)": pg.AEASGD(window=5)}


class Paced(nn.Module):
    """A small model that takes its time; the first process to make the flag file takes four times as long."""

    def __init__(self, flag: Path, compute: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.flag = str(flag)
        self.compute = compute
        self.pause: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            if self.pause is None:
                self.pause = PAUSE
                if self._is_first():
                    self.pause = SLOWDOWN * PAUSE + (SLOWDOWN - 1) * self.compute
            time.sleep(self.pause)
        return self.body(x)  # type: ignore[no-any-return]

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def compute_seconds(folder: Path) -> float:
    """What a step takes beside its pause, in a run of one worker that is not slowed."""
    flag = folder / "nobody"
    flag.touch()
    data = (torch.rand(4096, 64), torch.randint(0, 10, (4096,)))
    options = {"optimizer": "sgd:lr=0.01", "loss": "crossentropy", "batch_size": BATCH}
    commits = measure.trained(Paced(flag), data, pg.AGN(window=5), workers=1, seconds=2, **options)
    return max(0.0, statistics.median(commits.step_seconds[0]) - PAUSE)


def main() -> None:
    options = measure.parser(Path(__file__).stem, __doc__, seconds=8, repeats=3).parse_args()
    report = measure.Report("straggler", options)
    data = (torch.rand(4096, 64), torch.randint(0, 10, (4096,)))
    training = {"optimizer": "sgd:lr=0.01", "loss": "crossentropy", "batch_size": BATCH}
    with measure.folder() as folder:
        compute = compute_seconds(folder)
        for repeat in range(options.repeats):
            figures: dict[str, float] = {}
            for name, scheme in measure.rotated(list(SCHEMES.items()), repeat):
                model = Paced(folder / f"{repeat}-{name}", compute)
                commits = measure.trained(model, data, scheme, workers=WORKERS, seconds=options.seconds, **training)
                figures[name] = measure.rate(commits.stamps, options.seconds)
                steps = sorted(statistics.median(seconds) for seconds in commits.step_seconds.values())
                figures[f"slow step / normal step, {name}"] = steps[-1] / steps[0]
            report.figures.append(figures)
    rows = []
    for name in SCHEMES:
        gains = report.ratios(name, "SyncSGD")
        slow = measure.spread(report.column(f"slow step / normal step, {name}"))
        rows.append([name, measure.spread(report.column(name), 0), measure.spread(gains), slow])
        if name != "SyncSGD":
            what = f"one of two workers slowed {SLOWDOWN}x: {name} / SyncSGD"
            report.claims.append(measure.Claim.over(what, gains, unit="x", target=">= 1.9"))
    title = f"One of {WORKERS} workers slowed {SLOWDOWN} times, {options.repeats} repeats: median (min-max)"
    measure.show(title, ["", "samples/s", "/ SyncSGD", "slow step / normal step"], rows)
    report.write()


if __name__ == "__main__":
    main()
