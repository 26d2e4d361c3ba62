"""``paragrad clusters``: the clusters that a run can be tried on, and what they are made of."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def clusters(
    name: Annotated[
        str | None, typer.Argument(help="One profile, as TOML to begin your own from; or one time or fault.")
    ] = None,
) -> None:
    """Clusters that exist only as numbers: profiles, fields, times, faults."""
    import inspect

    from rich.text import Text

    from paragrad import cluster as known
    from paragrad.cli.tables import catalogue, console, field_table, flowing, table
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
        console.print(Text(chosen, "bold cyan"))
        console.print(Text(flowing(inspect.getdoc(parts[chosen]) or "")))
        console.print(field_table(fields_of(parts[chosen])))
        return

    catalogue("Profiles (--cluster NAME, --cluster NAME:field=value,...)", known.CATALOGUE, "what it is like")
    made = table("field", "default", "meaning", title="Fields")
    for field in fields_of(known.Cluster):
        made.add_row(Text(field.name), Text(field.default), Text(field.doc))
    console.print(made)
    _forms("Times that are not a plain number of seconds", known.TIMES)
    _forms("Faults, as in faults=(crash(worker=2,at=30),leave(worker=0,at=60))", known.FAULTS)
    _forms("Churn, as in churn=churn(exponential(600),30)", {"churn": known.Churn})
    console.print(Text("paragrad clusters NAME shows one with its fields, and a profile as TOML.", "dim"))
    console.print(Text("--cluster FILE.toml chooses a cluster of your own.", "dim"))


def _forms(title: str, parts: dict[str, Any]) -> None:
    """How each part is written, and what it is."""
    import inspect

    from paragrad.cli.tables import catalogue, flowing
    from paragrad.config.options import fields_of

    lines = {}
    for name, cls in parts.items():
        fields = (field.name + f"={field.default}" * bool(field.default) for field in fields_of(cls))
        lines[f"{name}({', '.join(fields)})"] = " ".join(flowing(inspect.getdoc(cls) or "").split())
    catalogue(title, lines, "what it is")
