"""``paragrad clusters``: simulated clusters, and the times and faults that they consist of."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A profile, shown as TOML to copy and change; or a time or fault."),
    ] = None,
) -> None:
    """List simulated clusters: profiles, fields, times and faults."""
    from rich.text import Text

    from paragrad import cluster as known
    from paragrad.cli.tables import catalogue, console, describe, show, table
    from paragrad.config.options import as_toml, fields_of
    from paragrad.errors import unknown

    parts: dict[str, type[Any]] = {**known.TIMES, **known.FAULTS, "churn": known.Churn}
    if name is not None:
        chosen = name.lower()
        if chosen in known.PROFILES:
            console.print(Text(chosen, "bold cyan"))
            console.print(Text(known.CATALOGUE[chosen]))
            console.print(Text(as_toml({"cluster": known.to_table(known.PROFILES[chosen])})), soft_wrap=True)
            return
        if chosen not in parts:
            raise unknown("profile, time or fault", name, [*known.PROFILES, *parts])
        describe(chosen, parts[chosen])
        return

    catalogue("Profiles (--cluster NAME, --cluster NAME:field=value,...)", known.CATALOGUE, "what it is like")
    made = table("field", "default", "meaning")
    for field in fields_of(known.Cluster):
        made.add_row(Text(field.name), Text(field.default), Text(field.doc))
    show(made, "Fields")
    _forms("Times other than a number of seconds", known.TIMES)
    _forms("Faults, as in faults=(crash(worker=2,at=30),leave(worker=0,at=60))", known.FAULTS)
    _forms("Churn, as in churn=churn(exponential(600),30)", {"churn": known.Churn})
    console.print(Text("paragrad clusters NAME shows a time or fault with its fields, and a profile as TOML.", "dim"))
    console.print(Text("--cluster FILE.toml selects your own cluster.", "dim"))


def _forms(title: str, parts: dict[str, Any]) -> None:
    """Print how each part is written, and what it is."""
    import inspect

    from paragrad.cli.tables import catalogue, flowing
    from paragrad.config.options import fields_of

    lines = {}
    for name, cls in parts.items():
        fields = (field.name + f"={field.default}" * bool(field.default) for field in fields_of(cls))
        lines[f"{name}({', '.join(fields)})"] = " ".join(flowing(inspect.getdoc(cls) or "").split())
    catalogue(title, lines, "what it is")
