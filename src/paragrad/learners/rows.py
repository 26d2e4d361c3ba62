"""Many replicas of one torch module, each a row of one tensor: their local steps are batched matrix products.

A window of local steps depends on nothing but the weights it begins from, the state of its own optimiser and its own
mini-batches. So the windows of many workers can be computed together, whenever that suits.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, vmap

from paragrad.data.plan import Plan
from paragrad.data.source import Arrays, Source, leaves, mapped
from paragrad.flat import Piece
from paragrad.learners.torch import TorchLearner, aligned, by_class, split
from paragrad.optim.rows import RowOptimizer, rows_of
from paragrad.types import Batches, Vector

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]
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

    def __init__(self, tensors: dict[str, torch.Tensor], pieces: dict[str, list[Piece]], slots: int) -> None:
        self.tensors = tensors
        self.steps = tensors["steps"]
        self.weights = _cut(tensors["weights"], pieces["weights"])
        self.buffers = _cut(tensors["buffers"], pieces["buffers"])
        self.integers = _cut(tensors["integers"], pieces["integers"])
        self.slots = [_cut(tensors[f"slot{k}"], pieces["weights"]) for k in range(slots)]
        self.gradients = _cut(tensors["gradients"], pieces["weights"]) if "gradients" in tensors else []


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
        lengths = {"weights": learner.weights.numel(), "buffers": learner.buffers.numel()}

        def rows(length: int, number: int, kind: torch.dtype = dtype, fill: float = 0.0) -> torch.Tensor:
            return torch.full((number, length), fill, dtype=kind, device=self.device)

        def everything(number: int) -> dict[str, torch.Tensor]:
            tensors = {kind: rows(length, number) for kind, length in lengths.items()}
            tensors["integers"] = rows(learner.integers.numel(), number, torch.int64)
            for k, fill in enumerate(self.optimizer.slots if not gradients else ()):
                tensors[f"slot{k}"] = rows(lengths["weights"], number, fill=fill)
            tensors["steps"] = torch.zeros(number, dtype=torch.float32, device=self.device)
            if gradients:
                tensors["gradients"] = rows(lengths["weights"], number)
                tensors["joined"] = torch.zeros(number, dtype=torch.float64, device=self.device)
            return tensors

        self._slots = 0 if gradients else len(self.optimizer.slots)
        self._all = everything(count)
        self.weights, self.buffers, self.integers = (self._all[kind] for kind in ("weights", "buffers", "integers"))
        self.gradients = self._all.get("gradients")
        self.weights.copy_(learner.weights)
        self.buffers.copy_(learner.buffers)
        self.integers.copy_(learner.integers)
        self._make_stage: Callable[[], dict[str, torch.Tensor]] = lambda: everything(self.chunk)
        self._stage: dict[str, torch.Tensor] | None = None
        self._stacks: dict[tuple[bool, int], Stack] = {}
        self._graphs: dict[tuple[bool, int, int, bool], _Graph] = {}
        self._seen: set[tuple[bool, int, int, bool]] = set()
        self._scratch = learner

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
        index = torch.tensor(where, device=self.device)
        if not direct:
            self._gather(index)
        found: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        for step in range(len(tasks[0].batches)):
            positions = [task.batches[step] for task in tasks if len(task.batches) > step]
            sizes = [self._plan.size_of(position) for position in positions]
            for size in sorted(set(sizes), reverse=True):
                mine = [k for k, other in enumerate(sizes) if other == size]
                losses, weights = self._step(direct, mine, [positions[k] for k in mine], step > 0, outcomes)
                found.append((mine, losses, weights))
            for outcome, size in zip(outcomes, sizes, strict=False):
                outcome.steps += 1
                outcome.rows += size
        if not direct:
            self._scatter(index)
        self._tell(found, outcomes)

    def _gather(self, index: torch.Tensor) -> None:
        if self._stage is None:
            self._stage = self._make_stage()
        for name, rows in self._all.items():
            torch.index_select(rows, 0, index, out=self._stage[name][: len(index)])

    def _scatter(self, index: torch.Tensor) -> None:
        assert self._stage is not None
        for name, rows in self._all.items():
            rows.index_copy_(0, index, self._stage[name][: len(index)])

    def _tell(self, found: list[tuple[list[int], torch.Tensor, torch.Tensor]], outcomes: list[Outcome]) -> None:
        """Losses and their normalisers, fetched from the device at once."""
        losses = torch.cat([losses for _, losses, _ in found]).tolist()
        weights = torch.cat([weights for _, _, weights in found]).tolist()
        places = [k for mine, _, _ in found for k in mine]
        for k, loss, weight in zip(places, losses, weights, strict=True):
            outcomes[k].loss += loss * weight
            outcomes[k].weight += weight

    # -- one step of many rows ------------------------------------------------------------------------------

    def _step(
        self, direct: bool, mine: list[int], positions: list[int], joined: bool, outcomes: list[Outcome]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the rows ``mine`` of the stage (or of all rows); a gradient is joined with what is there."""
        count = len(mine)
        rows = np.stack([self._plan.rows_of(position) for position in positions])
        prefix = mine == list(range(count))
        before = self._tensors(direct)["weights"][mine].clone() if self._measured else None
        if prefix:
            losses, weights = self._advance(direct, count, rows, joined)
        else:
            # The last mini-batch of an epoch is shorter: its rows are computed aside.
            place = torch.tensor(mine, device=self.device)
            aside = {name: rows_.index_select(0, place) for name, rows_ in self._tensors(direct).items()}
            stack = Stack(aside, self._pieces, self._slots)
            losses, weights = self._compute(stack, self._batch(rows), joined)
            for name, rows_ in self._tensors(direct).items():
                rows_.index_copy_(0, place, aside[name])
        if before is not None:
            after = self._tensors(direct)["weights"][mine]
            for k, moved in zip(mine, torch.linalg.vector_norm(after - before, dim=1).tolist(), strict=True):
                outcomes[k].moved = moved
        return losses, weights

    def _tensors(self, direct: bool) -> dict[str, torch.Tensor]:
        if direct:
            return self._all
        assert self._stage is not None
        return self._stage

    def _stack(self, direct: bool, count: int) -> Stack:
        key = direct, count
        if key not in self._stacks:
            tensors = {name: rows[:count] for name, rows in self._tensors(direct).items()}
            self._stacks[key] = Stack(tensors, self._pieces, self._slots)
        return self._stacks[key]

    def _advance(self, direct: bool, count: int, rows: np.ndarray, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if self.device.type != "cuda" or not isinstance(self._source, Arrays):
            return self._compute(self._stack(direct, count), self._batch(rows), joined)
        key = (direct, count, rows.shape[1], joined and self._gradients)
        index = torch.from_numpy(rows).pin_memory().to(self.device, non_blocking=True)
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._seen or len(self._graphs) >= GRAPHS:
                self._seen.add(key)  # the first time is the warm-up that a capture needs
                return self._compute(self._stack(direct, count), self._taken(index), joined)
            graph = self._graphs[key] = _Graph(index)
            stack = self._stack(direct, count)
            graph.capture(lambda index: self._compute(stack, self._taken(index), joined))
        return graph.replay(index)

    def _compute(self, stack: Stack, batch: Any, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and update of every row of the stack; returns losses and their normalisers."""
        inputs, target = split(batch)
        parameters = [weights.detach().requires_grad_() for weights in stack.weights]
        # torch's rule for batch-norm writes running statistics into a copy where the rows do not lie side by side.
        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in stack.buffers]
        with torch.enable_grad(), self._autocast():
            one = vmap(self._loss_of_one, randomness="error")
            losses, normalisers = one(parameters, buffers, stack.integers, inputs, target)
        for into, buffer in zip(stack.buffers, buffers, strict=True):
            into.copy_(buffer)
        gradients = torch.autograd.grad(losses.sum(), parameters)
        losses = losses.detach()
        if self._gradients:
            self._join(stack, gradients, normalisers, joined)
        elif self.optimizer.fused and self.device.type == "cuda":
            self._fused(stack, gradients)
        else:
            for k, (weights, gradient) in enumerate(zip(stack.weights, gradients, strict=True)):
                steps = stack.steps.view(-1, *[1] * (weights.ndim - 1))
                self.optimizer.step(weights, gradient, [slot[k] for slot in stack.slots], steps)
        stack.steps.add_(1)
        return losses.to(torch.float64), normalisers.to(torch.float64)

    def _loss_of_one(
        self, weights: list[Vector], buffers: list[Vector], integers: list[Vector], inputs: Any, target: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = dict(zip(self._names["weights"], weights, strict=True))
        state |= dict(zip(self._names["buffers"], buffers, strict=True))
        state |= dict(zip(self._names["integers"], integers, strict=True))
        if isinstance(inputs, dict):
            output = functional_call(self.module, state, (), inputs)
        else:
            output = functional_call(self.module, state, inputs if isinstance(inputs, tuple) else (inputs,))
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

    def _join(self, stack: Stack, gradients: Sequence[torch.Tensor], weights: torch.Tensor, joined: bool) -> None:
        """A mean gradient, or its mean with what earlier mini-batches of the window gave."""
        total = stack.tensors["joined"]
        if joined:
            total.add_(weights)
        else:
            total.copy_(weights)
        share = torch.where(total > 0, weights / total, 0.0).to(gradients[0].dtype)
        for into, gradient in zip(stack.gradients, gradients, strict=True):
            if joined:
                into.lerp_(gradient, share.view(-1, *[1] * (gradient.ndim - 1)).expand_as(gradient))
            else:
                into.copy_(gradient)

    def _fused(self, stack: Stack, gradients: Sequence[torch.Tensor]) -> None:
        """torch's own kernel for lists of tensors: one pass over memory."""
        assert self.optimizer.fused is not None
        o = self.optimizer.options
        stack.steps.add_(1)
        count = len(stack.steps)
        steps = [step for step in stack.steps.unbind() for _ in gradients]

        def one_by_one(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [piece[row] for row in range(count) for piece in pieces]

        getattr(torch, self.optimizer.fused)(
            one_by_one(stack.weights),
            one_by_one(gradients),
            one_by_one(stack.slots[0]),
            one_by_one(stack.slots[1]),
            [],
            steps,
            lr=o["lr"],
            beta1=o["betas"][0],
            beta2=o["betas"][1],
            weight_decay=o["weight_decay"],
            eps=o["eps"],
            amsgrad=False,
            maximize=o["maximize"],
        )
        stack.steps.sub_(1)

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

    def _taken(self, index: torch.Tensor) -> Any:
        assert isinstance(self._source, Arrays)
        return mapped(self._source.tree, lambda leaf: leaf.index_select(0, index.view(-1)).view(*index.shape, *leaf.shape[1:]))

    def _batch(self, rows: np.ndarray) -> Any:
        if isinstance(self._source, Arrays):
            return self._taken(torch.from_numpy(rows).to(self.device))
        return stacked([self._source.batch(mine) for mine in rows], self.device)


@dataclass
class _Graph:
    """One step of so many rows as a CUDA graph: launched as one, with other mini-batches each time."""

    index: torch.Tensor
    graph: Any = field(default=None, init=False)
    out: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def capture(self, step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.index = self.index.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = step(self.index)

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
        first = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first[:160]}"
    finally:
        functorch._set_vmap_fallback_enabled(fallback)
    assert rows.gradients is not None
    for row in range(two):
        if not _same_alone(learner, source.batch(plan.rows_of(row)), rows, row, outcomes[row]):
            return "a step of two rows together is not the same as one after another"
    return None


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
