"""``paragrad analyse``: the staleness of a run from its record, and the comparison of two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad.errors import UsageError, counted

if TYPE_CHECKING:
    from paragrad.analysis.staleness import Balance, Sample
    from paragrad.types import Event


def analyse(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    against: Annotated[Path | None, typer.Option(metavar="RUN", help="Another run, to compare accuracy over time.")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory for pictures (needs matplotlib).")] = None,
) -> None:
    """Show how stale the commits of each worker were and why, from the record of a run."""
    from paragrad.analysis import efficiency, staleness
    from paragrad.cli.tables import console, show

    events = record_of(run)
    commits = staleness.samples(events)
    ratio = None
    if against is not None:
        others = record_of(against)
        ratio = efficiency.efficiency(
            efficiency.accuracy(events, name=str(run)), efficiency.accuracy(others, name=str(against))
        )
    if figures is not None:
        from paragrad.analysis.figures import staleness as draw
        from paragrad.rundir.record import is_virtual

        virtual = any(event.kind == "start" and is_virtual(event.data) for event in events)
        draw(figures / "staleness.png", commits, virtual=virtual)
    show(_table(commits, _idle(run)), str(run))
    workers = len({commit.worker for commit in commits})
    for line in _explained(staleness.balance(events), workers, gaps=any(event.kind == "gap" for event in events)):
        console.print(line, soft_wrap=True, markup=False)
    if ratio is not None:
        place = "ahead" if ratio > 1 else "behind" if ratio < 1 else "even"
        console.print(
            f"Temporal efficiency against {against}: {ratio:.4f} ({place} on average over the time when both ran)",
            soft_wrap=True,
            markup=False,
        )
    if figures is not None:
        console.print(f"Written: {figures / 'staleness.png'}", soft_wrap=True, markup=False)


def record_of(run: Path) -> list[Event]:
    """Return the events of a run; raise if no commit was applied."""
    from paragrad.rundir import record

    events = list(record.read(run))
    if not record.effective(events):
        raise UsageError(f"The record in {run} has no applied commit: there is nothing to analyse.")
    return events


def _table(commits: list[Sample], idle: dict[int, float]) -> Any:
    from paragrad.analysis.staleness import by_worker
    from paragrad.cli.tables import table

    made = table("worker", "commits", "mean staleness", "max", "mean distance", "idle", right=1)
    for worker in by_worker(commits):
        made.add_row(
            str(worker.worker),
            f"{worker.commits:,}",
            f"{worker.staleness.mean:.2f}",
            str(worker.staleness.max),
            "-" if worker.distance is None else f"{worker.distance:.4g}",
            f"{idle[worker.worker]:.1%}" if worker.worker in idle else "-",
        )
    return made


def _explained(found: Balance, workers: int, *, gaps: bool) -> list[str]:
    """Return the balance of staleness in numbers, and how to read it."""
    signed = f"{found.elsewhere:+,}".replace("+", "− ").replace("-", "+ ") if found.elsewhere else "− 0"
    lines = [
        f"Mean staleness {found.staleness / found.commits:.2f}, over {counted(found.commits, 'commit')} in "
        f"{counted(found.updates, 'update')}.",
        f"Where it comes from: {found.staleness:,} = {found.others:,} (other windows in flight, one per worker, or two with "
        f"overlap, summed over updates) − {found.unfinished:,} (windows that no commit ended) {signed} (windows that began "
        "later or earlier than at their worker's last commit, or with overlap at the commit before it)",
    ]
    if not found.holds:
        why = "lines of the record are missing" if gaps else "the record is incomplete, or its events are out of order"
        lines.append(f"WARNING: the two sides differ, {found.staleness:,} and {found.explained:,}: {why}.")
    if workers > 1 and found.commits == found.updates and found.others:
        lines.append(
            f"Asynchronous workers act like extra momentum: in theory about 1 - 1/n = {1 - 1 / workers:.2f} for n = {workers} "
            "workers with plain SGD (Mitliagkas et al. 2016). So try less momentum in the optimiser when you add workers. "
            "This run cannot show its size: only the mean of many runs does (paragrad.analysis.momentum measures it)."
        )
    return lines


def _idle(run: Path) -> dict[int, float]:
    """Return each worker's share of time spent waiting; only the summary of a simulated run has it."""
    file = run / "summary.json"
    cluster = json.loads(file.read_text(encoding="utf-8")).get("cluster") if file.exists() else None
    if cluster is None:
        return {}
    times = zip(cluster["idle_seconds"], cluster["computing_seconds"], strict=True)
    return {rank: idle / (idle + computing) for rank, (idle, computing) in enumerate(times) if idle + computing}
