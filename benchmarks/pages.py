"""Write docs/schemes/: a page for each scheme and the table of all, from their docstrings, results/schemes.json and toys.py.

.venv/bin/python benchmarks/pages.py
"""

from __future__ import annotations

import inspect
import json
import math
import re
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from scipy import stats

from paragrad import schemes
from paragrad.config.options import fields_of

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.insert(0, str(ROOT))
from benchmarks import toys  # noqa: E402

PAGES = ROOT / "docs" / "schemes"
RESULTS = ROOT / "benchmarks" / "results" / "schemes.json"
TASKS = {"digits": "digits, 20 epochs, batch 16", "mnist": "MNIST, 2 epochs, batch 64"}

INTRODUCTION = """\
# All schemes

This page compares test accuracy of all schemes; [choosing](../choosing.md) recommends one. Values are percent, mean of 5 seeds
with its 95 % interval.

- Every scheme trains on the same rows: digits 20 epochs with batch 16, MNIST 2 epochs with batch 64. The model is an MLP with
  128 hidden units. Workers are real processes on two cores.
- The batch is that of one worker. So a synchronous step of 4 workers has 4 times the batch, and there are a quarter as many
  steps.
- No scheme was tuned beyond the fields shown. The table shows the effect of these settings and is not a ranking.

| scheme | optimiser | digits, 2 workers | digits, 4 | MNIST, 2 workers | MNIST, 4 | staleness, 4 |
|---|---|---|---|---|---|---|"""

Figures = dict[tuple[str, str, str, int], list[dict[str, Any]]]
"""(scheme with its fields, optimiser, task, workers) -> the runs of all seeds."""


def pages(results: Path = RESULTS) -> dict[str, str]:
    """File name -> content."""
    figures = grouped(json.loads(results.read_text(encoding="utf-8"))["repeats"])
    measured = {spec.partition(":")[0] for spec, *_ in figures}
    made = {f"{name.lower()}.md": page(name, figures) for name in schemes.names() if name.lower() in measured}
    return made | {"README.md": overview(figures)}


def grouped(runs: list[dict[str, Any]]) -> Figures:
    """Runs that differ in their seed only, together."""
    found: Figures = {}
    for run in runs:
        found.setdefault((run["scheme"], run["optimizer"], run["task"], run["workers"]), []).append(run)
    return found


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of a mean, by Student's t."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def cell(runs: list[dict[str, Any]] | None) -> str:
    """Mean accuracy in percent with its interval, and how many runs diverged."""
    if not runs:
        return ""
    values = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
    lost = len(runs) - len(values)
    said = f"{statistics.mean(values):.2f} ± {interval(values):.2f}" if len(values) > 1 else ""
    return said + (f"{' ' if said else ''}({lost} of {len(runs)} diverged)" if lost else "")


def staleness(runs: list[dict[str, Any]] | None) -> str:
    """Mean staleness over the runs."""
    values = [run["staleness"] for run in runs or [] if run["accuracy"] is not None]
    return f"{statistics.mean(values):.1f}" if values else ""


def choices(figures: Figures, name: str | None = None) -> list[tuple[str, str]]:
    """(scheme with its fields, optimiser) that were measured with several workers."""
    keys = dict.fromkeys((spec, optimizer) for spec, optimizer, _, workers in figures if workers > 1)
    return [key for key in keys if name is None or key[0].split(":")[0] == name]


def page(name: str, figures: Figures) -> str:
    """One scheme."""
    cls = schemes.load(name)
    module = import_module(cls.__module__)
    equation, *rest = (inspect.getdoc(cls) or "").split("\n\n")
    about = (module.__doc__ or "").strip().partition(": ")[2].rstrip(".")
    text = [
        f"# {name}",
        "",
        f"{about[:1].upper()}{about[1:]}.",
        "",
        "```",
        *re.split(r";\s\s+", equation.rstrip(".")),
        "```",
        "",
    ]
    for paragraph in rest:
        paragraph = re.sub(r"\s*\n\s*", " ", paragraph).replace("``", "`")
        paragraph = re.sub(r"(^|\s)Choose it ", r"\1**Choose it** ", paragraph)
        text += [re.sub(r"\sNot ", "\n\n**Not** ", paragraph, count=1) if "**Choose it**" in paragraph else paragraph, ""]
    text += [*toys.seen(name), ""]
    text += ["## Fields", "", "| field | default | meaning |", "|---|---|---|"]
    text += [f"| `{f.name}` | `{f.default}` | {re.sub(chr(10), ' ', f.doc).replace('``', '`')} |" for f in fields_of(cls)]
    text += [
        "",
        "## Measured",
        "",
        "| | optimiser | task | 2 workers | 4 workers | mean staleness, 4 workers |",
        "|---|---|---|---|---|---|",
    ]
    for spec, optimizer in choices(figures, name.lower()):
        for task, said in TASKS.items():
            two, four = (figures.get((spec, optimizer, task, n)) for n in (2, 4))
            if two or four:
                text.append(f"| `{spec}` | `{optimizer}` | {said} | {cell(two)} | {cell(four)} | {staleness(four)} |")
    text += [
        *plain(figures),
        "",
        "Test accuracy in percent, mean of 5 seeds with its 95 % interval, on the local engine (real processes).",
        "[All schemes](README.md) describes the setting.",
        "",
    ]
    return "\n".join(text)


def plain(figures: Figures) -> list[str]:
    """Rows of one worker, to compare with."""
    rows = []
    for spec, optimizer in dict.fromkeys((s, o) for s, o, _, workers in figures if workers == 1):
        for task, said in TASKS.items():
            runs = figures.get((spec, optimizer, task, 1))
            if runs:
                rows.append(f"| *one worker* | `{optimizer}` | {said} | {cell(runs)} | | |")
    return rows


def overview(figures: Figures) -> str:
    """All schemes in one table."""
    text = [*INTRODUCTION.split("\n")]
    for spec, optimizer in dict.fromkeys((s, o) for s, o, _, workers in figures if workers == 1):
        alone = [cell(figures.get((spec, optimizer, task, 1))) for task in TASKS]
        text.append(f"| *one worker, plain training* | `{optimizer}` | {alone[0]} | | {alone[1]} | | |")
    for spec, optimizer in choices(figures):
        cells = [cell(figures.get((spec, optimizer, task, n))) for task in TASKS for n in (2, 4)]
        name = spec.split(":")[0]
        seen = staleness(figures.get((spec, optimizer, "mnist", 4)) or figures.get((spec, optimizer, "digits", 4)))
        text.append(f"| [`{spec}`]({name}.md) | `{optimizer}` | {' | '.join(cells)} | {seen} |")
    text += [
        "",
        "`.venv/bin/python benchmarks/schemes.py --mnist mnist.npz` repeats the measurement. The figures of every run are in",
        "[benchmarks/results/schemes.json](../../benchmarks/results/schemes.json).",
        "",
    ]
    return "\n".join(text)


def main() -> None:
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (PAGES / name).write_text(content, encoding="utf-8")
    print(f"{len(schemes.names()) + 1} pages written to {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
