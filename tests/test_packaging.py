"""What is handed out: sdist and wheel hold what they should, and work in an empty environment without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both, made of a copy: the wheel from the sdist, as everybody else would."""
    here = tmp_path_factory.mktemp("dist")
    tree = here / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in NEEDED:
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-c", BUILD, here, cwd=tree)
    (sdist,) = here.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", here, sdist, cwd=here)
    (wheel,) = here.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def test_the_sdist_holds_the_sources_and_nothing_that_was_built(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {
        "src/paragrad/core/kernels.c",
        "src/paragrad/py.typed",
        "src/paragrad/cli/main.py",
        "pyproject.toml",
        "LICENSE",
    }
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("tests", "docs", "benchmarks"))]


def test_the_wheel_is_of_this_python_and_machine_and_holds_every_module(built: dict[str, Path]) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert built["wheel"].name.endswith(f"-{python}-{python}-linux_{platform.machine()}.whl")
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    assert names >= {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "paragrad").rglob("*.py")}
    assert "paragrad/py.typed" in names


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_it_works_in_an_empty_environment_without_a_compiler(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    bin_ = tmp_path / "venv" / "bin"
    clean = {"PYTHONPATH": "", "CC": "/bin/false"}
    run(bin_ / "pip", "install", "-c", ROOT / "constraints.txt", built[kind], cwd=tmp_path, **clean)
    shown = run(bin_ / "python", "-c", "import paragrad.core.kernels as k; print(k.__file__)", cwd=tmp_path, **clean)
    assert shown.startswith(str(tmp_path))
    if kind == "sdist":
        assert not list((tmp_path / "venv").rglob("_kernels*.so"))
    assert "aeasgd" in run(bin_ / "paragrad", "demo", cwd=tmp_path, **clean)
    options = ("--data", "digits", "--workers", "2", "--epochs", "3", "--out", "runs/mine")
    run(bin_ / "paragrad", "train", *options, cwd=tmp_path, **clean)
    run(bin_ / "paragrad", "predict", "runs/mine", "--out", "predictions.csv", cwd=tmp_path, **clean)
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 361
    assert "This machine can run paragrad." in run(bin_ / "paragrad", "doctor", cwd=tmp_path, **clean)
    assert run(bin_ / "paragrad", "runs", cwd=tmp_path, **clean).count("finished") == 4
