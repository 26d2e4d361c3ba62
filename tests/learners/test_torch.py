"""The torch learner: one learner is plain PyTorch to the bit, whatever the model, the batch and the optimiser are."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from paragrad.core import flat
from paragrad.data.source import Arrays
from paragrad.errors import UsageError
from paragrad.learners.batch import split
from paragrad.learners.criterion import aligned, normaliser
from paragrad.learners.learner import Learner
from paragrad.learners.torch import TorchLearner
from paragrad.optim import optimizer as optim

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": SGD,
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": ADAM,
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=1e-2),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
}


def net(seed: int = 0, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16, bias=bias), nn.ReLU(), nn.Linear(16, 3, bias=bias))


def batches(count: int = 6, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)) for _ in range(count)
    ]


def plainly(module: nn.Module, loss: Any, make: Callable[..., torch.optim.Optimizer], data: list[Any]) -> list[float]:
    """The loop that everyone writes."""
    optimizer = make(module if optim.takes_model(make) else module.parameters())
    losses = []
    module.train()
    for x, y in data:
        optimizer.zero_grad()
        value = loss(module(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def vector(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector([p for p in module.parameters() if p.requires_grad]).detach()


# -- one learner is plain training ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flat", [True, False])
def test_one_learner_is_the_plain_loop_to_the_bit(name: str, flat: bool, monkeypatch) -> None:
    monkeypatch.setattr(optim, "SMALL", 10**9 if flat else 0)
    plain = net()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), OPTIMIZERS[name])
    assert (learner._optimizer.whole is not None) == (flat and name != "adafactor")
    losses = plainly(plain, nn.CrossEntropyLoss(), OPTIMIZERS[name], batches(8))
    assert [learner.step(batch).loss for batch in batches(8)] == losses
    assert torch.equal(learner.weights, vector(plain))
    learner.check()


def test_muon_steps_matrices() -> None:
    plain = net(bias=False)
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), "muon:lr=0.01")
    plainly(plain, nn.CrossEntropyLoss(), functools.partial(torch.optim.Muon, lr=0.01), batches())
    for batch in batches():
        learner.step(batch)
    assert torch.equal(learner.weights, vector(plain))
    assert learner.lr == 0.01


def test_an_optimizer_that_cannot_be_exchanged_is_refused() -> None:
    with pytest.raises(UsageError, match="use Adam"):
        TorchLearner(net(), nn.CrossEntropyLoss(), "sparseadam")


def test_a_factory_may_sort_the_models_parameters_into_groups() -> None:
    def grouped(model: nn.Sequential) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.3)

    plain = net()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), grouped)
    plainly(plain, nn.CrossEntropyLoss(), grouped, batches())
    for batch in batches():
        learner.step(batch)
    assert torch.equal(learner.weights, vector(plain))
    assert torch.equal(learner.module[0].weight, net()[0].weight)


def test_tied_and_frozen_parameters_train_as_plainly() -> None:
    def tied() -> nn.Sequential:
        module = net()
        module.insert(2, nn.Linear(16, 16))
        module.insert(3, nn.Linear(16, 16))
        module[3].weight = module[2].weight
        module[0].requires_grad_(False)
        return module

    plain = tied()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), ADAM)
    plainly(plain, nn.CrossEntropyLoss(), ADAM, batches())
    for batch in batches():
        learner.step(batch)
    assert torch.equal(learner.weights, vector(plain))
    assert torch.equal(learner.module[0].weight, tied()[0].weight)
    assert learner.module[3].weight is learner.module[2].weight


def test_batch_norm_statistics_and_counters_are_vectors_too() -> None:
    plain = nn.Sequential(net()[0], nn.BatchNorm1d(16), nn.ReLU(), net()[2])
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), SGD)
    plainly(plain, nn.CrossEntropyLoss(), SGD, batches())
    for batch in batches():
        learner.step(batch)
    learner.collect()
    assert torch.equal(learner.buffers, torch.cat([plain[1].running_mean, plain[1].running_var]))
    assert learner.integers.tolist() == [6]
    assert learner.integers.dtype == torch.int64
    learner.buffers.fill_(0.5)
    learner.spread()
    assert bool((learner.module[1].running_var == 0.5).all())


class Running(nn.Module):
    """Keeps a mean the careless way: by a new tensor in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.seen = self.seen + 1
        return self.body(x)


def test_buffers_that_a_forward_pass_replaces_are_not_lost() -> None:
    plain = Running()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), SGD)
    plainly(plain, nn.CrossEntropyLoss(), SGD, batches(4))
    learner.warm_up(batches()[0])
    for batch in batches(4):
        learner.step(batch)
        learner.collect()
    assert torch.equal(learner.buffers, plain.mean)
    assert learner.integers.tolist() == [4]
    learner.check()
    learner.module.mean = torch.zeros(7)
    with pytest.raises(UsageError, match="persistent=False"):
        learner.collect()


def test_dropout_draws_what_plain_training_draws() -> None:
    plain = nn.Sequential(net()[0], nn.Dropout(0.5), net()[2])
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), SGD)
    torch.manual_seed(9)
    plainly(plain, nn.CrossEntropyLoss(), SGD, batches())
    torch.manual_seed(9)
    for batch in batches():
        learner.step(batch)
    assert torch.equal(learner.weights, vector(plain))


class Mixed(nn.Module):
    """A body in bf16 and a head in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 3)
        self.body = nn.Linear(6, 16).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x.bfloat16())).float())


def test_a_model_of_mixed_types_trains_as_plainly() -> None:
    plain = Mixed()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), SGD)
    plainly(plain, nn.CrossEntropyLoss(), SGD, batches())
    assert learner.spread() is True
    for batch in batches():
        learner.step(batch)
    learner.collect()
    assert learner.weights.dtype == torch.float32
    assert torch.equal(learner.weights, torch.cat([vector(plain.body).float(), vector(plain.head)]))
    out = torch.empty_like(learner.weights)
    learner.gradient(batches()[0], out)
    assert torch.equal(out[: 6 * 16].view(16, 6), learner.module.body.weight.grad.float())


@pytest.mark.parametrize("small", [0, 10**9])
def test_a_model_on_a_device_trains_beside_its_vector(small: int, monkeypatch) -> None:
    """The CPU stands in for the device: the vectors lie elsewhere than the tensors, and only spread and collect join them."""
    monkeypatch.setattr(optim, "SMALL", small)
    monkeypatch.setattr(flat, "HOST", torch.device("cuda"))
    plain = nn.Sequential(net()[0], nn.BatchNorm1d(16), nn.ReLU(), net()[2])
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), ADAM)
    assert learner.weights.data_ptr() != learner.module[0].weight.data_ptr()
    learner.warm_up(batches()[1])
    start = learner.weights.clone()
    plainly(plain, nn.CrossEntropyLoss(), ADAM, batches())
    assert learner.spread() is False
    for batch in batches():
        learner.step(batch)
    assert torch.equal(learner.weights, start)
    learner.collect()
    assert torch.equal(learner.weights, vector(plain))
    assert torch.equal(learner.buffers, torch.cat([plain[1].running_mean, plain[1].running_var]))
    assert learner.integers.tolist() == [6]
    learner.check()
    learner.alias(start)
    assert learner.weights is start
    learner.spread()
    assert torch.equal(vector(learner.module), start)
    learner.check()


def test_a_model_of_doubles_trains_in_doubles() -> None:
    plain = net().double()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), ADAM)
    data = [(x.double(), y) for x, y in batches()]
    plainly(plain, nn.CrossEntropyLoss(), ADAM, data)
    for batch in data:
        learner.step(batch)
    assert learner.weights.dtype == torch.float64
    assert torch.equal(learner.weights, vector(plain))


# -- batches ----------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([a, b], 1))


@pytest.mark.parametrize(
    "shape",
    [
        lambda a, b, y: (a, b, y),
        lambda a, b, y: [[a, b], y],
        lambda a, b, y: ({"b": b, "a": a}, y),
        lambda a, b, y: {"b": b, "a": a, "labels": y},
    ],
)
def test_several_inputs_are_one_model_however_they_are_nested(shape) -> None:
    (x, y), plain = batches()[0], net()
    learner = TorchLearner(Two(), nn.CrossEntropyLoss(), SGD)
    learner.step(shape(x[:, :2], x[:, 2:], y))
    plainly(plain, nn.CrossEntropyLoss(), SGD, batches(1))
    assert torch.equal(learner.weights, vector(plain))


def test_a_lone_array_is_its_own_target() -> None:
    x, module = torch.randn(8, 6), nn.Linear(6, 6)
    expected = float(nn.functional.mse_loss(module(x), x).detach())
    for batch in (x, (x,), [x]):
        assert TorchLearner(module, nn.MSELoss(), SGD).step(batch).loss == expected
    assert split((x,))[0] is x


def test_a_dict_without_a_target_is_refused_by_its_keys() -> None:
    with pytest.raises(UsageError, match="it has a, b"):
        split({"a": 1, "b": 2})


def test_one_logit_meets_flat_labels() -> None:
    x, y = batches(1, rows=50)[0]
    labels = (y > 0).long()
    module = nn.Linear(6, 1)
    learner = TorchLearner(module, nn.BCEWithLogitsLoss(), SGD)
    expected = nn.functional.binary_cross_entropy_with_logits(module(x).squeeze(1), labels.float())
    step = learner.step((x, labels))
    assert step.loss == pytest.approx(float(expected.detach()), abs=1e-6)
    assert step.weight == 50
    found = learner.evaluate(Arrays((x, labels)), 16)
    right = ((learner.module(x).squeeze(1) > 0) == labels.bool()).float().mean()
    assert found["accuracy"] == pytest.approx(float(right))


def test_several_labels_are_each_right_or_wrong() -> None:
    x = torch.randn(20, 6)
    y = (torch.randn(20, 3) > 0).float()
    learner = TorchLearner(net(), nn.BCEWithLogitsLoss(), SGD)
    found = learner.evaluate(Arrays((x, y)), 7)
    output = learner.module(x)
    assert found["accuracy"] == pytest.approx(float(((output > 0) == (y > 0.5)).float().mean()))
    assert found["loss"] == pytest.approx(float(nn.functional.binary_cross_entropy_with_logits(output, y).detach()))


def test_regression_has_no_accuracy_and_does_not_broadcast() -> None:
    x, y = torch.randn(9, 6), torch.randn(9)
    learner = TorchLearner(nn.Linear(6, 1), nn.MSELoss(), SGD)
    found = learner.evaluate(Arrays((x, y)), 4)
    assert set(found) == {"loss"}
    assert found["loss"] == pytest.approx(float((learner.module(x).squeeze(1) - y).square().mean().detach()))


def test_targets_are_reshaped_only_where_rows_stay_rows() -> None:
    assert aligned(torch.zeros(4, 1), torch.zeros(4)).shape == (4, 1)
    assert aligned(torch.zeros(2, 6), torch.zeros(2, 2, 3)).shape == (2, 6)
    assert aligned(torch.zeros(4, 3), torch.zeros(3, 4)).shape == (3, 4)
    assert aligned(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)).dtype == torch.float32
    # One output and cross-entropy: a float target would make every loss 0, and nobody would know.
    labels = torch.ones(4, dtype=torch.long)
    assert aligned(torch.zeros(4, 1), labels, nn.CrossEntropyLoss()) is labels
    assert aligned("output", labels) is labels


# -- what the loss divides by -----------------------------------------------------------------------------------


def test_the_normaliser_is_what_the_loss_divides_by() -> None:
    output, target = torch.randn(6, 3), torch.tensor([0, 2, -100, 1, 2, 2])
    weights = torch.tensor([1.0, 5.0, 0.5])
    for loss in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=weights),
        nn.CrossEntropyLoss(weight=weights, ignore_index=2),
        nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1),
    ):
        labels = target.where(target >= 0, 2) if loss.ignore_index == 2 else target
        total = copy.deepcopy(loss)
        total.reduction = "sum"
        assert float(total(output, labels)) / normaliser(loss, labels) == pytest.approx(float(loss(output, labels)), rel=1e-5)
    assert normaliser(nn.functional.cross_entropy, target) == 5
    assert normaliser(nn.CrossEntropyLoss(), torch.zeros(4, 7, dtype=torch.long)) == 28
    assert normaliser(nn.MSELoss(), torch.zeros(4, 7)) == 4
    assert normaliser(lambda o, t: 0, (torch.zeros(4, 7), torch.zeros(4))) == 4


@pytest.mark.parametrize("flat", [True, False])
def test_accumulated_gradients_of_parts_are_that_of_the_whole(flat: bool, monkeypatch) -> None:
    monkeypatch.setattr(optim, "SMALL", 10**9 if flat else 0)
    (x, y) = batches(1, rows=24)[0]
    y[3] = -100
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.2]))
    learner = TorchLearner(net().double(), loss.double(), SGD)
    whole, parts = torch.empty_like(learner.weights), torch.full_like(learner.weights, torch.nan)
    full = learner.gradient((x.double(), y), whole)
    done = 0.0
    for lo, hi in ((0, 5), (5, 6), (6, 24)):
        done += learner.gradient((x[lo:hi].double(), y[lo:hi]), parts, accumulate=done).weight
    assert done == pytest.approx(full.weight)
    assert torch.allclose(whole, parts, rtol=1e-10, atol=1e-14)


def test_taking_a_gradient_does_not_move_the_weights() -> None:
    learner = TorchLearner(net(), nn.CrossEntropyLoss(), ADAM)
    before = learner.weights.clone()
    learner.gradient(batches()[0], torch.empty_like(before))
    assert torch.equal(learner.weights, before)


def test_evaluation_is_the_mean_over_all_rows_and_changes_nothing() -> None:
    module = nn.Sequential(net()[0], nn.BatchNorm1d(16), nn.Dropout(0.5), net()[2])
    metric = {"worst": lambda output, target: (output.argmax(1) != target).float().mean()}
    learner = TorchLearner(module, nn.CrossEntropyLoss(torch.tensor([1.0, 3.0, 0.1])), SGD, metrics=metric)
    learner.step(batches()[0])
    x, y = batches(1, rows=23)[0]
    vectors = [v.clone() for v in (learner.weights, learner.buffers, learner.integers)]
    found = learner.evaluate(Arrays((x, y)), 5)
    output = learner.module.eval()(x)
    assert found["loss"] == pytest.approx(float(learner.loss(output, y).detach()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()))
    assert found["worst"] == pytest.approx(1 - found["accuracy"])
    assert all(torch.equal(a, b) for a, b in zip(vectors, (learner.weights, learner.buffers, learner.integers), strict=True))
    learner.module.train()
    learner.evaluate(Arrays((x, y)), 5)
    assert learner.module.training
    assert math.isnan(learner.evaluate(Arrays((x, torch.full_like(y, -100))), 5)["loss"])


# -- states -----------------------------------------------------------------------------------------------------


def test_the_model_given_is_left_alone() -> None:
    module = net().eval()
    before = copy.deepcopy(module.state_dict())
    pointers = [p.data_ptr() for p in module.parameters()]
    learner = TorchLearner(module, nn.CrossEntropyLoss(), ADAM)
    for batch in batches():
        learner.step(batch)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert [p.data_ptr() for p in module.parameters()] == pointers
    assert all(p.grad is None for p in module.parameters())
    assert not module.training
    assert isinstance(learner, Learner)


@pytest.mark.parametrize("flat", [True, False])
def test_a_warm_up_leaves_no_trace(flat: bool, monkeypatch) -> None:
    monkeypatch.setattr(optim, "SMALL", 10**9 if flat else 0)
    module = nn.Sequential(net()[0], nn.BatchNorm1d(16), nn.Dropout(0.5), net()[2])
    learners = [TorchLearner(module, nn.CrossEntropyLoss(), ADAM) for _ in range(2)]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    learners[0].warm_up(batches()[0])
    assert torch.equal(torch.get_rng_state(), state)
    for learner in learners:
        torch.manual_seed(6)
        for batch in batches():
            learner.step(batch)
        learner.collect()
    for name in ("weights", "buffers", "integers"):
        assert torch.equal(getattr(learners[0], name), getattr(learners[1], name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_state_goes_on_to_the_bit(name: str) -> None:
    straight = TorchLearner(net(), nn.CrossEntropyLoss(), OPTIMIZERS[name])
    first = TorchLearner(net(), nn.CrossEntropyLoss(), OPTIMIZERS[name])
    for batch in batches()[:3]:
        straight.step(batch)
        first.step(batch)
    state, weights = first.state(), first.weights.clone()
    first.step(batches()[5])  # what was taken before must not follow
    resumed = TorchLearner(net(1), nn.CrossEntropyLoss(), OPTIMIZERS[name])
    resumed.weights.copy_(weights)
    resumed.load(state)
    for batch in batches()[3:]:
        straight.step(batch)
        resumed.step(batch)
    assert torch.equal(straight.weights, resumed.weights)


def test_a_scattered_learner_starts_elsewhere_by_its_seed() -> None:
    learner = TorchLearner(net(), nn.CrossEntropyLoss(), SGD)
    before = learner.weights.clone()
    state = torch.get_rng_state()
    places = []
    for seed in (1, 2, 1):
        learner.scatter(seed)
        places.append(learner.weights.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(places[0], places[2])
    assert not torch.equal(places[0], places[1])
    assert not torch.equal(places[0], before)
    learner.check()
    with pytest.raises(UsageError, match="reset_parameters"):
        TorchLearner(Bare(), nn.MSELoss(), SGD).scatter(1)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def test_an_aliased_learner_trains_in_the_centers_own_memory() -> None:
    plain = net()
    learner = TorchLearner(plain, nn.CrossEntropyLoss(), SGD)
    center = learner.weights.clone()
    learner.alias(center)
    plainly(plain, nn.CrossEntropyLoss(), SGD, batches())
    for batch in batches():
        learner.step(batch)
    assert learner.weights is center
    assert torch.equal(center, vector(plain))
    learner.check()


@pytest.mark.parametrize("make", [SGD, ADAM, torch.optim.Adafactor], ids=["sgd", "adam", "adafactor"])
@pytest.mark.parametrize("module", [net, Mixed], ids=["one type", "mixed"])
def test_gradients_stepped_at_the_center_are_local_steps(make, module) -> None:
    """Also for a mixed model, whose vector is ordered by type: a matrix must meet its own gradient."""
    learner = TorchLearner(module(), nn.CrossEntropyLoss(), make)
    center = learner.center_optimizer()
    value, gradient = learner.weights.clone(), torch.empty_like(learner.weights)
    single = copy.deepcopy(learner.module).float()
    optimizer = make(single.parameters())
    names = [piece.name for piece in learner._weights.pieces]
    for batch in batches():
        learner.gradient(batch, gradient)
        for name, view in zip(names, learner._weights.views(gradient), strict=True):
            single.get_parameter(name).grad = view.clone()
        optimizer.step()
        center.step(value, gradient)
        assert torch.equal(value, torch.cat([single.get_parameter(name).detach().reshape(-1) for name in names]))


def test_a_learner_that_was_moved_out_of_its_vector_says_so() -> None:
    for spoil in (
        lambda module: module.double(),
        lambda module: module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True),
    ):
        learner = TorchLearner(net(), nn.CrossEntropyLoss(), SGD)
        spoil(learner.module)
        with pytest.raises(UsageError, match="was moved out"):
            learner.check()


def test_a_learner_can_be_built_from_a_pickled_factory() -> None:
    make = cloudpickle.loads(cloudpickle.dumps(lambda: TorchLearner(nn.Linear(6, 3), nn.CrossEntropyLoss(), "adam:lr=0.01")))
    learner = make()
    assert learner.lr == 0.01
    assert learner.step(batches()[0]).weight == 8


# -- what cannot be trained -------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.scale * nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("module", "loss", "message"),
    [
        (nn.Sequential(nn.LazyLinear(3)), nn.MSELoss(), "no shape yet"),
        (nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(1, 1)), nn.MSELoss(), "no shape yet"),
        (nn.Embedding(4, 2, sparse=True), nn.MSELoss(), "sparse=False"),
        (net, nn.MSELoss(), "The model is a function"),
        (net(), nn.CrossEntropyLoss(reduction="sum"), "reduction='sum'"),
        (net(), Scaled(), "has parameters, which would never be trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(module, loss, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TorchLearner(module, loss, SGD)


def test_a_loss_that_is_no_number_is_refused() -> None:
    batch = batches()[0]
    with pytest.raises(UsageError, match=r"shape \(8,\)"):
        TorchLearner(net(), lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"), SGD).step(batch)
    with pytest.raises(UsageError, match="returned a float"):
        TorchLearner(net(), lambda o, t: 0.5, SGD).step(batch)


def test_integer_rows_of_any_source_reach_the_model() -> None:
    tokens = torch.randint(0, 10, (12, 4))
    learner = TorchLearner(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(16, 3)), nn.CrossEntropyLoss(), SGD)
    source = Arrays((tokens, torch.randint(0, 3, (12,))))
    first = learner.evaluate(source, 12)["loss"]
    for _ in range(20):
        learner.step(source.batch(np.arange(12)))
    assert learner.evaluate(source, 12)["loss"] < first
