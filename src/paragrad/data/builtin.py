"""Data sets without a file: the handwritten digits, and noise for toy problems."""

from __future__ import annotations

import numpy as np
import torch

from paragrad.config.options import parse_fields
from paragrad.data.source import Arrays
from paragrad.errors import UsageError, unknown

NOISE_ROWS = 1_000
"""Default number of rows of ``"noise"``."""


def digits() -> Arrays:
    """Return scikit-learn's copy of the handwritten digits."""
    from sklearn.datasets import load_digits  # takes a second to import

    pixels, labels = load_digits(return_X_y=True)
    return Arrays((torch.from_numpy((pixels / 16).astype(np.float32)), torch.from_numpy(labels.astype(np.int64))))


def noise(text: str, what: str, seed: int, width: int | None) -> tuple[Arrays, Arrays]:
    """Return rows of noise, and one row of zeros to test on."""
    _, fields = parse_fields(text)
    for key in fields:
        if key != "rows":
            raise unknown(f"field of {what} 'noise':", key, ["rows"])
    rows = fields.get("rows", NOISE_ROWS)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise UsageError(f"rows={rows} in {text!r}, but it must be a whole number of at least 1.")
    if width is None:
        raise UsageError(
            f"{what}={text!r} is for toy problems, but the model is not one. Give a toy problem as the model, such as beale "
            "(paragrad models lists them; in Python: paragrad.models.toys.Beale()), or other data."
        )
    drawn = np.random.default_rng((seed, 3)).standard_normal((rows, width), dtype=np.float32)
    # Without noise, only the value of the function at the center can be tested.
    return Arrays(torch.from_numpy(drawn)), Arrays(torch.zeros(1, width))
