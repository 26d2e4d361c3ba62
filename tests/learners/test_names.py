"""The names of a module's tensors: in the model's file, in checkpoints, and of modules that torch compiles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import paragrad as pg
from paragrad.errors import UsageError
from paragrad.learners.torch import TorchLearner
from paragrad.rundir import checkpoint


class Tied(nn.Module):
    """Batch-norm, a tensor under two names, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.again(torch.tanh(self.norm(self.first(x)))))


class Inside(nn.Module):
    """A part of it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.compile(Tied(), backend="eager")

    def forward(self, x):
        return self.whole(x)


class Plain(Inside):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.whole = Tied()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def trained(model: Any, out: Path, **options: Any) -> Any:
    given = {"engine": pg.Local(workers=2), "scheme": pg.SyncSGD(), "optimizer": "adam:lr=0.02", "batch_size": 8}
    return pg.train(model, rows(), run=pg.Run(out=out), **(given | options))


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


COMPILED = {"whole": (lambda: torch.compile(Tied(), backend="eager"), Tied), "inside": (Inside, Plain)}


@pytest.mark.parametrize("engine", [pg.Local(workers=2), pg.Vector(workers=2)], ids=["local", "vector"])
@pytest.mark.parametrize("kind", COMPILED)
def test_a_compiled_model_is_saved_under_its_own_names(kind: str, engine: Any, tmp_path: Path) -> None:
    compiled, plain = COMPILED[kind]
    result = trained(compiled(), tmp_path / "compiled", engine=engine)
    saved = pg.state_dict(tmp_path / "compiled")
    assert saved.keys() == plain().state_dict().keys()
    x, _ = rows()
    with torch.no_grad():
        output = result.model.eval()(x)
    for model in (plain(), compiled()):
        for which in (None, "latest"):
            loaded = pg.load(tmp_path / "compiled", model, checkpoint=which).module
            with torch.no_grad():
                assert torch.equal(loaded(x), output)
    other = trained(plain(), tmp_path / "plain", engine=engine)
    assert same(pg.state_dict(tmp_path / "plain"), other.model.state_dict())
    assert same(saved, other.model.state_dict())


def test_a_checkpoint_is_read_by_the_modules_names(tmp_path: Path) -> None:
    result = trained(Tied(), tmp_path / "run")
    model = result.model.state_dict()
    found = pg.state_dict(tmp_path / "run", checkpoint="latest")
    assert set(model) - set(found) == {"frozen.weight", "frozen.bias"}
    assert same(found, {name: model[name] for name in found})
    number = int(max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()))
    assert same(pg.state_dict(tmp_path / "run", checkpoint=number), found)
    assert same(pg.load(tmp_path / "run", Tied(), checkpoint=number).module.state_dict(), model)
    fresh = Tied()
    fresh.load_state_dict(found, strict=False)
    assert same(fresh.state_dict(), model)


def test_safetensors_alone_is_enough_to_find_a_tensor_in_a_checkpoint(tmp_path: Path) -> None:
    result = trained(Tied(), tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    with safe_open(newest / "state.safetensors", framework="pt") as file:
        vector, lo, hi, shape, dtype = json.loads(file.metadata()["names"])["again.weight"]
        tensor = file.get_tensor(vector)[lo:hi].reshape(shape)
    assert dtype == "float32"
    assert torch.equal(tensor, result.model.again.weight)


def test_what_has_no_such_checkpoint_or_no_names_is_said(tmp_path: Path) -> None:
    trained(Tied(), tmp_path / "run")
    with pytest.raises(UsageError, match=r"no valid checkpoint 12345 \(it has: "):
        pg.state_dict(tmp_path / "run", checkpoint=12345)
    with pytest.raises(UsageError, match="'latest', the number of an update, or None"):
        pg.state_dict(tmp_path / "run", checkpoint="best")
    with pytest.raises(UsageError, match="The model has a tensor 'weight', but the run"):
        pg.load(tmp_path / "run", nn.Linear(4, 2), checkpoint="latest")


DTYPES = ["float32", "float64", "bfloat16"]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), dtypes=st.lists(st.sampled_from(DTYPES), max_size=3))
def test_every_tensor_of_a_checkpoint_is_found_under_its_name(tmp_path_factory, sizes: list[int], dtypes: list[str]) -> None:
    module = nn.ModuleList(nn.Linear(size, 2) for size in sizes)
    for layer, dtype in zip(module, dtypes, strict=False):
        layer.to(getattr(torch, dtype))
    module.append(nn.BatchNorm1d(3))
    learner = TorchLearner(module, nn.MSELoss(), "sgd:lr=0.1")
    vectors = {"value": learner.weights, "buffers": learner.buffers, "integers": learner.integers}
    folder = tmp_path_factory.mktemp("checkpoints")
    found = checkpoint.load(checkpoint.save(folder, vectors, {"clock": 1}, learner.layout)).named()
    assert same(found, module.state_dict())
    assert sum(math.prod(tensor.shape) for tensor in found.values()) == sum(vector.numel() for vector in vectors.values())
