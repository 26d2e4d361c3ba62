"""What was trained, used: the same weights, the same transformations, the same figures as at the end of training."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.errors import UsageError
from paragrad.evaluation.card import Card
from paragrad.learners import kerasmodel
from paragrad.models import builtin, toys
from paragrad.rundir.record import read
from tests.conftest import train

Rows = tuple[torch.Tensor, torch.Tensor]


def trained(model: Any, data: Any, out: Path, **options: Any) -> pg.Result:
    settings: dict[str, Any] = {
        "engine": pg.Vector(workers=2),
        "scheme": pg.SyncSGD(),
        "epochs": 1,
        "batch_size": 20,
        "holdout": 0.25,
    } | options
    return train(model, data, out, **settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def archive(runs: Path) -> Path:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 8)).astype(np.float32)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(np.int64)
    np.savez(runs / "two.npz", x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:])
    return runs / "two.npz"


@pytest.fixture(scope="module")
def first(runs: Path, archive: Path) -> pg.Result:
    """A built-in model, in a program of the user's."""
    model = builtin.build("mlp:16", inputs=(8,), outputs=2)
    return trained(model, str(archive), runs / "first", holdout=None)


# -- the same ---------------------------------------------------------------------------------------------------------


def test_a_built_in_model_comes_back_with_its_weights_and_without_its_data(first, archive):
    loaded = pg.load(first.directory)
    assert not loaded.module.training
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor)
    with np.load(archive) as held:
        x = held["x_test"]
    expected = first.model.eval()(torch.from_numpy(x)).softmax(1).detach().numpy()
    np.testing.assert_array_equal(loaded.predict(x), expected)
    assert "mlp" not in repr(loaded)
    assert "Trained(Sequential, head='softmax'" in repr(loaded)


def test_evaluate_says_what_the_last_validation_said(first):
    found = pg.load(first.directory).evaluate()
    assert found["loss"] == first.summary["test_loss"]
    assert found["accuracy"] == first.summary["test_accuracy"]
    assert found["rows"] == 100
    assert np.sum(found["confusion"]) == 100


def test_rows_with_targets_and_without_give_the_same_predictions(first, archive):
    loaded = pg.load(first.directory)
    with np.load(archive) as held:
        x, y = held["x_test"], held["y_test"]
    np.testing.assert_array_equal(loaded.predict((x, y)), loaded.predict(x))
    np.testing.assert_array_equal(loaded.predict(str(archive)), loaded.predict(x))
    assert loaded.evaluate((x, y)) == loaded.evaluate(str(archive)) == loaded.evaluate()


def test_a_hold_out_is_drawn_again(runs):
    model = builtin.build("linear", inputs=(64,), outputs=10)
    result = trained(model, "digits", runs / "digits", holdout=0.3, seed=4)
    found = pg.load(result.directory).evaluate()
    assert found["loss"] == result.summary["test_loss"]
    assert found["accuracy"] == result.summary["test_accuracy"]


class Tied(nn.Module):
    """Two names for one tensor, batch-norm, and several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.a(left) + self.b(right)))


def test_a_module_made_in_python_is_given_again(runs, rows):
    data = (rows[0][:, :4], rows[0][:, 4:], rows[1].float())
    result = trained(Tied(), data, runs / "tied", loss="bce")
    loaded = pg.load(result.directory, model=Tied())
    expected = result.model.eval()(*data[:2]).sigmoid().detach().numpy()[:, 0]
    np.testing.assert_array_equal(loaded.predict(data), expected)
    np.testing.assert_array_equal(loaded.predict(data[:2]), expected)
    found = loaded.evaluate(data)
    assert {"loss", "auc", "f1", "accuracy", "confusion"} <= set(found)


def test_numbers_are_judged_as_numbers(runs, rows):
    data = (rows[0], rows[0][:, :1] * 2)
    result = trained(builtin.build("linear", (8,), 1), data, runs / "numbers", epochs=4)
    loaded = pg.load(result.directory)
    predicted = loaded.predict(data)
    assert predicted.shape == (400,)
    found = loaded.evaluate(data)
    assert found["mse"] == pytest.approx(found["loss"], rel=1e-5)
    assert found["r2"] == pytest.approx(1 - found["mse"] / float(data[1].var(correction=0)), rel=1e-5)


def test_several_labels_at_once_are_averaged(runs, rows):
    data = (rows[0], (rows[0][:, :3] > 0).float())
    result = trained(builtin.build("linear", (8,), 3), data, runs / "labels", epochs=4, optimizer="adam:lr=0.05")
    found = pg.load(result.directory).evaluate(data)
    assert found["auc"] > 0.8
    assert "confusion" not in found


def test_an_autoencoder_and_a_toy_are_their_own_targets(runs, rows):
    result = trained(builtin.build("linear", (8,), 8), rows[0], runs / "auto")
    loaded = pg.load(result.directory)
    assert loaded.evaluate(rows[0])["mse"] == pytest.approx(loaded.evaluate(rows[0])["loss"], rel=1e-5)
    toy = trained(toys.Beale(), "noise", runs / "toy", holdout=None, optimizer="sgd:lr=0.001")
    assert pg.load(toy.directory).evaluate() == {"rows": 1, "loss": toy.summary["test_loss"]}


def test_a_loss_of_ones_own_is_left_out_or_given(runs, rows):
    own = lambda output, target: nn.functional.multi_margin_loss(output, target)  # noqa: E731
    result = trained(builtin.build("linear", (8,), 2), rows, runs / "own", loss=own)
    loaded = pg.load(result.directory)
    assert loaded.head == "scores"
    assert "loss" not in loaded.evaluate(rows)
    assert "log_loss" not in loaded.evaluate(rows)
    assert pg.load(result.directory, loss=own).evaluate(rows)["loss"] > 0


def test_class_weights_make_a_loss_ones_own(runs, rows):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    result = trained(builtin.build("linear", (8,), 2), rows, runs / "weights", loss=loss)
    assert Card.read(result.directory).loss is None
    assert pg.load(result.directory).head == "softmax"
    assert pg.load(result.directory, loss=loss).evaluate(rows)["loss"] > 0


def test_a_model_from_a_file_is_built_again(runs, rows, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build(inputs, outputs):\n    return nn.Linear(inputs[0], outputs)\n"
    )
    result = trained(builtin.build("net.py:build", (8,), 2), rows, runs / "file")
    loaded = pg.load(result.directory)
    np.testing.assert_array_equal(loaded.module.weight.detach(), result.model.weight.detach())
    (tmp_path / "net.py").unlink()
    with pytest.raises(UsageError, match=r"cannot be built again: .*net.py.*model="):
        pg.load(result.directory)


def test_the_newest_checkpoint_of_a_run_that_is_not_finished(runs, rows):
    model = builtin.build("mlp:4", (8,), 2)
    result = trained(model, rows, runs / "stopped")
    (result.directory / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"not finished.*checkpoint='latest'.*paragrad train --resume"):
        pg.load(result.directory)
    loaded = pg.load(result.directory, checkpoint="latest")
    np.testing.assert_array_equal(loaded.predict(rows[0]), result.model.eval()(rows[0]).softmax(1).detach().numpy())
    for path in (result.directory / "checkpoints").iterdir():
        (path / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="no valid checkpoint"):
        pg.load(result.directory, checkpoint="latest")


class Own(pg.TorchLearner):
    """A learner of the user's own."""


def make_own() -> Own:
    torch.manual_seed(0)
    return Own(nn.Linear(8, 2), nn.CrossEntropyLoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_a_learner_of_ones_own_comes_back_as_a_learner(runs, rows):
    result = trained(make_own, rows, runs / "learner")
    loaded = pg.load(result.directory, model=make_own)
    assert torch.equal(loaded.module.weights, result.model.weights)
    with pytest.raises(UsageError, match="make_own makes a custom learner"):
        loaded.predict(rows[0])
    with pytest.raises(UsageError, match="not a Learner"):
        pg.load(result.directory, model=lambda: 3)  # type: ignore[arg-type, return-value]


# -- tables -----------------------------------------------------------------------------------------------------------

CHAIN = (pg.Missing(columns="mass", flag=True), pg.Log(columns="pt"), pg.Standardise())


def columns(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    pt = rng.exponential(50, 300)
    mass = np.where(rng.random(300) < 0.2, -999.0, rng.normal(120, 5, 300))
    kind = np.where(pt + rng.normal(0, 10, 300) > 40, "signal", "background")
    return {
        "pt": pt,
        "mass": mass,
        "kind": kind,
        "w": np.where(kind == "signal", 0.3, 2.0) * rng.choice([1, -0.2], 300, p=[0.9, 0.1]),
    }


def write(path: Path, held: dict[str, Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(held)
        writer.writerows(zip(*(values.tolist() for values in held.values()), strict=True))
    return path


@pytest.fixture(scope="module", params=[None, "w"], ids=["rows", "weighted rows"])
def fitted_run(request: pytest.FixtureRequest, runs: Path) -> pg.Result:
    pytest.importorskip("pyarrow")
    file = write(runs / f"train-{request.param}.csv", columns(1))
    table = pg.Table(str(file), features=["pt", "mass"], label="kind", weight=request.param, transforms=CHAIN)
    return trained(builtin.build("mlp:8", (3,), 2), table, runs / f"table-{request.param}", epochs=4)


def test_transformations_are_saved_and_are_those_of_training_to_the_bit(fitted_run, runs):
    loaded = pg.load(fitted_run.directory)
    assert loaded.transforms is not None
    assert (fitted_run.directory / "transforms.json").read_text() == loaded.transforms.to_json()
    assert loaded.classes == ("background", "signal")
    held = columns(2)
    made = loaded.transforms.apply({name: held[name] for name in ("pt", "mass")})
    x = torch.from_numpy(np.stack(list(made.values()), axis=1).astype(np.float32))
    expected = fitted_run.model.eval()(x).softmax(1).detach().numpy()
    np.testing.assert_array_equal(loaded.predict(str(write(runs / "labelled.csv", held))), expected)
    bare = {name: held[name] for name in ("mass", "pt")}  # without labels, in another order
    np.testing.assert_array_equal(loaded.predict(str(write(runs / "bare.csv", bare))), expected)
    np.testing.assert_array_equal(loaded.predict(pg.Table(bare)), expected)


def test_evaluate_of_a_table_says_what_the_last_validation_said(fitted_run):
    found = pg.load(fitted_run.directory).evaluate()
    assert found["loss"] == pytest.approx(fitted_run.summary["test_loss"], rel=1e-6)
    assert found["accuracy"] == pytest.approx(fitted_run.summary["test_accuracy"], rel=1e-6)


def test_notes_about_rows_are_shown_in_python_as_on_the_command_line_and_once(runs, capsys):
    pytest.importorskip("pyarrow")
    held = {name: values for name, values in columns(4).items() if name != "w"}
    table = pg.Table(str(write(runs / "selected.csv", held)), label="kind", select="pt > 20")
    run = trained(builtin.build("mlp:8", (2,), 2), table, runs / "selected").directory
    file = str(write(runs / "judged.csv", held))
    capsys.readouterr()
    assert CliRunner().invoke(app, ["evaluate", str(run), "--data", file, "--json"]).exit_code == 0
    loaded = pg.load(run)
    assert loaded.evaluate(file)["rows"] == (held["pt"] > 20).sum()
    shown = capsys.readouterr().out
    assert "select 'pt > 20' leaves" in shown
    assert shown.strip() in " ".join(CliRunner().invoke(app, ["evaluate", str(run), "--data", file]).stdout.split("\n"))
    loaded.evaluate(file)
    assert capsys.readouterr().out == ""
    assert len(loaded.predict(file)) == 300
    assert "every row gets a prediction" in capsys.readouterr().out
    pg.load(run).predict(file, verbose=0)
    assert capsys.readouterr().out == ""
    with pytest.raises(UsageError, match="verbose=2"):
        loaded.predict(file, verbose=2)


def test_weights_count_as_events(fitted_run, runs):
    loaded, held = pg.load(fitted_run.directory), columns(3)
    file = str(write(runs / "judged.csv", held))
    found, scores = loaded.evaluate(file), loaded.predict(file)
    signal, weight = held["kind"] == "signal", held["w"]
    right = (scores.argmax(1) == 1) == signal
    if loaded.card.table["weight"] is None:
        assert "significance" not in found
        assert found["accuracy"] == pytest.approx(right.mean())
        return
    assert found["accuracy"] == pytest.approx((weight * right).sum() / weight.sum(), rel=1e-6)
    true = np.where(signal, scores[:, 1], scores[:, 0])
    assert found["loss"] == pytest.approx((loaded.card.scale * weight * -np.log(true)).mean(), rel=1e-4)
    cut = found["significance"]
    assert cut["s"] == pytest.approx(weight[signal & (scores[:, 1] >= cut["cut"] - 1e-6)].sum(), rel=1e-5)
    np.testing.assert_allclose(np.sum(found["confusion"]), weight.sum(), rtol=1e-6)


def test_a_table_with_other_columns_is_refused(fitted_run, runs):
    held = columns(2)
    file = write(runs / "other.csv", {"PT": held["pt"], "mass": held["mass"]})
    with pytest.raises(UsageError, match=r"other.csv.*'pt'.*Did you mean 'PT'"):
        pg.load(fitted_run.directory).predict(str(file))
    file = write(runs / "unlabelled.csv", {"pt": held["pt"], "mass": held["mass"]})
    with pytest.raises(UsageError, match=r"unlabelled.csv.*'kind'"):
        pg.load(fitted_run.directory).evaluate(str(file))
    file = write(runs / "third.csv", held | {"kind": np.where(held["kind"] == "signal", "higgs", "background")})
    with pytest.raises(UsageError, match=r"third.csv.*'higgs'"):
        pg.load(fitted_run.directory).evaluate(str(file))


def frame_of(held: dict[str, Any]) -> Any:
    return pytest.importorskip("pandas").DataFrame(held)


def parquet_of(held: dict[str, Any], directory: Path) -> str:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").table(held), directory / "door.parquet")
    return str(directory / "door.parquet")


class Pairs(torch.utils.data.Dataset[Any]):
    """Rows one by one."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[row], self.y[row]


def doors(x: Any, y: Any, directory: Path) -> dict[str, Any]:
    """The same rows by every way in."""
    columns = {"pt": x[:, 0], "mass": x[:, 1]}
    labelled = columns | {"kind": np.array(["background", "signal"])[y]}
    tensors = torch.from_numpy(x), torch.from_numpy(y)
    dataset = torch.utils.data.TensorDataset(*tensors)
    return {
        "array": x,
        "list": x.tolist(),
        "objects": x.astype(object),
        "tensor": tensors[0],
        "pair": pg.Table((x, y)),
        "tuple": (x, y),
        "text labels": (x, labelled["kind"]),
        "tensors": tensors,
        "dict": {"x": x, "y": y},
        "columns": labelled,
        "table": pg.Table(columns),
        "frame": frame_of(labelled),
        "frame in another order": frame_of({name: labelled[name] for name in ("kind", "mass", "pt")}),
        "csv": str(write(directory / "door.csv", labelled)),
        "parquet": parquet_of(labelled, directory),
        "TensorDataset": dataset,
        "Dataset": Pairs(*tensors),
        "DataLoader": torch.utils.data.DataLoader(dataset, batch_size=7),
        "weighted": pg.Weighted((x, y), np.ones(len(x))),
    }


@given(seed=st.integers(0, 1000), rows=st.integers(1, 40))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_same_rows_give_the_same_predictions_and_figures_through_every_door(fitted_run, runs, seed, rows):
    rng = np.random.default_rng(seed)
    x = np.stack([rng.exponential(50, rows), np.where(rng.random(rows) < 0.2, -999.0, rng.normal(120, 5, rows))], 1)
    y = rng.integers(0, 2, rows)
    loaded = pg.load(fitted_run.directory)
    made = doors(x, y, runs)
    expected = loaded.predict(made["frame"])
    assert expected.shape == (rows, 2)
    for name, door in made.items():
        np.testing.assert_array_equal(loaded.predict(door), expected, err_msg=name)
    plain = loaded.card.table["weight"] is None
    labelled = (
        "tuple",
        "pair",
        "text labels",
        "tensors",
        "dict",
        "TensorDataset",
        "Dataset",
        "DataLoader",
        "frame",
        "csv",
        "parquet",
    )
    found = {name: loaded.evaluate(made[name]) for name in labelled if plain or name not in ("frame", "csv", "parquet")}
    for name, figures in found.items():
        assert figures["confusion"] == found["tuple"]["confusion"], name
        assert figures["loss"] == pytest.approx(found["tuple"]["loss"], rel=1e-6), name


def test_arrays_of_another_width_are_refused_with_both_numbers_and_the_names(fitted_run):
    loaded = pg.load(fitted_run.directory)
    with pytest.raises(UsageError, match=r"The rows have 3 columns, but the run was trained on 2 columns: pt, mass"):
        loaded.predict(np.zeros((4, 3)))
    with pytest.raises(UsageError, match=r"The rows are 3 arrays, but the run was trained on one table"):
        loaded.predict((np.zeros((4, 2)), np.zeros((4, 2)), np.zeros(4)))
    with pytest.raises(UsageError, match=r"The rows are arrays by name \(pt, w\)"):
        loaded.predict({"pt": np.zeros(4), "w": np.zeros(4)})
    with pytest.raises(UsageError, match="arrays has no labels"):
        loaded.evaluate(np.zeros((4, 2)))


def test_a_column_of_text_is_taken_from_an_array_of_objects(runs):
    held = {"pt": np.linspace(0, 9, 60), "channel": np.array(["mu", "e", "tau"] * 20), "y": np.arange(60) % 2}
    table = pg.Table(frame_of(held), transforms=[pg.OneHot(columns="channel"), pg.Standardise(columns="pt")])
    result = trained(builtin.build("linear", (4,), 2), table, runs / "text")
    loaded = pg.load(result.directory)
    x = np.stack([held["pt"].astype(object), held["channel"].astype(object)], 1)
    np.testing.assert_array_equal(loaded.predict(x), loaded.predict(frame_of(held)))
    with pytest.raises(UsageError, match=r"'channel'.*holds numbers, but in the training part it holds text"):
        loaded.predict(np.zeros((3, 2)))


@pytest.mark.parametrize("scale", [(pg.MinMax(columns="mass"),), (pg.Log(columns="mass"), pg.Standardise(columns="mass"))])
def test_predictions_and_errors_are_in_the_units_of_the_label(runs, tmp_path, scale):
    rng = np.random.default_rng(5)
    pt = rng.exponential(1.0, 400)
    held = {"pt": pt, "mass": 300.0 + 40.0 * pt + rng.normal(0, 2.0, 400)}
    file = str(write(tmp_path / "mass.csv", held))
    table = pg.Table(file, label="mass", transforms=[*scale, pg.Standardise(columns="pt")])
    result = trained(builtin.build("mlp:8", (1,), 1), table, tmp_path / "run", epochs=20, optimizer="adam:lr=0.01")
    said = [event.data["message"] for event in read(result.directory) if event.kind == "note"]
    assert any("The label 'mass' is transformed" in message for message in said)
    loaded = pg.load(result.directory)
    predicted, found = loaded.predict(file), loaded.evaluate(file)
    assert np.corrcoef(predicted, held["mass"])[0, 1] > 0.9
    assert abs(predicted.mean() - held["mass"].mean()) < 40
    assert found["mae"] == pytest.approx(np.abs(predicted - held["mass"]).mean(), rel=1e-4)
    assert found["mse"] == pytest.approx(((predicted - held["mass"]) ** 2).mean(), rel=1e-4)
    assert found["r2"] == pytest.approx(1 - found["mse"] / held["mass"].var(), rel=1e-4)
    assert loaded.evaluate()["loss"] == pytest.approx(result.loss, rel=1e-6)
    np.testing.assert_array_equal(loaded.predict(pt[:, None]), predicted)
    out = tmp_path / "out.npy"
    assert CliRunner().invoke(app, ["predict", str(result.directory), "--data", file, "--out", str(out)]).exit_code == 0
    written = np.load(out)
    np.testing.assert_array_equal(written["prediction"], predicted)
    np.testing.assert_allclose(written["label"], held["mass"], rtol=1e-5)
    shown = CliRunner().invoke(app, ["evaluate", str(result.directory), "--data", file, "--json"])
    assert json.loads(shown.stdout)["mae"] == found["mae"]


def test_every_row_of_a_loader_is_predicted_once(first):
    loaded, x = pg.load(first.directory), torch.randn(50, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(50)), batch_size=8)
    np.testing.assert_allclose(loaded.predict(loader), loaded.predict(x), rtol=1e-5)  # rows may be cut in another way


def test_a_keras_model_comes_back_from_its_own_file(runs, rows):
    keras = kerasmodel.library()
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2, activation="softmax")]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    result = pg.train(model, rows, validation=rows, batch_size=50, engine=pg.Local(workers=2), run=pg.Run(out=runs / "keras"))
    assert not result.model.training
    for loaded in (pg.load(result.directory), pg.load(result.directory, model=model)):
        assert not loaded.module.training
        np.testing.assert_array_equal(loaded.predict(rows[0]), result.model(rows[0], training=False).detach().numpy())
        found = loaded.evaluate(rows)
        assert found["loss"] == pytest.approx(result.summary["test_loss"], rel=1e-6)
        assert found["accuracy"] == pytest.approx(result.summary["test_accuracy"], rel=1e-6)


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_another_model_is_refused_by_the_first_tensor_that_differs(first):
    with pytest.raises(
        UsageError, match=r"'0.weight' is float32 of shape \(9, 8\) in the model, but float32 of shape \(16, 8\)"
    ):
        pg.load(first.directory, model=builtin.build("mlp:9", (8,), 2))
    with pytest.raises(UsageError, match=r"has a tensor '4.weight', but the run in .* has none"):
        pg.load(first.directory, model=nn.Sequential(*builtin.build("mlp:16", (8,), 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"'0.weight' is float64"):
        pg.load(first.directory, model=builtin.build("mlp:16", (8,), 2).double())
    with pytest.raises(UsageError, match=r"has a tensor '2.bias', but the model has none"):
        pg.load(first.directory, model=nn.Sequential(nn.Linear(8, 16)))
    with pytest.raises(UsageError, match="neither a torch module"):
        pg.load(first.directory, model="mlp")  # type: ignore[arg-type]


def test_a_module_that_is_not_given_is_asked_for(runs, rows):
    result = trained(nn.Linear(8, 2), rows, runs / "linear")
    with pytest.raises(UsageError, match=r"\(Linear\) was made in Python.*model=Linear\(\.\.\.\)"):
        pg.load(result.directory)


def test_rows_of_another_shape_are_refused(first):
    with pytest.raises(UsageError, match=r"A row has the shape \(5,\), but the run was trained on rows of \(8,\)"):
        pg.load(first.directory).predict(np.zeros((3, 5)))


def test_rows_without_labels_cannot_be_judged(first):
    with pytest.raises(UsageError, match="arrays has no labels"):
        pg.load(first.directory).evaluate(np.zeros((3, 8)))


def test_rows_that_were_given_in_python_must_be_given_again(runs, rows):
    result = trained(builtin.build("linear", (8,), 2), rows, runs / "arrays")
    with pytest.raises(UsageError, match=r"cannot be read again: give the rows \(--data"):
        pg.load(result.directory).evaluate()
    none = trained(builtin.build("linear", (8,), 2), rows, runs / "none", holdout=None)
    with pytest.raises(UsageError, match="had no validation rows"):
        pg.load(none.directory).evaluate()


def test_data_that_has_changed_is_not_taken_for_the_old(runs, archive):
    x, y = np.random.default_rng(3).normal(size=(60, 8)), np.arange(60) % 2
    np.savez(runs / "changing.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    result = trained(builtin.build("linear", (8,), 2), str(runs / "changing.npz"), runs / "changing", holdout=None)
    config = result.directory / "run.toml"
    config.write_text(config.read_text().replace(json.dumps(str(runs / "changing.npz")), json.dumps(str(archive))))
    with pytest.raises(UsageError, match=r"differ from the rows that its run.toml names"):
        pg.load(result.directory).evaluate()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("model.json", "{", "model.json cannot be read"),
        ("model.safetensors", "x", "damaged"),
        ("transforms.json", "", "transformations"),
    ],
)
def test_damaged_files_are_named(first, tmp_path, name, text, said):
    copy = tmp_path / "copy"
    shutil.copytree(first.directory, copy)
    (copy / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        pg.load(copy)


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(UsageError, match="is not a run directory"):
        pg.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no model.json"):
        pg.load(tmp_path)
    with pytest.raises(UsageError, match="'latest', the number of an update, or None"):
        pg.load(tmp_path, checkpoint="newest")


def test_a_card_is_the_same_when_it_is_read(first):
    card = Card.read(first.directory)
    assert Card.from_json(card.to_json()) == card
    assert card.built == builtin.Built("mlp:16", (8,), 2, 0)
