"""Rejects unknown keyword arguments, and names the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from paragrad.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_RUN = {
    **dict.fromkeys(("out", "out_dir", "output_dir", "directory", "save_dir", "log_dir", "logdir"), "run='{}'"),
    "callback": "run=pg.Run(callbacks=(...,))",
    "resume": "run=pg.Run(out=..., resume={})",
    **dict.fromkeys(("patience", "early_stopping"), "run=pg.Run(stop=pg.Stop(patience={}))"),
    **dict.fromkeys(("max_seconds", "max_time", "timeout"), "run=pg.Run(stop=pg.Stop(seconds={}))"),
    "target_accuracy": "run=pg.Run(stop=pg.Stop(accuracy={}))",
    "target_loss": "run=pg.Run(stop=pg.Stop(loss={}))",
    "stop": "run=pg.Run(stop=...)",
    **{name: f"run=pg.Run({name}={{}})" for name in ("checkpoint_every", "validate_every", "distances")},
    **{name: f"run=pg.Run({name}='{{}}')" for name in ("partition", "keep")},
    "shards": "run=pg.Run(partition='{}') for rows, or engine=pg.Network(shards=...) for the center",
}
_WORKERS = {
    **dict.fromkeys(
        ("workers", "n_workers", "num_workers", "nworkers", "n_jobs", "num_processes"), "engine='local:workers={}'"
    ),
    **dict.fromkeys(("world_size", "nproc"), "engine='local:workers={}'"),
    "threads": "engine='local:threads={}'",
    "device": "engine='local:device={}', or engine='vector:device={}'",
    "cluster": "engine=pg.Vector(cluster=...)",
    "window": "scheme='agn:window={}'",
    **dict.fromkeys(("algorithm", "strategy", "method"), "scheme='{}'"),
    "compression": "codec='{}'",
}
TRAIN = {
    **_RUN,
    **_WORKERS,
    "callbacks": "run=pg.Run(callbacks=...)",
    **dict.fromkeys(("lr", "learning_rate"), "optimizer='adam:lr={}'"),
    "momentum": "optimizer='sgd:lr=...,momentum={}'",
    "weight_decay": "optimizer='adamw:lr=...,weight_decay={}'",
    **dict.fromkeys(
        ("schedule", "scheduler", "lr_schedule", "lr_scheduler"), "optimizer=pg.Optimizer('adam', schedule='cosine')"
    ),
    **dict.fromkeys(("clip", "clip_norm", "max_grad_norm"), "optimizer=pg.Optimizer('adam', clip_norm={})"),
    "clip_value": "optimizer=pg.Optimizer('adam', clip_value={})",
    **dict.fromkeys(("optimiser", "opt"), "optimizer="),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function", "objective"), "loss="),
    **dict.fromkeys(
        ("val", "val_data", "valid", "validation_data", "test", "test_data", "eval_data", "eval_set"), "validation="
    ),
    **dict.fromkeys(("validation_split", "val_split", "test_size"), "holdout={}"),
    "metric": "metrics=",
    **dict.fromkeys(("n_epochs", "num_epochs", "max_epochs", "nb_epoch"), "epochs={}"),
    **dict.fromkeys(("bs", "batchsize", "batch", "minibatch_size"), "batch_size={}"),
    **dict.fromkeys(("random_state", "random_seed"), "seed={}"),
    **dict.fromkeys(("x", "y", "targets", "labels"), "pg.train(model, (x, y))"),
    **dict.fromkeys(("dataset", "train_data", "dataloader", "loader"), "data="),
    **dict.fromkeys(("sample_weight", "weights", "weight"), "pg.train(model, pg.Weighted((x, y), weights))"),
    "shuffle": "Every epoch takes the rows in a new order, drawn from seed=: leave it out.",
}
"""Meaning of keywords that ``pg.train`` does not have."""
FIT = {
    **_RUN,
    **_WORKERS,
    **dict.fromkeys(("lr", "learning_rate", "optimizer", "loss", "metrics"), "model.compile(...), which takes it"),
    **dict.fromkeys(("validation", "val"), "validation_data=(x, y)"),
    "holdout": "validation_split={}",
    "steps_per_epoch": "An epoch is every row once: leave it out. For a shorter run give fewer rows, or run=pg.Run(stop=...).",
    "validation_steps": "Validation takes all rows of validation_data: leave it out, or give fewer rows.",
    **dict.fromkeys(("use_multiprocessing", "max_queue_size"), "Workers share the arrays in memory: leave it out."),
}
"""Meaning of keywords that ``pg.fit`` does not have."""


def guarded(guesses: Mapping[str, str], positional: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that rejects unknown keywords with "Did you mean ...".

    ``guesses`` maps a wrong keyword to its meaning, with ``{}`` for the given value; a text that ends with a full stop is a
    complete explanation. ``positional`` is the remedy for too many positional arguments.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name not in parameters:
                    meant = _suggest(name, value, guesses, tuple(parameters))
                    raise UsageError(f"Unknown argument {name}= of pg.{function.__name__}. {meant}")
            if len(args) > most:
                raise UsageError(f"pg.{function.__name__} was given {len(args)} arguments without a keyword. {positional}")
            return function(*args, **kwargs)

        return checked

    return wrap


def _suggest(name: str, value: object, guesses: Mapping[str, str], known: tuple[str, ...]) -> str:
    near = name if name in guesses else next(iter(get_close_matches(name.lower(), [*known, *guesses], n=1)), "")
    if near in guesses:
        text = str(value)
        shown = text if isinstance(value, int | float | str) and len(text) <= 40 else "..."
        meaning = guesses[near].replace("{}", shown)
        return meaning if meaning.endswith(".") else f"Did you mean {meaning}?"
    return (f"Did you mean {near}=? " if near else "") + f"Available: {', '.join(known)}."
