"""A Keras model as a learner: the same steps as Keras's own, whatever the model is made of."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

import paragrad as pg  # noqa: E402
from paragrad.cli.main import app  # noqa: E402
from paragrad.data.plan import Plan  # noqa: E402
from paragrad.data.seeds import seed_everything  # noqa: E402
from paragrad.data.source import Arrays, Weighted  # noqa: E402
from paragrad.learners.kerascopy import pack  # noqa: E402
from paragrad.models import builtin  # noqa: E402
from paragrad.schemes.traits import name_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, with NumPy 2
layers, ops = keras.layers, keras.ops
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(48, 8)).astype("float32")
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).astype("int64")
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(optimizer: Any = "sgd", dtype: str = "float32", constraint: str | None = "max_norm", **compiled: Any) -> Any:
    keras.utils.set_random_seed(0)
    first = layers.Dense(6, activation="tanh", kernel_constraint=constraint, dtype=dtype)
    model = keras.Sequential([keras.Input((8,)), first, layers.Dense(2, dtype=dtype)])
    model.compile(optimizer, **{"loss": SPARSE, **compiled})
    return model


def weights(model: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(value, dtype="float64").reshape(-1) for value in model.get_weights()])


def tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: tensors(value) for key, value in tree.items()}
    return tuple(map(tensors, tree)) if isinstance(tree, tuple | list) else torch.from_numpy(tree)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_train_on_batch_to_the_bit(name):
    model = mlp(OPTIMIZERS[name]())
    learner = pg.KerasLearner(model)
    for start in range(0, 48, 8):
        rows = slice(start, start + 8)
        loss = model.train_on_batch(X[rows], Y[rows])
        assert learner.step((torch.from_numpy(X[rows]), torch.from_numpy(Y[rows]))) == pg.Step(float(loss), 8.0)
    assert np.array_equal(weights(model), weights(learner.copy()))
    assert learner.lr == pytest.approx(float(model.optimizer.learning_rate))


@pytest.mark.parametrize("name", ["sgd", "adam", "clipnorm", "schedule", "momentum", "accumulated"])
def test_syncsgd_is_one_process_with_the_whole_batch(name, tmp_path):
    exact = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    model, plan = mlp(OPTIMIZERS[name](), "float64", loss=exact), Plan(rows=48, batch_size=8, epochs=2, seed=3)
    before = weights(model)
    result = pg.train(
        model,
        (X, Y),
        scheme=pg.SyncSGD(),
        engine=pg.Vector(3),
        epochs=2,
        batch_size=8,
        seed=3,
        run=pg.Run(out=tmp_path / "run"),
    )
    assert np.array_equal(before, weights(model)), "the model that was given is left as it is"
    assert not model.optimizer.built
    for at in range(0, plan.positions, 3):
        rows = np.concatenate([plan.rows_of(position) for position in range(at, at + 3)])
        model.train_on_batch(X[rows], Y[rows])
    assert np.abs(weights(model) - weights(result.model)).max() < 1e-7


def test_one_worker_is_plain_keras(tmp_path):
    model, plan = mlp("adam"), Plan(rows=48, batch_size=8, epochs=2, seed=1)
    result = pg.train(
        model,
        (X, Y),
        scheme=pg.Downpour(window=1),
        engine=pg.Vector(1),
        epochs=2,
        batch_size=8,
        seed=1,
        run=pg.Run(out=tmp_path / "run"),
    )
    for position in range(plan.positions):
        rows = plan.rows_of(position)
        model.train_on_batch(X[rows], Y[rows])
    assert np.abs(weights(model) - weights(result.model)).max() < 1e-6
    assert result.model.compiled
    assert type(result.model.optimizer) is type(model.optimizer)
    again = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert np.array_equal(weights(again), weights(result.model))


# -- what models are made of ------------------------------------------------------------------------------------------


def several():
    a, b = keras.Input((8,), name="a"), keras.Input((3,), name="b")
    joined = layers.Concatenate()([layers.Dense(4)(a), layers.Dense(4)(b)])
    outputs = {"kind": layers.Dense(2, name="kind")(joined), "size": layers.Dense(1, name="size")(joined)}
    model = keras.Model([a, b], outputs)
    model.compile(
        "adam", loss={"kind": SPARSE, "size": "mse"}, loss_weights={"kind": 0.3, "size": 2.0}, metrics={"kind": "acc"}
    )
    return model, ([X, X[:, :3]], {"kind": Y, "size": X[:, :1]})


def compiled(*parts, loss=SPARSE, optimizer="adam"):
    model = keras.Sequential(list(parts))
    model.compile(optimizer, loss)
    return model


def frozen():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(6), layers.BatchNormalization(), layers.Dense(2)])
    model.layers[0].trainable = False
    model.compile("adam", SPARSE)
    return model


def adapted():
    layer = layers.Normalization()
    layer.adapt(X)
    return layer


WORDS = GENERATOR.integers(0, 9, size=(48, 5))
MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, Any]]]] = {
    "several inputs and outputs": several,
    "lstm": lambda: (compiled(layers.Embedding(9, 4), layers.LSTM(3), layers.Dense(2)), (WORDS, Y)),
    "masked": lambda: (compiled(layers.Embedding(9, 4, mask_zero=True), layers.GRU(3), layers.Dense(2)), (WORDS, Y)),
    "batch-norm": lambda: (
        compiled(keras.Input((8,)), layers.Dense(6), layers.BatchNormalization(), layers.Dense(2)),
        (X, Y),
    ),
    "convolution": lambda: (
        compiled(layers.Reshape((4, 2, 1)), layers.Conv2D(3, 2), layers.Flatten(), layers.Dense(2)),
        (X, Y),
    ),
    "regularised": lambda: (compiled(layers.Dense(4, kernel_regularizer="l2"), layers.Dense(2)), (X, Y)),
    "subclass": lambda: (compiled_subclass(), (X, Y)),
    "frozen": lambda: (frozen(), (X, Y)),
    "inputs prepared": lambda: (compiled(adapted(), layers.Rescaling(0.5), layers.Dense(2)), (X, Y)),
    "torch inside": lambda: (compiled(keras.Input((8,)), layers.TorchModuleWrapper(torch_part()), layers.Dense(2)), (X, Y)),
    "a closure as loss": lambda: (compiled(layers.Dense(2), loss=lambda y, p: ops.mean((p[:, :1] - y) ** 2)), (X, Y)),
    "mixed bfloat16": lambda: (under("mixed_bfloat16"), (X, Y)),
    "mixed float16": lambda: (under("mixed_float16"), (X, Y)),
    "bfloat16": lambda: (compiled(keras.Input((8,)), layers.Dense(2, dtype="bfloat16")), (X, Y)),
    "float64": lambda: (compiled(keras.Input((8,), dtype="float64"), layers.Dense(2, dtype="float64")), (X, Y)),
}


def compiled_subclass():
    """Classes that only this function knows: no worker could import them."""

    class Scaled(layers.Layer):
        """A layer of a user's own, without get_config, that adds to the loss."""

        def __init__(self, function):
            super().__init__()
            self.function = function

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
            self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

        def call(self, x):
            self.seen.assign_add(1)
            self.add_loss(0.1 * ops.sum(self.scale**2))
            return self.function(x * self.scale)

    class Subclass(keras.Model):
        """A subclass without a ``training`` argument, with branches of its own."""

        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(5, activation="relu"), Scaled(lambda x: x + 1), layers.Dense(2)]

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    model = Subclass()
    model.compile("adam", SPARSE)
    return model


def torch_part():
    return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6))


def under(policy):
    keras.mixed_precision.set_global_policy(policy)
    try:
        return compiled(keras.Input((8,)), layers.Dense(6, activation="relu"), layers.Dense(2, dtype="float32"))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_steps_as_in_keras(name):
    keras.utils.set_random_seed(1)
    model, (x, y) = MODELS[name]()
    rows = tensors((x, y))
    model.train_on_batch(x, y)  # builds it, and leaves a state in its optimiser
    learner = pg.KerasLearner(model)
    frozen_before = [v.numpy().copy() for v in model.non_trainable_variables] if name == "frozen" else []
    for _ in range(3):
        model.train_on_batch(x, y)
        learner.step(rows)
    learner.collect()
    learner.check()
    assert np.array_equal(weights(model), weights(learner.copy()))
    if name == "frozen":
        assert np.array_equal(frozen_before[0], learner.copy().layers[0].kernel.numpy())
        assert learner.weights.numel() == 6 * 2 + 2 + 12
    if name == "subclass":
        assert int(learner.integers[0]) == int(model.parts[1].seen.value)
    assert learner.buffers.numel() == {"batch-norm": 12, "frozen": 12, "torch inside": 12, "inputs prepared": 16}.get(name, 0)


def test_dropout_goes_by_the_mini_batch_and_not_by_what_was_done_before():
    noise = layers.Lambda(lambda x: x + keras.random.normal(ops.shape(x)))  # of the one generator that all share

    def after(part: Any, *seeds: int) -> torch.Tensor:
        keras.utils.set_random_seed(0)
        learner = pg.KerasLearner(compiled(keras.Input((8,)), layers.Dense(4), part, layers.Dense(2)))
        out = torch.empty_like(learner.weights)
        for seed in seeds:
            seed_everything(seed)
            learner.gradient(tensors((X, Y)), out)
        return out

    for part in (layers.Dropout(0.5, seed=1), layers.GaussianNoise(1.0), noise):
        assert torch.equal(after(part, 5), after(part, 1, 2, 5))
        assert not torch.equal(after(part, 5), after(part, 6))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_weights_of_rows_mean_what_they_mean_in_keras(reduction):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model, weight = mlp("sgd", loss=loss), np.linspace(0, 2, 48).astype("float32")
    learner = pg.KerasLearner(model)
    whole, joined = torch.empty_like(learner.weights), torch.empty_like(learner.weights)
    rows = Arrays(Weighted(tensors((X, Y)), torch.from_numpy(weight)))
    learner.gradient(rows.batch(np.arange(48)), whole)
    first = learner.gradient(rows.batch(np.arange(20)), joined)
    learner.gradient(rows.batch(np.arange(20, 48)), joined, accumulate=first.weight)
    assert torch.allclose(whole, joined, atol=1e-7)
    model.train_on_batch(X, Y, sample_weight=weight)
    learner.step(rows.batch(np.arange(48)))
    assert np.array_equal(weights(model), weights(learner.copy()))


def test_the_vectors_are_the_model():
    model, _ = MODELS["batch-norm"]()
    learner, rows = pg.KerasLearner(model), tensors((X, Y))
    assert isinstance(learner, pg.Learner)
    assert weights(learner.copy()).tolist() == weights(model).tolist()
    mine = torch.randn_like(learner.weights)
    learner.alias(mine)
    learner.buffers.fill_(0.25)
    learner.spread()
    assert np.array_equal(learner.copy().layers[0].kernel.numpy().reshape(-1), mine[:48].numpy())
    assert (learner.copy().layers[1].moving_mean.numpy() == 0.25).all()
    learner.step(rows)
    assert learner.weights is mine
    state, at = learner.state(), mine.clone()
    learner.step(rows)
    further = mine.clone()
    mine.copy_(at)
    learner.load(state)
    learner.buffers.fill_(0.25)
    learner.step(rows)
    assert torch.allclose(mine, further, atol=1e-6)
    learner.recover()
    assert all(not tensor.any() for name, tensor in learner.state().items() if name != "1")  # 1 is the learning rate
    before = learner.weights.clone(), learner.buffers.clone()
    learner.warm_up(rows)
    assert torch.equal(before[0], learner.weights)
    assert torch.equal(before[1], learner.buffers)


def test_workers_can_start_apart():
    learners = [pg.KerasLearner(mlp()) for _ in range(3)]
    for learner, seed in zip(learners, (1, 2, 1), strict=True):
        learner.scatter(seed)
    assert not torch.equal(learners[0].weights, learners[1].weights)
    assert torch.equal(learners[0].weights, learners[2].weights)
    seeded = compiled(keras.Input((8,)), layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=1)))
    with pytest.raises(pg.UsageError, match="initialisers have a seed"):
        pg.KerasLearner(seeded).scatter(1)


def test_a_scaled_step_at_the_center_scales_the_rate():
    for optimizer in ("sgd", keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 9, 0.5))):
        center = pg.KerasLearner(mlp(optimizer, constraint=None)).center_optimizer()
        vector, gradient = torch.zeros(68), torch.full((68,), 0.01)
        center.step(vector, gradient, scale=0.5)
        assert torch.allclose(vector, torch.full((68,), -0.00005), rtol=1e-5)
        state = {name: tensor.clone() for name, tensor in center.state().items()}
        center.step(vector, gradient)
        center.load(state)
        assert int(center.state()["0"]) == 1


class OwnStep(keras.Model):
    """A step of the user's own: sign descent, without any optimiser."""

    def train_step(self, data):
        x, y, _ = data
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            for variable in self.trainable_variables:
                variable.assign_sub(0.01 * ops.sign(variable.value.grad))
        return {"loss": loss.detach()}


def test_a_train_step_of_ones_own_is_honoured_where_workers_step():
    inputs = keras.Input((8,))
    model = OwnStep(inputs, layers.Dense(2)(inputs))
    model.compile("adam", SPARSE)
    learner = pg.KerasLearner(model)
    model.train_step((torch.from_numpy(X), torch.from_numpy(Y), None))
    learner.step(tensors((X, Y)))
    assert np.array_equal(weights(model), weights(learner.copy()))
    with pytest.raises(pg.UsageError, match=r"own train_step.*pg\.AGN"):
        pg.train(model, (X, Y), scheme=pg.SyncSGD(), engine=pg.Vector(2), batch_size=8)


# -- runs ---------------------------------------------------------------------------------------------------------------


def test_processes_train_classes_that_they_cannot_import(tmp_path):
    keras.utils.set_random_seed(0)
    model = compiled_subclass()  # not built, either
    model.compile(keras.optimizers.Adam(0.03), SPARSE, metrics=["accuracy"])
    result = pg.train(
        model,
        (X, Y),
        validation=(X, Y),
        scheme=pg.Downpour(window=2),
        engine=pg.Local(2),
        epochs=16,
        batch_size=4,
        run=pg.Run(out=tmp_path / "run"),
    )
    assert not model.built
    loss, accuracy = result.model.evaluate(X, Y, verbose=0)
    assert result.accuracy == pytest.approx(accuracy)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.accuracy > 0.7


def test_a_run_repeats_and_is_replayed(tmp_path):
    model, (x, y) = several()
    runs = [
        pg.train(model, (tuple(x), y), engine=pg.Vector(3, mode=mode), epochs=2, batch_size=4, run=pg.Run(out=tmp_path / name))
        for name, mode in (("one", "auto"), ("two", "auto"), ("loop", "loop"))
    ]
    assert np.array_equal(weights(runs[0].model), weights(runs[1].model))
    for name, bits in (("one", False), ("loop", True)):  # a replay computes one worker after another
        replayed = pg.replay(tmp_path / name, model, (tuple(x), y))
        assert replayed.compared
        assert replayed.largest < 1e-5
        assert replayed.equal or not bits


@pytest.mark.parametrize("engine", [pg.Vector(2), pg.Vector(2, mode="loop"), pg.Local(2)], ids=["together", "loop", "local"])
@pytest.mark.parametrize("scheme", [pg.SyncSGD(), pg.DiLoCo(window=2)], ids=name_of)
def test_a_resumed_run_ends_where_an_unbroken_one_does(scheme, engine, tmp_path):
    def run(name: str, commits: int = 0, **options: Any) -> pg.Result:
        seen: list[pg.Event] = []

        def enough(event: pg.Event) -> bool:
            seen.extend([event] if event.kind == "commit" else [])
            return bool(commits) and len(seen) >= commits

        where = pg.Run(out=tmp_path / name, callbacks=(enough,), **options)
        return pg.train(mlp("adam"), (X, Y), scheme=scheme, engine=engine, epochs=3, batch_size=8, run=where)

    assert run("broken", commits=6).stopped == "callback"
    broken, whole = weights(run("broken", resume=True).model), weights(run("whole").model)
    np.testing.assert_allclose(broken, whole, rtol=0, atol=1e-6 if isinstance(engine, pg.Local) else 0)


def test_the_command_line_takes_a_function_and_a_file(tmp_path):
    text = (
        "import keras\nfrom keras import layers\n\nclass Own(layers.Dense):\n    pass\n\n"
        "def build(outputs):\n    model = keras.Sequential([keras.Input((64,)), Own(outputs)])\n"
        "    model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=['accuracy'])\n"
        "    return model\n"
    )
    (tmp_path / "mine.py").write_text(text)
    model = keras.Sequential([keras.Input((64,)), layers.Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.save(tmp_path / "saved.keras")
    for which in ("mine.py:build", "saved.keras"):
        command = ["train", "--data", "digits", "--model", which, "--out", f"run-{which[:4]}", "--engine", "vector", "-q"]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert (tmp_path / f"run-{which[:4]}" / "model.keras").exists()
    assert keras.saving.load_model(tmp_path / "run-save" / "model.keras").compiled


def test_a_file_of_the_users_is_imported_with_keras_on_torch(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\nimport torch\n\ndef build():\n    return torch.nn.Linear(1, 1)\n")
    monkeypatch.delitem(sys.modules, "keras")
    for before, after in ((None, "torch"), ("jax", "jax")):
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
        if before is not None:
            monkeypatch.setenv("KERAS_BACKEND", before)
        builtin.build("mine.py:build", (1,), 1)
        assert os.environ["KERAS_BACKEND"] == after


# -- bad input ----------------------------------------------------------------------------------------------------------


def ema() -> Any:
    return mlp(keras.optimizers.SGD(0.1, use_ema=True))


def untrainable() -> Any:
    model = mlp()
    model.trainable = False
    model.compile("sgd", SPARSE)
    return model


def stuck() -> Any:
    model = mlp()
    model.lock = threading.Lock()
    return model


def unfit() -> Any:
    return compiled(keras.Input((5,)), layers.Dense(2))


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "not compiled": (lambda: keras.Sequential([keras.Input((8,)), layers.Dense(2)]), {}, r"not compiled.*model\.compile\("),
    "steps": (lambda: mlp(steps_per_execution=4), {}, "steps_per_execution=4"),
    "jit": (lambda: mlp(jit_compile=True), {}, "jit_compile=False"),
    "average": (ema, {}, "use_ema"),
    "nothing to train": (untrainable, {}, "no trainable weights"),
    "cannot be pickled": (stuck, {}, "cannot be copied to the workers.*a lock"),
    "other rows": (unfit, {}, "(?s)does not take these rows.*5"),
    "loss": (mlp, {"loss": "mse"}, "loss='mse' is given, but the Keras model"),
    "optimizer": (mlp, {"optimizer": "adam"}, "optimizer='adam' is given, but the Keras model"),
    "momentum": (lambda: mlp(OPTIMIZERS["momentum"]()), {"scheme": pg.EAMSGD()}, r"plain SGD.*keras\.optimizers\.SGD"),
    "float16": (lambda: under("mixed_float16"), {"scheme": pg.SyncSGD()}, "LossScaleOptimizer.*mixed_bfloat16"),
    "sum": (lambda: mlp(loss=keras.losses.MeanSquaredError("sum")), {"scheme": pg.SyncSGD()}, "reduction='sum'"),
    "together": (mlp, {"engine": pg.Vector(2, mode="together")}, "cannot be computed together.*kernel has a constraint"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_is_said_before_anything_is_written(name, tmp_path):
    make, options, words = BAD[name]
    with pytest.raises(pg.UsageError, match=words):
        pg.train(make(), (X, Y), **{"engine": pg.Vector(2), "batch_size": 8, "run": pg.Run(out=tmp_path / "run"), **options})
    assert not (tmp_path / "run").exists()


def test_another_backend_is_told_how_to_be_changed(monkeypatch):
    model = mlp()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(pg.UsageError, match=r"runs on jax.*os\.environ\['KERAS_BACKEND'\] = 'torch'.*keras\.json"):
        pg.train(model, (X, Y), engine=pg.Vector(2), batch_size=8)


def test_a_backend_that_is_not_there_is_told_how_to_be_changed(tmp_path):
    code = "from paragrad.learners.kerasmodel import library; library()"
    environment = {**os.environ, "KERAS_BACKEND": "no_such_backend"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode
    assert "UsageError" in done.stderr
    assert "os.environ['KERAS_BACKEND'] = 'torch'" in done.stderr


def test_inputs_with_names_are_asked_for_by_name():
    inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((3,), name="b")}
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(list(inputs.values()))))
    model.compile("sgd", SPARSE)
    with pytest.raises(pg.UsageError, match=r"names \(a, b\)"):
        pg.train(model, ((X, X[:, :3]), Y), engine=pg.Vector(2), batch_size=8)
    pg.KerasLearner(model).step(tensors(({"a": X, "b": X[:, :3]}, Y)))


def test_a_copy_is_no_larger_than_the_model(tmp_path: Path) -> None:
    learner = pg.KerasLearner(compiled(keras.Input((8,)), *(layers.Dense(8) for _ in range(40)), layers.Dense(2)))
    assert len(pack(learner.model).data) < 2 * len(pack(learner.copy()).data)


def graphs() -> dict[str, Callable[[], Any]]:
    """Functional models: their graph is known to them by the ids of its layers."""

    def of(outputs: Callable[[Any, Any], Any]) -> Any:
        keras.utils.set_random_seed(0)
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        model = keras.Model([a, b], outputs(a, b))
        model.compile("sgd", "mse")
        return model

    shared, inner = layers.Dense(4), keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.BatchNormalization()])
    return {
        "joined": lambda: of(lambda a, b: layers.Dense(1)(layers.Concatenate()([a, b]))),
        "shared layer": lambda: of(lambda a, b: layers.Dense(1)(layers.Add()([shared(a), shared(b)]))),
        "model in a model": lambda: of(lambda a, b: layers.Dense(1)(layers.Subtract()([inner(a), inner(b)]))),
        "operations": lambda: of(lambda a, b: layers.Dense(1)(a * ops.tanh(b))),
    }


@pytest.mark.parametrize("kind", ["joined", "shared layer", "model in a model", "operations"])
def test_a_functional_model_is_saved_whether_given_or_trained(kind: str, tmp_path: Path) -> None:
    model = graphs()[kind]()
    assert pack(model).open().get_config() == model.get_config()
    result = pg.train(model, (X, X, X[:, :1]), engine=pg.Vector(2), batch_size=8, run=pg.Run(out=tmp_path / "run"))
    result.model.save(tmp_path / "mine.keras")
    expected = result.model.predict([X, X], verbose=0)
    for path in (tmp_path / "mine.keras", tmp_path / "run" / "model.keras"):
        assert np.array_equal(keras.saving.load_model(path).predict([X, X], verbose=0), expected)
