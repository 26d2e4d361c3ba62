"""One step of many replicas at once: forward, backward, and each row's own optimiser."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from paragrad.data.source import leaves
from paragrad.flat import Piece
from paragrad.learners.linear import Linears, Sink, Uses
from paragrad.learners.torch import TorchLearner, aligned, by_class, split
from paragrad.optim.rows import RowOptimizer, rows_of
from paragrad.types import Vector

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]


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


class Stepper:
    """A learner's module, loss and optimiser, for rows."""

    def __init__(
        self, learner: TorchLearner, device: torch.device, *, gradients: bool, precision: Precision, most: int
    ) -> None:
        optimizer = rows_of(learner.torch_optimizer)
        assert optimizer is not None, "why_not was not asked"
        self.optimizer: RowOptimizer = optimizer
        self._chosen = learner.chosen
        self.scheduled = learner.chosen.schedule is not None and not gradients
        """Whether each row has a learning rate of its own."""
        self.pieces = learner.pieces
        self._module = copy.deepcopy(learner.module).to(device).requires_grad_(False)
        self._module.train()
        self._loss = copy.deepcopy(learner.loss).to(device) if isinstance(learner.loss, nn.Module) else learner.loss
        self._names = {kind: [piece.name for piece in pieces] for kind, pieces in self.pieces.items()}
        self._device = device
        self._gradients = gradients
        self._precision = precision
        self._most = most
        self._scratch_rows: torch.Tensor | None = None
        self._linears: list[tuple[int, int | None]] | None = None
        """Weight and bias of each linear layer that is used once in a forward pass; None: not looked at yet."""
        self._looked_at: list[tuple[int, int | None]] = []
        self._looked = False
        self._at_once = False
        """Whether a step is made in the product that computes a linear layer's gradient: plain SGD, and no other layers."""

    def close(self) -> None:
        """Let go of memory."""
        self._scratch_rows = None

    def step(self, stack: Stack, batch: Any, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and update of every row of the stack; returns losses and their normalisers."""
        inputs, target = split(batch)
        gradient = self._gradient_of(stack, joined)
        views = stack.weights if self._at_once else _cut(gradient, self.pieces["weights"])
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
        also = False
        for k, mine in enumerate(found):
            if mine is None and k not in sunk:
                raise RuntimeError(f"The loss does not depend on {self._names['weights'][k]!r}")
            if mine is not None and k in sunk:
                also = True
                views[k].add_(mine)  # a layer's weight that is used elsewhere, too: both parts count
            elif mine is not None:
                views[k].copy_(mine)
        if self._gradients:
            self._join(stack, gradient, normalisers, joined)
        elif not self._at_once:
            self._update(stack, gradient)
        stack.steps.add_(1)
        self._learn(also)
        return losses.detach().to(torch.float64), normalisers.to(torch.float64)

    def _learn(self, also: bool) -> None:
        """The first step shows which linear layers there are, the second whether their weights are used elsewhere."""
        if self._linears is None:
            self._linears = self._looked_at
        elif not self._looked:
            self._looked = True
            every = {k for pair in self._linears for k in pair if k is not None} == set(range(len(self._names["weights"])))
            plain = self.optimizer.plain and not self._gradients and self._precision != "bf16"
            self._at_once = every and plain and not also and not self.scheduled and not self._chosen.clips

    def _gradient_of(self, stack: Stack, joined: bool) -> torch.Tensor:
        """Where the step's gradients are written, a row for each replica."""
        if self._gradients and not joined:
            return stack.tensors["gradients"]
        weights = stack.tensors["weights"]
        count, width = weights.shape
        if self._scratch_rows is None or len(self._scratch_rows) < count:
            self._scratch_rows = torch.zeros((max(count, self._most), width), dtype=weights.dtype, device=weights.device)
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
                output = functional_call(self._module, state, (), inputs)
            else:
                output = functional_call(self._module, state, inputs if isinstance(inputs, tuple) else (inputs,))
        if isinstance(looking, Uses):
            self._looked_at = _used_once(looking.found, places)
        target = aligned(output, target, self._loss)
        return self._loss(output, target), self._normaliser(target)

    def _normaliser(self, target: Any) -> torch.Tensor:
        """As ``learners.torch.normaliser``, of one row, without looking at the values."""
        first = leaves(target)[0]
        if not first.ndim:
            return first.new_ones((), dtype=torch.float64)
        if by_class(self._loss) and not first.is_floating_point():
            here = first != getattr(self._loss, "ignore_index", -100)
            weight = getattr(self._loss, "weight", None)
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
        self._chosen.clip_rows(gradient)
        if self.optimizer.fused is None or self._device.type != "cuda" or self.scheduled:
            slots = [stack.tensors[f"slot{k}"] for k in range(len(self.optimizer.slots))]
            rates = stack.tensors["rates"].view(-1, 1) if self.scheduled else None
            self.optimizer.step(stack.tensors["weights"], gradient, slots, stack.steps.view(-1, 1), rates)
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
        return torch.autocast(self._device.type, torch.bfloat16)


def _used_once(found: list[tuple[int, int | None]], places: dict[int, int]) -> list[tuple[int, int | None]]:
    """The linear layers whose weight and bias are replicas' own and are used in that one place."""
    uses = Counter(tensor for pair in found for tensor in pair)
    mine = []
    for weight, bias in found:
        known = weight in places and (bias is None or bias in places)
        if known and uses[weight] == 1 and (bias is None or uses[bias] == 1):
            mine.append((places[weight], None if bias is None else places[bias]))
    return mine
