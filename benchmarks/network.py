"""The network engine on one machine: exchanges beside bare TCP, torch RPC and a Ray actor, training beside one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import exchange
import measure
import peers
import torch

import paragrad as pg
from paragrad.models import builtin

LIMIT, ALONE = "bare TCP", "Flight alone"
FLIGHT, TLS, BESIDE, INT8, TOPK = (f"the engine{more}" for more in ("", ", TLS", ", shared memory", ", int8", ", top-k 1 %"))
TARGETS = {ALONE: ">= 0.4"}
MODEL, BATCH = "mlp:1000-1000-600", 128
"""2,398,210 parameters on MNIST's shape."""
ONE, ALL, TWO = "one process, one thread", "one process, both cores", "two network workers, AGN(window=15)"
HERE = f"{TWO}, shared memory"


def network(workers: int, seconds: float, *, codec: Any = None, **fields: Any) -> measure.Stamps:
    """The network engine, its workers processes of this machine that do not share memory unless told to."""
    engine = pg.Network(workers=workers, here=workers, threads=1, **{"shared": False, **fields})
    more = {} if codec is None else {"codec": codec}
    data, scheme = torch.zeros(100_000, 1), pg.AGN(window=1)
    return measure.trained(
        exchange.Idle, data, scheme, workers=workers, seconds=seconds, batch_size=1, engine=engine, **more
    ).stamps


def tcp(workers: int, seconds: float) -> measure.Stamps:
    """The limit: sockets, and nothing done with what comes."""
    with measure.folder() as folder:
        arguments = (str(folder / "meeting"), exchange.PARAMETERS)
        return measure.together(peers.tcp, workers + 1, *arguments, seconds=seconds)


def transport(workers: int, seconds: float) -> measure.Stamps:
    """Flight alone, as paragrad uses it, without a center behind it."""
    with measure.folder() as folder:
        arguments = (str(folder / "meeting"), exchange.PARAMETERS)
        return measure.together(peers.flight, workers + 1, *arguments, seconds=seconds)


EXCHANGES: dict[str, Callable[[int, float], measure.Stamps | None]] = {
    LIMIT: tcp,
    ALONE: transport,
    FLIGHT: network,
    TLS: partial(network, tls="on"),
    BESIDE: partial(network, shared=True),
    INT8: partial(network, codec=pg.Int8()),
    TOPK: partial(network, codec=pg.TopK(0.01)),
    "torch RPC (TCP)": exchange.rpc,
    "Ray actor": exchange.ray_actor,
}


def one(threads: int, seconds: float) -> measure.Stamps:
    """A plain PyTorch loop."""
    return measure.together(peers.plain_on_threads, 1, threads, MODEL, "sgd", BATCH, seconds=seconds, rows=BATCH)


def two(shared: bool, seconds: float) -> measure.Stamps:
    """Two workers of one thread, over the network or, as is the default on one machine, through the center's memory."""
    engine = pg.Network(workers=2, here=2, threads=1, shared=shared)
    make = partial(peers.optimizer_of, "sgd")
    options: dict[str, Any] = {"optimizer": make, "loss": "crossentropy", "batch_size": BATCH, "engine": engine}
    model, scheme = builtin.build(MODEL, (784,), 10), pg.AGN(window=15)
    return measure.trained(model, peers.images(), scheme, workers=2, seconds=seconds, **options).stamps


TRAININGS: dict[str, Callable[[float], measure.Stamps]] = {
    ONE: partial(one, 1),
    ALL: partial(one, 2),
    TWO: partial(two, False),
    HERE: partial(two, True),
}


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=5, repeats=5)
    parser.add_argument("--only", nargs="+", default=list(EXCHANGES), choices=list(EXCHANGES))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="How exchanges go by workers and shards.")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    report = measure.Report("network", options)
    by = {f"{w} workers, {s} shards": (w, s) for w in options.workers for s in options.shards}
    for repeat in range(options.repeats):
        figures: dict[str, float | None] = {}
        for name in measure.rotated(options.only, repeat):
            stamps = EXCHANGES[name](2, options.seconds)
            figures[name] = None if stamps is None else measure.rate(stamps, options.seconds)
        for name in measure.rotated(list(TRAININGS), repeat):
            figures[name] = measure.rate(TRAININGS[name](2 * options.seconds), 2 * options.seconds)
        for name in measure.rotated(list(by), repeat):
            workers, shards = by[name]
            figures[name] = measure.rate(network(workers, options.seconds, shards=shards), options.seconds)
        report.figures.append(figures)
    rows = []
    for name in options.only:
        shares = report.ratios(name, LIMIT)
        missing = not report.column(name)
        rows.append([name, "not installed" if missing else measure.spread(report.column(name), 1), measure.spread(shares)])
        if shares and name != LIMIT:
            what = f"exchange of 4.8M parameters, 2 workers on loopback, {name} / {LIMIT}"
            report.claims.append(measure.Claim.over(what, shares, target=TARGETS.get(name, "")))
    title = f"Exchange of {exchange.PARAMETERS:,} float32 by 2 workers, {options.repeats} repeats: median (min-max)"
    measure.show(title, ["", "exchanges/s", f"share of {LIMIT}"], rows)
    measure.show(
        "Exchanges by workers and shards",
        ["", "exchanges/s"],
        [[name, measure.spread(report.column(name), 1)] for name in by],
    )
    trained = []
    for name in TRAININGS:
        shares = report.ratios(name, ONE)
        trained.append([name, measure.spread(report.column(name), 0), measure.spread(shares)])
    for which in (TWO, HERE):
        for other in (ONE, ALL):
            what = f"MLP of 2.4M parameters: {which} / {other}"
            report.claims.append(measure.Claim.over(what, report.ratios(which, other), target=">= 1.2"))
    measure.show(f"{MODEL}, batch {BATCH}, SGD", ["", "samples/s", f"/ {ONE}"], trained)
    report.write()


if __name__ == "__main__":
    main()
