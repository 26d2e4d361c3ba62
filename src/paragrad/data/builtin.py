"""Rows that need no file: the digits, and noise for toy problems."""

from __future__ import annotations

import numpy as np
import torch

from paragrad.config.options import parse_fields
from paragrad.data.source import Arrays
from paragrad.errors import UsageError, unknown

NOISE_ROWS = 1_000
"""Rows of ``"noise"`` where it is not said how many."""


def digits() -> Arrays:
    """scikit-learn's own copy of the handwritten digits."""
    from sklearn.datasets import load_digits  # a second to import

    pixels, labels = load_digits(return_X_y=True)
    tree = (torch.from_numpy((pixels / 16).astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))
    return Arrays(tree)


def noise(text: str, what: str, seed: int, width: int | None) -> tuple[Arrays, Arrays]:
    """Rows of noise, and a row of zeros to test on."""
    _, fields = parse_fields(text)
    for key in fields:
        if key != "rows":
            raise unknown(f"field of {what} 'noise':", key, ["rows"])
    rows = fields.get("rows", NOISE_ROWS)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise UsageError(f"rows={rows} in {text!r}, but it is a whole number of at least 1.")
    if width is None:
        raise UsageError(
            f"{what}={text!r} is what toy problems are trained on, but the model is none. Give a toy problem as the model, "
            "such as beale (paragrad models lists them; in Python: paragrad.models.toys.Beale()), or other data."
        )
    drawn = np.random.default_rng((seed, 3)).standard_normal((rows, width), dtype=np.float32)
    # Without noise there is only one thing to test: the function where the center is.
    return Arrays(torch.from_numpy(drawn)), Arrays(torch.zeros(1, width))
