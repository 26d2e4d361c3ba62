"""``paragrad serve``: a center that listens, for workers that join by ``paragrad join``."""

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
    Flag("listen", str, "Address to listen at, as 0.0.0.0:7000. [default: 127.0.0.1, any free port]", "HOST:PORT"),
    Flag("workers", int, "How many may work at once. [default: 2]"),
    Flag("min_workers", int, "Begin once so many have joined. [default: all]"),
    Flag("here", int, "Workers to start on this machine; the others join."),
    Flag("shards", int, "Processes that hold a slice of the center each. [default: 1]"),
    Flag("shards_elsewhere", int, "How many of these are started by hand: paragrad shard. [default: 0]"),
    Flag("token_file", Path, "Secret that workers must know; mode 600. [default: DIR/token, made]", "FILE"),
    Flag("tls", str, "Encrypt. [default: if others can reach the address]", "auto|on|off"),
    Flag("tls_cert", str, "A certificate of your own (PEM).", "FILE"),
    Flag("tls_key", str, "Its private key.", "FILE"),
    Flag("advertise", str, "Name by which workers reach this host.", "HOST"),
)
RENAMED = {"listen": "address", "tls_cert": "certificate", "tls_key": "key"}
"""Options that are fields of the engine by another name."""


@with_flags(("Where workers come from", WORKERS))
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="What is trained, and how: the options of paragrad train, in a file."),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The run directory; workers may join by its name.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR|auto", help="Continue the run in DIR; auto: the one in --out, if it has begun."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    **flags: Any,
) -> None:
    """Serve a center that workers join, from this machine or others.

    paragrad serve run.toml --out runs/night --workers 4 --listen 0.0.0.0:7000
    """
    from paragrad.cli.train import carry_out, gather
    from paragrad.engines.transport.endpoint import read_token

    if config is None and resume is None:
        raise UsageError("Nothing says what to train: give a RUN.toml, such as that of a run made with paragrad train.")
    given: dict[str, Any] = {} if out is None else {"out": out}
    settings, going_on = gather(config, resume, given)
    if going_on and _is_done(Path(settings["out"]), settings["epochs"]):
        if not quiet:
            typer.echo(f"The run in {settings['out']} is done: {counted(settings['epochs'], 'epoch')}. To go on, raise it.")
        return
    if options.split_fields(settings["engine"])[0] != "network":
        # A run.toml of another engine is served all the same: what is trained, and how, is what counts.
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
