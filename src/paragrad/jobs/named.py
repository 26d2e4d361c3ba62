"""Schemes, engines and codecs as users give them: an object, or its name and fields as text."""

from __future__ import annotations

from paragrad import codecs, engines, schemes
from paragrad.codecs.codec import Codec
from paragrad.config import options
from paragrad.engines.engine import Engine
from paragrad.schemes.scheme import Scheme


def scheme(given: Scheme | str) -> Scheme:
    """A scheme, as ``agn:window=5``."""
    made: Scheme = options.made(given, "scheme", schemes, Scheme, "pg.AGN(window=15)")
    return made


def engine(given: Engine | str) -> Engine:
    """An engine, as ``local:workers=4``."""
    made: Engine = options.made(given, "engine", engines, Engine, "pg.Local(workers=4)")
    return made


def codec(given: Codec | str | None) -> Codec | None:
    """A codec, as ``topk:share=0.01``; None: none."""
    return None if given is None else options.made(given, "codec", codecs, Codec, "pg.TopK(0.01)")
