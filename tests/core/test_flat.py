"""A module as one vector: the same memory, whatever the module is made of, and an error where it is not any more."""

import copy

import pytest
import torch
from torch import nn

from paragrad.core.flat import Flat, floating_buffers, integer_buffers, trained
from paragrad.errors import UsageError


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def values(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for _, p in trained(module)])


def test_the_vector_is_the_parameters_one_after_another() -> None:
    module = small()
    before = values(module)
    flat = Flat(trained(module))
    assert flat.vector.dtype == torch.float32
    assert torch.equal(flat.vector.double(), before)
    flat.vector.mul_(2)
    assert torch.equal(values(module), 2 * before)
    with torch.no_grad():
        module[2].bias.fill_(7.0)
    assert flat.vector[-2:].tolist() == [7.0, 7.0]
    assert flat.spread() is False
    flat.check(module.named_parameters())


def test_of_a_hundred_million_parameters_no_second_copy_is_kept() -> None:
    module = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 5000, 5000, bias=False) for _ in range(4)))
    flat = Flat(trained(module))
    assert flat.vector.numel() == 100_000_000
    (storage,) = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert storage == flat.vector.untyped_storage().data_ptr()
    assert flat.vector.untyped_storage().nbytes() == 4 * sum(p.numel() for p in module.parameters())


def test_tied_parameters_are_in_the_vector_once() -> None:
    module = small()
    module.append(nn.Linear(2, 4))
    module.append(nn.Linear(4, 2))
    module[4].weight = module[2].weight
    flat = Flat(trained(module))
    assert flat.vector.numel() == sum(p.numel() for p in module.parameters())
    flat.vector.fill_(3.0)
    assert module[4].weight is module[2].weight
    assert bool((module[4].weight == 3).all())


def test_parameters_tied_by_memory_alone_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight.data = module[0].weight.data
    with pytest.raises(UsageError, match=r"'0.weight' and '1.weight'"):
        trained(module)


def test_frozen_parameters_stay_out() -> None:
    module = small()
    module[0].requires_grad_(False)
    flat = Flat(trained(module))
    assert flat.vector.numel() == 4 * 2 + 2
    frozen = module[0].weight.clone()
    flat.vector.zero_()
    assert torch.equal(module[0].weight, frozen)


def test_each_type_has_its_segment_and_the_vector_is_cast_at_the_border() -> None:
    module = small()
    module[0].to(torch.bfloat16)
    before = values(module[0]), values(module[2])
    flat = Flat(trained(module))
    assert (module[0].weight.dtype, module[2].weight.dtype) == (torch.bfloat16, torch.float32)
    assert (flat.dtype, flat.coarse, flat.segment) == (torch.float32, True, None)
    assert torch.equal(flat.vector.double(), torch.cat(before))
    flat.vector.fill_(1 + 2**-10)
    assert flat.spread() is True
    assert values(module[0]).tolist() == [1.0] * 16
    assert values(module[2]).tolist() == [1 + 2**-10] * 10
    # The vector follows what the module can hold, else the rounding would be committed as movement.
    assert torch.equal(flat.vector.double(), torch.cat([values(module[0]), values(module[2])]))
    with torch.no_grad():
        module[0].bias.fill_(5.0)
    flat.collect()
    assert flat.vector[12:16].tolist() == [5.0] * 4
    flat.check(module.named_parameters())


def test_a_module_of_doubles_has_a_vector_of_doubles() -> None:
    module = small().double()
    flat = Flat(trained(module))
    assert (flat.dtype, flat.coarse) == (torch.float64, False)
    assert flat.vector.data_ptr() == module[0].weight.data_ptr()
    mixed = small()
    mixed[0].double()
    assert Flat(trained(mixed)).dtype == torch.float64


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
        lambda m: m.to(memory_format=torch.channels_last),
    ],
)
def test_a_parameter_that_left_the_vector_is_noticed(spoil) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    flat = Flat(trained(module))
    flat.check(module.named_parameters())
    spoil(module)
    with pytest.raises(UsageError, match=r"parameter '0.weight' was moved out"):
        flat.check(module.named_parameters())


def test_what_keeps_the_memory_is_no_fault() -> None:
    module = small()
    flat = Flat(trained(module))
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    module.float().cpu().zero_grad()
    module.requires_grad_(True).eval()
    flat.check(module.named_parameters())


def test_channels_last_weights_are_laid_out_in_the_common_order() -> None:
    module = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 8, 8)
    before = module(x)
    module.to(memory_format=torch.channels_last)
    flat = Flat(trained(module))
    assert torch.allclose(module(x), before, atol=1e-6)
    assert torch.equal(flat.views(flat.vector)[0], module.weight)
    flat.check(module.named_parameters())


def test_moving_to_another_vector_takes_its_contents() -> None:
    module = small()
    flat = Flat(trained(module))
    other = torch.arange(float(flat.vector.numel()))
    flat.move_to(other)
    assert flat.vector is other
    assert torch.equal(values(module), other.double())
    other.zero_()
    assert not values(module).any()
    flat.check(module.named_parameters())
    for wrong in (other.double(), other[1:], torch.zeros(2 * other.numel())[::2]):
        with pytest.raises(UsageError, match="contiguous vector of the same length"):
            flat.move_to(wrong)
    mixed = small()
    mixed[0].half()
    coarse = Flat(trained(mixed))
    with pytest.raises(UsageError, match="several dtypes"):
        coarse.move_to(torch.zeros_like(coarse.vector))


def test_empty_and_scalar_tensors_have_their_place() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(0, 3))
    module.b = nn.Parameter(torch.tensor(2.0))
    module.c = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    module.d = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
    flat = Flat(trained(module))
    assert flat.vector.tolist() == [1.0, 1.0, 2.0]
    flat.check(module.named_parameters())


def test_buffers_are_sorted_into_averaged_and_counted() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.register_buffer("mask", torch.ones(100, 100, dtype=torch.bool), persistent=False)
    assert [name for name, _ in floating_buffers(module)] == ["1.running_mean", "1.running_var"]
    assert [name for name, _ in integer_buffers(module)] == ["1.num_batches_tracked"]
    counts = Flat(integer_buffers(module), kind="buffer")
    assert (counts.dtype, counts.vector.tolist()) == (torch.int64, [0])
    module(torch.randn(5, 3))
    assert counts.vector.tolist() == [1]
    assert Flat(floating_buffers(nn.Linear(1, 1)), kind="buffer").vector.numel() == 0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "'0.weight' has no shape yet"),
        (nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d(affine=False)), "'1.running_mean' has no shape yet"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), "Embedding '0' has sparse=True"),
        (nn.Linear(2, 2, device="meta"), "'weight' has no values"),
        (nn.ReLU(), "nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), "torch.complex64"),
    ],
)
def test_what_no_vector_can_hold_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trained(module)
