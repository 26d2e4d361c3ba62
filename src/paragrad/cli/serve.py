"""``paragrad serve``: a center for workers that connect with ``paragrad join``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paragrad.cli.flags import Flag, with_flags
from paragrad.config import options
from paragrad.engines.process.signals import not_ended_by_usr1
from paragrad.errors import UsageError, counted

WORKERS = (
    Flag("listen", str, "Address to listen at, such as 0.0.0.0:7000. [default: 127.0.0.1, any free port]", "HOST:PORT"),
    Flag("workers", int, "Number of workers at the same time. [default: 2]"),
    Flag("min_workers", int, "Start when this many workers have joined. [default: all]"),
    Flag("here", int, "Workers to start on this machine; the others join."),
    Flag("shards", int, "Processes that each hold a slice of the center. [default: 1]"),
    Flag("shards_elsewhere", int, "How many shards you start by hand with paragrad shard. [default: 0]"),
    Flag("token_file", Path, "File with the secret that workers must know; mode 600. [default: DIR/token, created]", "FILE"),
    Flag("tls", str, "Encrypt connections; auto: if other machines can reach the address. [default: auto]", "auto|on|off"),
    Flag("tls_cert", str, "Your own certificate (PEM).", "FILE"),
    Flag("tls_key", str, "The private key of the certificate.", "FILE"),
    Flag("advertise", str, "Name by which workers reach this host.", "HOST"),
)
RENAMED = {"listen": "address", "tls_cert": "certificate", "tls_key": "key"}
"""Options whose field of the engine has another name."""


@with_flags(("Workers and connections", WORKERS))
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="What to train and how: the options of paragrad train, in a file."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The run directory. Workers can join by this path.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR|auto", help="Resume the run in DIR; auto: the run in --out, if it was started before."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    **flags: Any,
) -> None:
    """Start a center that workers join, from this machine or others.

    paragrad serve run.toml --out runs/night --workers 4 --listen 0.0.0.0:7000
    """
    from paragrad.cli.train import carry_out, gather
    from paragrad.engines.transport.endpoint import read_token

    if config is None and resume is None:
        raise UsageError("There is nothing to train: give a RUN.toml, such as that of a run made with paragrad train.")
    given: dict[str, Any] = {} if out is None else {"out": out}
    settings, going_on = gather(config, resume, given)
    if going_on and _is_done(Path(settings["out"]), settings["epochs"]):
        if not quiet:
            typer.echo(f"The run in {settings['out']} is done: {counted(settings['epochs'], 'epoch')}. To go on, raise epochs.")
        return
    if options.split_fields(settings["engine"])[0] != "network":
        # A run.toml of another engine still says what to train and how.
        kept = {key: value for key, value in settings.items() if key not in ("threads", "cluster")}
        settings = {**kept, "engine": "network"}
    fields = {RENAMED.get(key, key): value for key, value in flags.items() if value is not None}
    if (token_file := fields.pop("token_file", None)) is not None:
        fields["token"] = read_token(token_file)
    if "workers" in fields:
        settings.pop("workers", None)
    with not_ended_by_usr1():
        carry_out(settings, going_on, quiet=quiet, engine_fields=fields)


def _is_done(directory: Path, epochs: int) -> bool:
    """Return whether the run has no epochs left. If it has, rename the old summary.

    A worker that finds no center takes a summary for the end of the run, and workers may start before their center listens.
    """
    path = directory / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    if summary["stopped"] == "finished" and summary["epochs"] >= epochs:
        return True
    path.rename(directory / "summary-before.json")
    return False
