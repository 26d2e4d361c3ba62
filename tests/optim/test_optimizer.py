"""Optimisers on a flat vector: by name or factory, the same steps as on the tensors, at a worker and at the center."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paragrad.core.flat import Flat, trained
from paragrad.errors import UsageError
from paragrad.optim import optimizer as optim
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import FlatOptimizer, factory, names, takes_model


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def bound(make: Callable[..., torch.optim.Optimizer], module: nn.Module) -> FlatOptimizer:
    return FlatOptimizer(make, module, Flat(trained(module)))


# -- names and factories ----------------------------------------------------------------------------------------


def test_a_name_may_carry_fields() -> None:
    made = factory("SGD:lr=0.5,momentum=0.9,nesterov=true")([nn.Parameter(torch.zeros(1))])
    assert isinstance(made, torch.optim.SGD)
    assert (made.defaults["lr"], made.defaults["momentum"], made.defaults["nesterov"]) == (0.5, 0.9, True)
    betas = factory("adam:lr=0.1,betas=(0.5,0.6)")([nn.Parameter(torch.zeros(1))])
    assert betas.defaults["betas"] == (0.5, 0.6)


def test_every_optimizer_of_torch_has_a_name() -> None:
    assert {"sgd", "adam", "adamw", "adafactor", "muon"} <= set(names())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("adm", "Unknown optimizer 'adm'. Did you mean 'adam'"),
        ("adam:lrr=1", "Unknown field of optimizer 'adam': 'lrr'. Did you mean 'lr'"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), "an optimiser object belongs to one model"),
        (3, "neither a name nor callable"),
    ],
)
def test_what_is_no_optimizer_is_refused(given: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        factory(given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (factory("adam:lr=-1"), "'adam' with {'lr': -1} cannot be made"),
        (factory("muon"), "cannot be made"),
        (torch.optim.SparseAdam, "use Adam"),
        (lambda parameters: None, "returned NoneType"),
        (lambda parameters: torch.optim.SGD(net().parameters()), "tensors of another model"),
    ],
)
def test_what_cannot_step_on_a_vector_is_refused(make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bound(make, net())


def test_a_factory_that_asks_for_the_model_is_known_by_its_name_or_type() -> None:
    def typed(net: nn.Sequential) -> torch.optim.Optimizer: ...

    def written(net: "torch.nn.Module") -> torch.optim.Optimizer: ...

    assert all(takes_model(f) for f in (lambda model: None, lambda module: None, typed, written))
    partial = functools.partial(torch.optim.Adam, lr=0.1)
    assert not any(takes_model(f) for f in (torch.optim.SGD, partial, lambda parameters: None, lambda: None))


# -- flat or by pieces ------------------------------------------------------------------------------------------


def groups_by_shape(parameters) -> torch.optim.Optimizer:
    flat = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW([{"params": [p for p in parameters if p.ndim > 1]}, {"params": flat, "weight_decay": 0.0}])


class Adam(torch.optim.Adam):
    """A user's own, of a well-known name."""


def test_small_tensors_are_stepped_as_one_vector_where_that_is_the_same() -> None:
    assert bound(torch.optim.Adam, net()).whole is not None
    assert bound(factory("sgd"), net()).whole is not None
    assert bound(torch.optim.Adafactor, net()).whole is None
    assert bound(groups_by_shape, net()).whole is None
    assert bound(Adam, net()).whole is None
    assert bound(lambda parameters: torch.optim.SGD(parameters[:1]), net()).whole is None
    assert bound(lambda model: torch.optim.SGD(model.parameters()), net()).whole is None
    assert bound(torch.optim.Adam, nn.Linear(300, 300)).whole is None
    mixed = net()
    mixed[0].bfloat16()
    assert bound(torch.optim.Adam, mixed).whole is None


@pytest.mark.parametrize("flat", [True, False])
def test_the_gathered_gradient_is_in_the_order_of_the_vector(flat: bool, monkeypatch) -> None:
    monkeypatch.setattr(optim, "SMALL", 10**9 if flat else 0)
    module = net()
    mine = bound(torch.optim.SGD, module)
    assert (mine.whole is not None) == flat
    out = torch.full((32,), torch.nan)
    for _ in range(2):
        mine.clear()
        module[0](torch.ones(4, 3)).sum().backward()
        mine.gathered()
        mine.gather(out)
        assert out.tolist() == [4.0] * 20 + [0.0] * 12


def test_a_model_that_drops_its_gradients_is_still_stepped() -> None:
    module = net()
    mine = bound(functools.partial(torch.optim.SGD, lr=1.0), module)
    before = module[0].bias.detach().clone()
    for _ in range(2):
        mine.clear()
        module.zero_grad()
        module[0](torch.ones(4, 3)).sum().backward()
        mine.gathered()
        mine.apply()
    assert torch.allclose(module[0].bias, before - 8)
    assert mine.lr == 1.0


def test_plain_numbers_in_the_state_come_back_as_they_were() -> None:
    mine = bound(torch.optim.SGD, net())
    (parameter,) = mine.torch.param_groups[0]["params"]
    mine.torch.state[parameter] = {"whole": 3, "part": 0.5, "yes": True, "none": None, "vector": torch.ones(2)}
    other = bound(torch.optim.SGD, net())
    other.load(mine.state())
    (theirs,) = other.torch.state.values()
    assert {k: v for k, v in theirs.items() if k != "vector"} == {"whole": 3, "part": 0.5, "yes": True}
    assert isinstance(theirs["whole"], int)
    assert theirs["yes"] is True
    with pytest.raises(UsageError, match="state has at least 8 tensors, but the optimiser here has 1"):
        other.load({"7.step": torch.zeros(())})


# -- at the center ----------------------------------------------------------------------------------------------

MAKERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "groups": groups_by_shape,
    "model": lambda model: torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("small", [0, 10**9])
def test_the_center_steps_as_the_optimizer_would(name: str, small: int, monkeypatch) -> None:
    monkeypatch.setattr(optim, "SMALL", small)
    plain = net()
    reference = MAKERS[name](plain if takes_model(MAKERS[name]) else list(plain.parameters()))
    module = net()
    center = CenterOptimizer(MAKERS[name], module, Flat(trained(module)))
    values = [nn.utils.parameters_to_vector(plain.parameters()).detach().clone() for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        gradient = torch.randn(32, generator=generator)
        for p, g in zip(plain.parameters(), Flat(trained(net())).views(gradient), strict=True):
            p.grad = g.clone()
        reference.step()
        # The center writes its next value into the other of two buffers.
        now, other = values[step % 2], values[(step + 1) % 2]
        other.copy_(now)
        center.step(other, gradient)
        assert torch.equal(other, nn.utils.parameters_to_vector(plain.parameters()))
        if step == 1:
            fresh = net()
            resumed = CenterOptimizer(MAKERS[name], fresh, Flat(trained(fresh)))
            resumed.load({k: t.clone() for k, t in center.state().items()})
            center = resumed


def test_the_rate_at_the_center_is_scaled_for_one_step_only() -> None:
    module = net()
    center = CenterOptimizer(functools.partial(torch.optim.SGD, lr=0.5), module, Flat(trained(module)))
    value = torch.zeros(32)
    center.step(value, torch.ones(32), scale=0.1)
    center.step(value, torch.ones(32))
    assert torch.allclose(value, torch.full((32,), -0.55))


def test_lists_of_a_state_keep_their_order_whatever_the_order_of_its_names() -> None:
    """A file lists its tensors by name, so [10] comes before [2]."""
    module = net()
    mine = bound(factory("lbfgs:lr=0.1,max_iter=30,history_size=20"), module)
    x, y = torch.randn(8, 3), torch.randn(8, 2)

    def loss() -> float:
        module.zero_grad()
        value = (module(x) - y).pow(2).mean()
        value.backward()
        return value

    mine.search(loss)
    state = mine.state()
    places = [int(name.partition("[")[2][:-1]) for name in state if "old_dirs[" in name]
    assert len(places) > 10
    for _ in range(2):  # a second load replaces the lists, and does not extend them
        mine.load(dict(sorted(state.items())))
    again = mine.state()
    assert set(again) == set(state)
    assert all(torch.equal(again[name], state[name]) for name in state)
