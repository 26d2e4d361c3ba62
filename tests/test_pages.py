"""docs/schemes is written from docstrings and results, and says what they say now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import pages, toys

from paragrad import schemes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLISHED = [name for name in schemes.names() if (DOCS / "schemes" / f"{name.lower()}.md").exists()]
"""Schemes with a page. A new scheme works without one (CONTRIBUTING.md)."""


def test_the_pages_are_up_to_date():
    written = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "schemes").glob("*.md")}
    assert written == pages.pages(), "run: .venv/bin/python benchmarks/pages.py"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_has_the_equation_and_figures_for_both_numbers_of_workers(name):
    page = (DOCS / "schemes" / f"{name.lower()}.md").read_text(encoding="utf-8")
    assert "<-" in page
    assert "**Choose it**" in page
    assert "**Not**" in page
    assert re.search(r"\| digits[^|]*\| \d\d\.\d\d ± \d+\.\d\d[^|]*\| \d\d\.\d\d ± ", page)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_shows_its_scheme_at_work(name):
    case = toys.CASES[name]
    page = (DOCS / "schemes" / f"{name.lower()}.md").read_text(encoding="utf-8")
    assert case.scheme.partition(":")[0] == name.lower()
    assert case.caption.endswith(".")
    assert f"(../figures/schemes/{name.lower()}.png)" in page
    assert 10_000 < (DOCS / "figures" / "schemes" / f"{name.lower()}.png").stat().st_size < toys.BYTES


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_scheme_with_a_page_is_in_the_readme_and_on_the_page_about_choosing(name):
    assert re.search(rf"^\| `{name}`[ (|]", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"`{name}`" in (DOCS / "choosing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_links_between_the_documents_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_a_cell_tells_how_many_runs_diverged():
    runs = [{"accuracy": 0.9}, {"accuracy": 0.92}, {"accuracy": None}]
    assert pages.cell(runs) == "91.00 ± 12.71 (1 of 3 diverged)"
    assert pages.cell([{"accuracy": None}]) == "(1 of 1 diverged)"
    assert pages.cell(None) == ""
