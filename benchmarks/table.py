"""Print the table for the README from the results that lie in benchmarks/results/."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
ORDER = (
    "exchange",
    "throughput",
    "network",
    "codecs",
    "straggler",
    "memory",
    "start",
    "stream",
    "vector",
    "cluster",
    "momentum",
)


def load(folder: Path) -> list[dict[str, Any]]:
    """All results that claim something, in the order of the README."""
    every = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    found = [result for result in every if result["claims"]]
    return sorted(found, key=lambda result: ORDER.index(result["name"]) if result["name"] in ORDER else len(ORDER))


def markdown(results: list[dict[str, Any]]) -> str:
    """One row a claim: what, the median of the repeats (smallest to largest), the target, the command."""
    lines = ["| what | median (min-max) | target | command |", "|---|---|---|---|"]
    for result in results:
        lines += [
            f"| {claim['what']} | {_value(claim)} | {claim['target'] or '-'} | `{result['command']}` |"
            for claim in result["claims"]
        ]
    return "\n".join([*lines, "", *_machines(results)])


def _value(claim: dict[str, Any]) -> str:
    unit = claim["unit"] and (" s" if claim["unit"] == "s" else claim["unit"])
    value = f"{claim['value']:.2f}{unit}"
    if claim["low"] is not None:
        value += f" ({claim['low']:.2f}-{claim['high']:.2f})"
    return value


def _machines(results: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for result in results:
        on = result["machine"]
        kernels = "with" if on["compiled_kernels"] else "without"
        sentences.append(f"{on['cpu']}, {on['cores']} cores, torch {on['torch']}, {kernels} compiled kernels")
    return [f"Measured on: {sentence}." for sentence in dict.fromkeys(sentences)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/table.py", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    results = load(parser.parse_args().folder)
    if not results:
        parser.error("there are no results yet: run the benchmarks first (make bench).")
    print(markdown(results))


if __name__ == "__main__":
    main()
