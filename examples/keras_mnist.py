"""Train a Keras model with several workers: on MNIST, or without it on scikit-learn's small digits.

    python examples/keras_mnist.py [EPOCHS] [--data mnist.npz] [--workers 2] [--engine local|vector]

The model is compiled as for ``model.fit``. ``pg.fit`` takes the same arguments, and trains with several processes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras
import numpy as np
from keras import layers

import paragrad as pg

Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def images(path: str | None) -> tuple[Part, Part]:
    """Return the training part and the test part, with pixels from 0 to 1 and one channel."""
    if path is not None:
        with np.load(path) as file:
            x_train, y_train, x_test, y_test = (file[key] for key in ("x_train", "y_train", "x_test", "y_test"))
        scale = 255
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 8, 8)
        order = np.random.default_rng(0).permutation(len(x))
        x, y = x[order], y[order]
        x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]
        scale = 16
    return ((x_train / scale).astype("float32")[..., None], y_train), ((x_test / scale).astype("float32")[..., None], y_test)


def build(shape: tuple[int, ...]) -> Any:
    """Return a compiled small convolutional network with batch-norm and dropout."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),  # the default of 0.99 takes longer than these few epochs
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(arguments: list[str] | None = None) -> float:
    """Train, and print the accuracy on the test part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("epochs", type=int, nargs="?", default=10)
    parser.add_argument("--data", metavar="FILE.npz", help="MNIST as x_train, y_train, x_test, y_test")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", choices=["local", "vector"], default="local")
    options = parser.parse_args(arguments)
    (x, y), (x_test, y_test) = images(options.data)
    model = build(x.shape[1:])
    engine = (pg.Local if options.engine == "local" else pg.Vector)(workers=options.workers)
    stopping = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
    history = pg.fit(
        model,
        x,
        y,
        batch_size=32,
        epochs=options.epochs,
        validation_split=0.1,
        callbacks=[stopping],
        verbose=2,
        scheme=pg.ModelAveraging(window=10),
        engine=engine,
    )
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"Accuracy on {len(x_test):,} test rows: {accuracy:.4f} after {len(history.epoch)} epochs")
    return float(accuracy)


if __name__ == "__main__":
    main()
