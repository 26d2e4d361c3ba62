"""``paragrad models``: what can be trained, with which loss, optimiser and schedule."""

from __future__ import annotations


def models() -> None:
    """What can be trained, with which losses, optimisers and schedules."""
    import inspect

    from paragrad.cli.tables import catalogue
    from paragrad.config.options import fields_of
    from paragrad.models import builtin as known
    from paragrad.models import losses
    from paragrad.optim import schedules
    from paragrad.optim.optimizer import names

    catalogue("Models (--model)", known.CATALOGUE, "what it is")
    catalogue("Losses (--loss)", losses.CATALOGUE, "what it is for")
    optimizers = {}
    for name, kind in sorted(names().items()):
        fields = [p for p in inspect.signature(kind).parameters if p != "params"]
        if name != "sparseadam":  # refused: sparse gradients
            optimizers[name] = ", ".join(fields)
    catalogue("Optimisers (--optimizer name:field=value,...)", optimizers, "fields")
    rates = {name: ", ".join(field.name for field in fields_of(kind)) for name, kind in sorted(schedules.TABLE.items())}
    catalogue("Learning-rate schedules (--schedule name:field=value,...)", rates, "fields")
