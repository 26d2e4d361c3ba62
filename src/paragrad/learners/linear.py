"""Linear layers of many replicas as batched matrix products, with weight gradients written in place.

``torch.func.vmap`` alone gives the gradient of a linear layer's weights as a transposed view, which makes every pass of an
optimiser over all replicas slower. Here the gradient is written in place, next to those of the other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Sink(NamedTuple):
    """Tensors that receive the gradients of a layer's weight and bias.

    With a ``rate`` they are the weights themselves: the product that computes the gradient also makes a step of plain SGD.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rate: float | None = None


class InterceptedLinear(TorchFunctionMode):
    """Calls ``replace`` instead of every ``linear``; if it returns None, the layer is computed as usual."""

    def __init__(self, replace: Callable[..., torch.Tensor | None]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._replace(*args, **(kwargs or {})) if func is torch.nn.functional.linear else None
        return func(*args, **(kwargs or {})) if out is None else out


def batched(sinks: dict[int, Sink]) -> InterceptedLinear:
    """Compute linear layers as batched products if their weight has a sink; ``sinks`` are by the ``id`` of the weight."""

    def replace(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        sink = sinks.get(id(weight))
        if sink is None or (bias is None) != (sink.bias is None):
            return None
        return _OneLinear.apply(input, weight, bias, sink)  # type: ignore[no-untyped-call, no-any-return]

    return InterceptedLinear(replace)


class _OneLinear(torch.autograd.Function):
    """The linear layer of one replica under vmap."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink) -> torch.Tensor:
        raise NotImplementedError("Only replicas that are computed together have a sink.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink
    ) -> tuple[torch.Tensor, int]:
        x = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        shape = x.shape[1:-1]
        out = _BatchedLinear.apply(x.reshape(info.batch_size, -1, x.shape[-1]), weight, bias, sink)  # type: ignore[no-untyped-call]
        return out.view(info.batch_size, *shape, -1), 0


class _BatchedLinear(torch.autograd.Function):
    """The linear layer of all replicas: x (r, b, in), weight (r, out, in), bias (r, out)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink) -> torch.Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            coarse = torch.get_autocast_dtype(kind)
            x, weight = x.to(coarse), weight.to(coarse)
            bias = None if bias is None else bias.to(coarse)
        ctx.save_for_backward(x)
        # Not saved: another layer's step may write to the same storage, and torch's version check would fail.
        ctx.weight = weight
        ctx.sink = sink
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        sink: Sink = ctx.sink
        grad_x = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        grad_transposed = grad.transpose(1, 2)
        if sink.rate is not None:
            torch.baddbmm(sink.weight, grad_transposed, x, alpha=-sink.rate, out=sink.weight)
            if sink.bias is not None:
                sink.bias.sub_(grad.sum(1), alpha=sink.rate)
            return grad_x, None, None, None
        if grad.dtype == sink.weight.dtype:
            torch.bmm(grad_transposed, x, out=sink.weight)
        else:
            sink.weight.copy_(torch.bmm(grad_transposed, x))
        if sink.bias is not None:
            sink.bias.copy_(grad.sum(1))
        return grad_x, None, None, None
