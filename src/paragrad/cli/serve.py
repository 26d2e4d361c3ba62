"""``paragrad serve``: a center that listens, for workers that join by ``paragrad join``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paragrad import options
from paragrad.engines.signals import not_ended_by_usr1
from paragrad.errors import UsageError

HOW = "Where workers come from"


def serve(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="What is trained, and how: the options of paragrad train, in a file."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The run directory; workers may join by its name.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR|auto", help="Go on with the run in DIR; auto: with that in --out if it has begun."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address to listen at, as 0.0.0.0:7000. \\[default: 127.0.0.1, any free port]",
            rich_help_panel=HOW,
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many may work at once. \\[default: 2]", rich_help_panel=HOW)] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="Begin once so many have joined. \\[default: all]", rich_help_panel=HOW)
    ] = None,
    here: Annotated[
        int | None, typer.Option(help="Workers to start on this machine at once; the others join.", rich_help_panel=HOW)
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Processes that the center is spread over, each with a slice. \\[default: 1]", rich_help_panel=HOW),
    ] = None,
    shards_elsewhere: Annotated[
        int | None,
        typer.Option(help="How many of these are started by hand: paragrad shard. \\[default: 0]", rich_help_panel=HOW),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What workers must know; mode 600. \\[default: DIR/token, made]",
            rich_help_panel=HOW,
        ),
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(metavar="auto|on|off", help="Encrypt. \\[default: if others can reach the address]", rich_help_panel=HOW),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="A certificate of your own (PEM).", rich_help_panel=HOW)
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key.", rich_help_panel=HOW)] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The name by which workers reach this host.", rich_help_panel=HOW)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Serve a center that workers join, from this machine or others.

    paragrad serve run.toml --out runs/night --workers 4 --listen 0.0.0.0:7000
    """
    from paragrad.cli.train import carry_out, gather
    from paragrad.transport.endpoint import read_token

    if config is None and resume is None:
        raise UsageError("Nothing says what to train: give a RUN.toml, such as that of a run made with paragrad train.")
    given: dict[str, Any] = {} if out is None else {"out": out}
    settings, going_on = gather(config, resume, given)
    if going_on and _is_done(Path(settings["out"]), settings["epochs"]):
        if not quiet:
            typer.echo(f"The run in {settings['out']} is done: all {settings['epochs']} epochs. To go on, raise epochs.")
        return
    if options.split_fields(settings["engine"])[0] != "network":
        # A run.toml of another engine is served all the same: what is trained, and how, is what counts.
        kept = {key: value for key, value in settings.items() if key not in ("threads", "cluster")}
        settings = {**kept, "engine": "network"}
    fields: dict[str, Any] = {
        "address": listen,
        "workers": workers,
        "min_workers": min_workers,
        "here": here,
        "shards": shards,
        "shards_elsewhere": shards_elsewhere,
        "tls": tls,
        "certificate": tls_cert,
        "key": tls_key,
        "advertise": advertise,
        "token": None if token_file is None else read_token(token_file),
    }
    changed = {key: value for key, value in fields.items() if value is not None}
    if workers is not None:
        settings.pop("workers", None)
    with not_ended_by_usr1():
        carry_out(settings, going_on, quiet=quiet, engine_fields=changed)


def _is_done(directory: Path, epochs: int) -> bool:
    """Whether there is nothing left to do. If there is, the summary of an earlier end is set aside: by it workers that find no
    center know that the run is done, and they may be started before their center listens."""
    path = directory / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    if summary["stopped"] == "finished" and summary["epochs"] >= epochs:
        return True
    path.rename(directory / "summary-before.json")
    return False
