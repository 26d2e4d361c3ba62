"""One update of the center: computes the next state from a round of commits."""

from __future__ import annotations

import math
from dataclasses import replace as changed
from typing import TYPE_CHECKING

import torch

from paragrad.core import kernels
from paragrad.core.state import State
from paragrad.core.view import NotFinite, View
from paragrad.errors import Diverged, UsageError
from paragrad.schemes.traits import is_shared, name_of
from paragrad.types import Commit

if TYPE_CHECKING:
    from paragrad.core.center import Center

BLOCK = 131_072
"""Elements per block for element-wise schemes: a few such blocks fit into a core's cache."""


def write(center: Center, now: State, spare: State, commits: list[Commit]) -> bool:
    """Write the next state into the spare buffer, and the workers' answers. Return False if it is not finite."""
    if center.homes:
        sound = _move(center, now, spare, commits[0])
    elif is_shared(center.scheme):
        _check_shared(center, now, commits)
        sound = True
    else:
        sound = _apply(center, now, spare, commits)
    if sound and center.buffered:
        _average_buffers(center, now, spare, commits)
    return sound


def in_blocks(center: Center) -> bool:
    """Return whether ``apply`` runs block by block. It does not if it may step: an optimiser steps on the whole vector."""
    return center.scheme.elementwise and (center.optimizer is None or center.scheme.plain_sgd)


def _check_shared(center: Center, now: State, commits: list[Commit]) -> None:
    """Raise if the weights that workers share are not finite: the workers wrote into them, so no finite copy is left.

    They are checked if a loss is not finite, and before the last commit counts.
    """
    last = center.leases.used + sum(len(commit.batches) for commit in commits) >= center.leases.total
    if (last or not all(math.isfinite(commit.loss) for commit in commits)) and not kernels.finite(now.value):
        raise Diverged(
            f"Training diverged: at update {now.clock} the weights that the workers share are not finite. Lower the learning "
            f"rate, or use a scheme that can refuse a commit (agn) instead of {name_of(center.scheme)}."
        )


def _apply(center: Center, now: State, spare: State, commits: list[Commit]) -> bool:
    """Run the scheme's ``apply`` on the whole vector or block by block."""
    scheme = center.scheme
    lo, hi = center.part(commits[0].part)
    if (lo, hi) != (0, now.value.numel()):
        spare.value.copy_(now.value)
        for name, slot in spare.slots.items():
            slot.copy_(now.slots[name])
    size = BLOCK if in_blocks(center) and now.value.device.type == "cpu" else max(1, hi - lo)
    for start in range(lo, max(hi, lo + 1), size):
        stop = min(start + size, hi)
        view = View(center, now, spare, start, stop)
        if center.twins:
            view.twin = center.answers[commits[0].worker][start:stop]
        try:
            answer = scheme.apply(view, [_narrow(c, start - lo, stop - lo) for c in commits])
        except NotFinite:
            return False
        view.settle()
        if not view.finite:
            return False
        if isinstance(answer, list):
            if scheme.answers != "own" or len(answer) != len(commits):
                raise UsageError(
                    f"{type(scheme).__name__}.apply returned {len(answer)} answers for {len(commits)} commits; it "
                    'must return center.value, or, with answers = "own", one vector per commit.'
                )
            for commit, mine in zip(commits, answer, strict=True):
                center.answers[commit.worker][start:stop].copy_(mine)
        elif not isinstance(answer, torch.Tensor):
            raise UsageError(f"{type(scheme).__name__}.apply returned {answer!r}; it must return center.value.")
        elif scheme.answers == "own":
            raise UsageError(f'{type(scheme).__name__}.answers is "own", so apply must return a list of one vector per commit.')
        elif center.answers and scheme.held and not view.twinned:
            for commit in commits:
                center.answers[commit.worker][start:stop].copy_(spare.value[start:stop])
    if scheme.parts > 1 and center.answers and scheme.answers != "own":
        for commit in commits:
            center.answers[commit.worker].copy_(spare.value)
    return True


def _move(center: Center, now: State, spare: State, commit: Commit) -> bool:
    """Make the whole exchange of a scaled movement in one pass over the worker's weights and its anchor."""
    worker = commit.worker
    mover = spare.movers.get(worker)
    if mover is None:
        mover = spare.movers[worker] = kernels.mover(spare.value, center.answers[worker], center.homes[worker], now.value)
    return mover(center.scheme.scale(commit))


def _average_buffers(center: Center, now: State, spare: State, commits: list[Commit]) -> None:
    if now.buffers.numel():
        share = 1.0 / max(len(commits), len(center.live), 1)
        alone = commits[0].buffers if share == 1.0 else None
        spare.buffers.copy_(now.buffers if alone is None else alone)  # adding a difference would round
        for commit in commits if alone is None else ():
            if commit.buffers is not None:
                spare.buffers.add_(commit.buffers - now.buffers, alpha=share)
    if now.integers.numel():
        latest = next((c.integers for c in reversed(commits) if c.integers is not None), None)
        spare.integers.copy_(now.integers if latest is None else latest)


def _narrow(commit: Commit, lo: int, hi: int) -> Commit:
    if hi - lo == commit.value.numel():
        return commit
    also = {name: vector[lo:hi] for name, vector in commit.also.items()}
    return changed(commit, value=commit.value[lo:hi], also=also)
