"""Train a GAN as a custom learner: two networks, two losses and two optimisers in one flat vector.

    python examples/gan.py

Workers commit the weights of both networks together, as ``step`` changed them.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import paragrad as pg


class Gan(pg.TorchLearner):
    """Generator and discriminator (critic) in one module; a step trains the critic, then the generator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        super().__init__(nn.ModuleDict({"generator": generator, "critic": critic}), nn.BCEWithLogitsLoss(), "sgd")
        self.generator, self.critic = self.module["generator"], self.module["critic"]
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def step(self, batch: torch.Tensor) -> pg.Step:
        """Make one step of the critic on real and generated points, then one of the generator against the critic."""
        ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        made = self.generator(torch.randn(len(batch), 4))
        self.of_critic.zero_grad()
        loss = self.loss(self.critic(batch), ones) + self.loss(self.critic(made.detach()), zeros)
        loss.backward()
        self.of_critic.step()
        self.of_generator.zero_grad()
        self.loss(self.critic(made), ones).backward()
        self.of_generator.step()
        return pg.Step(loss=float(loss.detach()), weight=len(batch))

    def warm_up(self, batch: torch.Tensor) -> None:
        """Do nothing: there is nothing to warm up."""

    @torch.no_grad()
    def evaluate(self, source: pg.Source, batch_size: int) -> dict[str, float]:
        """Return the mean distance of generated points from the ring of radius 1, since the loss does not measure a GAN."""
        torch.manual_seed(1)
        points = self.generator(torch.randn(2000, 4))
        return {"loss": float((points.norm(dim=1) - 1.0).abs().mean())}


def ring(rows: int) -> torch.Tensor:
    """Return points on a circle of radius 1."""
    angles = torch.rand(rows, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], 1)


def main(epochs: int = 60) -> pg.Result:
    """Train with two workers that take the mean of their networks every 10 steps."""
    data = ring(4096)
    result = pg.train(
        Gan,
        data,
        validation=data[:256],
        scheme=pg.ModelAveraging(window=10),
        engine=pg.Local(workers=2),
        epochs=epochs,
        batch_size=64,
    )
    first, last = result.history[0]["loss"], result.loss
    print(f"Mean distance from the ring: {last:.3f} (at the start: {first:.3f}). Run directory: {result.directory}")
    return result


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
