"""Any torch module as a learner: its parameters are views of one vector, its steps are plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paragrad.core.flat import Flat, floating_buffers, integer_buffers, plain_name, trained
from paragrad.data.source import Source, all_rows, mapped
from paragrad.errors import UsageError
from paragrad.learners.batch import fitting, weight_of
from paragrad.learners.closure import Closure, RandomState
from paragrad.learners.criterion import Loss, Means
from paragrad.learners.flattened import Flattened, Place
from paragrad.learners.frozen import Watch, frozen
from paragrad.learners.learner import Step
from paragrad.learners.measured import Measured, Metric
from paragrad.learners.objective import objective_of
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import FlatOptimizer, OptimizerLike, prepared
from paragrad.types import Vector


class TorchLearner(Flattened):
    """One nn.Module with its loss and optimiser. The learner copies the given module; ``module`` is the copy."""

    _optimizer: FlatOptimizer

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: OptimizerLike,
        *,
        metrics: Mapping[str, Metric] | None = None,
        device: str = "cpu",
    ) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(f"The model is a {type(module).__name__}, but it must be a torch.nn.Module.")
        trained(module)
        self.module = copy.deepcopy(module).to(device)
        self.device = torch.device(device)
        self.loss = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
        self.objective = objective_of(self.loss)
        self.metrics = dict(metrics or {})
        self.chosen = prepared(optimizer)
        """The user's choice of optimiser, schedule and clipping."""
        self.carry(())
        self.module.train()

    def carry(self, names: Sequence[str]) -> None:
        """Treat these parameters, which require no gradient, as buffers; call it before any other use of the learner."""
        others = frozen(self.module)
        carried: list[tuple[str, torch.Tensor]] = [(name, others.pop(name)) for name in names]
        super().__init__(trained(self.module), floating_buffers(self.module) + carried, integer_buffers(self.module))
        kept = {id(piece.tensor) for piece in (*self._buffers.pieces, *self._integers.pieces)}
        self._places = [
            (path, name, tensor)
            for path, child in self.module.named_modules()
            for name, tensor in (*child._buffers.items(), *child._parameters.items())
            if tensor is not None and id(tensor) in kept
        ]
        self._changed_by_forward: str | None = None
        """Name of a trained parameter that the forward pass itself changes."""
        self.carried = tuple(names)
        """Parameters that require no gradient, but that training changes."""
        self._others = others
        self._watch: Watch | None = None
        self._optimizer = FlatOptimizer(self.chosen, self.module, self._weights)

    # -- the vectors ----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Current learning rate."""
        return self._optimizer.lr

    def set_progress(self, progress: float) -> None:
        """Set the learning rate for this share of the run."""
        self._optimizer.set_progress(progress)

    @property
    def layout(self) -> dict[str, Place]:
        """Positions of the module's tensors in the vectors of a checkpoint; tied tensors under each of their names."""
        places = super().layout
        mine = {id(piece.tensor): places[piece.name] for pieces in self.pieces.values() for piece in pieces}
        state = self.module.state_dict(keep_vars=True)
        return {plain_name(name): mine[id(tensor)] for name, tensor in state.items() if id(tensor) in mine}

    @property
    def searches(self) -> bool:
        """True if the optimiser evaluates the loss at several points per step."""
        return self._optimizer.searches

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser object of torch."""
        return self._optimizer.torch

    @property
    def optimizer_name(self) -> str:
        """Class name of the optimiser."""
        return type(self.torch_optimizer).__name__

    @property
    def optimizer_is_flat(self) -> bool:
        """True if the optimiser's state belongs to one flat vector, False if it belongs to the module's tensors."""
        return self._optimizer.whole is not None

    @property
    def is_plain_sgd(self) -> bool:
        """True if a step is exactly ``w - lr * gradient``."""
        return self._optimizer.is_plain_sgd

    def collect(self) -> None:
        """Copy the module's state to the vectors."""
        for path, name, tensor in self._places:
            child = self.module.get_submodule(path)
            owner: dict[str, Any] = child._buffers if name in child._buffers else child._parameters
            now = owner.get(name)
            if now is tensor:
                continue
            # ``self.mean = 0.9 * self.mean + ...`` in a forward pass makes a new tensor, which is not in the vector.
            if now is None or now.shape != tensor.shape:
                raise UsageError(
                    f"Buffer {name!r} of {type(child).__name__} had the shape {tuple(tensor.shape)} and is now "
                    f"{None if now is None else tuple(now.shape)}. Keep its shape, or register it with persistent=False."
                )
            with torch.no_grad():
                tensor.copy_(now)
            owner[name] = tensor
        self._buffers.reclaim()
        self._integers.reclaim()
        super().collect()
        if self._watch is not None:
            self._watch.check(self.module)

    def alias(self, vector: Vector) -> None:
        """Make the parameters views of this vector; they take its values."""
        self._weights.move_to(vector)
        self._optimizer = FlatOptimizer(self.chosen, self.module, self._weights)

    def check(self) -> None:
        """Raise if a parameter is no longer a view of the vector."""
        self.check_all(self.module.named_parameters())

    # -- training -------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """Make one step of the local optimiser."""
        if self._optimizer.searches:
            closure = Closure(lambda: self._backward(batch), self.collect, [self._buffers, self._integers], self.device)
            self._optimizer.search(closure)
            return closure.finish(self.optimizer_name)
        result = self._backward(batch)
        self._optimizer.apply()
        return result

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """Write the mean gradient of a mini-batch to ``out``, or average it there with a mean of weight ``accumulate``."""
        if self._changed_by_forward is not None:
            raise UsageError(
                f"The forward pass changes the parameter {self._changed_by_forward!r}, but workers ship gradients, so the "
                "change would be lost. Make it in the optimiser's step, or use a scheme whose workers step (modelaveraging)."
            )
        result = self._backward(batch)
        mine = torch.empty_like(out) if accumulate else out
        self._optimizer.gather(mine)
        if accumulate:
            out.lerp_(mine, result.weight / (accumulate + result.weight))
        return result

    def try_step(self, batch: Any, *, at_center: bool) -> tuple[str, ...]:
        """Return the parameters without gradient that one training step changes; do not use the learner afterwards."""
        watch, random = Watch(self._others), RandomState(self.device)
        self._watch = Watch({})
        try:
            self._nudge()
            with fitting():
                if not at_center:
                    self.step(batch)
                    return tuple(watch.changed(self.module))
                self.gradient(batch, torch.empty_like(self.weights))
                found = tuple(watch.changed(self.module))
                self._optimizer.apply()
        finally:
            random.restore()
        late = [name for name in watch.changed(self.module) if name not in found]
        if late:
            raise UsageError(
                f"The optimiser changes the parameter {late[0]!r}, which requires no gradient. The scheme's optimiser is at "
                "the center, so the change would be lost. Make it in the model's forward, or use a scheme whose workers "
                "make the steps (modelaveraging, diloco)."
            )
        return found

    def warm_up(self, batch: Any) -> None:
        """Make one forward and backward pass and leave the learner unchanged."""
        self.collect()
        with self.unchanged():
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                before = self._nudge()
                self._backward(batch)
            self.collect()
            self._find_changed_by_forward(before)
            self._optimizer.clear()
        self.check()

    def _nudge(self) -> Vector:
        """Move the weights slightly, so that copies of them change, too; return the moved weights."""
        self.weights.add_(torch.randn_like(self.weights), alpha=1e-3)
        self.spread()
        return self.weights.clone()

    def _find_changed_by_forward(self, before: Vector) -> None:
        """Find trained parameters that a forward and backward pass has changed; raise if one of them gets no gradient."""
        if torch.equal(before, self.weights):
            return
        gradient = torch.empty_like(before)
        self._optimizer.gather(gradient)
        for piece in self._weights.pieces:
            mine = slice(piece.lo, piece.hi)
            if torch.equal(before[mine], self.weights[mine]):
                continue
            self._changed_by_forward = self._changed_by_forward or piece.name
            if not gradient[mine].any():
                raise UsageError(
                    f"Parameter {piece.name!r} requires a gradient, but gets none, and the forward pass changes it. Call "
                    "requires_grad_(False) on it: workers then exchange it like batch-norm statistics."
                )

    def scatter(self, seed: int) -> None:
        """Move to a random point: every submodule with ``reset_parameters`` draws its parameters again."""
        before = self.weights.clone()
        kept = {name: parameter.detach().clone() for name, parameter in frozen(self.module).items()}
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for child in self.module.modules():
                reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
                if callable(reset):
                    reset()
        with torch.no_grad():
            for name, parameter in frozen(self.module).items():
                parameter.copy_(kept[name])
        self._watch = None
        self.collect()
        self.check()
        if torch.equal(before, self.weights):
            raise UsageError(
                f"{type(self.module).__name__} cannot start from a random point: none of its modules has reset_parameters(). "
                "Write one, or choose a scheme whose workers start together."
            )

    def _backward(self, batch: Any) -> Step:
        if self._watch is None:
            self._watch = Watch(self._others)
        self._optimizer.clear()
        loss, weight = self.objective.mean(self.module, self._moved(batch))
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"The loss returned a {type(loss).__name__}; it must return a tensor of one number.")
        if loss.ndim:
            raise UsageError(
                f"The loss returned a tensor of shape {tuple(loss.shape)}; it must return one number: use reduction='mean'."
            )
        if not loss.requires_grad:
            raise UsageError("The loss has no gradient: it does not depend on the model's parameters, or was detached.")
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gathered()
        return Step(float(loss.detach()), weight)

    def _moved(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return mapped(batch, lambda leaf: leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf)

    # -- evaluation -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Return mean loss, accuracy where it has a meaning, and metrics; row weights count in loss and accuracy."""
        self.spread()
        self.module.eval()
        means, measured = Means(), Measured(self.metrics, self.report)
        try:
            for rows in all_rows(source, batch_size):
                batch = self._moved(source.batch(rows))
                judged = self.objective.judge(self.module, batch, outputs=bool(self.metrics))
                means.add(judged.sums)
                measured.add(judged.output, judged.target, weight_of(batch))
        finally:
            self.module.train()
        return means.result() | measured.result()

    def center_optimizer(self, device: str = "cpu") -> CenterOptimizer:
        """Return the same optimiser for the center, on a copy of the module in the center's type."""
        module = copy.deepcopy(self.module).to(device, self.weights.dtype)
        now = dict(trained(module))
        # The workers' order sorts by dtype first; here all tensors have one dtype.
        pieces = [(piece.name, now[piece.name]) for piece in self._weights.pieces]
        weights = Flat(pieces, home=pieces[0][1].device)
        return CenterOptimizer(self.chosen, module, weights)
