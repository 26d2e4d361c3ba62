"""Where workers run, and how a commit reaches the center. table.pyi lists the engines."""

from paragrad.config.lazy import Table

_TABLE = Table(__name__, __file__)
names, load = _TABLE.names, _TABLE.load
