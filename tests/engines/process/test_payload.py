"""A job on its way to another process: the same object from every storage, its large arrays once and not writable to others."""

from __future__ import annotations

import os
import stat
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from paragrad.engines.process.payload import LARGE, Bytes, File, Memfd, Payload, pack

BIG = LARGE // 4


@pytest.fixture(params=["memfd", "file", "bytes"])
def storage(request, tmp_path):
    made = {"memfd": Memfd, "file": lambda: File(tmp_path / "job.payload"), "bytes": Bytes}[request.param]()
    yield made
    made.close()


def thing() -> dict[str, Any]:
    base = torch.arange(4 * BIG, dtype=torch.float32)
    return {
        "tensor": base,
        "view": base[BIG:],
        "columns": base.view(4, BIG).t(),
        "array": np.arange(BIG, dtype=np.float64),
        "strided": np.arange(4 * BIG).reshape(4, -1)[:, ::2],
        "fortran": np.asfortranarray(np.arange(2 * BIG).reshape(2, -1)),
        "small": torch.ones(3),
        "function": lambda x: x + base[0],
        "text": "ä",
        "weights": torch.zeros(BIG, dtype=torch.bfloat16),
    }


def test_an_object_is_the_same_from_every_storage(storage):
    given, found = thing(), pack(thing(), storage).open()
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert (found[name].dtype, found[name].stride()) == (value.dtype, value.stride()), name
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value)
        elif name == "function":
            assert found[name](1) == 1
        else:
            assert found[name] == value


def test_views_of_one_tensor_share_their_memory(storage):
    found = pack(thing(), storage).open()
    assert found["view"].data_ptr() == found["tensor"].data_ptr() + 4 * BIG
    assert found["tensor"].untyped_storage().data_ptr() == found["columns"].untyped_storage().data_ptr()


def test_a_change_is_seen_by_nobody_else(storage):
    payload = pack(thing(), storage)
    first, second = payload.open(), payload.open()
    first["tensor"].fill_(7)
    first["array"].fill(7)
    assert float(second["tensor"].sum()) == float(thing()["tensor"].sum())
    assert second["array"][1] == payload.open()["array"][1] == 1


def test_a_large_array_is_stored_once_and_not_pickled():
    stored = pack([np.zeros(10 * BIG), torch.zeros(10 * BIG)], Bytes()).stored
    sizes = sorted(map(len, stored.blocks))
    assert sizes[0] < 10_000
    assert sizes[1:] == [40 * BIG, 80 * BIG]


def test_a_small_view_does_not_bring_its_large_base_along():
    stored = pack(torch.zeros(100 * BIG)[:BIG], Bytes()).stored
    assert sum(map(len, stored.blocks)) < 8 * BIG


def test_a_file_can_be_read_by_its_owner_alone_and_is_removed(tmp_path):
    path = tmp_path / "job.payload"
    storage = File(path)
    payload = pack(thing(), storage)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    travelled = cloudpickle.loads(cloudpickle.dumps(payload))
    assert isinstance(travelled, Payload)
    found = travelled.open()
    storage.close()
    assert not path.exists()
    assert torch.equal(found["tensor"], thing()["tensor"])


def test_a_payload_of_bytes_needs_nothing_but_itself():
    payload = cloudpickle.loads(cloudpickle.dumps(pack(thing(), Bytes())))
    assert torch.equal(payload.open()["view"], thing()["view"])


def test_nothing_is_left_open(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    storage = File(tmp_path / "job.payload")
    pack(thing(), storage).open()
    storage.close()
    memfd = Memfd()
    pack(thing(), memfd).open()
    memfd.close()
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing itself
