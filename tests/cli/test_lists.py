"""The commands that say what there is."""

from __future__ import annotations

import inspect
from importlib import metadata

import pytest
from typer.testing import CliRunner

from paragrad import cluster, engines, schemes
from paragrad.cli import doctor, tables
from paragrad.cli.main import app
from paragrad.cli.tables import flowing, summary_of
from paragrad.config.extras import EXTRAS
from paragrad.config.options import CONFIG
from paragrad.data import transforms


def said(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_every_scheme_is_listed_with_its_advice() -> None:
    listed = said("schemes")
    for name in schemes.names():
        assert name.lower() in listed


@pytest.mark.parametrize("name", schemes.names())
def test_every_scheme_tells_its_equation_and_when_to_choose_it(name: str) -> None:
    equation, choose = summary_of(schemes.load(name))
    assert "<-" in equation
    assert choose
    assert "\nNot " in flowing(inspect.getdoc(schemes.load(name)) or "")
    page = said("schemes", name)
    assert "window" in page
    assert "Choose it" in page


def test_every_engine_is_listed() -> None:
    for name in engines.names():
        assert name.lower() in said("engines")
        assert "workers" in said("engines", name)


def test_every_cluster_is_listed_with_its_fields_and_faults() -> None:
    listed = said("clusters")
    for name in (*cluster.PROFILES, *cluster.FAULTS, *cluster.TIMES, "replace_after"):
        assert name in listed
    assert "speeds = [0.58, 0.75, 1.51, 3.33]" in said("clusters", "Heterogeneous")
    assert "factor" in said("clusters", "slow")
    assert "Did you mean 'straggler'?" in said("clusters", "stragler", code=2)


def test_every_transformation_is_listed_with_its_fields() -> None:
    listed = said("transforms")
    for name in transforms.names():
        assert name.lower() in listed
        assert "names joined by +" in said("transforms", name)
    assert "Did you mean 'standardise'?" in said("transforms", "standardize", code=2)


def test_data_models_losses_and_optimisers_are_listed() -> None:
    assert "digits" in said("data")
    listed = said("models")
    for name in ("resnet8", "crossentropy", "adamw", "weight_decay", "lbfgs", "cosine", "warmup"):
        assert name in listed
    assert "sparseadam" not in listed


def test_a_docstring_flows() -> None:
    text = inspect.cleandoc("First\nline.\n\nA ``code``\nword.\nChoose it now.\nNot then.")
    assert flowing(text) == "First line.\n\nA code word.\nChoose it now.\nNot then."


@pytest.mark.parametrize(
    "command", ["train", "replay", "analyse", "plot", "runs", "schemes", "engines", "clusters", "data", "models", "doctor"]
)
def test_every_command_has_help(command: str) -> None:
    assert "Usage: paragrad" in said(command, "--help").replace("root", "paragrad")


def test_every_option_of_run_toml_is_a_flag() -> None:
    shown = said("train", "--help")
    for key in CONFIG:
        assert f"--{key.replace('_', '-')} " in shown


def test_the_version_is_told() -> None:
    assert said("--version").startswith("paragrad ")


def test_doctor_finds_this_machine_fit() -> None:
    listed = said("doctor")
    assert "memfd and eventfd work" in listed
    assert "This machine can run paragrad." in listed


def test_doctor_lists_every_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"matplotlib": "3.7.1", "keras": "3.15.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(tables.console, "_width", 200)  # it may have been made when COLUMNS was less
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(doctor.metadata, "version", version)
    lines = {line.split()[1]: " ".join(line.split()) for line in said("doctor").splitlines() if len(line.split()) > 2}
    assert lines["plot"].startswith("– plot")
    assert lines["plot"].endswith("matplotlib 3.7.1, too old pip install 'matplotlib>=3.8'")
    assert lines["keras"].startswith("✓ keras")
    assert lines["keras"].endswith("keras 3.15.1")
    assert lines["root"].endswith("uproot missing, awkward missing pip install 'uproot>=5.6' 'awkward>=2.6'")
    assert lines.keys() >= EXTRAS.keys()


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Finding:
        raise OSError("no such thing")

    lame = doctor.Finding("legs", "one", "warning", "Walk slowly.")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: lame,))
    assert "Walk slowly." in said("doctor")
    monkeypatch.setattr(doctor, "CHECKS", (broken,))
    assert "no such thing" in said("doctor", code=1)
