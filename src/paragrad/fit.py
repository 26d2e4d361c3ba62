"""fit(...): ``model.fit`` with several workers: Keras's arguments, its callbacks at the ends of epochs, its History."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

LOOKED_AT = 2_048
"""Rows of the training part on which metrics are taken at the end of an epoch: workers send their losses only."""
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
    callbacks         Keras callbacks, called at the beginning and end of the training and of each epoch; the model
                      holds the center's weights then
    validation_split  the share of rows, the last ones, to validate on; or ``validation_data``: (x, y) or (x, y, weights)
    class_weight      a weight for each class; or ``sample_weight``: one for each row
    validation_freq   validate after every so many epochs, or after those in a list, counted from 1
    initial_epoch     the number of the first epoch, counted from 0: ``epochs - initial_epoch`` are trained
    scheme, engine, codec, seed, run    as of ``pg.train``

    Of the logs, ``loss`` is the workers' mean over the epoch; metrics are the center's at its end, on up to 2,048 rows;
    ``val_...`` are those of the center at the end of the epoch, on all rows to validate on.
    """
    kerasmodel.refuse(model)
    keras = kerasmodel.library()
    if not shuffle:
        raise UsageError("shuffle=False, but workers take their mini-batches from one permutation of the rows: leave it out.")
    if isinstance(validation_freq, int) and validation_freq < 1:
        raise UsageError(f"validation_freq={validation_freq}, but it is a number of epochs: 1 or more.")
    if not 0 <= initial_epoch < epochs:
        raise UsageError(
            f"initial_epoch={initial_epoch} and epochs={epochs}, but epochs is the number of the last one: initial_epoch is 0 "
            "or more, and below it."
        )
    rows, held = _rows(x, y, class_weight, sample_weight, validation_split, validation_data)
    with torch.no_grad():
        KerasLearner.build_on(model, rows.batch(np.arange(min(2, len(rows)), dtype=np.int64)))
    listed = _callbacks(keras, model, callbacks, verbose, epochs, -(-len(rows) // batch_size))
    run = Run.of(run)
    if run.stop.looks or run.keep == "best" or run.validate_every not in ("epoch", None):
        raise UsageError(
            "pg.fit validates at the end of every epoch, and Keras's callbacks decide by that: instead of pg.Run(stop=..., "
            "keep=..., validate_every=...), give callbacks=[keras.callbacks.EarlyStopping(patience=3, "
            "restore_best_weights=True)]."
        )
    told = () if verbose == 0 else (_tell_note,)
    with followed(model) as (copy, rate):
        watch = _Epochs(
            model,
            listed,
            rate,
            rows,
            held,
            batch_size=validation_batch_size or batch_size,
            epochs=epochs - initial_epoch,
            first=initial_epoch,
            validation_freq=validation_freq,
        )
        watch.begin()
        result = train(
            copy,
            rows,
            validation=held,
            scheme=scheme,
            engine=engine,
            codec=codec,
            epochs=epochs - initial_epoch,
            batch_size=batch_size,
            seed=seed,
            run=replace(run, callbacks=(*told, *run.callbacks, watch), validate_every=None),
            verbose=0,
        )
        watch.end(result.model)
    return model.history


def _tell_note(event: Event) -> None:
    """Print a note of the run; Keras shows the progress itself."""
    if event.kind == "note":
        print(event.data["message"])


class _Epochs:
    """Sees the commits go by; at the end of an epoch the model is brought to the center, and Keras's callbacks are called."""

    def __init__(
        self,
        model: Any,
        callbacks: Any,
        rate: Rate | None,
        rows: Arrays,
        held: Arrays | None,
        *,
        batch_size: int,
        epochs: int,
        first: int,
        validation_freq: int | Sequence[int],
    ) -> None:
        self._model = model
        self._callbacks = callbacks
        self._rate = rate
        self._length = len(rows)
        looked = np.linspace(0, self._length - 1, min(self._length, LOOKED_AT)).astype(np.int64)
        self._looked = rows.select(looked) if len(model.metrics) > 1 else None
        self._held = held
        self._batch_size = batch_size
        self._epochs = epochs
        self._first = first
        self._validation_freq = validation_freq
        self._center: Center | None = None
        self._used = 0
        self._epoch = 0
        self._total = [0.0, 0.0]
        self._stopped = False
        self._logs: dict[str, float] = {}

    def watch(self, center: Center) -> None:
        """This is the center of the run."""
        self._center = center

    def begin(self) -> None:
        """Before the run."""
        self._model.stop_training = False
        self._callbacks.on_train_begin()

    def __call__(self, event: Event) -> bool:
        """An event of the run; True once a callback has asked for the end."""
        if event.kind == "resume":
            self._used = event.data["rows"]
            self._epoch = self._used // self._length
        if event.kind == "go":
            self._begin_epoch()
        if event.kind == "commit" and not self._stopped:
            self._used += event.data["rows"]
            if event.data["loss"] is not None:
                self._total[0] += event.data["loss"] * event.data["rows"]
                self._total[1] += event.data["rows"]
            while self._epoch < min(self._epochs, self._used // self._length) and not self._stopped:
                self._end_epoch()
        return self._stopped

    def _begin_epoch(self) -> None:
        if self._epoch < self._epochs:
            self._callbacks.on_epoch_begin(self._first + self._epoch)
            self._tell_rate()

    def _end_epoch(self) -> None:
        assert self._center is not None
        kerasmodel.fill(self._model, *self._center.model().values())
        self._logs = {"loss": self._total[0] / self._total[1] if self._total[1] else math.nan}
        self._total = [0.0, 0.0]
        if self._looked is not None:
            self._logs |= {name: value for name, value in self._evaluated(self._looked).items() if name not in self._logs}
        if self._held is not None and self._validates(self._first + self._epoch + 1):
            self._logs |= {f"val_{name}": value for name, value in self._evaluated(self._held).items()}
        self._callbacks.on_epoch_end(self._first + self._epoch, self._logs)
        self._tell_rate()
        self._epoch += 1
        self._stopped = bool(self._model.stop_training)
        if not self._stopped:
            self._begin_epoch()

    def _validates(self, epoch: int) -> bool:
        """Whether the epoch of this number, counted from 1, is followed by a validation."""
        freq = self._validation_freq
        return epoch % freq == 0 if isinstance(freq, int) else epoch in freq

    def _tell_rate(self) -> None:
        """A callback may have changed the learning rate."""
        if self._rate is not None:
            self._rate.value = float(self._model.optimizer.learning_rate)

    def _evaluated(self, source: Arrays) -> dict[str, Any]:
        x, y, weight = parts(self._model, source.tree)
        found = self._model.evaluate(x, y, sample_weight=weight, batch_size=self._batch_size, verbose=0, return_dict=True)
        return dict(found)

    def end(self, trained: Any) -> None:
        """After the run: the model is where the last epoch ended, or where the run was stopped in the midst of one."""
        if self._epoch < self._epochs and not self._stopped:
            self._model.set_weights(trained.get_weights())
        optimizer, rate = self._model.optimizer, self._rate and self._rate.value
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        # Where the center made the steps, what it holds of moments and iterations is there to go on from.
        with torch.no_grad():
            for mine, theirs in zip(optimizer.variables, trained.optimizer.variables, strict=True):
                mine.value.copy_(theirs.value)
        if rate is not None:
            optimizer.learning_rate = rate
        self._callbacks.on_train_end(self._logs)


def _callbacks(keras: Any, model: Any, given: Any, verbose: str | int, epochs: int, steps: int) -> Any:
    """Keras's own list of callbacks; raise for those that want to see every mini-batch."""
    base = keras.callbacks.Callback
    for callback in given if isinstance(given, Sequence) else [given] if given is not None else []:
        if not isinstance(callback, base):
            raise UsageError(f"callbacks has a {type(callback).__name__}, which is not a keras.callbacks.Callback.")
        own = type(callback).__module__.partition(".")[0] != "keras"
        by_batch = [n for n in BY_BATCH if n in vars(callback) or (own and getattr(type(callback), n) is not getattr(base, n))]
        if by_batch:
            raise UsageError(
                f"{type(callback).__name__} has {by_batch[0]}, but mini-batches are done by several workers at once, and only "
                "epochs have an end: use on_epoch_end. (pg.Run(callbacks=...) sees every commit.)"
            )
        if getattr(callback, "save_freq", "epoch") != "epoch":
            raise UsageError(
                f"{type(callback).__name__} has save_freq={callback.save_freq!r}, but only the ends of epochs are seen: use "
                "save_freq='epoch'. (The run directory has checkpoints of its own, every pg.Run(checkpoint_every=...) seconds.)"
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
    """What to train on and what to validate on, with weights of rows where there are any."""
    if y is None:
        raise UsageError(
            f"y is not given, and x is a {type(x).__name__}: pg.fit takes arrays, pg.fit(model, x, y). Files, Datasets and "
            "loaders are for pg.train(model, data)."
        )
    if class_weight is not None and sample_weight is not None:
        raise UsageError("class_weight and sample_weight are both given: multiply them into one sample_weight.")
    rows, held = _arrays(x, y, sample_weight, "x and y"), None
    if validation_data is not None:
        if not isinstance(validation_data, tuple | list) or len(validation_data) not in (2, 3):
            raise UsageError(
                f"validation_data is a {type(validation_data).__name__}, but it is (x, y) or (x, y, sample_weight)."
            )
        held = _arrays(validation_data[0], validation_data[1], (*validation_data, None)[2], "validation_data")
    elif validation_split:
        if not 0 < validation_split < 1:
            raise UsageError(f"validation_split={validation_split}, but it is a share of the rows: above 0 and below 1.")
        first = math.floor(len(rows) * (1.0 - validation_split))
        if not 0 < first < len(rows):
            raise UsageError(
                f"validation_split={validation_split} of {len(rows):,} rows leaves {first:,} to train on and "
                f"{len(rows) - first:,} to validate on: give more rows, or another share."
            )
        every = np.arange(len(rows), dtype=np.int64)
        rows, held = rows.select(every[:first]), rows.select(every[first:])
    if class_weight is not None:
        rows = Arrays(Weighted(rows.tree, _by_class(target_of(rows.tree), class_weight)))
    return rows, held


def _arrays(x: Any, y: Any, weight: Any, what: str) -> Arrays:
    found = load.split((x, y) if weight is None else Weighted((x, y), weight), keras=True).train
    if not isinstance(found, Arrays):
        raise UsageError(f"{what} must be arrays, but is a {type(x).__name__}: use pg.train for a Dataset.")
    return found


def _by_class(target: Any, weights: Mapping[int, float]) -> torch.Tensor:
    """The weight of each row by its class; 1 for a class that has none, as in Keras."""
    if not isinstance(target, torch.Tensor):
        raise UsageError("class_weight needs one output with one class a row: with several outputs, give sample_weight.")
    if target.ndim == 2 and target.shape[1] > 1:
        target = target.argmax(1)
    classes = target.reshape(-1).long()
    if len(classes) != len(target):
        raise UsageError(f"class_weight needs one class a row, but y has the shape {tuple(target.shape)}: give sample_weight.")
    weight = torch.ones(len(classes))
    for label, value in weights.items():
        weight[classes == int(label)] = float(value)
    return weight
