"""Train your own network on handwritten digits: two workers, a cosine schedule, clipped gradients.

python examples/torch_mnist.py                        scikit-learn's digits, 8x8 pixels, no download
python examples/torch_mnist.py --data mnist.npz       MNIST, or any .npz with x_train, y_train, x_test, y_test
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import paragrad as pg


def network(side: int) -> nn.Module:
    """Return a small convolutional network for square grey images with sides of that length."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * ((side + 1) // 2) ** 2, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def main(epochs: int | None, data: str | None) -> pg.Result:
    """Train, and print the accuracy."""
    result = pg.train(
        network(28 if data else 8),
        data or "digits",
        holdout=None if data else 0.2,
        optimizer=pg.Optimizer("adam:lr=0.003", schedule="cosine:warmup=0.05", clip_norm=1.0),
        scheme=pg.ModelAveraging(window=5),
        engine=pg.Local(workers=2),
        epochs=epochs or (2 if data else 20),
        batch_size=64 if data else 16,
    )
    print(f"Accuracy on the test part: {result.accuracy:.2%}. Run directory: {result.directory}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("epochs", type=int, nargs="?", help="passes over the data (default: 20 for digits, 2 for a file)")
    parser.add_argument("--data", help="an .npz of images of 28x28 pixels; without it: scikit-learn's digits")
    given = parser.parse_args()
    main(given.epochs, given.data)
