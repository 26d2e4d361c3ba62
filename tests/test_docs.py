"""What README, docs and examples tell people to type works as it stands; in one process where a start is not the point."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from paragrad.cli.main import app

ROOT = Path(__file__).parents[1]
NAMES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("first_run", "your_model", "vector", "runs", "streaming", "clusters", "compression")),
]
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
BLOCKS = [(name, block) for name, page in PAGES.items() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def type_in(line: str) -> None:
    """A command, as if it had been typed."""
    done = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
    assert done.exit_code == 0, f"{line}: {done.output}"


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name} {place}" for place, (name, _) in enumerate(BLOCKS)])
def test_the_python_on_a_page_runs(name: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block)
    if name != "README.md":
        runpy.run_path(str(tmp_path / "block.py"), run_name="__main__")
        return
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["README.md", "docs/first_run.md", "docs/your_model.md", "docs/runs.md", "docs/compression.md"]
)
def test_the_commands_on_a_page_run_one_after_another(name: str, tmp_path: Path) -> None:
    for file, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGES[name], re.DOTALL):
        (tmp_path / file).write_text(text)
    blocks = re.findall(r"```console\n(.*?)```", PAGES[name], re.DOTALL)
    typed = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ paragrad ")]
    assert len(typed) >= 2
    for line in typed:
        type_in(line)


def test_a_cluster_is_made_by_hand_as_on_its_page(tmp_path: Path) -> None:
    page = PAGES["docs/clusters.md"]
    (tmp_path / "run.toml").write_text(re.findall(r"```toml\n# run.toml\n(.*?)```", page, re.DOTALL)[0])
    (typed,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    script = "\n".join(line.removeprefix("$ ") for line in typed.splitlines())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/night/summary.json").read_text())["test_accuracy"] > 0.8
    assert done.stdout.count("All rows are used: the run is done.") == 2


def test_the_page_about_data_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```(python|console)\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/data.md", "exec"), {"__name__": "page"})
            continue
        for line in block.splitlines():
            type_in(line.removeprefix("$ "))


def test_the_scripts_on_the_page_about_slurm_are_bash_and_say_nothing_that_paragrad_does_not_know() -> None:
    page = (ROOT / "docs/slurm.md").read_text()  # tests/chaos/test_slurm.py submits them
    scripts = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(scripts) == 6
    for script in scripts:
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    typed = re.findall(
        r"paragrad (serve|join) ((?:--?[\w-]+|[\w./:$(]\S*| )*)", "".join(re.findall(r"```.*?```", page, re.DOTALL))
    )
    assert len(typed) >= 10
    for name, words in typed:
        commands[name].make_context(name, re.sub(r"\$SLURM_\w+", "2", words).split())


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda path: path.name)
def test_the_links_on_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_runs_in_short_form(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(example), "2"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 1
