"""AGN: accumulated gradient normalisation; like Downpour, but a window counts as its mean step."""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.schemes.scheme import Scheme
from paragrad.types import Commit, SchemePlan


@dataclass(frozen=True)
class AGN(Scheme):
    """c <- c + d / λ', with λ' the number of steps in the window;  the worker takes c.

    Hermans, *On Scalable Deep Learning and Parallelizing Gradient Descent* (2017), chapter 3; Hermans,
    Spanakis, Möckel, *Accumulated Gradient Normalization*, arXiv:1710.02368. One worker is Lookahead(λ, 1/λ).
    (Distributed Keras calls this class ``ADAG``.)

    Choose it as the first asynchronous scheme to try; a good window is λ ≈ (n + layers) / 2.
    Not with many workers and a short window: early training is then unstable.
    """

    window: int = 15

    elementwise = True

    def scale(self, commit: Commit) -> float:
        return 1.0 / commit.steps

    def warnings(self, plan: SchemePlan) -> list[str]:
        workers = plan.workers
        if workers >= 2 * self.window and workers >= 8:
            return [
                f"AGN with {workers} workers and a window of {self.window} is unstable early in training (Hermans: 40 workers "
                f"at window 10 lose 3 points). A window of {workers // 2 + 2} or more, about (workers + layers) / 2, is stable."
            ]
        return []
