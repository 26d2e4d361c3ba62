"""An optimiser of slices does what the one of the whole does, to the bit, and its state is the same in all forms."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core.flat import Flat
from paragrad.optim import optimizer as optimizers
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.cut import CutOptimizer, kept
from paragrad.optim.optimizer import ELEMENTWISE
from paragrad.optim.pieces import flattened, shaped

CHOICES: list[Any] = [
    *(name.lower() for name in ELEMENTWISE),
    "sgd:lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01",
    "adam:amsgrad=true,weight_decay=0.1",
    "rmsprop:centered=true,momentum=0.9",
    "adagrad:initial_accumulator_value=0.3",
    pg.Optimizer("adam", schedule="cosine", clip_value=0.5),
    functools.partial(torch.optim.Adam, lr=0.03),
]
SHAPES = [(3, 5), (), (7,), (2, 2, 2)]
LENGTH = 31


def whole_of(optimizer: Any) -> CenterOptimizer:
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    return CenterOptimizer(optimizer, module, Flat(module.named_parameters()))


@pytest.mark.parametrize("small", [0, 1 << 15], ids=["tensors", "flat"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_slices_step_as_the_whole_does(choice, small, monkeypatch):
    monkeypatch.setattr(optimizers, "SMALL", small)

    @settings(max_examples=5, deadline=None)
    @given(st.lists(st.integers(1, LENGTH - 1), max_size=3, unique=True), st.integers(0, 99))
    def law(inner, seed):
        draw = torch.Generator().manual_seed(seed)
        cuts = [0, *sorted(inner), LENGTH]
        whole, value = whole_of(choice), torch.randn(LENGTH, generator=draw)
        slices = [(CutOptimizer(choice, hi - lo, value.dtype, whole=whole), lo, hi) for lo, hi in pairwise(cuts)]
        mine = value.clone()
        for turn in range(4):
            gradient = torch.randn(LENGTH, generator=draw)
            whole.set_progress(turn / 4)
            whole.step(value, gradient, 0.5)
            for cut, lo, hi in slices:
                cut.set_progress(turn / 4)
                cut.begin()
                cut.step(mine[lo:hi].clone(), gradient[lo:hi] + 1.0)
                cut.begin()  # that came to nothing
                cut.step(mine[lo:hi], gradient[lo:hi], 0.5)
                cut.flip()
            assert torch.equal(mine, value)
            states = [cut.state() for cut, _, _ in slices]
            joined = {name: torch.cat([s[name] for s in states]) if t.ndim else t for name, t in states[0].items()}
            state = whole.state()
            assert_same(slices[0][0].to_whole(joined), state)
            assert_same(slices[0][0].of_whole(state), joined)
            assert_same(slices[0][0].of_whole(joined), joined)
            whole = whole_of(choice)
            whole.load(joined if turn % 2 else state)
            assert_same(whole.state(), state)

    law()


def assert_same(these: Any, those: Any) -> None:
    assert these.keys() == those.keys()
    for name in these:
        assert these[name].shape == those[name].shape
        assert torch.equal(these[name], those[name])


def test_what_is_kept_of_a_vector_is_known_before_there_is_one():
    assert {name: tensor.ndim for name, tensor in kept("adam", torch.float64).items()} == {
        "0.step": 0,
        "0.exp_avg": 1,
        "0.exp_avg_sq": 1,
    }
    assert kept("adam", torch.float64)["0.exp_avg"].dtype == torch.float64
    assert kept("sgd", torch.float32) == {}


def test_a_state_of_another_optimiser_is_refused():
    names = {name: bool(tensor.ndim) for name, tensor in kept("adam", torch.float32).items()}
    with pytest.raises(pg.UsageError, match=r"lacks exp_avg, exp_avg_sq, step: it was saved with another optimiser"):
        flattened({"0.momentum_buffer": torch.zeros(LENGTH)}, [torch.Size(shape) for shape in SHAPES], names)
    assert flattened({}, [torch.Size((2,))], names) == {}


def test_a_lone_tensor_has_its_shape_back():
    shape = torch.Size((2, 3))
    state = {"0.step": torch.tensor(4.0), "0.exp_avg": torch.arange(6.0)}
    found = shaped(state, [shape])
    assert found["0.exp_avg"].shape == shape
    assert_same(flattened(found, [shape], {"0.step": False, "0.exp_avg": True}), state)


def group_by_shape(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)


def by_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (pg.Optimizer("adam", clip_norm=1.0), "clip_norm needs the norm of the whole gradient"),
        ("adam:fused=true", "fused=True rounds"),
        ("adafactor", "Adafactor is not known to work element by element"),
        (group_by_shape, "into 4 groups"),
        (by_model, "takes the model"),
    ],
)
def test_why_an_optimiser_must_see_the_whole(choice, why):
    assert why in str(whole_of(choice).why_whole)


def test_words_say_all_of_an_optimiser_that_has_a_name():
    assert whole_of(pg.Optimizer("adam:lr=0.1", schedule="cosine")).has_name
    assert not whole_of(functools.partial(torch.optim.Adam, lr=0.1)).has_name
    assert not whole_of(pg.Optimizer("adam", schedule=lambda progress: 1.0)).has_name
