"""Toy problems: their functions are what they say, their noise is of the stated size, and they need no data."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call, grad, vmap
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.cli.train import gather
from paragrad.data import load
from paragrad.data.builtin import NOISE_ROWS
from paragrad.errors import UsageError
from paragrad.models import builtin, losses, toys

SPECS = ["booth", "beale", "rosenbrock", "quadratic", "quadratic:curvatures=(1,5,25)", "quadratic:curvatures=(3,)"]


def slope(toy: toys.Toy, at: tuple[float, ...]) -> torch.Tensor:
    point = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(toy.value(point), point)
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_the_known_minimum_is_one_and_the_start_is_not(spec: str) -> None:
    toy = toys.build(spec)
    assert float(toy.value(torch.tensor(toy.minimum, dtype=torch.float64))) == pytest.approx(0, abs=1e-12)
    assert float(slope(toy, toy.minimum).norm()) == pytest.approx(0, abs=1e-12)
    assert float(slope(toy, toy.start).norm()) > 0.1
    around = torch.tensor(toy.minimum) + 0.1 * torch.randn(50, toy.size, generator=torch.Generator().manual_seed(0))
    assert bool((toy.value(around) > 0).all())


def test_the_functions_are_those_of_the_books() -> None:
    origin = torch.zeros(2)
    assert float(toys.Booth().value(origin)) == 7**2 + 5**2
    assert float(toys.Beale().value(origin)) == 1.5**2 + 2.25**2 + 2.625**2
    assert float(toys.Rosenbrock().value(torch.tensor([-1.2, 1.0]))) == pytest.approx(24.2)
    assert float(toys.Quadratic((2, 6)).value(torch.tensor([1.0, 2.0]))) == 0.5 * (2 * 1 + 6 * 4)


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_has_the_gradient_of_the_function_and_of_its_mean_noise(spec: str) -> None:
    toy = toys.build(spec)
    toy.noise = 0.7
    rows = torch.randn(5, toy.size)
    losses.build("value")(toy(rows), rows).backward()
    expected = slope(toy, toy.start).float() + 0.7 * rows.mean(0)
    torch.testing.assert_close(toy.point.grad, expected)


def test_the_gradients_noise_has_the_stated_deviation() -> None:
    toy = toys.Beale(noise=0.3)
    rows = load.split("noise:rows=4000", width=2).train.batch(np.arange(4000))
    gradients = vmap(grad(lambda p, row: functional_call(toy, {"point": p}, row[None]).mean()), (None, 0))(
        toy.point.detach(), rows
    )
    assert gradients.std(0).tolist() == pytest.approx([0.3, 0.3], rel=0.05)
    torch.testing.assert_close(gradients.mean(0), slope(toy, toy.start).float(), atol=0.03, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_many_replicas_are_computed_at_once(spec: str) -> None:
    toy = toys.build(spec)
    points, rows = torch.randn(3, toy.size), torch.randn(3, 4, toy.size)
    together = vmap(lambda p, r: functional_call(toy, {"point": p}, r))(points, rows)
    alone = torch.stack([functional_call(toy, {"point": p}, r) for p, r in zip(points, rows, strict=True)])
    torch.testing.assert_close(together, alone)


def test_noise_goes_by_the_seed_and_its_test_part_is_without() -> None:
    first, again, other = (load.split("noise:rows=30", seed=seed, width=3) for seed in (0, 0, 1))
    whole = np.arange(30)
    assert torch.equal(first.train.batch(whole), again.train.batch(whole))
    assert not torch.equal(first.train.batch(whole), other.train.batch(whole))
    assert len(load.split("noise", width=2).train) == NOISE_ROWS
    assert first.validation is not None
    assert torch.equal(first.validation.batch(np.arange(1)), torch.zeros(1, 3))


@pytest.mark.parametrize("spec", [*SPECS, "beale:start=(2,1),noise=0.5"])
def test_a_problem_is_spelled_as_it_is_built(spec: str) -> None:
    toy = builtin.build(spec, (), 1)
    assert isinstance(toy, toys.Toy)
    again = toys.build(toy.spelled())
    assert again.extra_repr() == toy.extra_repr()
    assert torch.equal(again.point, toy.point)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("beale:nois=1", "Unknown field of model 'beale': 'nois'. Did you mean 'noise'"),
        ("booth:curvatures=(1,2)", "field of model 'booth'"),
        ("beale:start=(1,2,3)", r"has 3 numbers, but Beale has 2 parameters"),
        ("quadratic:curvatures=(1,2,3),start=(1,2)", "has 2 numbers, but Quadratic has 3"),
        ("quadratic:curvatures=(1,0)", "above 0"),
        ("quadratic:curvatures=()", "one finite number per parameter"),
        ("quadratic:curvatures=steep", "curvatures='steep'"),
        ("rosenbrock:noise=-1", "noise=-1"),
        ("rosenbrock:noise=much", "noise='much'"),
        ("rosenbrock:start=(true,1)", "start="),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        toys.build(spec)


@pytest.mark.parametrize(
    ("data", "width", "message"),
    [
        ("noise:row=3", 2, "Unknown field of data 'noise': 'row'. Did you mean 'rows'"),
        ("noise:rows=0", 2, "rows=0"),
        ("noise:rows=many", 2, "rows=many"),
        ("noise", None, "the model is not one"),
    ],
)
def test_noise_that_cannot_be_is_refused(data: str, width: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load.split(data, width=width)


def test_a_toy_problem_takes_no_other_rows_and_noise_no_other_model() -> None:
    with pytest.raises(UsageError, match=r"^Beale has 2 parameters, but the rows have the shape \(3,\)"):
        pg.train(toys.Beale(), torch.zeros(8, 3), batch_size=1)
    with pytest.raises(UsageError, match="the model is not one"):
        pg.train(nn.Linear(2, 1), "noise")


def test_workers_can_start_apart() -> None:
    toy = toys.Booth()
    torch.manual_seed(0)
    toy.reset_parameters()
    assert not torch.equal(toy.point, torch.tensor(toy.start))


def test_python_trains_a_toy_problem(tmp_path: Path) -> None:
    run = pg.Run(out=str(tmp_path / "run"), checkpoint_every=None)
    result = pg.train(
        toys.Booth(noise=0.1),
        "noise:rows=200",
        optimizer="sgd:lr=0.05",
        scheme=pg.ModelAveraging(window=20),
        engine=pg.Local(workers=2),
        batch_size=1,
        run=run,
    )
    assert result.loss == pytest.approx(0, abs=0.05)
    assert result.model.point.tolist() == pytest.approx(toys.Booth().minimum, abs=0.1)
    config = tomllib.loads((tmp_path / "run/run.toml").read_text())
    assert toys.build(config["model"]).extra_repr() == result.model.extra_repr()
    assert (config["data"], config["loss"]) == ("noise:rows=200", "value")


def test_the_command_line_needs_no_data_and_its_run_toml_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("--model", "beale:noise=0.1", "--scheme", "easgd:window=50", "--workers", "2", "--optimizer", "sgd:lr=0.02")
    for arguments in ((*asked, "--out", "one"), ("one/run.toml", "--out", "two")):
        done = CliRunner().invoke(app, ("train", *arguments, "--quiet"), catch_exceptions=False)
        assert done.exit_code == 0, done.output
    one, two = (tomllib.loads(Path(name, "run.toml").read_text()) for name in ("one", "two"))
    assert one == two
    assert one.items() >= {"data": "noise", "loss": "value", "batch_size": 1, "model": "beale:noise=0.1"}.items()
    first, second = (load_file(Path(name, "model.safetensors"))["point"] for name in ("one", "two"))
    assert torch.equal(first, second)


def test_what_is_given_goes_before_the_defaults_of_a_toy() -> None:
    settings, _ = gather(None, None, {"model": "Beale", "batch_size": 7, "data": "noise:rows=50"})
    assert (settings["batch_size"], settings["data"], settings["loss"]) == (7, "noise:rows=50", "value")
