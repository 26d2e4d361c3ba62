"""``paragrad data``: what can be trained on."""

from __future__ import annotations


def data() -> None:
    """What can be trained on."""
    from paragrad.cli.tables import catalogue
    from paragrad.data.load import CATALOGUE

    catalogue("Data (--data)", CATALOGUE, "what it is")
