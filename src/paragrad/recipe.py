"""What a run.toml names, built: the model, for the shape of the rows, and the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from paragrad import losses, models, toys
from paragrad.data.load import split
from paragrad.data.source import leaves
from paragrad.errors import UsageError
from paragrad.learners.torch import split as inputs_and_target

HOLDOUT = 0.2
"""The share of rows kept for testing where the data has no test part, and nothing else was asked for."""


def build(settings: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model, made for the shape of the rows; and the rows, as ``train`` takes them, with what to say of them."""
    for key in ("model", "loss", "optimizer", "schedule"):
        if str(settings.get(key)).startswith("python:"):
            raise UsageError(f"{key} = {settings[key]!r} was made in Python, which a run.toml cannot repeat: give --{key}.")
    seed, holdout = settings["seed"], settings.get("holdout")
    if toys.is_toy(settings["model"]):
        return toys.build(settings["model"]), {"data": settings["data"], "holdout": holdout, "notes": ()}
    parts = split(settings["data"], None, holdout, seed)
    if parts.validation is None and holdout is None:
        parts = split(settings["data"], None, HOLDOUT, seed)
    loss = losses.build(settings["loss"]) if settings.get("loss") is not None else losses.infer(parts.train)[0]
    inputs, _ = inputs_and_target(parts.train.batch(np.zeros(1, dtype=np.int64)))
    model = models.build(settings["model"], tuple(leaves(inputs)[0].shape[1:]), losses.outputs(parts.train, loss), seed)
    if holdout is None:
        return model, {"data": parts.train, "validation": parts.validation, "notes": parts.notes}
    # A hold-out that was asked for is left to train, which writes it into run.toml.
    return model, {"data": settings["data"], "holdout": holdout, "notes": ()}
