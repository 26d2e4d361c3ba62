"""What the guides for new users tell people to type works as it stands; in one process, since each takes long to start."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paragrad.cli.main import app

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("first_run.md", "your_model.md")}
BLOCKS = [(name, block) for name, page in PAGES.items() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name} {place}" for place, (name, _) in enumerate(BLOCKS)])
def test_the_python_on_a_page_runs(name: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block)
    runpy.run_path(str(tmp_path / "block.py"), run_name="__main__")
    assert ("pg.train(" in block) == bool(list((tmp_path / "runs").glob("*/summary.json")))


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_on_a_page_run_one_after_another(name: str, tmp_path: Path) -> None:
    for file, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGES[name], re.DOTALL):
        (tmp_path / file).write_text(text)
    lines = [line for block in re.findall(r"```console\n(.*?)```", PAGES[name], re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 2
    for line in lines:
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert program == "paragrad"
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, f"{line}: {done.output}"


@pytest.mark.parametrize("name", [*PAGES, "troubleshooting.md"])
def test_the_links_on_a_page_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", (DOCS / name).read_text())
    assert targets
    for target in targets:
        assert (DOCS / target).exists(), target
