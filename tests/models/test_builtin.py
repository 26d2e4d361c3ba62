"""Built-in models: shapes, seeds, and models from a file that travel to other processes."""

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from paragrad.errors import UsageError
from paragrad.models.builtin import CATALOGUE, build
from paragrad.models.toys import is_toy

FILE = """
import torch
from torch import nn

WIDTH = 7

class Mine(nn.Module):
    def __init__(self, inputs=4, outputs=2):
        super().__init__()
        self.body = nn.Linear(inputs, WIDTH)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

def plain():
    return Mine()

def sized(inputs, outputs):
    return Mine(inputs[0], outputs)

def only(outputs=3):
    return Mine(4, outputs)

def everything(**kind):
    return Mine(kind["inputs"][0], kind["outputs"])

def wrong():
    return 5

def greedy(depth):
    return Mine()

def broken():
    raise RuntimeError("no luck")

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("spec", ["linear", "mlp", "mlp:20", "mlp:10-20-10", "MLP", "cnn", "resnet8"])
@pytest.mark.parametrize("inputs", [(64,), (8, 8), (3, 8, 8), (1, 9, 11)])
def test_a_model_takes_rows_and_gives_outputs(spec: str, inputs: tuple[int, ...]) -> None:
    model = build(spec, inputs, 5)
    output = model(torch.randn(3, *inputs))
    assert output.shape == (3, 5)
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_hidden_sizes_are_those_asked_for() -> None:
    sizes = [tuple(m.weight.shape) for m in build("mlp:1000-2000-1000", (784,), 10) if isinstance(m, nn.Linear)]
    assert sizes == [(1000, 784), (2000, 1000), (1000, 2000), (10, 1000)]
    assert sum(p.numel() for p in build("mlp:1000-2000-1000", (28, 28), 10).parameters()) == 4_798_010
    assert [tuple(p.shape) for p in build("linear", (2, 3), 4).parameters()] == [(4, 6), (4,)]


def test_a_row_may_be_a_single_number() -> None:
    assert build("mlp", (), 2)(torch.randn(5)).shape == (5, 2)


def test_resnet8_has_three_stages_with_batch_norm() -> None:
    model = build("resnet8", (3, 32, 32), 10)
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in model.modules()) == 7
    assert {m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {16, 32, 64}
    assert model[:-3](torch.randn(2, 3, 32, 32)).shape == (2, 64, 8, 8)


@pytest.mark.parametrize("spec", ["mlp", "cnn", "resnet8"])
def test_weights_go_by_the_seed_and_leave_the_callers_numbers_alone(spec: str) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, again, other = (nn.utils.parameters_to_vector(build(spec, (64,), 10, seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("spec", "inputs", "message"),
    [
        ("mpl", (4,), "Unknown model 'mpl'. Did you mean 'mlp'"),
        ("", (4,), "Unknown model ''"),
        ("mlp:", (4,), "model='mlp:'"),
        ("mlp:10-x", (4,), "model='mlp:10-x'"),
        ("mlp:10-0", (4,), "at least 1"),
        ("linear:5", (4,), "linear takes no sizes"),
        ("cnn", (28,), r"\(28,\), which is neither"),
        ("cnn", (10, 10, 4, 4), "neither"),
        ("resnet8", (32, 32, 3), "channels first"),
        ("cnn", (2, 2), "at least 4 x 4"),
        ("model.py", (4,), "name its function"),
        ("no/such.py:f", (4,), "there is no file"),
    ],
)
def test_a_model_that_cannot_be_is_refused(spec: str, inputs: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(spec, inputs, 2)


def test_a_file_of_the_users_gives_models_of_the_users(file: Path) -> None:
    for function, shape in (("plain", (2, 7)), ("sized", (5, 7)), ("only", (5, 7)), ("everything", (5, 7))):
        model = build(f"{file}:{function}", (4,), 5)
        assert tuple(model.head.weight.shape) == shape
    first, again, other = (build(f"{file}:plain", (4,), 5, seed).body.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("plian", "Unknown function in mine.py: 'plian'. Did you mean 'plain'"),
        ("number", "Unknown function in mine.py: 'number'"),
        ("wrong", "returned a int"),
        ("greedy", "raised TypeError: .*depth"),
        ("broken", "raised RuntimeError: no luck"),
    ],
)
def test_a_function_that_gives_no_model_is_named(file: Path, function: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(f"{file}:{function}", (4,), 2)


def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match=r"bad.py cannot be imported: SyntaxError"):
        build(f"{tmp_path / 'bad.py'}:f", (4,), 2)


@pytest.mark.parametrize("spec", ["cnn", "resnet8", "FILE:plain"])
def test_a_model_travels_to_a_process_that_has_not_its_file(spec: str, file: Path, tmp_path: Path) -> None:
    inputs = (4,) if spec.startswith("FILE") else (64,)
    model = build(spec.replace("FILE", str(file)), inputs, 2).eval()
    x = torch.randn(2, *inputs)
    sent = cloudpickle.dumps((model, x, model(x).detach()))
    file.unlink()
    if not spec.startswith("FILE"):
        model, x, y = cloudpickle.loads(sent)
        assert torch.equal(model(x), y)
        return
    (tmp_path / "sent").write_bytes(sent)
    code = "import pickle, sys, torch; m, x, y = pickle.load(open(sys.argv[1], 'rb')); assert torch.equal(m(x), y)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "sent")], check=True, timeout=60, cwd="/")


def test_the_catalogue_builds() -> None:
    for name in CATALOGUE:
        if is_toy(name):
            assert build(name, (64,), 2)(torch.zeros(3, 2)).shape == (3,)
        elif not name.startswith("FILE"):
            assert build(name, (64,), 2)(torch.zeros(3, 64)).shape == (3, 2)


def test_a_file_without_its_ending_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=r"'mine:build'.* such as mine\.py:build \(there is no mine\.py in .*\)\. Built in: linear"
    ):
        build("mine:build", (4,), 2)
    (tmp_path / "mine.py").touch()
    with pytest.raises(UsageError, match=r"such as mine\.py:build \(mine\.py exists here\)"):
        build("mine:build", (4,), 2)
    with pytest.raises(UsageError, match="Did you mean 'mlp'"):
        build("mpl:32", (4,), 2)
