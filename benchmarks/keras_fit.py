"""A Keras model on two workers of one thread against ``keras.fit`` on one thread, and on all cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import measure
import numpy as np
import torch
from keras import layers

import paragrad as pg
from paragrad.engines.process import devices

WORKERS, BATCH, ROWS = 2, 128, 20_000
ALONE, CORES = "keras.fit, 1 thread", "keras.fit, all cores"
SCHEMES = {"AGN(window=15)": pg.AGN(window=15), "SyncSGD": pg.SyncSGD()}
TARGETS = {"AGN(window=15)": ">= 1.6"}


def mlp() -> list[Any]:
    """About 0.7M parameters."""
    return [layers.Flatten(), layers.Dense(512, activation="relu"), layers.Dense(512, activation="relu"), layers.Dense(10)]


def cnn() -> list[Any]:
    """Two convolutions with batch-norm, two dense layers with dropout."""
    head = [layers.Flatten(), layers.Dropout(0.3), layers.Dense(64, activation="relu"), layers.Dense(10)]
    first = [layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization(), layers.MaxPooling2D()]
    return [*first, layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(), *head]


MODELS: dict[str, Callable[[], list[Any]]] = {"MLP 784-512-512-10": mlp, "small CNN": cnn}


def model(kind: str) -> Any:
    """Compiled as anyone would."""
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((28, 28, 1)), *MODELS[kind]()])
    made.compile(
        keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return made


def images() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Random rows of MNIST's shape: what they show does not matter to the speed."""
    draw = np.random.default_rng(0)
    return draw.random((ROWS, 28, 28, 1), dtype=np.float32), draw.integers(0, 10, ROWS)


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the end of every mini-batch, and ends the training when time is up."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.stamps: list[tuple[float, int]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """The clock runs."""
        self.began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Another mini-batch."""
        now = time.monotonic() - self.began
        # The last mini-batch of an epoch is shorter.
        self.stamps.append((now, min(BATCH, ROWS - batch * BATCH)))
        if now > self.seconds:
            self.model.stop_training = True


def alone(threads: int, kind: str, seconds: float) -> measure.Stamps:
    """Keras itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = Clock(seconds)
    try:
        model(kind).fit(*images(), batch_size=BATCH, epochs=10_000, verbose=0, callbacks=[clock])
    finally:
        torch.set_num_threads(before)
    return {0: clock.stamps}


def paragrad(scheme: pg.Scheme, kind: str, seconds: float) -> measure.Stamps:
    """The local engine."""
    return measure.trained(model(kind), images(), scheme, workers=WORKERS, seconds=seconds, batch_size=BATCH).stamps


CONTENDERS: dict[str, Callable[[str, float], measure.Stamps]] = {
    ALONE: partial(alone, 1),
    CORES: partial(alone, devices.usable_cores()),
    **{name: partial(paragrad, scheme) for name, scheme in SCHEMES.items()},
}


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=15, repeats=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    report = measure.Report("keras_fit", options)
    for repeat in range(options.repeats):
        figures: dict[str, float] = {}
        for kind in options.models:
            for name in measure.rotated(list(CONTENDERS), repeat):
                figures[f"{name}, {kind}"] = measure.rate(CONTENDERS[name](kind, options.seconds), options.seconds)
        report.figures.append(figures)
    for kind in options.models:
        rows = []
        for name in CONTENDERS:
            shares = report.ratios(f"{name}, {kind}", f"{ALONE}, {kind}")
            rows.append([name, measure.spread(report.column(f"{name}, {kind}"), 0), measure.spread(shares)])
            if name in SCHEMES:
                what = f"Keras {kind}: {name} with {WORKERS} workers / keras.fit with 1 thread"
                report.claims.append(measure.Claim.over(what, shares, target=TARGETS.get(name, "")))
        title = f"{kind}, batch {BATCH}, {WORKERS} x 1 thread, {options.repeats} repeats: median (min-max)"
        measure.show(title, ["", "samples/s", "/ keras.fit, 1 thread"], rows)
    report.write()


if __name__ == "__main__":
    main()
