"""``paragrad models``: what can be trained, with which loss, optimiser and schedule."""

from __future__ import annotations


def models() -> None:
    """What can be trained, with which losses, optimisers and schedules."""
    import inspect

    from paragrad import losses
    from paragrad import models as known
    from paragrad.cli.tables import catalogue
    from paragrad.optim import schedules
    from paragrad.optim.optimizer import names
    from paragrad.options import fields_of

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
