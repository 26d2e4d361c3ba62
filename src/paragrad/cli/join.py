"""``paragrad join``: a worker for a center that ``paragrad serve`` started."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paragrad.engines.process.signals import not_ended_by_usr1, sigterm_as_ctrl_c

ENDED = {
    "finished": "All rows are used: the run is done.",
    "interrupted": "The run was stopped at its center.",
    "failed": "The run ended with an error at its center.",
    "left": "This worker has left; the others go on without it.",
}

SETTLES = 2.0
"""Seconds that a stopping center needs to inform all workers and exit."""


def join(
    where: Annotated[str, typer.Argument(metavar="DIR|HOST:PORT", help="The center's run directory, or its address.")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A copy of the center's token, mode 600. \\[default: DIR/token]")
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate to trust, for HOST:PORT. \\[default: the one in DIR]")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FACTORY", help="The model, from a file on this machine. \\[default: the center's setting]"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE|CLASS=FILE", help="The rows on this machine. \\[default: the center's setting]"),
    ] = None,
    allow_import: Annotated[
        list[str] | None, typer.Option(metavar="FILE.py", help="A file from which the center's model may be imported.")
    ] = None,
    device: Annotated[str, typer.Option(help="The device of the model, such as cuda:0.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of this worker. \\[default: SLURM_CPUS_PER_TASK, or the cores divided by the workers here]"),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared/--no-shared", help="Use shared memory if the center is on this machine.")
    ] = True,
    stay: Annotated[
        bool, typer.Option("--stay", help="If the center is stopped before the end, wait until it is started again.")
    ] = False,
    patience: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for a center that is gone.")] = 600.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Join a center as a worker. Ctrl-C or SIGTERM leaves it at any time; the other workers continue.

    paragrad join runs/night
    """

    def say(message: str) -> None:
        if not quiet:
            typer.echo(message)

    try:
        with not_ended_by_usr1(), sigterm_as_ctrl_c():
            from paragrad.join import join as begin

            work = partial(
                begin,
                where,
                model,
                (data[0] if len(data) == 1 else data) if data else None,
                token_file=token_file,
                certificate=cert,
                allow_import=allow_import or (),
                device=device,
                threads=threads,
                shared=shared,
                patience=patience,
                say=say,
            )
            while (reason := work()) == "interrupted" and stay:
                say("The run was stopped at its center; this worker stays.")
                time.sleep(SETTLES)
    except KeyboardInterrupt:
        reason = "left"
    say(ENDED.get(reason, f"The run is over ({reason})."))
    if reason == "failed":
        raise typer.Exit(1)
