"""One step of many replicas at once: forward, backward, and each row's own optimiser."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.func import vmap

from paragrad.core.flat import Piece
from paragrad.learners.linear import Linears, Sink, Uses
from paragrad.learners.rowmodel import RowModel
from paragrad.optim.rows import RowOptimizer
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
    """Rows of everything that a step reads and writes, cut into the model's tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], pieces: dict[str, list[Piece]]) -> None:
        self.tensors = tensors
        self.steps = tensors["steps"]
        self.weights = _cut(tensors["weights"], pieces["weights"])
        self.buffers = _cut(tensors["buffers"], pieces["buffers"])
        self.integers = _cut(tensors["integers"], pieces["integers"])


def _cut(tensor: torch.Tensor, pieces: list[Piece]) -> list[torch.Tensor]:
    return [tensor[:, piece.lo : piece.hi].view(len(tensor), *piece.tensor.shape) for piece in pieces]


class Stepper:
    """A model's loss, its gradient and its optimiser, for rows."""

    def __init__(self, model: RowModel, device: torch.device, *, gradients: bool, precision: Precision, most: int) -> None:
        self._model = model
        self.optimizer: RowOptimizer = model.optimizer
        self.scheduled = model.paced and not gradients
        """Whether each row has a learning rate of its own."""
        self.pieces = model.pieces
        self._names = [piece.name for piece in self.pieces["weights"]]
        self._device = device
        self._gradients = gradients
        self._precision = precision
        self._most = most
        self._scratch_rows: torch.Tensor | None = None
        self._linears: list[tuple[int, int | None]] = []
        """Weight and bias of each linear layer that is used once in a forward pass."""
        self._at_once = False
        """Whether a step is made in the product that computes a linear layer's gradient: plain SGD, and no other layers."""

    def close(self) -> None:
        """Let go of memory."""
        self._scratch_rows = None

    def choose(self, stack: Stack, batch: Any) -> None:
        """Choose how all steps are computed, in a dry run on copies: forward and backward passes that no row keeps anything of.

        Were it seen in the first steps instead, these would be computed by another formula than the others, and round
        differently. A resumed run has first steps where an unbroken one has none.
        """
        dry = Stack({name: rows.clone() for name, rows in stack.tensors.items()}, self.pieces)
        self._linears = self._layers(dry, batch)
        views = _cut(torch.zeros_like(dry.tensors["weights"]), self.pieces["weights"])
        _, _, also = self._backward(dry, batch, views)
        every = {k for pair in self._linears for k in pair if k is not None} == set(range(len(self._names)))
        plain = self.optimizer.plain and not self._gradients and self._precision != "bf16"
        self._at_once = every and plain and not also and not self.scheduled and not self._model.clips

    def step(self, stack: Stack, batch: Any, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and update of every row of the stack; returns losses and their normalisers."""
        gradient = self._gradient_of(stack, joined)
        views = stack.weights if self._at_once else _cut(gradient, self.pieces["weights"])
        losses, normalisers, _ = self._backward(stack, batch, views)
        if self._gradients:
            self._join(stack, gradient, normalisers, joined)
        elif not self._at_once:
            self._update(stack, gradient)
        stack.steps.add_(1)
        return losses.detach().to(torch.float64), normalisers.to(torch.float64)

    def _backward(self, stack: Stack, batch: Any, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Losses, their normalisers, and whether a linear layer's weight is used elsewhere, too; gradients go into views."""
        parameters = [weights.detach().requires_grad_() for weights in stack.weights]
        # torch's rule for batch-norm writes running statistics into a copy where the rows do not lie side by side.
        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in stack.buffers]
        with torch.enable_grad(), self._autocast():
            one = vmap(partial(self._loss_of_one, views), randomness="error")
            losses, normalisers = one(parameters, buffers, stack.integers, batch)
        for into, buffer in zip(stack.buffers, buffers, strict=True):
            into.copy_(buffer)
        sunk = {k for pair in self._linears for k in pair}
        found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        also = False
        for k, mine in enumerate(found):
            if mine is None and k not in sunk:
                raise RuntimeError(f"The loss does not depend on {self._names[k]!r}")
            if mine is not None and k in sunk:
                also = True
                views[k].add_(mine)  # a layer's weight that is used elsewhere, too: both parts count
            elif mine is not None:
                views[k].copy_(mine)
        return losses, normalisers, also

    def _layers(self, stack: Stack, batch: Any) -> list[tuple[int, int | None]]:
        """The linear layers that a forward pass uses once."""
        layers: list[tuple[int, int | None]] = []

        def look(weights: list[Vector], *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            with Uses() as looking:
                found = self._model.loss(weights, *others)
            layers.extend(_used_once(looking.found, {id(weight): k for k, weight in enumerate(weights)}))
            return found

        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in stack.buffers]
        with torch.no_grad(), self._autocast():
            vmap(look, randomness="error")(stack.weights, buffers, stack.integers, batch)
        return layers

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
        batch: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._linears:
            return self._model.loss(weights, buffers, integers, batch)
        rate = self.optimizer.lr if self._at_once else None
        places = {id(weights[w]): Sink(sinks[w], None if b is None else sinks[b], rate) for w, b in self._linears}
        with Linears(places):
            return self._model.loss(weights, buffers, integers, batch)

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
        self._model.clip(gradient)
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
