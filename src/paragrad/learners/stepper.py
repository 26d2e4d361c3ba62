"""One step of many replicas at once: forward pass, backward pass and optimiser of each row."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.func import vmap

from paragrad.core.flat import Piece
from paragrad.learners.linear import InterceptedLinear, Sink, batched
from paragrad.learners.rowmodel import RowModel
from paragrad.optim.rows import RowOptimizer
from paragrad.types import Vector

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]


@contextlib.contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """Compute float32 matrix products in tf32 if ``precision`` is tf32, else in full precision."""
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
    """Rows of everything that a step reads and writes, split into the model's tensors."""

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
        """True if the learning rate differs between rows."""
        self.pieces = model.pieces
        self._names = [piece.name for piece in self.pieces["weights"]]
        self._device = device
        self._gradients = gradients
        self._precision = precision
        self._most = most
        self._scratch_rows: torch.Tensor | None = None
        self._linears: list[tuple[int, int | None]] = []
        """Weight and bias of each linear layer that a forward pass uses once."""
        self._merged = False
        """True if the product that computes a gradient also makes the step: plain SGD, and linear layers only."""

    def close(self) -> None:
        """Free memory."""
        self._scratch_rows = None

    def choose(self, stack: Stack, batch: Any) -> None:
        """Choose how to compute all steps, by a forward and a backward pass on copies.

        If the first steps decided, they would use another formula than later ones and round differently. A resumed run has
        first steps where an uninterrupted run has none.
        """
        dry = Stack({name: rows.clone() for name, rows in stack.tensors.items()}, self.pieces)
        self._linears = self._layers(dry, batch)
        views = _cut(torch.zeros_like(dry.tensors["weights"]), self.pieces["weights"])
        _, _, shared = self._backward(dry, batch, views)
        only_linear = {k for pair in self._linears for k in pair if k is not None} == set(range(len(self._names)))
        plain = self.optimizer.plain and not self._gradients and self._precision != "bf16"
        self._merged = only_linear and plain and not shared and not self.scheduled and not self._model.clips

    def step(self, stack: Stack, batch: Any, joined: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a step of every row of the stack; return losses and their normalisers."""
        gradient = self._gradient_rows(stack, joined)
        views = stack.weights if self._merged else _cut(gradient, self.pieces["weights"])
        losses, normalisers, _ = self._backward(stack, batch, views)
        if self._gradients:
            self._join(stack, gradient, normalisers, joined)
        elif not self._merged:
            self._update(stack, gradient)
        stack.steps.add_(1)
        return losses.detach().to(torch.float64), normalisers.to(torch.float64)

    def _backward(self, stack: Stack, batch: Any, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Write gradients to ``views``; return losses, normalisers, and whether a linear weight is also used elsewhere."""
        parameters = [weights.detach().requires_grad_() for weights in stack.weights]
        # If rows are not contiguous, torch's vmap rule for batch-norm writes running statistics to a copy.
        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in stack.buffers]
        with torch.enable_grad(), self._autocast():
            one = vmap(partial(self._loss_of_one, views), randomness="error")
            losses, normalisers = one(parameters, buffers, stack.integers, batch)
        for into, buffer in zip(stack.buffers, buffers, strict=True):
            into.copy_(buffer)
        sunk = {k for pair in self._linears for k in pair}
        found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        shared = False
        for k, mine in enumerate(found):
            if mine is None and k not in sunk:
                raise RuntimeError(f"The loss does not depend on {self._names[k]!r}")
            if mine is not None and k in sunk:
                shared = True
                views[k].add_(mine)  # the linear layer has already written its part
            elif mine is not None:
                views[k].copy_(mine)
        return losses, normalisers, shared

    def _layers(self, stack: Stack, batch: Any) -> list[tuple[int, int | None]]:
        """Return weight and bias of the linear layers that a forward pass uses once."""
        layers: list[tuple[int, int | None]] = []

        def recorded(weights: list[Vector], *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            used: list[tuple[int, int | None]] = []

            def record(input: Any, weight: Any, bias: Any = None) -> None:
                used.append((id(weight), None if bias is None else id(bias)))

            with InterceptedLinear(record):
                loss = self._model.loss(weights, *others)
            layers.extend(_used_once(used, {id(weight): k for k, weight in enumerate(weights)}))
            return loss

        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in stack.buffers]
        with torch.no_grad(), self._autocast():
            vmap(recorded, randomness="error")(stack.weights, buffers, stack.integers, batch)
        return layers

    def _gradient_rows(self, stack: Stack, joined: bool) -> torch.Tensor:
        """Return the tensor for the step's gradients, one row per replica."""
        if self._gradients and not joined:
            return stack.tensors["gradients"]
        weights = stack.tensors["weights"]
        count, width = weights.shape
        if self._scratch_rows is None or len(self._scratch_rows) < count:
            self._scratch_rows = torch.zeros((max(count, self._most), width), dtype=weights.dtype, device=weights.device)
        return self._scratch_rows[:count]

    def _loss_of_one(self, sinks: list[torch.Tensor], weights: list[Vector], *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._linears:
            return self._model.loss(weights, *others)
        rate = self.optimizer.lr if self._merged else None
        places = {id(weights[w]): Sink(sinks[w], None if b is None else sinks[b], rate) for w, b in self._linears}
        with batched(places):
            return self._model.loss(weights, *others)

    def _join(self, stack: Stack, gradient: torch.Tensor, weights: torch.Tensor, joined: bool) -> None:
        """Average the gradient with those of the window's earlier mini-batches."""
        total = stack.tensors["joined"]
        if not joined:
            total.copy_(weights)
            return
        total.add_(weights)
        share = torch.where(total > 0, weights / total, 0.0).to(gradient.dtype)
        stack.tensors["gradients"].lerp_(gradient, share.view(-1, 1).expand_as(gradient))

    def _update(self, stack: Stack, gradient: torch.Tensor) -> None:
        """Make one step of every row's optimiser, with torch's fused kernel if there is one."""
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
    """Return the linear layers whose weight and bias are trained and are used only there."""
    uses = Counter(tensor for pair in found for tensor in pair)
    mine = []
    for weight, bias in found:
        known = weight in places and (bias is None or bias in places)
        if known and uses[weight] == 1 and (bias is None or uses[bias] == 1):
            mine.append((places[weight], None if bias is None else places[bias]))
    return mine
