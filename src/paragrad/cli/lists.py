"""``paragrad schemes``, ``engines``, ``codecs``, ``transforms`` and ``models``: what is available."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Show this one in full, with its fields.", show_default=False)]


def schemes(name: Name = None) -> None:
    """List schemes, which define how workers cooperate: the equation, and when to choose each."""
    from paragrad import schemes as known
    from paragrad.cli.tables import listing

    listing("scheme", known, name, ("what the center does", "choose it"), "--scheme NAME:field=value selects it.")


def engines(name: Name = None) -> None:
    """List engines, which define where workers run."""
    from paragrad import engines as known
    from paragrad.cli.tables import listing

    listing("engine", known, name, ("what it is", "when to choose it"), "--engine NAME:field=value selects it.")


def codecs(name: Name = None) -> None:
    """List codecs, which send commits in fewer bytes: what is sent, and when to choose each."""
    from paragrad import codecs as known
    from paragrad.cli.tables import listing

    hint = "--codec NAME:field=value selects it. The part that is not sent is added to the worker's next commit."
    listing("codec", known, name, ("what is sent", "choose it"), hint)


def transforms(name: Name = None) -> None:
    """List transformations of table columns."""
    from paragrad.cli.tables import catalogue, page, summary_of
    from paragrad.data import transforms as known

    if name is not None:
        page(name, "transformation", known)
        return
    entries = {entry.lower(): summary_of(known.load(entry))[0] for entry in known.names()}
    catalogue("Transformations (--transform)", entries, "what it does")


def models() -> None:
    """List models, losses, optimisers and learning-rate schedules."""
    import inspect

    from paragrad.cli.tables import catalogue
    from paragrad.config.options import fields_of
    from paragrad.models import builtin, losses
    from paragrad.optim import schedules
    from paragrad.optim.optimizer import names

    catalogue("Models (--model)", builtin.CATALOGUE, "what it is")
    catalogue("Losses (--loss)", losses.CATALOGUE, "what it is for")
    optimizers = {
        name: ", ".join(field for field in inspect.signature(kind).parameters if field != "params")
        for name, kind in sorted(names().items())
        if name != "sparseadam"  # rejected by paragrad: it needs sparse gradients
    }
    catalogue("Optimisers (--optimizer name:field=value,...)", optimizers, "fields")
    rates = {name: ", ".join(field.name for field in fields_of(kind)) for name, kind in sorted(schedules.TABLE.items())}
    catalogue("Learning-rate schedules (--schedule name:field=value,...)", rates, "fields")
