"""fit(...): ``model.fit`` with several workers. It takes Keras's arguments and callbacks, and returns its History."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paragrad.codecs.codec import Codec
from paragrad.config import keywords
from paragrad.core.center import Center
from paragrad.data import load
from paragrad.data.source import Arrays, Weighted, target_of
from paragrad.engines.engine import Engine
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.learners.keras import KerasLearner, parts
from paragrad.learners.kerascopy import Rate, followed
from paragrad.run import Run
from paragrad.schemes.scheme import Scheme
from paragrad.train import train
from paragrad.types import Event

METRIC_ROWS = 2_048
"""Training rows on which metrics are computed after an epoch. Workers report only their losses."""
BY_BATCH = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


@keywords.guarded(keywords.FIT, "Give the model, x and y; everything else by its keyword.")
def fit(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    batch_size: int = 32,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    initial_epoch: int = 0,
    scheme: Scheme | str = "syncsgd",
    engine: Engine | str = "local",
    codec: Codec | str | None = None,
    seed: int = 0,
    run: Run | str | Path | None = None,
) -> Any:
    """Train a compiled Keras model in place, as ``model.fit`` does, and return its ``History``.

    x, y              arrays, or lists or dicts of them for several inputs and outputs
    batch_size        rows in one worker's mini-batch
    verbose           0: nothing; 1 or "auto": notes and a bar; 2: notes and a line for each epoch
    callbacks         Keras callbacks, called at the beginning and end of the training and of each epoch; the model then
                      has the center's weights
    validation_split  the share of the rows, taken from the end, to validate on; or ``validation_data``: (x, y) or
                      (x, y, weights)
    class_weight      a weight per class; or ``sample_weight``: a weight per row
    validation_freq   validate after every that many epochs, or after the epochs in a list, counted from 1
    initial_epoch     the number of the first epoch, counted from 0: ``epochs - initial_epoch`` epochs are trained
    scheme, engine, codec, seed, run    as in ``pg.train``

    In the logs, ``loss`` is the workers' mean over the epoch. Metrics are the center's at the end of the epoch, on up to
    2,048 training rows. ``val_...`` are the center's at the end of the epoch, on all validation rows.
    """
    kerasmodel.refuse(model)
    keras = kerasmodel.library()
    if not shuffle:
        raise UsageError(
            "shuffle=False is not supported: workers take their mini-batches from one permutation of the rows. Leave it out."
        )
    if isinstance(validation_freq, int) and validation_freq < 1:
        raise UsageError(f"validation_freq={validation_freq} must be 1 or more: it is a number of epochs.")
    if not 0 <= initial_epoch < epochs:
        raise UsageError(
            f"initial_epoch={initial_epoch} and epochs={epochs}, but initial_epoch must be 0 or more and below epochs, the "
            "number of the last epoch."
        )
    rows, held_out = _rows(x, y, class_weight, sample_weight, validation_split, validation_data)
    with torch.no_grad():
        KerasLearner.build_on(model, rows.batch(np.arange(min(2, len(rows)), dtype=np.int64)))
    keras_callbacks = _callbacks(keras, model, callbacks, verbose, epochs, -(-len(rows) // batch_size))
    run = Run.of(run)
    if run.stop.looks or run.keep == "best" or run.validate_every not in ("epoch", None):
        raise UsageError(
            "pg.fit validates after every epoch, and Keras's callbacks decide when to stop. Instead of pg.Run(stop=..., "
            "keep=..., validate_every=...), give callbacks=[keras.callbacks.EarlyStopping(patience=3, "
            "restore_best_weights=True)]."
        )
    notes = () if verbose == 0 else (_print_note,)
    with followed(model) as (copy, rate):
        watch = _Epochs(
            model,
            keras_callbacks,
            rate,
            rows,
            held_out,
            batch_size=validation_batch_size or batch_size,
            epochs=epochs - initial_epoch,
            first=initial_epoch,
            validation_freq=validation_freq,
        )
        watch.begin()
        result = train(
            copy,
            rows,
            validation=held_out,
            scheme=scheme,
            engine=engine,
            codec=codec,
            epochs=epochs - initial_epoch,
            batch_size=batch_size,
            seed=seed,
            run=replace(run, callbacks=(*notes, *run.callbacks, watch), validate_every=None),
            verbose=0,
        )
        watch.end(result.model)
    return model.history


def _print_note(event: Event) -> None:
    if event.kind == "note":
        print(event.data["message"])


@dataclass(eq=False)
class _Epochs:
    """A callback of the run. After each epoch it gives the model the center's weights and calls Keras's callbacks."""

    model: Any
    callbacks: Any
    rate: Rate | None
    rows: Arrays
    held_out: Arrays | None
    batch_size: int
    epochs: int
    first: int
    """Number of the first epoch."""
    validation_freq: int | Sequence[int]
    center: Center | None = None
    used: int = 0
    """Rows committed so far."""
    epoch: int = 0
    """Epochs completed so far."""
    total: tuple[float, float] = (0.0, 0.0)
    """Weighted sum of the losses in this epoch, and its rows."""
    stopped: bool = False
    logs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sample = np.linspace(0, len(self.rows) - 1, min(len(self.rows), METRIC_ROWS)).astype(np.int64)
        self.metric_rows = self.rows.select(sample) if len(self.model.metrics) > 1 else None

    def watch(self, center: Center) -> None:
        self.center = center

    def begin(self) -> None:
        self.model.stop_training = False
        self.callbacks.on_train_begin()

    def __call__(self, event: Event) -> bool:
        """Handle an event of the run; return True once a callback has asked to stop."""
        if event.kind == "resume":
            self.used = event.data["rows"]
            self.epoch = self.used // len(self.rows)
        if event.kind == "go":
            self._begin_epoch()
        if event.kind == "commit" and not self.stopped:
            self.used += event.data["rows"]
            if event.data["loss"] is not None:
                loss, rows = self.total
                self.total = loss + event.data["loss"] * event.data["rows"], rows + event.data["rows"]
            while self.epoch < min(self.epochs, self.used // len(self.rows)) and not self.stopped:
                self._end_epoch()
        return self.stopped

    def _begin_epoch(self) -> None:
        if self.epoch < self.epochs:
            self.callbacks.on_epoch_begin(self.first + self.epoch)
            self._update_rate()

    def _end_epoch(self) -> None:
        assert self.center is not None
        kerasmodel.fill(self.model, *self.center.model().values())
        self.logs = {"loss": self.total[0] / self.total[1] if self.total[1] else math.nan}
        self.total = (0.0, 0.0)
        if self.metric_rows is not None:
            self.logs |= self._evaluated(self.metric_rows) | self.logs
        if self.held_out is not None and self._validates(self.first + self.epoch + 1):
            self.logs |= {f"val_{name}": value for name, value in self._evaluated(self.held_out).items()}
        self.callbacks.on_epoch_end(self.first + self.epoch, self.logs)
        self._update_rate()
        self.epoch += 1
        self.stopped = bool(self.model.stop_training)
        if not self.stopped:
            self._begin_epoch()

    def _validates(self, epoch: int) -> bool:
        """Return whether to validate after this epoch, counted from 1."""
        freq = self.validation_freq
        return epoch % freq == 0 if isinstance(freq, int) else epoch in freq

    def _update_rate(self) -> None:
        """Pass on the learning rate, which a callback may have changed."""
        if self.rate is not None:
            self.rate.value = float(self.model.optimizer.learning_rate)

    def _evaluated(self, source: Arrays) -> dict[str, Any]:
        x, y, weight = parts(self.model, source.tree)
        return dict(self.model.evaluate(x, y, sample_weight=weight, batch_size=self.batch_size, verbose=0, return_dict=True))

    def end(self, trained: Any) -> None:
        """Give the model the final weights, also if the run was stopped within an epoch, and the optimiser's state."""
        if self.epoch < self.epochs and not self.stopped:
            self.model.set_weights(trained.get_weights())
        optimizer, rate = self.model.optimizer, self.rate and self.rate.value
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        # If the center made the steps, it has the moments and the iteration count from which training can continue.
        with torch.no_grad():
            for mine, theirs in zip(optimizer.variables, trained.optimizer.variables, strict=True):
                mine.value.copy_(theirs.value)
        if rate is not None:
            optimizer.learning_rate = rate
        self.callbacks.on_train_end(self.logs)


def _callbacks(keras: Any, model: Any, given: Any, verbose: str | int, epochs: int, steps: int) -> Any:
    """Return Keras's list of callbacks; raise if one needs every mini-batch."""
    base = keras.callbacks.Callback
    for callback in given if isinstance(given, Sequence) else [given] if given is not None else []:
        if not isinstance(callback, base):
            raise UsageError(f"callbacks has a {type(callback).__name__}, which is not a keras.callbacks.Callback.")
        own = type(callback).__module__.partition(".")[0] != "keras"
        by_batch = [n for n in BY_BATCH if n in vars(callback) or (own and getattr(type(callback), n) is not getattr(base, n))]
        if by_batch:
            raise UsageError(
                f"{type(callback).__name__} has {by_batch[0]}, but several workers process mini-batches at the same time: use "
                "on_epoch_end. (pg.Run(callbacks=...) receives every commit.)"
            )
        if getattr(callback, "save_freq", "epoch") != "epoch":
            raise UsageError(
                f"{type(callback).__name__} has save_freq={callback.save_freq!r}, but callbacks are called only after epochs: "
                "use save_freq='epoch'. (The run writes its own checkpoints, every pg.Run(checkpoint_every=...) seconds.)"
            )
    return keras.callbacks.CallbackList(
        given, add_history=True, add_progbar=verbose != 0, verbose=verbose, epochs=epochs, steps=steps, model=model
    )


# -- rows -----------------------------------------------------------------------------------------------------------


def _rows(
    x: Any,
    y: Any,
    class_weight: Mapping[int, float] | None,
    sample_weight: Any,
    validation_split: float,
    validation_data: Any,
) -> tuple[Arrays, Arrays | None]:
    """Return the training rows and the validation rows, with their weights if there are any."""
    if y is None:
        raise UsageError(
            f"y is not given, and x is a {type(x).__name__}: pg.fit takes arrays, pg.fit(model, x, y). For files, Datasets and "
            "DataLoaders use pg.train(model, data)."
        )
    if class_weight is not None and sample_weight is not None:
        raise UsageError("class_weight and sample_weight are both given: multiply them into one sample_weight.")
    rows, held_out = _arrays(x, y, sample_weight, "x and y"), None
    if validation_data is not None:
        if not isinstance(validation_data, tuple | list) or len(validation_data) not in (2, 3):
            raise UsageError(
                f"validation_data is a {type(validation_data).__name__}, but must be (x, y) or (x, y, sample_weight)."
            )
        held_out = _arrays(validation_data[0], validation_data[1], (*validation_data, None)[2], "validation_data")
    elif validation_split:
        if not 0 < validation_split < 1:
            raise UsageError(f"validation_split={validation_split} must be above 0 and below 1: it is a share of the rows.")
        first = math.floor(len(rows) * (1.0 - validation_split))
        if not 0 < first < len(rows):
            raise UsageError(
                f"validation_split={validation_split} of {len(rows):,} rows leaves {first:,} to train on and "
                f"{len(rows) - first:,} to validate on: give more rows, or another share."
            )
        every = np.arange(len(rows), dtype=np.int64)
        rows, held_out = rows.select(every[:first]), rows.select(every[first:])
    if class_weight is not None:
        rows = Arrays(Weighted(rows.tree, _by_class(target_of(rows.tree), class_weight)))
    return rows, held_out


def _arrays(x: Any, y: Any, weight: Any, what: str) -> Arrays:
    found = load.split((x, y) if weight is None else Weighted((x, y), weight), keras=True).train
    if not isinstance(found, Arrays):
        raise UsageError(f"{what} must be arrays, but is a {type(x).__name__}: use pg.train for a Dataset.")
    return found


def _by_class(target: Any, weights: Mapping[int, float]) -> torch.Tensor:
    """Return the weight of each row's class; 1 for a class without a weight, as in Keras."""
    if not isinstance(target, torch.Tensor):
        raise UsageError("class_weight needs one output with one class per row: with several outputs, give sample_weight.")
    if target.ndim == 2 and target.shape[1] > 1:
        target = target.argmax(1)
    classes = target.reshape(-1).long()
    if len(classes) != len(target):
        raise UsageError(
            f"class_weight needs one class per row, but y has the shape {tuple(target.shape)}: give sample_weight."
        )
    weight = torch.ones(len(classes))
    for label, value in weights.items():
        weight[classes == int(label)] = float(value)
    return weight
