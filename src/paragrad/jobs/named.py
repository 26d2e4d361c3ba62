"""Schemes, engines and codecs from an object, or from a text with name and fields."""

from __future__ import annotations

from paragrad import codecs, engines, schemes
from paragrad.codecs.codec import Codec
from paragrad.config import options
from paragrad.engines.engine import Engine
from paragrad.schemes.scheme import Scheme


def scheme(given: Scheme | str) -> Scheme:
    """Return a scheme, given itself or a text such as ``agn:window=5``."""
    made: Scheme = options.made(given, "scheme", schemes, Scheme, "pg.AGN(window=15)")
    return made


def engine(given: Engine | str) -> Engine:
    """Return an engine, given itself or a text such as ``local:workers=4``."""
    made: Engine = options.made(given, "engine", engines, Engine, "pg.Local(workers=4)")
    return made


def codec(given: Codec | str | None) -> Codec | None:
    """Return a codec, given itself or a text such as ``topk:share=0.01``; None for None."""
    return None if given is None else options.made(given, "codec", codecs, Codec, "pg.TopK(0.01)")
