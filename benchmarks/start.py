"""From the call of pg.train to the first applied commit, 4 workers; and from a worker's death to its replacement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure
import torch

import paragrad as pg
from paragrad.models import builtin

WORKERS = 4
MODELS = {"digits-sized MLP": ("mlp", 64), "MLP 784-1000-2000-1000-10": ("mlp:1000-2000-1000", 784)}
KILL_AT = 40
"""The applied commit after which a worker is killed."""


class Witness:
    """Notes the times that matter, and kills worker 0 where it is asked to."""

    def __init__(self, *, kills: bool = False) -> None:
        self.kills = kills
        self.pids: dict[int, int] = {}
        self.killed: float | None = None
        self.found: float | None = None
        self.first: float | None = None
        self.replaced: float | None = None

    def __call__(self, event: pg.Event) -> bool:
        now, data = time.monotonic(), event.data
        if event.kind == "worker":
            self.pids[data["rank"]] = data["pid"]
        elif event.kind == "lost":
            self.found = now
        elif event.kind == "commit":
            self.first = self.first or now
            if self.kills and self.killed is None and data["clock"] >= KILL_AT:
                self.killed = time.monotonic()
                os.kill(self.pids[0], signal.SIGKILL)
            if data["incarnation"] > 0:
                # It was ready, and got its first lease, when the window of its first commit began.
                self.replaced = self.replaced or now - data["seconds"]
                return True
            return not self.kills and data["clock"] >= KILL_AT
        return False


def once(spec: str, inputs: int) -> dict[str, float]:
    """In a fresh process: a cold start, a warm one, and a replacement."""
    _ = pg.train  # names are loaded when first used
    x, y = torch.rand(4096, inputs), torch.randint(0, 10, (4096,))
    model = builtin.build(spec, (inputs,), 10)
    found: dict[str, float] = {}
    with measure.folder() as folder:
        for name in ("cold", "warm", "replacement"):
            witness = Witness(kills=name == "replacement")
            run = pg.Run(out=folder / name, validate_every=None, checkpoint_every=None, callbacks=(witness,))
            options: dict[str, Any] = {"loss": "crossentropy", "optimizer": "adam:lr=0.001", "epochs": 100_000}
            began = time.monotonic()
            pg.train(model, (x, y), scheme=pg.AGN(window=5), engine=pg.Local(workers=WORKERS), run=run, **options, verbose=0)
            if not witness.kills:
                assert witness.first is not None
                found[name] = witness.first - began
            else:
                assert witness.killed is not None
                assert witness.found is not None
                assert witness.replaced is not None
                found["death noticed"] = witness.found - witness.killed
                found["replaced"] = witness.replaced - witness.killed
    return found


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=5)
    parser.add_argument("--seconds", type=float, help="has no effect here: each repeat ends by itself")
    parser.add_argument("--role", help="internal: measure one model in this process")
    options = parser.parse_args()
    if options.role:
        print(json.dumps(once(*MODELS[options.role])))
        return
    report = measure.Report("start", options)
    for repeat in range(options.repeats):
        figures: dict[str, float] = {}
        for model in measure.rotated(list(MODELS), repeat):
            command = [sys.executable, str(Path(__file__).resolve()), "--role", model]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
            figures |= {f"{model}, {name}": value for name, value in json.loads(child.stdout.splitlines()[-1]).items()}
        report.figures.append(figures)
    rows = []
    names = {
        "cold": ("first pg.train of a process to its first commit", "< 3 s"),
        "warm": ("a later pg.train of the same process to its first commit", ""),
        "death noticed": ("SIGKILL of a worker until it is noticed", ""),
        "replaced": ("SIGKILL of a worker until its replacement begins its first window", ""),
    }
    for model in MODELS:
        for name, (sentence, target) in names.items():
            values = report.column(f"{model}, {name}")
            rows.append([f"{sentence}, {model}", measure.spread(values, 3), target])
            report.claims.append(measure.Claim.over(f"{sentence}, {WORKERS} workers, {model}", values, unit="s", target=target))
    title = f"{WORKERS} workers, {options.repeats} fresh processes: median (min-max)"
    measure.show(title, ["", "seconds", "target"], rows)
    report.write()


if __name__ == "__main__":
    main()
