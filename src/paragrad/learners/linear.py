"""Linear layers of many replicas as batched matrix products, whose weight gradients are written where they are wanted.

``torch.func.vmap`` alone gives the gradient of a linear layer's weights as a transposed view, which every pass of an
optimiser over all replicas then pays for; here it is written in place, beside those of the other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Sink(NamedTuple):
    """Where the gradients of a layer's weight and bias go; with a ``rate``, those are the weights themselves, which make
    a step of plain SGD in the product that computes the gradient."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rate: float | None = None


class Linears(TorchFunctionMode):
    """Inside it, ``linear`` on weights that have a sink is a batched product; all else is as usual."""

    def __init__(self, sinks: dict[int, Sink]) -> None:
        super().__init__()
        self._sinks = sinks
        """By the identity of the weight, as the module sees it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            sink = self._sinks.get(id(weight))
            if sink is not None and (bias is None) == (sink.bias is None):
                return _OfOne.apply(x, weight, bias, sink)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class Uses(TorchFunctionMode):
    """Counts, for each weight, the linear layers it is used in, and with which bias."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int | None]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            _, weight, bias = _arguments(*args, **(kwargs or {}))
            self.found.append((id(weight), None if bias is None else id(bias)))
        return func(*args, **(kwargs or {}))


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


class _OfOne(torch.autograd.Function):
    """One replica's linear layer, as vmap sees it."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink) -> torch.Tensor:
        raise NotImplementedError("only replicas that are computed together have a sink")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink
    ) -> tuple[torch.Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        shape = x.shape[1:-1]
        out = _OfAll.apply(x.reshape(info.batch_size, -1, x.shape[-1]), weight, bias, sink)  # type: ignore[no-untyped-call]
        return out.view(info.batch_size, *shape, -1), 0


class _OfAll(torch.autograd.Function):
    """All replicas' linear layers: x (r, b, in), weight (r, out, in), bias (r, out)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink) -> torch.Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            coarse = torch.get_autocast_dtype(kind)
            x, weight = x.to(coarse), weight.to(coarse)
            bias = None if bias is None else bias.to(coarse)
        ctx.save_for_backward(x)
        ctx.weight = weight  # other rows of its memory may have made their step when it is needed
        ctx.sink = sink
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        sink: Sink = ctx.sink
        below = torch.bmm(slope, weight) if ctx.needs_input_grad[0] else None
        across = slope.transpose(1, 2)
        if sink.rate is not None:
            torch.baddbmm(sink.weight, across, x, alpha=-sink.rate, out=sink.weight)
            if sink.bias is not None:
                sink.bias.sub_(slope.sum(1), alpha=sink.rate)
            return below, None, None, None
        if slope.dtype == sink.weight.dtype:
            torch.bmm(across, x, out=sink.weight)
        else:
            sink.weight.copy_(torch.bmm(across, x))
        if sink.bias is not None:
            sink.bias.copy_(slope.sum(1))
        return below, None, None, None
