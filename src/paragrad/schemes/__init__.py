"""Schemes, the algorithms by which workers cooperate: one file per scheme. table.pyi lists them all."""

from paragrad.config.lazy import Table

_TABLE = Table(__name__, __file__)
names, load = _TABLE.names, _TABLE.load
