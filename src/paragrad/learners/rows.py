"""Many replicas of one model, each a row of one tensor: their local steps are batched matrix products.

A window of local steps depends only on its initial weights, the state of its optimiser and its mini-batches. So the windows
of many workers can be computed together, at any time.
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
"""Row lengths are rounded up to a multiple of this number of elements."""
ALL, STAGE, ASIDE = "all", "stage", "aside"
"""Places of computation: ALL holds every row, STAGE the rows of the current windows, ASIDE rows with a short mini-batch."""
FEW = 4
"""Rows that are computed aside at a time."""
PATIENCE = 10
"""Steps of one shape before it becomes a CUDA graph; the capture takes as long as several steps."""
GRAPHS = 24
"""Maximum number of CUDA graphs; steps of further shapes are launched one kernel at a time."""


@dataclass(frozen=True, slots=True)
class Task:
    """A window of one row: local steps on these mini-batches, or their mean gradient."""

    row: int
    batches: Batches
    progress: tuple[float, ...] = ()
    """Progress of the run at each step, for a learning-rate schedule."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The mini-batches of one step of some rows."""

    rows: torch.Tensor
    """(row, position in the mini-batch) -> row of the data, on the device."""
    sizes: list[int]
    """Size of each mini-batch."""
    positions: list[int]
    """Position of each mini-batch in the plan."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one step of some rows, still on the device."""

    places: list[int | None]
    """Index of each row's task; None: its result does not count."""
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
        self._learner = learner
        self._model = row_model(learner, self.device)
        self._stepper = Stepper(self._model, self.device, gradients=gradients, precision=precision, most=self.chunk)
        self.optimizer = self._stepper.optimizer
        self.paced = self._model.paced
        """True if the learning rate changes during a run."""
        self.lr = self.optimizer.lr
        """Learning rate without a schedule."""
        self._gradients = gradients
        self._measured = measured
        self._precision = precision
        self._plan = plan
        if self.device.type != "cpu" and isinstance(source, Arrays):
            source = Arrays(mapped(source.tree, lambda leaf: leaf.to(self.device)))
        self._source = source
        self._length = learner.weights.numel()
        # Every row begins at a multiple of 128 bytes. Kernels read aligned rows up to twice as fast, and some round by how
        # their operands are aligned, so unaligned rows would give results that depend on their position.
        self._width = -(-self._length // ALIGNED) * ALIGNED
        self._all = self._allocate(count)
        self.weights = self._all["weights"][:, : self._length]
        self.buffers, self.integers = self._all["buffers"], self._all["integers"]
        self.gradients = self._all["gradients"][:, : self._length] if gradients else None
        self._start = learner.weights.clone(), learner.buffers.clone(), learner.integers.clone()
        self._made = [0] * count
        """Steps of each row's optimiser, equal to ``steps`` on the device."""
        self._reset()
        self._places = {ALL: self._all}
        self._stacks: dict[tuple[str, int], Stack] = {}
        self._graphs: dict[tuple[str, int, int, bool], Graph] = {}
        self._launches: Counter[tuple[str, int, int, bool]] = Counter()
        self._orders: dict[int, torch.Tensor] = {}
        self._patience = PATIENCE
        (first,) = self._drawn([Task(0, (0,))])
        with seeds.kept():
            self._stepper.choose(self._stack(ALL, 1), self._batch(first.rows, first.positions))

    def _allocate(self, count: int) -> dict[str, torch.Tensor]:
        learner, dtype = self._learner, self._learner.weights.dtype

        def rows(width: int, dtype: torch.dtype, fill: float = 0.0) -> torch.Tensor:
            return torch.full((count, width), fill, dtype=dtype, device=self.device)

        def numbers(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=self.device)

        tensors = {
            "weights": rows(self._width, dtype),
            "buffers": rows(learner.buffers.numel(), learner.buffers.dtype),
            "integers": rows(learner.integers.numel(), torch.int64),
            "steps": numbers(torch.float32),
        }
        if self._gradients:
            return tensors | {"gradients": rows(self._width, dtype), "joined": numbers(torch.float64)}
        for k, start in enumerate(self.optimizer.slots):
            tensors[f"slot{k}"] = rows(self._width, dtype, start if isinstance(start, float) else 0.0)
        if self._stepper.scheduled:
            tensors["rates"] = numbers(torch.float64)
        return tensors

    def _reset(self) -> None:
        for rows, start in zip((self.weights, self.buffers, self.integers), self._start, strict=True):
            rows.copy_(start)
        for row in range(self.count):
            self.forget(row)

    def warm_up(self) -> None:
        """Make the first steps and their CUDA graphs before the start barrier, and reset all rows."""
        if self.device.type == "cuda":
            self._patience = 2
            ends = (0,) * (self.count - 1) + (self._plan.batches - 1,)  # the last mini-batch of an epoch may be short
            for _ in range(3):
                self.run([Task(row, (0,)) for row in range(self.count)])
                self.run([Task(row, (position,)) for row, position in enumerate(ends)])
            self._reset()
            self._patience = PATIENCE
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Free the memory that only the computation of windows needs."""
        self._graphs.clear()
        self._stacks.clear()
        self._places = {ALL: self._all}
        self._stepper.close()

    # -- one row --------------------------------------------------------------------------------------------

    def forget(self, row: int) -> None:
        """Reset the optimiser's state, because a new worker takes the row or the optimiser has received NaN."""
        for slot, start in zip(self._slots(), self.optimizer.slots, strict=False):
            mine = slot[row]
            if isinstance(start, float):
                mine.fill_(start)
            else:
                mine[: len(start)].copy_(start)
        self._all["steps"][row] = self._made[row] = self.optimizer.made

    def state(self, row: int) -> dict[str, torch.Tensor]:
        """Return the state of a row's optimiser in the form of a separate learner's state."""
        return self._model.state([slot[row, : self._length] for slot in self._slots()], self._made[row])

    def load(self, row: int, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that ``state`` returned."""
        if state:
            slots, made = self._model.slots(state)
            for mine, slot in zip(self._slots(), slots, strict=True):
                mine[row, : self._length].copy_(slot)
            self._all["steps"][row] = self._made[row] = made

    def _slots(self) -> list[torch.Tensor]:
        return [] if self._gradients else [self._all[f"slot{k}"] for k in range(len(self.optimizer.slots))]

    def scatter(self, row: int, seed: int) -> None:
        """Move a row to a random point."""
        self._learner.weights.copy_(self.weights[row])
        self._learner.spread()
        self._learner.scatter(seed)
        self.weights[row].copy_(self._learner.weights)

    # -- windows --------------------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> list[Done]:
        """Compute these windows, up to ``chunk`` rows at a time; a row may be in only one of them."""
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
        place = ALL if direct else STAGE
        index = torch.tensor(where, device=self.device)
        if not direct:
            self._move(index, place)
        found: list[Found] = []
        for step, drawn in enumerate(self._drawn(tasks)):
            if self.paced:
                self._set_rates(place, tasks[: len(drawn.rows)], step, outcomes)
            found += self._step(place, drawn, step > 0, outcomes)
        if not direct:
            self._move(index, place, back=True)
        if not self._gradients:
            for task in tasks:
                self._made[task.row] += len(task.batches)
        self._add_losses(found, outcomes)

    def _set_rates(self, place: str, tasks: list[Task], step: int, outcomes: list[Done]) -> None:
        rates = [self._model.rate(task.progress[step] if task.progress else 0.0, self._made[task.row] + step) for task in tasks]
        if self._stepper.scheduled:
            self._tensors(place)["rates"][: len(rates)] = torch.tensor(rates, dtype=torch.float64, device=self.device)
        for outcome, rate in zip(outcomes, rates, strict=False):
            outcome.lr = rate

    def _drawn(self, tasks: list[Task]) -> list[Drawn]:
        """Return the mini-batches of each step; the windows are sorted by length, the longest first."""
        plan, steps = self._plan, len(tasks[0].batches)
        positions = np.array([task.batches + task.batches[:1] * (steps - len(task.batches)) for task in tasks]).T
        epochs, batches = np.divmod(positions, plan.batches)
        starts = batches * plan.batch_size
        sizes = np.minimum(plan.batch_size, plan.rows - starts)
        used = np.unique(epochs)
        orders = torch.cat([self._order(int(epoch)) for epoch in used])
        first = torch.from_numpy(np.searchsorted(used, epochs) * plan.rows + starts).to(self.device)
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

    def _move(self, index: torch.Tensor, place: str, *, back: bool = False, source: str = ALL) -> None:
        """Copy rows of one place to the beginning of another, or back."""
        into = self._tensors(place)
        for name, rows in self._tensors(source).items():
            mine = into[name][: len(index)]
            if back:
                rows.index_copy_(0, index, mine)
            else:
                torch.index_select(rows, 0, index, out=mine)

    def _tensors(self, place: str) -> dict[str, torch.Tensor]:
        if place not in self._places:
            self._places[place] = self._allocate(self.chunk if place == STAGE else min(self.chunk, FEW))
        return self._places[place]

    def _add_losses(self, found: list[Found], outcomes: list[Done]) -> None:
        """Fetch losses and normalisers from the device at once, and add them to the outcomes."""
        losses = torch.cat([piece.losses for piece in found]).tolist()
        weights = torch.cat([piece.weights for piece in found]).tolist()
        places = [k for piece in found for k in piece.places]
        for k, loss, weight in zip(places, losses, weights, strict=True):
            if k is not None:
                outcomes[k].loss += loss * weight
                outcomes[k].weight += weight

    # -- one step of many rows ------------------------------------------------------------------------------

    def _step(self, place: str, drawn: Drawn, joined: bool, outcomes: list[Done]) -> list[Found]:
        """Make one step of the first rows of a place; with ``joined`` a gradient is averaged with the earlier ones.

        The last mini-batch of an epoch may be shorter than the others. A row with such a mini-batch is copied. The row makes
        the others' step with them, and the result is discarded; the copy makes its own step and replaces the row.
        """
        rows, sizes, positions = drawn.rows, drawn.sizes, drawn.positions
        for outcome, size in zip(outcomes, sizes, strict=False):
            outcome.steps += 1
            outcome.rows += size
        count, full = len(sizes), rows.shape[-1]
        short = [k for k, size in enumerate(sizes) if size != full]
        tensors = self._tensors(place)
        before = tensors["weights"][:count].clone() if self._measured else None
        found = []
        groups = [short[start : start + FEW] for start in range(0, len(short), FEW)]
        copies = [{name: tensor[group].clone() for name, tensor in tensors.items()} for group in groups]
        if len(short) < count:
            losses, normalisers = self._advance(place, rows, positions, joined)
            discarded = set(short)
            found.append(Found([None if k in discarded else k for k in range(count)], losses, normalisers))
        for group, copied in zip(groups, copies, strict=True):
            for name, apart in self._tensors(ASIDE).items():
                apart[: len(group)].copy_(copied[name])
            mine, where = rows[group, : sizes[group[0]]], [positions[k] for k in group]
            losses, normalisers = self._advance(ASIDE, mine, where, joined)
            self._move(torch.tensor(group, device=self.device), ASIDE, back=True, source=place)
            found.append(Found(list(group), losses, normalisers))
        if before is not None:
            lengths = torch.linalg.vector_norm(tensors["weights"][:count] - before, dim=1).tolist()
            for outcome, moved in zip(outcomes, lengths, strict=False):
                outcome.moved = moved
        return found

    def _stack(self, place: str, count: int) -> Stack:
        key = place, count
        if key not in self._stacks:
            first = {name: rows[:count] for name, rows in self._tensors(place).items()}
            self._stacks[key] = Stack(first, self._stepper.pieces)
        return self._stacks[key]

    def _advance(self, place: str, rows: torch.Tensor, positions: list[int], joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(rows)
        stack = self._stack(place, count)
        if self.device.type != "cuda" or not isinstance(self._source, Arrays) or not self._model.capturable:
            return self._stepper.step(stack, self._batch(rows, positions), joined)
        key = (place, count, rows.shape[1], joined and self._gradients)
        graph = self._graphs.get(key)
        if graph is None:
            if self._launches[key] < self._patience or len(self._graphs) >= GRAPHS:
                self._launches[key] += 1  # the first launches are the warm-up that a capture needs
                return self._stepper.step(stack, self._batch(rows, positions), joined)
            graph = Graph(rows, lambda rows: self._stepper.step(stack, self._batch(rows, positions), joined))
            self._graphs[key] = graph
        return graph.replay(rows)

    def _batch(self, index: torch.Tensor, positions: list[int]) -> Any:
        """Return rows of the data as mini-batches; a Dataset draws the random numbers of their positions."""
        if isinstance(self._source, Arrays):
            flat = index.view(-1)
            return mapped(self._source.tree, lambda leaf: leaf.index_select(0, flat).view(*index.shape, *leaf.shape[1:]))
        batches = []
        for position, rows in zip(positions, index.cpu().numpy(), strict=True):
            seeds.seed_everything(self._plan.seed_of(position))
            batches.append(self._source.batch(rows))
        return stacked(batches, self.device)


def stacked(batches: list[Any], device: torch.device) -> Any:
    """Stack mini-batches of the same nesting; the new first dimension is that of the replicas."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: stacked([batch[key] for batch in batches], device) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stacked(list(parts), device) for parts in zip(*batches, strict=True))
    return torch.stack([torch.as_tensor(batch) for batch in batches]).to(device)
