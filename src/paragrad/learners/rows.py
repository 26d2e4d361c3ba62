"""Many replicas of one torch module, each a row of one tensor: their local steps are batched matrix products.

A window of local steps depends on nothing but the weights it begins from, the state of its own optimiser and its own
mini-batches. So the windows of many workers can be computed together, whenever that suits.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from paragrad.data.plan import Plan
from paragrad.data.source import Arrays, Source, leaves, mapped
from paragrad.flat import Piece
from paragrad.learners.linear import Linears, Sink, Uses
from paragrad.learners.torch import TorchLearner, aligned, by_class, split
from paragrad.optim.rows import RowOptimizer, rows_of
from paragrad.types import Batches, Vector

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]
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


@dataclass(slots=True)
class Outcome:
    """What a window of one row did."""

    steps: int = 0
    rows: int = 0
    weight: float = 0.0
    loss: float = 0.0
    """Summed over the window, each step weighted by its normaliser."""
    moved: float = 0.0
    """The length of its last step, where that was asked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one step of some rows came to, still on the device; None: a row whose result does not count."""

    places: list[int | None]
    losses: torch.Tensor
    weights: torch.Tensor


@contextlib.contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """Matrix products of float32 in tf32, where that is asked for."""
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    wanted = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = wanted
    torch.backends.cudnn.conv.fp32_precision = wanted  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]
        torch.backends.cudnn.conv.fp32_precision = before[1]  # type: ignore[attr-defined]


class Stack:
    """Rows of everything that a step reads and writes, cut into the module's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], pieces: dict[str, list[Piece]]) -> None:
        self.tensors = tensors
        self.steps = tensors["steps"]
        self.weights = _cut(tensors["weights"], pieces["weights"])
        self.buffers = _cut(tensors["buffers"], pieces["buffers"])
        self.integers = _cut(tensors["integers"], pieces["integers"])


def _cut(tensor: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor]:
    return [tensor[:, piece.lo : piece.hi].view(len(tensor), *piece.tensor.shape) for piece in pieces]


class TorchRows:
    """``count`` replicas of a learner's module, loss and optimiser on one device."""

    batched = True

    def __init__(
        self,
        learner: TorchLearner,
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
        optimizer = rows_of(learner.torch_optimizer)
        assert optimizer is not None, "why_not was not asked"
        self.optimizer: RowOptimizer = optimizer
        self.device = torch.device(device)
        self.count = count
        self.chunk = min(chunk or count, count)
        self._gradients = gradients
        self._measured = measured
        self._precision = precision
        self._plan = plan
        self._source = self._on_device(source)
        self.module = copy.deepcopy(learner.module).to(device).requires_grad_(False)
        self.module.train()
        self.loss = copy.deepcopy(learner.loss).to(device) if isinstance(learner.loss, nn.Module) else learner.loss
        self._pieces = learner.pieces
        self._names = {kind: [piece.name for piece in pieces] for kind, pieces in self._pieces.items()}
        dtype = learner.weights.dtype
        length = learner.weights.numel()
        # Every row begins at a multiple of 128 bytes: kernels read aligned rows up to twice as fast.
        self._width = -(-length // ALIGNED) * ALIGNED

        def rows(length: int, number: int, kind: torch.dtype = dtype, fill: float = 0.0) -> torch.Tensor:
            return torch.full((number, length), fill, dtype=kind, device=self.device)

        def everything(number: int) -> dict[str, torch.Tensor]:
            tensors = {"weights": rows(self._width, number)}
            tensors["buffers"] = rows(learner.buffers.numel(), number, learner.buffers.dtype)
            tensors["integers"] = rows(learner.integers.numel(), number, torch.int64)
            for k, fill in enumerate(self.optimizer.slots if not gradients else ()):
                tensors[f"slot{k}"] = rows(self._width, number, fill=fill)
            tensors["steps"] = torch.zeros(number, dtype=torch.float32, device=self.device)
            if gradients:
                tensors["gradients"] = rows(self._width, number)
                tensors["joined"] = torch.zeros(number, dtype=torch.float64, device=self.device)
            return tensors

        self._slots = 0 if gradients else len(self.optimizer.slots)
        self._all = everything(count)
        self.weights, self.buffers, self.integers = (
            self._all["weights"][:, :length],
            self._all["buffers"],
            self._all["integers"],
        )
        self.gradients = self._all["gradients"][:, :length] if gradients else None
        self._start = learner.weights.clone(), learner.buffers.clone(), learner.integers.clone()
        self._begin()
        self._make = everything
        self._places = {ALL: self._all}
        self._stacks: dict[tuple[str, int], Stack] = {}
        self._graphs: dict[tuple[str, int, int, bool], _Graph] = {}
        self._seen: Counter[tuple[str, int, int, bool]] = Counter()
        self._orders: dict[int, torch.Tensor] = {}
        self._patience = PATIENCE
        self._at_once = False
        self._scratch = learner
        self._scratch_rows: torch.Tensor | None = None
        self._linears: list[tuple[int, int | None]] | None = None
        """Weight and bias of each linear layer that is used once in a forward pass; None: not looked at yet."""
        self._looked_at: list[tuple[int, int | None]] = []

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
        self._scratch_rows = None

    # -- one row --------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.optimizer.lr

    def forget(self, row: int) -> None:
        """A new worker takes the row, or its optimiser has seen NaN: the optimiser's state is as at the start."""
        for k, fill in enumerate(self.optimizer.slots if not self._gradients else ()):
            self._all[f"slot{k}"][row].fill_(fill)
        self._all["steps"][row] = 0

    def scatter(self, row: int, seed: int) -> None:
        """Move a row to a random point."""
        self._scratch.weights.copy_(self.weights[row])
        self._scratch.spread()
        self._scratch.scatter(seed)
        self.weights[row].copy_(self._scratch.weights)

    # -- windows --------------------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Compute these windows, in as many rows at a time as there is room for; no row may be in two of them."""
        order = sorted(range(len(tasks)), key=lambda k: (-len(tasks[k].batches), tasks[k].row))
        outcomes = [Outcome() for _ in tasks]
        with computing(self._precision):
            for start in range(0, len(order), self.chunk):
                mine = order[start : start + self.chunk]
                self._run([tasks[k] for k in mine], [outcomes[k] for k in mine])
        return outcomes

    def _run(self, tasks: list[Task], outcomes: list[Outcome]) -> None:
        where = [task.row for task in tasks]
        direct = where == list(range(self.count))
        home = ALL if direct else STAGE
        index = torch.tensor(where, device=self.device)
        if not direct:
            self._move(index, home)
        rows, sizes = self._rows_of(tasks)
        found: list[Found] = []
        for step in range(len(tasks[0].batches)):
            active = sum(1 for task in tasks if len(task.batches) > step)
            found += self._step(home, rows[step, :active], sizes[step][:active], step > 0, outcomes)
        if not direct:
            self._move(index, home, back=True)
        self._tell(found, outcomes)

    def _rows_of(self, tasks: list[Task]) -> tuple[torch.Tensor, list[list[int]]]:
        """(step, task, place in the mini-batch) -> row of the data, on the device; and how many of these count."""
        plan, steps = self._plan, len(tasks[0].batches)
        positions = np.array([task.batches + task.batches[:1] * (steps - len(task.batches)) for task in tasks]).T
        epochs, batches = np.divmod(positions, plan.batches)
        starts = batches * plan.batch_size
        sizes = np.minimum(plan.batch_size, plan.rows - starts)
        there = np.unique(epochs)
        orders = torch.cat([self._order(int(epoch)) for epoch in there])
        first = torch.from_numpy(np.searchsorted(there, epochs) * plan.rows + starts).to(self.device)
        inside = torch.arange(min(plan.batch_size, plan.rows), device=self.device)
        return orders[(first.unsqueeze(-1) + inside).clamp_(max=len(orders) - 1)], sizes.tolist()

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

    def _tell(self, found: list[Found], outcomes: list[Outcome]) -> None:
        """Losses and their normalisers, fetched from the device at once."""
        losses = torch.cat([piece.losses for piece in found]).tolist()
        weights = torch.cat([piece.weights for piece in found]).tolist()
        places = [k for piece in found for k in piece.places]
        for k, loss, weight in zip(places, losses, weights, strict=True):
            if k is not None:
                outcomes[k].loss += loss * weight
                outcomes[k].weight += weight

    # -- one step of many rows ------------------------------------------------------------------------------

    def _step(self, home: str, rows: torch.Tensor, sizes: list[int], joined: bool, outcomes: list[Outcome]) -> list[Found]:
        """One step of the first rows of a place; a gradient is joined with what is there.

        The last mini-batch of an epoch may be shorter than the others. Who has it is set aside, makes the others' step
        with them in vain, and then its own from where it was.
        """
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
            losses, normalisers = self._advance(home, count, rows, joined)
            wasted = set(short)
            found.append(Found([None if k in wasted else k for k in range(count)], losses, normalisers))
        for group, old in zip(aside, kept, strict=True):
            for name, mine in self._place(ASIDE).items():
                mine[: len(group)].copy_(old[name])
            losses, normalisers = self._advance(ASIDE, len(group), rows[group, : sizes[group[0]]], joined)
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
            self._stacks[key] = Stack({name: rows[:count] for name, rows in self._place(home).items()}, self._pieces)
        return self._stacks[key]

    def _advance(self, home: str, count: int, rows: torch.Tensor, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        stack = self._stack(home, count)
        if self.device.type != "cuda" or not isinstance(self._source, Arrays):
            return self._compute(stack, self._batch(rows), joined)
        key = (home, count, rows.shape[1], joined and self._gradients)
        graph = self._graphs.get(key)
        if graph is None:
            if self._seen[key] < self._patience or len(self._graphs) >= GRAPHS:
                self._seen[key] += 1  # the first times are the warm-up that a capture needs
                return self._compute(stack, self._batch(rows), joined)
            graph = self._graphs[key] = _Graph(rows)
            graph.capture(lambda rows: self._compute(stack, self._batch(rows), joined))
        return graph.replay(rows)

    def _compute(self, stack: Stack, batch: Any, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and update of every row of the stack; returns losses and their normalisers."""
        inputs, target = split(batch)
        gradient = self._gradient_of(stack, joined)
        # A step of plain SGD is made in the very product that computes a linear layer's gradient.
        views = stack.weights if self._at_once else _cut(gradient, self._pieces["weights"])
        parameters = [weights.detach().requires_grad_() for weights in stack.weights]
        # torch's rule for batch-norm writes running statistics into a copy where the rows do not lie side by side.
        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in stack.buffers]
        with torch.enable_grad(), self._autocast():
            one = vmap(partial(self._loss_of_one, views), randomness="error")
            losses, normalisers = one(parameters, buffers, stack.integers, inputs, target)
        for into, buffer in zip(stack.buffers, buffers, strict=True):
            into.copy_(buffer)
        sunk = {k for pair in self._linears or () for k in pair}
        found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        for k, mine in enumerate(found):
            if mine is not None:
                views[k].copy_(mine)
            elif k not in sunk:
                raise RuntimeError(f"The loss does not depend on {self._names['weights'][k]!r}")
        if self._gradients:
            self._join(stack, gradient, normalisers, joined)
        elif not self._at_once:
            self._update(stack, gradient)
        stack.steps.add_(1)
        if self._linears is None:
            self._use(self._looked_at)
        return losses.detach().to(torch.float64), normalisers.to(torch.float64)

    def _use(self, linears: list[tuple[int, int | None]]) -> None:
        """From the next step on, these layers' gradients are written where they are wanted."""
        self._linears = linears
        alone = {k for pair in linears for k in pair if k is not None} == set(range(len(self._names["weights"])))
        self._at_once = alone and self.optimizer.plain and not self._gradients and self._precision != "bf16"

    def _gradient_of(self, stack: Stack, joined: bool) -> torch.Tensor:
        """Where the step's gradients are written, a row for each replica."""
        if self._gradients and not joined:
            return stack.tensors["gradients"]
        count = len(stack.steps)
        if self._scratch_rows is None or len(self._scratch_rows) < count:
            size = max(count, self.chunk)
            self._scratch_rows = torch.zeros((size, self._width), dtype=self.weights.dtype, device=self.device)
        return self._scratch_rows[:count]

    def _loss_of_one(
        self,
        sinks: list[torch.Tensor],
        weights: list[Vector],
        buffers: list[Vector],
        integers: list[Vector],
        inputs: Any,
        target: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = dict(zip(self._names["weights"], weights, strict=True))
        state |= dict(zip(self._names["buffers"], buffers, strict=True))
        state |= dict(zip(self._names["integers"], integers, strict=True))
        places = {id(weight): k for k, weight in enumerate(weights)}
        if self._linears is None:
            looking: TorchFunctionMode = Uses()
        else:
            rate = self.optimizer.lr if self._at_once else None
            found = {id(weights[w]): Sink(sinks[w], None if b is None else sinks[b], rate) for w, b in self._linears}
            looking = Linears(found)
        with looking:
            if isinstance(inputs, dict):
                output = functional_call(self.module, state, (), inputs)
            else:
                output = functional_call(self.module, state, inputs if isinstance(inputs, tuple) else (inputs,))
        if isinstance(looking, Uses):
            self._looked_at = _used_once(looking.found, places)
        target = aligned(output, target, self.loss)
        return self.loss(output, target), self._normaliser(target)

    def _normaliser(self, target: Any) -> torch.Tensor:
        """As ``learners.torch.normaliser``, of one row, without looking at the values."""
        first = leaves(target)[0]
        if not first.ndim:
            return first.new_ones((), dtype=torch.float64)
        if by_class(self.loss) and not first.is_floating_point():
            here = first != getattr(self.loss, "ignore_index", -100)
            weight = getattr(self.loss, "weight", None)
            if weight is None:
                return here.sum(dtype=torch.float64)
            return torch.where(here, weight[torch.where(here, first, 0)], 0.0).sum(dtype=torch.float64)
        return first.new_full((), float(first.shape[0]), dtype=torch.float64)

    def _join(self, stack: Stack, gradient: torch.Tensor, weights: torch.Tensor, joined: bool) -> None:
        """A mean gradient, or its mean with what earlier mini-batches of the window gave."""
        total = stack.tensors["joined"]
        if not joined:
            total.copy_(weights)
            return
        total.add_(weights)
        share = torch.where(total > 0, weights / total, 0.0).to(gradient.dtype)
        stack.tensors["gradients"].lerp_(gradient, share.view(-1, 1).expand_as(gradient))

    def _update(self, stack: Stack, gradient: torch.Tensor) -> None:
        """One step of every row's optimiser; by torch's own kernel for lists of tensors where it has one."""
        if self.optimizer.fused is None or self.device.type != "cuda":
            slots = [stack.tensors[f"slot{k}"] for k in range(self._slots)]
            self.optimizer.step(stack.tensors["weights"], gradient, slots, stack.steps.view(-1, 1))
            return
        o = self.optimizer.options
        made = stack.steps + 1
        getattr(torch, self.optimizer.fused)(
            list(stack.tensors["weights"].unbind()),
            list(gradient.unbind()),
            list(stack.tensors["slot0"].unbind()),
            list(stack.tensors["slot1"].unbind()),
            [],
            list(made.unbind()),
            lr=o["lr"],
            beta1=o["betas"][0],
            beta2=o["betas"][1],
            weight_decay=o["weight_decay"],
            eps=o["eps"],
            amsgrad=False,
            maximize=o["maximize"],
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # -- data -----------------------------------------------------------------------------------------------

    def _on_device(self, source: Source) -> Source:
        """Arrays go to the device once; a Dataset is asked row by row."""
        if self.device.type == "cpu" or not isinstance(source, Arrays):
            return source
        return Arrays(mapped(source.tree, lambda leaf: leaf.to(self.device)))

    def _batch(self, index: torch.Tensor) -> Any:
        if isinstance(self._source, Arrays):
            flat = index.view(-1)
            return mapped(self._source.tree, lambda leaf: leaf.index_select(0, flat).view(*index.shape, *leaf.shape[1:]))
        return stacked([self._source.batch(rows) for rows in index.cpu().numpy()], self.device)


def _used_once(found: list[tuple[int, int | None]], places: dict[int, int]) -> list[tuple[int, int | None]]:
    """The linear layers whose weight and bias are replicas' own and are used in that one place."""
    uses = Counter(tensor for pair in found for tensor in pair)
    mine = []
    for weight, bias in found:
        known = weight in places and (bias is None or bias in places)
        if known and uses[weight] == 1 and (bias is None or uses[bias] == 1):
            mine.append((places[weight], None if bias is None else places[bias]))
    return mine


@dataclass
class _Graph:
    """One step of so many rows as a CUDA graph: launched as one, with other mini-batches each time."""

    index: torch.Tensor
    graph: Any = field(default=None, init=False)
    out: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def capture(self, step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.index = self.index.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Garbage that holds memory of the device, collected while a graph is captured, would spoil it; so would a checkpoint
        # that another thread copies from there, but for this mode.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.out = step(self.index)
        finally:
            gc.enable()

    def replay(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.out is not None
        self.index.copy_(index)
        self.graph.replay()
        return self.out[0].clone(), self.out[1].clone()


def stacked(batches: list[Any], device: torch.device) -> Any:
    """Mini-batches of the same nesting as one, with a first dimension for the rows."""
    first = batches[0]
    if isinstance(first, dict):
        return {key: stacked([batch[key] for batch in batches], device) for key in first}
    if isinstance(first, tuple | list):
        return tuple(stacked(list(parts), device) for parts in zip(*batches, strict=True))
    return torch.stack([torch.as_tensor(batch) for batch in batches]).to(device)


def why_not(learner: TorchLearner, source: Source, plan: Plan, *, gradients: bool = False) -> str | None:
    """Why this learner's replicas cannot be computed together; None where they can.

    It is tried: two rows make a step together, and must come to where each comes alone.
    """
    if rows_of(learner.torch_optimizer) is None:
        return f"the optimiser {type(learner.torch_optimizer).__name__} is not known for rows"
    if learner.coarse:
        return "the module holds weights in a coarser type than the center"
    two = min(2, plan.positions)
    functorch: Any = torch._C._functorch
    fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)  # a loop inside torch would be slower than ours
    try:
        rows = TorchRows(learner, two, source, plan, gradients=True)
        outcomes = rows.run([Task(row, (row,)) for row in range(two)])
    except Exception as error:
        return _in_words(error)
    finally:
        functorch._set_vmap_fallback_enabled(fallback)
    assert rows.gradients is not None
    for row in range(two):
        if not _same_alone(learner, source.batch(plan.rows_of(row)), rows, row, outcomes[row]):
            return "a step of two rows together is not the same as one after another"
    return None


def _in_words(error: Exception) -> str:
    """What keeps a model from being computed together; torch's own words where they are not known."""
    said = str(error).strip()
    if "randomness" in said:
        return "the model draws random numbers (dropout), which must not depend on who is computed with whom"
    if "item()" in said or "data-dependent control flow" in said:
        return "what the model does depends on the values of a batch (data-dependent control flow)"
    if "fallback" in said.lower() or "batching rule" in said.lower():
        return "torch has no way to compute one of its operations for many models at once"
    first = said.partition("\n")[0]
    return f"{type(error).__name__}: {first if len(first) < 160 else first[:160].rpartition(' ')[0] + ' ...'}"


def _same_alone(learner: TorchLearner, batch: Any, rows: TorchRows, row: int, outcome: Outcome) -> bool:
    assert rows.gradients is not None
    before = learner.weights.clone(), learner.buffers.clone(), learner.integers.clone()
    gradient = torch.empty_like(learner.weights)
    with torch.random.fork_rng(devices=[]):
        step = learner.gradient(batch, gradient)
    learner.collect()
    after = learner.buffers.clone()
    for vector, old in zip((learner.weights, learner.buffers, learner.integers), before, strict=True):
        vector.copy_(old)
    learner.spread()
    tolerance = 1e-3 if learner.weights.dtype == torch.float32 else 1e-9
    scale = max(float(gradient.abs().max()), 1e-12)
    return (
        math.isclose(outcome.loss, step.loss * step.weight, rel_tol=tolerance, abs_tol=tolerance)
        and math.isclose(outcome.weight, step.weight, rel_tol=tolerance)
        and bool((rows.gradients[row] - gradient).abs().max() <= tolerance * scale)
        and torch.allclose(rows.buffers[row], after, rtol=tolerance, atol=tolerance)
    )


def slots_of(learner: TorchLearner) -> int:
    """How many vectors the optimiser keeps for each replica."""
    optimizer = rows_of(learner.torch_optimizer)
    return 2 if optimizer is None else len(optimizer.slots)


def activations(learner: TorchLearner, source: Source, plan: Plan) -> int:
    """Bytes that the forward pass of one replica keeps for its backward pass, beside the weights."""
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = TorchRows(learner, 1, source, plan, gradients=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows.run([Task(0, (0,))])
    seen.pop(rows.weights.untyped_storage().data_ptr(), None)
    return sum(seen.values())
