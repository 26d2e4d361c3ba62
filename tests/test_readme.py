"""What the README and the docs tell people to type works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paragrad.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/vector.md", "docs/runs.md", "docs/streaming.md")}
BLOCKS = [(name, block) for name, page in PAGES.items() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name} {place}" for place, (name, _) in enumerate(BLOCKS)])
def test_the_python_on_a_page_runs(name, block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/runs.md"])
def test_the_commands_on_a_page_run_one_after_another(page, tmp_path):
    blocks = re.findall(r"```console\n(.*?)```", PAGES[page], re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines()]
    typed = [shlex.split(command) for command in lines if command.startswith("paragrad ")]
    assert len(typed) >= 5
    for words in typed:
        command = [str(Path(sys.executable).parent / "paragrad"), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"


def test_the_page_about_data_runs_from_top_to_bottom():
    page = (ROOT / "docs/data.md").read_text()
    blocks = re.findall(r"```(python|console)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 4
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, "docs/data.md", "exec"), {"__name__": "page"})
            continue
        for line in block.splitlines():
            done = CliRunner().invoke(app, shlex.split(line.removeprefix("$ paragrad ")), catch_exceptions=False)
            assert done.exit_code == 0, f"{line}: {done.stderr}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_runs_in_short_form(example, tmp_path):
    done = subprocess.run([sys.executable, str(example), "2"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 1
