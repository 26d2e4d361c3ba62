"""A job: everything a worker needs to start, the same for every worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paragrad.codecs.codec import Codec
from paragrad.codecs.feedback import Feedback
from paragrad.config.options import describe
from paragrad.core.center import Center
from paragrad.core.state import Allocate
from paragrad.data.generated import Generated
from paragrad.data.leases import Leases
from paragrad.data.plan import Plan
from paragrad.data.source import Source
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner, Scatters, StepsAtCenter
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.cut import CutOptimizer
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_additive, is_scaled_movement, is_shared, keeps_state, pull_every, starts_apart
from paragrad.types import Vector, VectorOptimizer


@dataclass(frozen=True)
class Job:
    """The model, the data and the scheme of a run."""

    scheme: Scheme
    make_learner: Callable[[str], Learner]
    """Builds the learner on a device; every worker builds the same one."""
    train: Source
    validation: Source | None
    plan: Plan
    evaluation_batch: int
    distances: bool = False
    """True if workers measure how far the center moves between two replies."""
    codec: Codec | None = None
    """Compresses the vectors of commits; None: they are sent uncompressed."""

    def check(self, learner: Learner) -> None:
        """Raise if the learner does not have what the scheme needs."""
        name = type(self.scheme).__name__
        if self.scheme.ships == "gradient" and not isinstance(learner, StepsAtCenter):
            raise UsageError(f"{name} ships gradients, so the Learner needs a center_optimizer() method.")
        if self.scheme.ships == "gradient" and getattr(learner, "searches", False):
            raise UsageError(
                f"{name} ships one gradient per step, but the optimiser evaluates the loss at several points per step. Use a "
                "scheme whose workers make the steps (modelaveraging, agn), or an optimiser such as adam."
            )
        if starts_apart(self.scheme) and not isinstance(learner, Scatters):
            raise UsageError(f"The workers of {self.scheme!r} start apart, so the Learner needs a scatter(seed) method.")
        if self.codec is not None:
            self._check_codec(self.codec)

    def _check_codec(self, codec: Codec) -> None:
        name, scheme = type(self.scheme).__name__, self.scheme
        if is_shared(scheme):
            raise UsageError(
                f"codec={codec.name}, but the workers of {name} share the center's weights and send no vectors: leave codec "
                "out, or use downpour."
            )
        if not is_additive(scheme):
            why = (
                "sends weights, and a codec's residual of weights cannot be sent later"
                if scheme.ships == "weights"
                else "gives each worker its own reply, which must equal what the worker sent"
            )
            raise UsageError(
                f"codec={codec.name}, but {describe(scheme)} {why}: leave codec out, or use a scheme that sends movements or "
                "gradients and replies with the center (agn, easgd, diloco, syncsgd)."
            )
        if scheme.sends:
            raise UsageError(
                f"codec={codec.name}, but {scheme!r} also sends {', '.join(scheme.sends)}, which is not a movement: leave "
                "codec out, or let the center remember it (adag:place=remembers)."
            )

    def feedback(self, like: Vector, rows: Sequence[Vector] | None = None) -> Feedback | None:
        """Return the error feedback of a worker, in new memory or in the given rows; None without a codec."""
        if self.codec is None:
            return None
        return Feedback.like(self.codec, like) if rows is None else Feedback(self.codec, rows)

    def center_optimizer(self, learner: Learner, device: str = "cpu") -> VectorOptimizer | None:
        """Return the center's optimiser; None if the workers make the steps."""
        if self.scheme.ships != "gradient":
            return None
        assert isinstance(learner, StepsAtCenter)
        return learner.center_optimizer() if device == "cpu" else learner.center_optimizer(device)

    def make_center(
        self,
        learner: Learner,
        *,
        workers: int,
        partition: str,
        allocate: Allocate,
        device: str = "cpu",
        length: int | None = None,
    ) -> Center:
        """Make the center of a run that begins from the learner's weights; from the first ``length`` of them, if given."""
        plan, stolen = self.plan, self.stolen(partition, workers)
        optimizer = self.center_optimizer(learner, device)
        if length is not None and optimizer is not None:
            assert isinstance(optimizer, CenterOptimizer)
            optimizer = CutOptimizer(optimizer.chosen, length, learner.weights.dtype, whole=optimizer)
        center = Center(
            self.scheme,
            learner.weights[:length].to(device),
            workers=workers,
            leases=Leases(batches=plan.batches, epochs=plan.epochs, workers=workers, stolen=stolen),
            buffers=learner.buffers.to(device),
            integers=learner.integers.to(device),
            optimizer=optimizer,
            allocate=allocate,
            rows=length is not None,
        )
        center.private.are_kept = self.keeps(learner)
        self.follow(center)
        return center

    def keeps(self, learner: Learner) -> bool:
        """Return whether workers have private state that a checkpoint must hold; plain SGD from the center has none."""
        scheme, plain = self.scheme, getattr(learner, "is_plain_sgd", False)
        nothing = plain and not (scheme.worker_slots or scheme.adopts_from) and pull_every(scheme) is None and scheme.parts == 1
        return keeps_state(scheme) and not nothing

    def follow(self, center: Center) -> None:
        """Let a source that keeps rows until they are retired read the lowest position that is not."""
        if isinstance(self.train, Generated):
            self.train.follow(lambda: center.leases.floor)

    def by_reference(self, center: Center) -> bool:
        """Return whether the center may read and write the workers' weights directly, if the engine gives it access."""
        return is_scaled_movement(self.scheme) and bool(center.answers) and not self.distances and self.codec is None

    def stolen(self, partition: str, workers: int) -> bool:
        """Return whether any ready worker takes the next mini-batch; by default, if no worker waits for all others."""
        if partition != "auto":
            return partition == "stolen"
        return self.scheme.quorum(workers) == 1 or self.scheme.late == "drop"

    def scatter(self, learner: Learner, rank: int) -> None:
        """Move a worker's weights to its random starting point."""
        assert isinstance(learner, Scatters)
        learner.scatter(self.scatter_seed(rank))

    def scatter_seed(self, rank: int) -> int:
        """Return the seed of a worker's random starting point."""
        return self.plan.seed * 1_000_003 + rank + 1
