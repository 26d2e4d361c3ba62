"""How a commit looks on the wire: codecs, and the table of them all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paragrad.codecs.codec import Codec
    from paragrad.codecs.halves import BF16 as BF16
    from paragrad.codecs.halves import FP16 as FP16
    from paragrad.codecs.int8 import Int8 as Int8
    from paragrad.codecs.onebit import OneBit as OneBit
    from paragrad.codecs.threshold import Threshold as Threshold
    from paragrad.codecs.topk import TopK as TopK

TABLE = {
    "FP16": "halves",
    "BF16": "halves",
    "Int8": "int8",
    "OneBit": "onebit",
    "Threshold": "threshold",
    "TopK": "topk",
}
"""Class name -> file. A codec that stands here is ``pg.<Name>``, in ``paragrad codecs``, and on the command line."""


def names() -> tuple[str, ...]:
    """Every codec, in the order of the table."""
    return tuple(TABLE)


def load(name: str) -> type[Codec]:
    """The class behind a name of the table."""
    codec: type[Codec] = getattr(import_module(f"{__name__}.{TABLE[name]}"), name)
    return codec
