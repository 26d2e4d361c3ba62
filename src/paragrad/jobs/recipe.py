"""Builds the model and the rows that a run.toml names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from paragrad.data import transforms
from paragrad.data.load import CATALOGUE, Split, split
from paragrad.data.source import leaves
from paragrad.data.table import Table
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.learners.batch import split as inputs_and_target
from paragrad.learners.criterion import by_class
from paragrad.models import builtin, losses, toys

HOLDOUT = 0.2
"""Default share of rows held out if the data has no test part."""
OF_TABLE = ("features", "exclude", "label", "weight", "select", "tree", "pad", "stream", "transform")
"""Options for the columns of a table."""
CLASS = re.compile(r"[\w.+ -]+")
"""Name of a class, before the equals sign."""


def rows(settings: Mapping[str, Any], *, keras: bool = False) -> Split:
    """Return the rows to train on and to validate on, as a torch or a Keras model gets them."""
    seed, holdout = settings["seed"], settings.get("holdout")
    width = toys.build(settings["model"]).size if toys.is_toy(settings["model"]) else None
    return split(
        data_of(settings),
        validation_of(settings),
        holdout,
        seed,
        width=width,
        keras=keras,
        as_classes=losses.as_classes(settings.get("loss")),
        otherwise=HOLDOUT,
    )


def build(settings: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, built for the shape of the rows, and the rows as arguments of ``train``."""
    for key in ("model", "loss", "optimizer", "schedule"):
        if str(settings.get(key)).startswith("python:"):
            raise UsageError(f"{key} = {settings[key]!r} was made in Python, which a run.toml cannot repeat: give --{key}.")
    seed, holdout = settings["seed"], settings.get("holdout")
    if toys.is_toy(settings["model"]):
        return toys.build(settings["model"]), {"data": data_of(settings), "holdout": holdout}
    if settings["model"].endswith(".keras"):
        return kerasmodel.load(settings["model"]), {"data": rows(settings, keras=True), "holdout": holdout}
    parts = rows(settings)
    loss = losses.build(settings["loss"]) if settings.get("loss") is not None else losses.infer(parts.train)[0]
    inputs, _ = inputs_and_target(parts.train.batch(np.zeros(1, dtype=np.int64)))
    model = builtin.build(settings["model"], tuple(leaves(inputs)[0].shape[1:]), _outputs(parts, loss), seed)
    if builtin.is_keras(model):  # built by the user's file, which needed the shape of a row
        parts = rows(settings, keras=True)
    # Only an explicit hold-out is in run.toml; a default one is made again.
    return model, {"data": parts, "holdout": holdout}


def named_data(data: list[str] | None, **columns: str | None) -> Any:
    """Return the rows that a command line names besides a run; None if it names none."""
    if not data:
        given = [key for key, value in columns.items() if value is not None]
        if given:
            raise UsageError(f"--{given[0]} describes a column of the data, but there is no data: give --data.")
        return None
    return data_of({"data": data} | columns)


def validation_of(settings: Mapping[str, Any]) -> Any:
    """Return the rows to validate on that settings name, a path or paths by class; None if they name none."""
    given = settings.get("validation")
    found = None if given is None else data_of({"data": given})
    # Only the paths: the columns are those of the rows to train on.
    return found.source if isinstance(found, Table) else found


def data_of(settings: Mapping[str, Any]) -> Any:
    """Return the rows that settings name: a table if there are several files, or options for the columns."""
    entries = settings["data"] if isinstance(settings["data"], list) else [settings["data"]]
    given = {key: settings[key] for key in OF_TABLE if settings.get(key) is not None}
    classes: dict[str, list[str]] = {}
    for entry in entries:
        name, equals, path = str(entry).partition("=")
        if equals and CLASS.fullmatch(name) and not Path(entry).exists():
            classes.setdefault(name.strip(), []).append(path)
    if classes and sum(map(len, classes.values())) != len(entries):
        raise UsageError(f"data {entries}: some name their class, as signal=FILE, and some do not. Name the class of each.")
    if not classes and not given and len(entries) == 1:
        return entries[0]
    source: Any = classes or (entries[0] if len(entries) == 1 else entries)
    if isinstance(source, str) and source.partition(":")[0] in CATALOGUE:
        raise UsageError(
            f"{', '.join(given)} describe the columns of a table, but data {source!r} is not a table: leave them out."
        )
    made = tuple(transforms.parse(text) for text in given.pop("transform", ()))
    return Table(source, transforms=made, **given)


def _outputs(parts: Split, loss: Any) -> int:
    known = losses.outputs(parts.train, loss)
    classes = parts.opened.classes if parts.opened is not None else None
    return max(known, len(classes)) if classes and by_class(loss) else known
