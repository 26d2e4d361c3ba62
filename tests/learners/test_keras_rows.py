"""Rows of a Keras model: the same values and weights through every door, and the kept weights when it is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

import paragrad as pg  # noqa: E402
from paragrad.cli.main import app  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, with NumPy 2
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(200, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
WEIGHT = DRAW.uniform(1, 5, 200).astype("float32")
IMAGES = DRAW.integers(0, 256, (60, 4, 4)).astype("uint8")
FILE = """
import keras

def build(inputs, outputs):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(inputs), keras.layers.Flatten(), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss=loss, weighted_metrics=["accuracy"])
    return model
"""
SHORT: dict[str, Any] = {"engine": pg.Vector(workers=2), "epochs": 2, "batch_size": 20, "verbose": 0}


def build(inputs: tuple[int, ...]) -> Any:
    found: dict[str, Any] = {}
    exec(FILE, found)
    return found["build"](inputs, 2)


def weights(model: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(value) for value in model.get_weights()]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def test_weights_of_rows_are_those_of_keras_through_every_door(tmp_path: Path) -> None:
    names = [f"f{k}" for k in range(4)]
    columns = {**{name: X[:, k] for k, name in enumerate(names)}, "w": WEIGHT, "y": Y}
    np.savetxt(tmp_path / "rows.csv", np.stack(list(columns.values()), 1), "%.9g", ",", header=",".join(columns), comments="")
    (tmp_path / "mine.py").write_text(FILE)
    table = pg.Table(str(tmp_path / "rows.csv"), label="y", weight="w", features=names)
    python = pg.train(build((4,)), table, holdout=0.25, run=tmp_path / "python", **SHORT)
    flags = f"--data {tmp_path}/rows.csv --label y --weight w --features {','.join(names)} --model {tmp_path}/mine.py:build"
    command = (
        f"train {flags} --holdout 0.25 --engine vector --workers 2 --epochs 2 --batch-size 20 --out {tmp_path}/typed --quiet"
    )
    done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    typed = pg.load(tmp_path / "typed", build((4,)))
    assert same(python.model, typed.module)
    assert typed.evaluate(verbose=0)["loss"] == pytest.approx(python.loss, abs=1e-6)
    assert pg.replay(tmp_path / "typed").equal
    assert pg.replay(tmp_path / "python", build((4,)), table, holdout=0.25).equal


def test_images_of_bytes_are_left_to_the_layers_of_keras_through_every_door(tmp_path: Path) -> None:
    y = np.arange(60) % 2
    np.savez(tmp_path / "parts.npz", x_train=IMAGES, y_train=y)
    np.savez(tmp_path / "columns.npz", x=IMAGES, y=y)
    doors = {
        "arrays": (IMAGES, y),
        "parts": str(tmp_path / "parts.npz"),
        "columns": str(tmp_path / "columns.npz"),
        "table": pg.Table(str(tmp_path / "columns.npz")),
    }
    made = {name: pg.train(build((4, 4)), rows, run=tmp_path / name, **SHORT).model for name, rows in doors.items()}
    assert all(same(made["arrays"], model) for model in made.values())
    trained = pg.load(tmp_path / "columns", build((4, 4)))
    expected = trained.predict(IMAGES, verbose=0)
    assert np.array_equal(trained.predict(str(tmp_path / "columns.npz"), verbose=0), expected)
    assert np.array_equal(trained.predict(str(tmp_path / "parts.npz"), verbose=0), expected)


def test_a_model_that_is_given_gets_the_weights_that_were_kept(tmp_path: Path) -> None:
    model = build((4,))
    run = pg.Run(out=tmp_path / "run", keep="best", validate_every=1)
    wrong = (X[:50], 1 - Y[:50])  # the loss of these rows rises as the others are learned
    result = pg.train(model, (X, Y), validation=wrong, run=run, **SHORT)
    assert result.kept["weights"] == "best"
    assert result.kept["clock"] < result.history[-1]["clock"]
    assert same(pg.load(tmp_path / "run", build((4,))).module, result.model)
    last = pg.load(tmp_path / "run", build((4,)), checkpoint="latest")
    assert not same(last.module, result.model)
    with pytest.raises(pg.UsageError, match="is float32 of shape"):
        pg.load(tmp_path / "run", build((5,)))
