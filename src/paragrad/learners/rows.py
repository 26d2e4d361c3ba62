"""Many replicas of one model, each a row of one tensor: their local steps are batched matrix products.

A window of local steps depends on nothing but the weights it begins from, the state of its own optimiser and its own
mini-batches. So the windows of many workers can be computed together, whenever that suits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragrad.data import seeds
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays, Source, mapped
from paragrad.learners.graph import Graph
from paragrad.learners.rowmodel import Batchable, row_model
from paragrad.learners.stepper import Precision, Stack, Stepper, computing
from paragrad.types import Batches, Done

ALIGNED = 32
"""Elements that a row's length is rounded up to."""
ALL, STAGE, ASIDE = "all", "stage", "aside"
"""Where rows are computed: in their own place where all are due, else side by side with others, or apart from them."""
FEW = 4
"""Rows that are computed apart at a time."""
PATIENCE = 10
"""Steps of one shape before it is made a CUDA graph, which takes as long as some of them."""
GRAPHS = 24
"""CUDA graphs that are kept; steps of further shapes are launched one kernel at a time."""


@dataclass(frozen=True, slots=True)
class Task:
    """A window of one row: local steps on these mini-batches, or their mean gradient."""

    row: int
    batches: Batches
    progress: tuple[float, ...] = ()
    """The share of the run at each of its steps, for a learning-rate schedule."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The mini-batches of one step of some rows."""

    rows: torch.Tensor
    """(row, place in the mini-batch) -> row of the data, on the device."""
    sizes: list[int]
    """How many places of each count."""
    positions: list[int]
    """The position of each in the plan."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one step of some rows came to, still on the device; None: a row whose result does not count."""

    places: list[int | None]
    losses: torch.Tensor
    weights: torch.Tensor


class TorchRows:
    """``count`` replicas of a learner's model, loss and optimiser on one device."""

    def __init__(
        self,
        learner: Batchable,
        count: int,
        source: Source,
        plan: Plan,
        *,
        device: str = "cpu",
        gradients: bool = False,
        measured: bool = False,
        precision: Precision = "float32",
        chunk: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.count = count
        self.chunk = min(chunk or count, count)
        self._model = row_model(learner, self.device)
        self._stepper = Stepper(self._model, self.device, gradients=gradients, precision=precision, most=self.chunk)
        self.optimizer = self._stepper.optimizer
        self._gradients = gradients
        self._measured = measured
        self._precision = precision
        self._plan = plan
        self._source = self._on_device(source)
        dtype = learner.weights.dtype
        length = learner.weights.numel()
        # Every row begins at a multiple of 128 bytes: kernels read aligned rows up to twice as fast, and some round by how
        # their operands are aligned, so that a row must not depend on its place.
        self._width = -(-length // ALIGNED) * ALIGNED
        self._length = length

        def rows(length: int, number: int, kind: torch.dtype = dtype, fill: float = 0.0) -> torch.Tensor:
            return torch.full((number, length), fill, dtype=kind, device=self.device)

        def everything(number: int) -> dict[str, torch.Tensor]:
            tensors = {"weights": rows(self._width, number)}
            tensors["buffers"] = rows(learner.buffers.numel(), number, learner.buffers.dtype)
            tensors["integers"] = rows(learner.integers.numel(), number, torch.int64)
            for k, start in enumerate(self.optimizer.slots if not gradients else ()):
                tensors[f"slot{k}"] = rows(self._width, number, fill=start if isinstance(start, float) else 0.0)
            tensors["steps"] = torch.zeros(number, dtype=torch.float32, device=self.device)
            if self._stepper.scheduled:
                tensors["rates"] = torch.zeros(number, dtype=torch.float64, device=self.device)
            if gradients:
                tensors["gradients"] = rows(self._width, number)
                tensors["joined"] = torch.zeros(number, dtype=torch.float64, device=self.device)
            return tensors

        self._all = everything(count)
        self.weights, self.buffers, self.integers = (
            self._all["weights"][:, :length],
            self._all["buffers"],
            self._all["integers"],
        )
        self.gradients = self._all["gradients"][:, :length] if gradients else None
        self._start = learner.weights.clone(), learner.buffers.clone(), learner.integers.clone()
        self._made = [0] * count
        """Steps of each row's optimiser, as ``steps`` has them on the device."""
        self._begin()
        self._make = everything
        self._places = {ALL: self._all}
        self._stacks: dict[tuple[str, int], Stack] = {}
        self._graphs: dict[tuple[str, int, int, bool], Graph] = {}
        self._seen: Counter[tuple[str, int, int, bool]] = Counter()
        self._orders: dict[int, torch.Tensor] = {}
        self._patience = PATIENCE
        self._scratch = learner
        (first,) = self._drawn([Task(0, (0,))])
        one = Stack({name: rows_[:1] for name, rows_ in self._all.items()}, self._stepper.pieces)
        with seeds.kept():
            self._stepper.choose(one, self._batch(first.rows, first.positions))

    def _begin(self) -> None:
        """All rows at the start."""
        for rows, start in zip((self.weights, self.buffers, self.integers), self._start, strict=True):
            rows.copy_(start)
        for row in range(self.count):
            self.forget(row)

    def warm_up(self) -> None:
        """Do before the start barrier what only the first steps would else wait for, and leave no trace."""
        if self.device.type == "cuda":
            self._patience = 2
            ends = (0,) * (self.count - 1) + (self._plan.batches - 1,)  # the last mini-batch of an epoch may be a short one
            for _ in range(3):
                self.run([Task(row, (0,)) for row in range(self.count)])
                self.run([Task(row, (position,)) for row, position in enumerate(ends)])
            self._begin()
            self._patience = PATIENCE
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Let go of what is only needed while windows are computed."""
        self._graphs.clear()
        self._stacks.clear()
        self._places = {ALL: self._all}
        self._stepper.close()

    # -- one row --------------------------------------------------------------------------------------------

    @property
    def paced(self) -> bool:
        """Whether the learning rate changes during a run."""
        return self._model.paced

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.optimizer.lr

    def forget(self, row: int) -> None:
        """A new worker takes the row, or its optimiser has seen NaN: the optimiser's state is as at the start."""
        for slot, start in zip(self._slots(), self.optimizer.slots, strict=False):
            mine = slot[row]
            if isinstance(start, float):
                mine.fill_(start)
            else:
                mine[: len(start)].copy_(start)
        self._all["steps"][row] = self._made[row] = self.optimizer.made

    def state(self, row: int) -> dict[str, torch.Tensor]:
        """The state of a row's optimiser, as that of a learner of its own would be."""
        return self._model.state([slot[row, : self._length] for slot in self._slots()], self._made[row])

    def load(self, row: int, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse."""
        if state:
            slots, made = self._model.slots(state)
            for mine, slot in zip(self._slots(), slots, strict=True):
                mine[row, : self._length].copy_(slot)
            self._all["steps"][row] = self._made[row] = made

    def _slots(self) -> list[torch.Tensor]:
        return [] if self._gradients else [self._all[f"slot{k}"] for k in range(len(self.optimizer.slots))]

    def scatter(self, row: int, seed: int) -> None:
        """Move a row to a random point."""
        self._scratch.weights.copy_(self.weights[row])
        self._scratch.spread()
        self._scratch.scatter(seed)
        self.weights[row].copy_(self._scratch.weights)

    # -- windows --------------------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> list[Done]:
        """Compute these windows, in as many rows at a time as there is room for; no row may be in two of them."""
        order = sorted(range(len(tasks)), key=lambda k: (-len(tasks[k].batches), tasks[k].row))
        outcomes = [Done(lr=self.lr) for _ in tasks]
        with computing(self._precision):
            for start in range(0, len(order), self.chunk):
                mine = order[start : start + self.chunk]
                self._run([tasks[k] for k in mine], [outcomes[k] for k in mine])
        return outcomes

    def _run(self, tasks: list[Task], outcomes: list[Done]) -> None:
        where = [task.row for task in tasks]
        direct = where == list(range(self.count))
        home = ALL if direct else STAGE
        index = torch.tensor(where, device=self.device)
        if not direct:
            self._move(index, home)
        found: list[Found] = []
        for step, drawn in enumerate(self._drawn(tasks)):
            if self.paced:
                self._set_rates(home, tasks[: len(drawn.rows)], step, outcomes)
            found += self._step(home, drawn, step > 0, outcomes)
        if not direct:
            self._move(index, home, back=True)
        if not self._gradients:
            for task in tasks:
                self._made[task.row] += len(task.batches)
        self._tell(found, outcomes)

    def _set_rates(self, home: str, tasks: list[Task], step: int, outcomes: list[Done]) -> None:
        """Each row's learning rate at this step of its window."""
        rates = [self._model.rate(task.progress[step] if task.progress else 0.0, self._made[task.row] + step) for task in tasks]
        if self._stepper.scheduled:
            self._place(home)["rates"][: len(rates)] = torch.tensor(rates, dtype=torch.float64, device=self.device)
        for outcome, rate in zip(outcomes, rates, strict=False):
            outcome.lr = rate

    def _drawn(self, tasks: list[Task]) -> list[Drawn]:
        """The mini-batches of each step of these windows, of which none is longer than the one before it."""
        plan, steps = self._plan, len(tasks[0].batches)
        positions = np.array([task.batches + task.batches[:1] * (steps - len(task.batches)) for task in tasks]).T
        epochs, batches = np.divmod(positions, plan.batches)
        starts = batches * plan.batch_size
        sizes = np.minimum(plan.batch_size, plan.rows - starts)
        there = np.unique(epochs)
        orders = torch.cat([self._order(int(epoch)) for epoch in there])
        first = torch.from_numpy(np.searchsorted(there, epochs) * plan.rows + starts).to(self.device)
        inside = torch.arange(min(plan.batch_size, plan.rows), device=self.device)
        rows = orders[(first.unsqueeze(-1) + inside).clamp_(max=len(orders) - 1)]
        active = [sum(1 for task in tasks if len(task.batches) > step) for step in range(steps)]
        each = zip(active, rows, sizes.tolist(), positions.tolist(), strict=True)
        return [Drawn(rows[:count], sizes[:count], positions[:count]) for count, rows, sizes, positions in each]

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            while len(self._orders) > 2:
                self._orders.pop(min(self._orders))
            self._orders[epoch] = torch.from_numpy(self._plan.order(epoch)).to(self.device)
        return self._orders[epoch]

    def _move(self, index: torch.Tensor, home: str, *, back: bool = False, source: str = ALL) -> None:
        """Bring rows of one place to the beginning of another, or back."""
        into = self._place(home)
        for name, rows in self._place(source).items():
            mine = into[name][: len(index)]
            if back:
                rows.index_copy_(0, index, mine)
            else:
                torch.index_select(rows, 0, index, out=mine)

    def _place(self, home: str) -> dict[str, torch.Tensor]:
        if home not in self._places:
            self._places[home] = self._make(self.chunk if home == STAGE else min(self.chunk, FEW))
        return self._places[home]

    def _tell(self, found: list[Found], outcomes: list[Done]) -> None:
        """Losses and their normalisers, fetched from the device at once."""
        losses = torch.cat([piece.losses for piece in found]).tolist()
        weights = torch.cat([piece.weights for piece in found]).tolist()
        places = [k for piece in found for k in piece.places]
        for k, loss, weight in zip(places, losses, weights, strict=True):
            if k is not None:
                outcomes[k].loss += loss * weight
                outcomes[k].weight += weight

    # -- one step of many rows ------------------------------------------------------------------------------

    def _step(self, home: str, drawn: Drawn, joined: bool, outcomes: list[Done]) -> list[Found]:
        """One step of the first rows of a place; a gradient is joined with what is there.

        The last mini-batch of an epoch may be shorter than the others. Who has it is set aside, makes the others' step
        with them in vain, and then its own from where it was.
        """
        rows, sizes, positions = drawn.rows, drawn.sizes, drawn.positions
        for outcome, size in zip(outcomes, sizes, strict=False):
            outcome.steps += 1
            outcome.rows += size
        count, full = len(sizes), rows.shape[-1]
        short = [k for k, size in enumerate(sizes) if size != full]
        weights = self._place(home)["weights"]
        before = weights[:count].clone() if self._measured else None
        found = []
        aside = [(short[start : start + FEW]) for start in range(0, len(short), FEW)]
        kept = [{name: rows_[group].clone() for name, rows_ in self._place(home).items()} for group in aside]
        if len(short) < count:
            losses, normalisers = self._advance(home, rows, positions, joined)
            wasted = set(short)
            found.append(Found([None if k in wasted else k for k in range(count)], losses, normalisers))
        for group, old in zip(aside, kept, strict=True):
            for name, apart in self._place(ASIDE).items():
                apart[: len(group)].copy_(old[name])
            mine, where = rows[group, : sizes[group[0]]], [positions[k] for k in group]
            losses, normalisers = self._advance(ASIDE, mine, where, joined)
            self._move(torch.tensor(group, device=self.device), ASIDE, back=True, source=home)
            found.append(Found(list(group), losses, normalisers))
        if before is not None:
            lengths = torch.linalg.vector_norm(weights[:count] - before, dim=1).tolist()
            for outcome, moved in zip(outcomes, lengths, strict=False):
                outcome.moved = moved
        return found

    def _stack(self, home: str, count: int) -> Stack:
        key = home, count
        if key not in self._stacks:
            self._stacks[key] = Stack({name: rows[:count] for name, rows in self._place(home).items()}, self._stepper.pieces)
        return self._stacks[key]

    def _advance(self, home: str, rows: torch.Tensor, positions: list[int], joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(rows)
        stack = self._stack(home, count)
        if self.device.type != "cuda" or not isinstance(self._source, Arrays) or not self._model.capturable:
            return self._stepper.step(stack, self._batch(rows, positions), joined)
        key = (home, count, rows.shape[1], joined and self._gradients)
        graph = self._graphs.get(key)
        if graph is None:
            if self._seen[key] < self._patience or len(self._graphs) >= GRAPHS:
                self._seen[key] += 1  # the first times are the warm-up that a capture needs
                return self._stepper.step(stack, self._batch(rows, positions), joined)
            graph = self._graphs[key] = Graph(rows)
            graph.capture(lambda rows: self._stepper.step(stack, self._batch(rows, positions), joined))
        return graph.replay(rows)

    # -- data -----------------------------------------------------------------------------------------------

    def _on_device(self, source: Source) -> Source:
        """Arrays go to the device once; a Dataset is asked row by row."""
        if self.device.type == "cpu" or not isinstance(source, Arrays):
            return source
        return Arrays(mapped(source.tree, lambda leaf: leaf.to(self.device)))

    def _batch(self, index: torch.Tensor, positions: list[int]) -> Any:
        """Rows of the data as mini-batches, with the random numbers of their positions where a Dataset draws some."""
        if isinstance(self._source, Arrays):
            flat = index.view(-1)
            return mapped(self._source.tree, lambda leaf: leaf.index_select(0, flat).view(*index.shape, *leaf.shape[1:]))
        batches = []
        for position, rows in zip(positions, index.cpu().numpy(), strict=True):
            seeds.seed_everything(self._plan.seed_of(position))
            batches.append(self._source.batch(rows))
        return stacked(batches, self.device)


def stacked(batches: list[Any], device: torch.device) -> Any:
    """Mini-batches of the same nesting as one, with a first dimension for the rows."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: stacked([batch[key] for batch in batches], device) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stacked(list(parts), device) for parts in zip(*batches, strict=True))
    return torch.stack([torch.as_tensor(batch) for batch in batches]).to(device)
