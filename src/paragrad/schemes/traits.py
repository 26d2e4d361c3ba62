"""Facts that follow from the declarations of a scheme, for engines."""

from __future__ import annotations

from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView


def name_of(scheme: Scheme) -> str:
    """Return the scheme's name on the command line."""
    return type(scheme).__name__.lower()


def is_shared(scheme: Scheme) -> bool:
    """Return whether the workers' weights are the center itself."""
    return scheme.starts == "shared"


def starts_apart(scheme: Scheme) -> bool:
    """Return whether each worker starts from its own random point."""
    return scheme.starts == "own"


def pulls_before_commit(scheme: Scheme) -> bool:
    """Return whether a worker pulls the center just before every commit."""
    return scheme.pulls == "commit"


def pull_every(scheme: Scheme) -> int | None:
    """Return the number of a worker's steps between pulls inside windows; None without such pulls."""
    return scheme.pulls if isinstance(scheme.pulls, int) else None


def is_additive(scheme: Scheme) -> bool:
    """Return whether values may be summed, and so compressed with error feedback."""
    return scheme.ships != "weights" and scheme.answers != "own" and not is_shared(scheme)


def keeps_state(scheme: Scheme) -> bool:
    """Return whether a worker has private state: of its optimiser, in slots, or its own weights."""
    return scheme.ships != "gradient" or bool(scheme.worker_slots) or type(scheme).adopt is not Scheme.adopt


def is_scaled_movement(scheme: Scheme) -> bool:
    """Return whether a scheme is just ``c <- c + scale * d``, after which the worker takes c: one pass for an engine."""
    own = ("commit", "apply", "adopt")
    return (
        all(getattr(type(scheme), name) is getattr(Scheme, name) for name in own)
        and scheme.ships == "movement"
        and scheme.answers == "center"
        and scheme.starts == "center"
        and scheme.held
        and scheme.parts == 1
        and not (scheme.sends or scheme.pulls or scheme.overlap)
    )


def is_ahead(scheme: Scheme, center: CenterView, worker: int) -> bool:
    """Return whether a worker is further ahead of the slowest than the scheme's bound allows."""
    if scheme.bound is None:
        return False
    counts = center.counts
    slowest = min((counts[k] for k in center.working), default=counts[worker])
    return counts[worker] - slowest > scheme.bound
