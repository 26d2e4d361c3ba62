"""``pg.fit`` means what ``model.fit`` means: the model itself is trained, callbacks see the ends of epochs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

import paragrad as pg  # noqa: E402
from paragrad.data.plan import Plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, with NumPy 2
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(60, 8)).astype("float32")
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).astype("int64")


def mlp(optimizer: Any = "adam", metrics: Any = ("accuracy",)) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


def fit(model: Any, x: Any = X, y: Any = Y, **options: Any) -> Any:
    given = {"engine": pg.Vector(2), "scheme": pg.SyncSGD(), "batch_size": 8, "verbose": 0, **options}
    return pg.fit(model, x, y, **given)


def weights(model: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([value.reshape(-1) for value in model.get_weights()])


def plain(model: Any, rows: int, epochs: int, sample_weight: Any = None, workers: int = 2) -> list[float]:
    """The same by Keras, with the mini-batches of all workers as one; the loss of each epoch."""
    plan, losses = Plan(rows=rows, batch_size=8, epochs=epochs), []
    for epoch in range(epochs):
        total = 0.0
        for at in range(0, plan.batches, workers):
            last = min(at + workers, plan.batches)
            taken = np.concatenate([plan.rows_of(epoch * plan.batches + k) for k in range(at, last)])
            weight = None if sample_weight is None else sample_weight[taken]
            total += len(taken) * float(
                model.train_on_batch(X[taken], Y[taken], sample_weight=weight, return_dict=True)["loss"]
            )
        losses.append(total / rows)
    return losses


def test_the_model_itself_is_trained_and_the_history_is_keras_own():
    model, other = mlp("sgd"), mlp("sgd")
    history = fit(model, epochs=3, validation_split=0.2)
    losses = plain(other, 48, 3)
    assert isinstance(history, keras.callbacks.History)
    assert history is model.history
    assert history.epoch == [0, 1, 2]
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert np.allclose(history.history["loss"], losses, atol=1e-5)
    assert np.allclose(weights(model), weights(other), atol=1e-6)
    loss, accuracy = model.evaluate(X[48:], Y[48:], verbose=0)  # the last rows were kept for validation
    assert history.history["val_loss"][-1] == pytest.approx(loss)
    assert history.history["val_accuracy"][-1] == pytest.approx(accuracy)
    assert history.history["accuracy"][-1] == pytest.approx(model.evaluate(X[:48], Y[:48], verbose=0)[1])


@pytest.mark.parametrize("named", [True, False])
def test_several_inputs_and_outputs(named):
    a, b = keras.Input((8,), name="a"), keras.Input((3,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    outputs = {"kind": keras.layers.Dense(2, name="kind")(joined), "size": keras.layers.Dense(1, name="size")(joined)}
    model = keras.Model({"a": a, "b": b} if named else [a, b], outputs if named else list(outputs.values()))
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    model.compile("sgd", dict(zip(outputs, losses, strict=True)) if named else losses)
    x, y = ({"a": X, "b": X[:, :3]}, {"kind": Y, "size": X[:, :1]}) if named else ([X, X[:, :3]], [Y, X[:, :1]])
    history = fit(model, x, y, epochs=2, validation_split=0.2).history
    assert history["loss"][1] < history["loss"][0]
    held = (
        ({k: v[48:] for k, v in x.items()}, {k: v[48:] for k, v in y.items()})
        if named
        else ([v[48:] for v in x], [v[48:] for v in y])
    )
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(*held, verbose=0, return_dict=True)["loss"])


def test_a_second_fit_goes_on_from_the_first_where_the_center_steps():
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 6, 0.5)
    model, other = (mlp(keras.optimizers.Adam(decay)) for _ in range(2))
    for _ in range(2):
        fit(model, epochs=1)
        plain(other, 60, 1)
    assert int(model.optimizer.iterations.value) == int(other.optimizer.iterations.value) == 8
    assert np.allclose(weights(model), weights(other), atol=1e-5)


@pytest.mark.parametrize("how", ["class_weight", "sample_weight"])
def test_weights_count_beside_rows_to_validate_on(how):
    by_row = np.where(Y == 1, 3.0, 0.5).astype("float32")
    given = {"class_weight": {0: 0.5, 1: 3.0}, "sample_weight": by_row}[how]
    model = mlp("sgd")
    history = fit(model, epochs=1, validation_split=0.2, **{how: given}).history
    held = {"sample_weight": by_row[48:]} if how == "sample_weight" else {}  # Keras does not weight these by class
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(X[48:], Y[48:], verbose=0, return_dict=True, **held)["loss"])


@pytest.mark.parametrize("how", ["class_weight", "sample_weight"])
def test_weights_are_those_of_keras(how):
    model, other = mlp("sgd"), mlp("sgd")
    by_row = np.where(Y == 1, 3.0, 0.5).astype("float32")
    fit(model, epochs=2, **({how: {0: 0.5, 1: 3.0}} if how == "class_weight" else {how: by_row}))
    plain(other, 60, 2, by_row)
    assert np.allclose(weights(model), weights(other), atol=1e-6)
    assert not np.allclose(weights(model), weights(mlp("sgd")), atol=1e-3)


def test_callbacks_see_the_center_at_the_ends_of_epochs(tmp_path):
    model, seen, order = mlp("sgd"), [], []

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            order.append("train")

        def on_epoch_begin(self, epoch, logs=None):
            order.append(f"begin {epoch}")

        def on_epoch_end(self, epoch, logs=None):
            order.append(f"end {epoch}")
            seen.append(weights(self.model))

        def on_train_end(self, logs=None):
            order.append("over")

    kept = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="val_loss", save_best_only=True)
    fit(model, epochs=2, validation_data=(X, Y), callbacks=[Looks(), kept])
    assert order == ["train", "begin 0", "end 0", "begin 1", "end 1", "over"]
    other = mlp("sgd")
    plain(other, 60, 1)
    assert np.allclose(seen[0], weights(other), atol=1e-6)
    assert np.array_equal(seen[1], weights(model))
    assert np.array_equal(weights(keras.saving.load_model(tmp_path / "best.keras")), seen[1])


@pytest.mark.parametrize(("freq", "validated"), [(2, [2, 4]), ([1, 4], [1, 4])])
def test_validation_freq_is_that_of_keras(freq, validated):
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((epoch + 1, "val_loss" in logs)))
    fit(mlp(), epochs=5, validation_split=0.2, validation_freq=freq, callbacks=[watch])
    assert seen == [(epoch, epoch in validated) for epoch in range(1, 6)]


def test_initial_epoch_numbers_the_epochs_and_trains_the_rest():
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    model, other = mlp("sgd"), mlp("sgd")
    history = fit(model, epochs=5, initial_epoch=3, callbacks=[watch])
    assert seen == history.epoch == [3, 4]
    fit(other, epochs=2)
    assert np.array_equal(weights(model), weights(other))


def test_early_stopping_stops_and_restores_the_best(tmp_path):
    model = mlp(keras.optimizers.SGD(1e-9))
    stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=0.1, patience=2, restore_best_weights=True)
    began = weights(model)
    history = fit(model, epochs=50, validation_split=0.2, callbacks=[stopping], run=pg.Run(out=tmp_path / "run"))
    assert len(history.epoch) == 3
    assert np.allclose(weights(model), began, atol=1e-6)
    assert '"stopped": "callback"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.parametrize(
    ("scheme", "engine"), [(pg.SyncSGD(), pg.Vector(2)), (pg.Downpour(window=1), pg.Vector(2)), (pg.SyncSGD(), pg.Local(2))]
)
def test_callbacks_may_change_the_learning_rate(scheme, engine):
    model, seen = mlp(keras.optimizers.SGD(0.1)), []
    rate = keras.callbacks.LearningRateScheduler(lambda epoch, lr: 0.1 if epoch < 2 else 0.0)
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(weights(model)))
    fit(model, epochs=4, callbacks=[rate, look], scheme=scheme, engine=engine)
    assert not np.allclose(seen[0], seen[1], atol=1e-4)
    assert np.array_equal(seen[2], seen[3])
    assert float(model.optimizer.learning_rate) == 0.0


def test_a_run_that_is_stopped_leaves_the_model_where_it_came_to(tmp_path):
    model = mlp()
    before = weights(model)

    def enough(event: pg.Event) -> bool:
        return event.kind == "commit"

    history = fit(model, run=pg.Run(out=tmp_path / "run", callbacks=(enough,)))
    assert history.epoch == []
    assert not np.array_equal(before, weights(model))
    saved = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert np.array_equal(weights(saved), weights(model))


def test_what_keras_prints_is_printed(capsys):
    fit(mlp(), epochs=2, verbose=2)
    printed = capsys.readouterr().out
    assert "Epoch 2/2" in printed
    assert "accuracy" in printed


class ByBatch(keras.callbacks.Callback):
    """Wants to see every mini-batch."""

    def on_train_batch_end(self, batch, logs=None):
        """There is no such moment."""


def uncompiled() -> Any:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "shuffle": ({"shuffle": False}, "shuffle=False"),
    "steps_per_epoch": ({"steps_per_epoch": 3}, "Unknown argument steps_per_epoch= of pg.fit. An epoch is every row once"),
    "validation_steps": ({"validation_steps": 3}, "Validation takes all rows of validation_data"),
    "workers": ({"workers": 4}, "Did you mean engine='local:workers=4'"),
    "holdout": ({"holdout": 0.1}, "Did you mean validation_split=0.1"),
    "initial_epoch": ({"initial_epoch": 2, "epochs": 2}, "initial_epoch=2 and epochs=2"),
    "validation_freq": ({"validation_freq": 0}, "validation_freq=0"),
    "no y": ({"y": None}, "y is not given"),
    "two weights": ({"class_weight": {0: 1.0}, "sample_weight": np.ones(60)}, "both given"),
    "weights of other rows": ({"sample_weight": np.ones(59)}, "60 rows, but.* 59"),
    "class weight of what": ({"y": np.zeros((60, 2, 3)), "class_weight": {0: 1.0}}, "one class per row"),
    "split": ({"validation_split": 1.5}, "validation_split=1.5"),
    "tiny split": ({"validation_split": 0.999}, "leaves 0 to train on"),
    "validation": ({"validation_data": X}, r"\(x, y\) or \(x, y, sample_weight\)"),
    "by batch": ({"callbacks": [ByBatch()]}, "ByBatch has on_train_batch_end.*on_epoch_end"),
    "lambda by batch": (
        {"callbacks": [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)]},
        "LambdaCallback has on_train_batch_end",
    ),
    "save_freq": ({"callbacks": [keras.callbacks.ModelCheckpoint("a.keras", save_freq=10)]}, "save_freq='epoch'"),
    "no callback": ({"callbacks": [print]}, "not a keras.callbacks.Callback"),
    "not compiled": ({"model": uncompiled()}, r"not compiled.*model\.compile\("),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done_is_said_before_anything_is_written(name, tmp_path):
    options, words = BAD[name]
    options = {"model": mlp(), **options}
    with pytest.raises(pg.UsageError, match=words):
        fit(**options)
    assert not (tmp_path / "runs").exists()
