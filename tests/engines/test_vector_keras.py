"""Keras models in the vector engine: what is computed together is what one worker after another would compute."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

import paragrad as pg  # noqa: E402
from paragrad.core.job import Job  # noqa: E402
from paragrad.data.plan import Plan  # noqa: E402
from paragrad.data.source import Arrays, Weighted  # noqa: E402
from paragrad.learners.batchable import why_not  # noqa: E402
from paragrad.learners.kerascopy import pack  # noqa: E402
from paragrad.learners.kerasrows import KerasRowModel  # noqa: E402
from tests.engines.sim.simulated import simulate  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:__array__ implementation")]
layers, ops, optimizers = keras.layers, keras.ops, keras.optimizers
JITTER = pg.Cluster(
    speeds=(pg.LogNormal(1.0, 0.5), 0.7, pg.Exponential(1.3), 1.9), faults=(pg.Crash(worker=1, at=6.3, down=2.0),)
)
ASYNCHRONOUS, ROUNDS, SHIPPED = pg.AGN(window=2), pg.EASGD(window=1), pg.SyncSGD()
GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(110, 5, dtype=torch.float64, generator=GENERATOR)
Y = (X[:, :3] + 0.3 * X[:, 2:]).argmax(1)


@pytest.fixture
def exact(monkeypatch):
    """Keras in float64 throughout. Of itself it never is on torch: the result of any two types, and so every matrix
    product, is at most float32 there (``keras.backend.result_type("float64", "float64")``)."""
    monkeypatch.setitem(sys.modules["keras.src.backend.common.dtypes"].BIT64_TO_BIT32_DTYPE, "float64", "float64")
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(optimizer=None, **first):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh", **first), layers.Dense(3)])
    model.compile(optimizer or optimizers.SGD(0.1), crossentropy())
    return model


def job_of(model, scheme=ASYNCHRONOUS, *, data=None, epochs=4):
    """A training of that model; the last mini-batch of an epoch is a short one."""
    kind = getattr(torch, model.trainable_variables[0].dtype)
    packed, data = pack(model), data or Arrays((X.to(kind), Y))
    return Job(
        scheme, lambda device: pg.KerasLearner(packed, device=device), data, None, Plan(len(data), 8, epochs, seed=5), 64
    )


def states(job):
    """Where runs end whose windows are computed together and one after another."""
    learner = job.make_learner("cpu")
    before = learner.weights.clone(), learner.buffers.clone(), learner.state()
    assert why_not(learner, job.train, job.plan) is None
    assert torch.equal(learner.weights, before[0])
    assert torch.equal(learner.buffers, before[1])
    assert all(torch.equal(mine, before[2][name]) for name, mine in learner.state().items()), "the trial left a trace"
    together, alone = (simulate(job, cluster=JITTER, together=together) for together in (True, False))
    assert together.order == alone.order
    assert len(together.order) >= 24
    return together.center.state, alone.center.state


def assert_same(job, within=1e-10):
    together, alone = states(job)
    assert torch.allclose(together.value, alone.value, atol=within, rtol=0)
    assert torch.allclose(together.buffers, alone.buffers, atol=within, rtol=0)
    assert torch.equal(together.integers, alone.integers)


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.8),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop-centered": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "adadelta": lambda: optimizers.Adadelta(0.5, weight_decay=0.01),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True, epsilon=1e-3),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global-clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.8), momentum=0.5),
    "schedule-adamw": lambda: optimizers.AdamW(optimizers.schedules.CosineDecay(0.01, 9), weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_optimisers_step_row_by_row_as_keras_does(name, exact):
    assert_same(job_of(mlp(OPTIMIZERS[name]())))


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adagrad", "rmsprop", "adadelta", "adam", "adamw"])
def test_in_float32_they_stay_close_over_two_dozen_events(name):
    assert_same(job_of(mlp(OPTIMIZERS[name]())), within=1e-5)


@pytest.mark.parametrize("scheme", [ROUNDS, SHIPPED, pg.AEASGD(window=2), pg.DiLoCo(window=2)], ids=repr)
def test_other_schemes_come_to_the_same_center(scheme, exact):
    assert_same(job_of(mlp(OPTIMIZERS["adam"]()), scheme))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_the_installed_keras_from_any_state(name, dtype):
    optimizer = OPTIMIZERS[name]()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, dtype=dtype), layers.Dense(3, dtype=dtype)])
    model.compile(optimizer, "mse")
    learner = pg.KerasLearner(model)
    for start in range(3):  # each time the rows begin with the state that the optimiser has come to
        rows = KerasRowModel(learner, torch.device("cpu"))
        assert rows.optimizer.made == 4 * start
        mine = learner.weights.clone().repeat(2, 1)
        slots = [torch.zeros_like(mine) + begun for begun in rows.optimizer.slots]
        for made in range(4 * start, 4 * start + 4):
            gradient = torch.randn(learner.weights.shape, dtype=mine.dtype, generator=GENERATOR)
            learner.descend(gradient)
            both = gradient.repeat(2, 1)
            rows.clip(both)
            rates = torch.full((2, 1), rows.rate(0.0, made), dtype=torch.float64) if rows.paced else None
            rows.optimizer.step(mine, both, slots, torch.full((2, 1), float(made)), rates)
        within = 1e-13 if dtype == "float64" and not rows.clips else 1e-6  # Keras clips with limits in float32
        assert torch.allclose(mine, learner.weights.expand_as(mine), atol=within, rtol=0)
        assert torch.equal(mine[0], mine[1])


# -- what models are made of ------------------------------------------------------------------------------------------


def compiled(model, loss=None, optimizer=None):
    model.compile(optimizer or optimizers.Adam(0.01), loss or crossentropy())
    return model


def built(model):
    model(X[:2])
    return compiled(model)


def normalised():
    # Without a bias before the batch-norm: its gradient is rounding alone, which Adam would blow up.
    hidden = [layers.Dense(6, use_bias=False), layers.BatchNormalization(), layers.Activation("tanh")]
    return compiled(keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(3)]))


class Own(keras.Model):
    """A subclass that counts, that leaves it to Keras to tell its layers that they are trained, and that adds to its loss."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.inside = layers.Dense(6, use_bias=False)
        self.norm, self.out = layers.BatchNormalization(), layers.Dense(3)

    def call(self, x):
        hidden = ops.tanh(self.norm(self.inside(x)))
        self.seen.assign_add(1)
        self.add_loss(0.1 * ops.mean(ops.square(hidden)))
        return self.out(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.01 * ops.mean(ops.square(y_pred))


def subclassed():
    return built(Own())


def regularised():
    first = layers.Dense(6, activation="tanh", kernel_regularizer="l2", activity_regularizer="l1")
    return compiled(keras.Sequential([keras.Input((5,)), first, layers.Dense(3, bias_regularizer="l1")]))


def frozen():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(3)])
    model.layers[0].trainable = False
    return compiled(model)


def convolved():
    parts = [layers.Reshape((5, 1, 1)), layers.Conv2D(2, (3, 1), activation="tanh"), layers.Flatten(), layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((5,)), *parts]))


def recurrent():
    words = layers.Lambda(lambda x: ops.cast(ops.abs(x) * 3, "int32"))
    parts = [words, layers.Embedding(20, 3, mask_zero=True), layers.LSTM(4), layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((5,)), *parts]))


def shared():
    x, layer = keras.Input((5,)), layers.Dense(5, activation="tanh")
    return compiled(keras.Model(x, layers.Dense(3)(layer(layer(x)))))


@pytest.mark.parametrize(
    "make", [normalised, subclassed, regularised, frozen, convolved, recurrent, shared], ids=lambda make: make.__name__
)
def test_whatever_a_model_is_made_of_rows_come_to_where_each_comes_alone(make, exact):
    keras.utils.set_random_seed(3)
    assert_same(job_of(make()))


@pytest.mark.parametrize("scheme", [ROUNDS, SHIPPED], ids=repr)
def test_batch_norm_statistics_travel_with_their_rows_in_every_scheme(scheme, exact):
    keras.utils.set_random_seed(3)
    assert_same(job_of(normalised(), scheme))


@pytest.mark.parametrize("scheme", [ASYNCHRONOUS, SHIPPED], ids=repr)
def test_several_inputs_and_outputs_with_weights_of_their_losses(scheme, exact):
    keras.utils.set_random_seed(3)
    a, b = keras.Input((5,), name="a"), keras.Input((3,), name="b")
    joined = layers.Concatenate()([layers.Dense(4, activation="tanh")(a), layers.Dense(4)(b)])
    model = keras.Model([a, b], {"kind": layers.Dense(3, name="kind")(joined), "size": layers.Dense(1, name="size")(joined)})
    losses = {"kind": crossentropy(), "size": "mse"}
    model.compile(optimizers.Adam(0.01), losses, loss_weights={"kind": 0.3, "size": 2.0}, metrics={"kind": "acc"})
    assert_same(job_of(model, scheme, data=Arrays(((X, X[:, :3]), {"kind": Y, "size": X[:, :1]}))))


@pytest.mark.parametrize("loss", ["mse", "huber", "binary_crossentropy", "cosine_similarity"])
def test_losses_are_those_that_the_model_was_compiled_with(loss, exact):
    keras.utils.set_random_seed(3)
    parts = [layers.Dense(6, activation="tanh"), layers.Dense(1, activation="sigmoid")]
    model = compiled(keras.Sequential([keras.Input((5,)), *parts]), loss)
    assert_same(job_of(model, data=Arrays((X, (Y > 0).double().unsqueeze(1)))))


# -- what is looped over ----------------------------------------------------------------------------------------------


class Stepping(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        return super().train_step(data)


class Choosing(Stepping):
    train_step = keras.Model.train_step

    def call(self, x):
        return self.out(x) if float(x.sum()) > 0 else self.out(-x)


class Mine(optimizers.SGD):
    pass


def looped(*parts, **options):
    return compiled(keras.Sequential([keras.Input((5,)), *parts, layers.Dense(3)]), **options)


LOOPED = {
    "the optimiser Adamax has no batched version": lambda: looped(optimizer=optimizers.Adamax(0.01)),
    "the optimiser Mine has no batched version": lambda: looped(optimizer=Mine(0.01)),
    "the optimiser LossScaleOptimizer has no batched version": lambda: looped(
        optimizer=optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
    ),
    "the optimiser's learning rate is a custom function": lambda: looped(optimizer=optimizers.SGD(lambda: 0.1)),
    "gradient_accumulation_steps=2": lambda: looped(optimizer=optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "loss_scale_factor=8": lambda: looped(optimizer=optimizers.SGD(0.1, loss_scale_factor=8.0)),
    "has a constraint": lambda: looped(layers.Dense(4, kernel_constraint="max_norm")),
    r"draws random numbers \(dropout\)": lambda: looped(layers.Dropout(0.5)),
    "random numbers": lambda: looped(layers.GaussianNoise(0.5)),
    "computes in bfloat16, but holds its weights in float32": lambda: looped(layers.Dense(4, dtype="mixed_bfloat16")),
    "coarser type than the center": lambda: looped(layers.Dense(4, dtype="float64")),
    "is a torch module": lambda: looped(layers.TorchModuleWrapper(torch.nn.Linear(5, 4))),
    "Stepping defines its own train_step": lambda: built(Stepping()),
    "data-dependent control flow": lambda: built(Choosing()),
}


@pytest.mark.parametrize("reason", LOOPED)
def test_what_has_no_form_for_rows_is_looped_over_with_its_reason(reason):
    job = job_of(LOOPED[reason](), data=Arrays((X.float(), Y)))
    assert re.search(reason, str(why_not(job.make_learner("cpu"), job.train, job.plan)))


def test_rows_with_weights_are_looped_over():
    job = job_of(mlp(), data=Arrays(Weighted((X.float(), Y), torch.rand(len(X), generator=GENERATOR))))
    assert why_not(job.make_learner("cpu"), job.train, job.plan) == "the rows have weights"


# -- runs -------------------------------------------------------------------------------------------------------------


def notes_of(model, directory, **engine):
    notes = []
    run = pg.Run(
        out=directory,
        callbacks=(lambda event: notes.append(event.data.get("message")) if event.kind in ("note", "warning") else None,),
    )
    result = pg.train(model, (X.float(), Y), engine=pg.Vector(3, **engine), batch_size=8, run=run)
    return " ".join(map(str, notes)), result


def test_a_run_says_that_it_loops_only_where_it_does(tmp_path):
    together, first = notes_of(mlp(), tmp_path / "together")
    assert "one after another" not in together
    notes, _ = notes_of(looped(layers.Dropout(0.5)), tmp_path / "dropout")
    assert "Workers are computed one after another: the model draws random numbers" in notes
    _, second = notes_of(mlp(), tmp_path / "loop", mode="loop")
    for mine, other in zip(first.model.get_weights(), second.model.get_weights(), strict=True):
        assert abs(mine - other).max() < 1e-5
    with pytest.raises(pg.UsageError, match=r"mode='together', but workers cannot be computed together: .*dropout"):
        notes_of(looped(layers.Dropout(0.5)), tmp_path / "error", mode="together")


def test_workers_follow_a_rate_that_is_changed_while_they_train(tmp_path):
    ends = []
    for mode in ("together", "loop"):
        model = mlp(optimizers.SGD(0.1, weight_decay=0.01))
        slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        engine, where = pg.Vector(3, mode=mode), pg.Run(out=tmp_path / mode)
        pg.fit(
            model, X.float().numpy(), Y.numpy(), engine=engine, epochs=4, batch_size=8, callbacks=[slower], verbose=0, run=where
        )
        assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 16)
        ends.append(model.get_weights())
    for mine, other in zip(*ends, strict=True):
        assert abs(mine - other).max() < 1e-5
