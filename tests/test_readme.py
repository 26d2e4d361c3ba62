"""What the README and the docs tell people to type works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line[2:] for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_the_python_in_the_readme_runs(block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_commands_in_the_readme_run_one_after_another(tmp_path):
    typed = [shlex.split(command) for command in COMMANDS if command.startswith("paragrad ")]
    assert len(typed) >= 5
    for words in typed:
        command = [str(Path(sys.executable).parent / "paragrad"), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_runs_in_short_form(example, tmp_path):
    done = subprocess.run([sys.executable, str(example), "2"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 1
