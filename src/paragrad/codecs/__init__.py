"""How a commit is encoded for the wire: one file for each codec. table.pyi lists them all."""

from paragrad.config.lazy import Table

_TABLE = Table(__name__, __file__)
names, load = _TABLE.names, _TABLE.load
