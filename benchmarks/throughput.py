"""Two workers of one thread against two plain PyTorch processes that never talk, and against DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure
import peers

import paragrad as pg
from paragrad.models import builtin

WORKERS, BATCH = 2, 128
MODELS = {"MLP 784-1000-2000-1000-10": "mlp:1000-2000-1000", "small CNN": "cnn"}
SCHEMES = {"AGN(window=15)": pg.AGN(window=15), "AGN(window=1)": pg.AGN(window=1), "SyncSGD": pg.SyncSGD()}
LIMIT, KEPT, DDP = "separate processes (the limit)", "the same, keeping their heap", "DistributedDataParallel (gloo)"
TARGETS = {"AGN(window=15)": ">= 0.95", "AGN(window=1)": ">= 0.85"}


def paragrad(scheme: pg.Scheme, spec: str, optimizer: str, seconds: float) -> measure.Stamps:
    """The local engine."""
    model, make = builtin.build(spec, (784,), 10), partial(peers.optimizer_of, optimizer)
    options = {"optimizer": make, "loss": "crossentropy", "batch_size": BATCH}
    return measure.trained(model, peers.images(), scheme, workers=WORKERS, seconds=seconds, **options).stamps


def apart(make: Callable[..., peers.Step], spec: str, optimizer: str, seconds: float) -> measure.Stamps:
    """Processes that never talk."""
    return measure.together(make, WORKERS, spec, optimizer, BATCH, seconds=seconds, rows=BATCH)


def ddp(spec: str, optimizer: str, seconds: float) -> measure.Stamps:
    """What torch offers for the same."""
    with measure.folder() as folder:
        arguments = (str(folder / "meeting"), spec, optimizer, BATCH)
        return measure.together(peers.ddp, WORKERS, *arguments, seconds=seconds, rows=BATCH)


CONTENDERS: dict[str, Callable[[str, str, float], measure.Stamps]] = {
    LIMIT: partial(apart, peers.plain),
    KEPT: partial(apart, peers.plain_keeping_heap),
    **{name: partial(paragrad, scheme) for name, scheme in SCHEMES.items()},
    DDP: ddp,
}


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=15, repeats=5)
    parser.add_argument("--optimizers", nargs="+", default=["sgd"], choices=["sgd", "adam"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    options = parser.parse_args()
    report = measure.Report("throughput", options)
    cells = [(model, optimizer) for optimizer in options.optimizers for model in options.models]
    for repeat in range(options.repeats):
        figures: dict[str, float] = {}
        for model, optimizer in cells:
            for name in measure.rotated(options.only, repeat):
                stamps = CONTENDERS[name](MODELS[model], optimizer, options.seconds)
                figures[f"{name}, {model}, {optimizer}"] = measure.rate(stamps, options.seconds)
        report.figures.append(figures)
    for model, optimizer in cells:
        cell, rows = f"{model}, {optimizer}", []
        for name in options.only:
            key = f"{name}, {cell}"
            shares, kept = report.ratios(key, f"{LIMIT}, {cell}"), report.ratios(key, f"{KEPT}, {cell}")
            over_ddp = report.ratios(key, f"{DDP}, {cell}") if name == "SyncSGD" else []
            rows.append([name, *(measure.spread(report.column(key), 0), measure.spread(shares)), measure.spread(kept)])
            rows[-1].append(measure.spread(over_ddp))
            if name in SCHEMES and shares:
                what = f"{cell}: {name} / two separate processes"
                report.claims.append(measure.Claim.over(what, shares, target=TARGETS.get(name, "")))
            if over_ddp:
                what = f"{cell}: SyncSGD / DistributedDataParallel"
                report.claims.append(measure.Claim.over(what, over_ddp, target="> 1"))
        title = f"{cell}, batch {BATCH}, {WORKERS} x 1 thread, {options.repeats} repeats: median (min-max)"
        measure.show(title, ["", "samples/s", "/ limit", "/ limit keeping heap", "/ DDP"], rows)
    report.write()


if __name__ == "__main__":
    main()
