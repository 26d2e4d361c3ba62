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
from paragrad.learners.criterion import Loss, Means
from paragrad.learners.flattened import Flattened, Place
from paragrad.learners.frozen import Watch, frozen
from paragrad.learners.learner import Step
from paragrad.learners.looks import Draws, Looks
from paragrad.learners.measured import Measured, Metric
from paragrad.learners.objective import objective_of
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.choice import Optimizer
from paragrad.optim.optimizer import FlatOptimizer, OptimizerLike, prepared
from paragrad.types import Vector


class TorchLearner(Flattened):
    """One nn.Module with its loss and optimiser. The module given is copied; ``module`` is the learner's own."""

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
        self._chosen = prepared(optimizer)
        self.carry(())
        self.module.train()

    def carry(self, names: Sequence[str]) -> None:
        """Carry these parameters, which require no gradient, as buffers are; before anything else is done with the learner."""
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
        self._moves_itself: str | None = None
        """A trained parameter that the forward pass itself changes."""
        self.carried = tuple(names)
        """Parameters that require no gradient, and that training changes."""
        self._others = others
        self._watch: Watch | None = None
        self._optimizer = FlatOptimizer(self._chosen, self.module, self._weights)

    # -- the vectors ----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return self._optimizer.lr

    def set_progress(self, progress: float) -> None:
        """Take the learning rate for this share of the run."""
        self._optimizer.set_progress(progress)

    @property
    def layout(self) -> dict[str, Place]:
        """Where each tensor of the module's state lies in the vectors of a checkpoint, tied ones under each of their names."""
        places = super().layout
        mine = {id(piece.tensor): places[piece.name] for pieces in self.pieces.values() for piece in pieces}
        state = self.module.state_dict(keep_vars=True)
        return {plain_name(name): mine[id(tensor)] for name, tensor in state.items() if id(tensor) in mine}

    @property
    def chosen(self) -> Optimizer:
        """The optimiser as it was chosen, with schedule and clipping."""
        return self._chosen

    @property
    def searches(self) -> bool:
        """Whether the optimiser evaluates the loss at several points for one step."""
        return self._optimizer.searches

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The user's optimiser, as it was made."""
        return self._optimizer.torch

    @property
    def optimizer_name(self) -> str:
        """The kind of the optimiser."""
        return type(self.torch_optimizer).__name__

    @property
    def optimizer_is_flat(self) -> bool:
        """Whether its state is of one flat vector, and not of the module's tensors."""
        return self._optimizer.whole is not None

    def collect(self) -> None:
        """Bring the vectors up to date with the module."""
        for path, name, tensor in self._places:
            child = self.module.get_submodule(path)
            held = child._buffers if name in child._buffers else child._parameters
            if held.get(name) is not tensor:
                self._put_back(child, name, tensor, held)
        self._buffers.reclaim()
        self._integers.reclaim()
        super().collect()
        if self._watch is not None:
            self._watch.check(self.module)

    def alias(self, vector: Vector) -> None:
        """Let the parameters be views of this vector; its contents count."""
        self._weights.move_to(vector)
        self._optimizer = FlatOptimizer(self._chosen, self.module, self._weights)

    def check(self) -> None:
        """Raise where a parameter no longer lies in the vector."""
        self.check_all(self.module.named_parameters())

    @staticmethod
    def _put_back(child: nn.Module, name: str, tensor: torch.Tensor, held: dict[str, Any]) -> None:
        # ``self.mean = 0.9 * self.mean + ...`` in a forward pass makes a new tensor, which is not in the vector.
        now = held.get(name)
        if now is None or now.shape != tensor.shape:
            raise UsageError(
                f"Buffer {name!r} of {type(child).__name__} had the shape {tuple(tensor.shape)} and is now "
                f"{None if now is None else tuple(now.shape)}. Keep its shape, or register it with persistent=False."
            )
        with torch.no_grad():
            tensor.copy_(now)
        held[name] = tensor

    # -- training -------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the local optimiser."""
        if self._optimizer.searches:
            looks = Looks(lambda: self._backward(batch), self.collect, [self._buffers, self._integers], self.device)
            self._optimizer.search(looks)
            return looks.settled(type(self.torch_optimizer).__name__)
        result = self._backward(batch)
        self._optimizer.step()
        return result

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """The mean gradient of a mini-batch."""
        if self._moves_itself is not None:
            raise UsageError(
                f"The forward pass changes the parameter {self._moves_itself!r}, but workers ship gradients, and the change "
                "would be lost. Make it in the optimiser's step, or take a scheme whose workers step (modelaveraging)."
            )
        result = self._backward(batch)
        if not accumulate:
            self._optimizer.gather(out)
        else:
            mine = torch.empty_like(out)
            self._optimizer.gather(mine)
            out.lerp_(mine, result.weight / (accumulate + result.weight))
        return result

    def try_step(self, batch: Any, *, at_center: bool) -> tuple[str, ...]:
        """The parameters that require no gradient and that one training step changes; the learner is of no use afterwards."""
        watch, draws = Watch(self._others), Draws(self.device)
        self._watch = Watch({})
        try:
            self._nudge()
            with fitting():
                if not at_center:
                    self.step(batch)
                    return tuple(watch.changed(self.module))
                self.gradient(batch, torch.empty_like(self.weights))
                found = tuple(watch.changed(self.module))
                self._optimizer.step()
        finally:
            draws.again()
        late = [name for name in watch.changed(self.module) if name not in found]
        if late:
            raise UsageError(
                f"The optimiser changes the parameter {late[0]!r}, which requires no gradient. The scheme's optimiser is at "
                "the center, where the change would be lost: make it in the model's forward, or take a scheme whose workers "
                "make the steps (modelaveraging, diloco)."
            )
        return found

    def warm_up(self, batch: Any) -> None:
        """One forward and backward pass that leaves no trace."""
        self.collect()
        weights, buffers, integers = self.weights.clone(), self.buffers.clone(), self.integers.clone()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            begun = self._nudge()
            self._backward(batch)
        self.collect()
        self._note_moved(begun)
        self._optimizer.clear()
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)
        self.integers.copy_(integers)
        self.spread()
        self.check()

    def _nudge(self) -> Vector:
        """Move the weights a little, so that whatever copies them changes; returns them as they are now."""
        self.weights.add_(torch.randn_like(self.weights), alpha=1e-3)
        self.spread()
        return self.weights.clone()

    def _note_moved(self, before: Vector) -> None:
        """Look for trained parameters that a pass forward and back has changed by itself; raise where it was all that did."""
        if torch.equal(before, self.weights):
            return
        gradient = torch.empty_like(before)
        self._optimizer.gather(gradient)
        for piece in self._weights.pieces:
            mine = slice(piece.lo, piece.hi)
            if torch.equal(before[mine], self.weights[mine]):
                continue
            self._moves_itself = self._moves_itself or piece.name
            if not gradient[mine].any():
                raise UsageError(
                    f"Parameter {piece.name!r} requires a gradient, but gets none, and the forward pass changes it. Call "
                    "requires_grad_(False) on it: it is then carried between workers as batch-norm statistics are."
                )

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is ``w - lr * gradient`` and no more."""
        return self._optimizer.is_plain_sgd

    def recover(self) -> None:
        """Forget the optimiser's state: it has seen NaN."""
        self._optimizer.forget()

    def scatter(self, seed: int) -> None:
        """Move to a random point: every submodule that has ``reset_parameters`` draws its parameters anew."""
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

    # -- looking --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Mean loss, accuracy where it has a meaning, and metrics of all rows; weights of rows count in loss and accuracy."""
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

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the local optimiser's state."""
        return {name: tensor.clone() for name, tensor in self._optimizer.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        self._optimizer.load(state)

    def center_optimizer(self, device: str = "cpu") -> CenterOptimizer:
        """The same optimiser for the center, on a copy of the module in the center's own type."""
        module = copy.deepcopy(self.module).to(device, self.weights.dtype)
        now = dict(trained(module))
        # In the workers' order, which goes by dtype first: here all are of one.
        pieces = [(piece.name, now[piece.name]) for piece in self._weights.pieces]
        weights = Flat(pieces, home=pieces[0][1].device)
        return CenterOptimizer(self._chosen, module, weights)
