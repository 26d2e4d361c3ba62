"""``paragrad models``: what can be trained, with which loss and which optimiser."""

from __future__ import annotations


def models() -> None:
    """What can be trained, with which losses and optimisers."""
    import inspect

    from paragrad import losses
    from paragrad import models as known
    from paragrad.cli.tables import catalogue
    from paragrad.optim.optimizer import names

    catalogue("Models (--model)", known.CATALOGUE, "what it is")
    catalogue("Losses (--loss)", losses.CATALOGUE, "what it is for")
    optimizers = {}
    for name, kind in sorted(names().items()):
        fields = [p for p in inspect.signature(kind).parameters if p != "params"]
        if name not in ("lbfgs", "sparseadam"):  # refused: a closure, sparse gradients
            optimizers[name] = ", ".join(fields)
    catalogue("Optimisers (--optimizer name:field=value,...)", optimizers, "fields")
