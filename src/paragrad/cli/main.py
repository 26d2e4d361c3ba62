"""The command ``paragrad``: its sub-commands and exit statuses."""

from __future__ import annotations

from signal import SIGINT
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from paragrad import __version__
from paragrad.cli import (
    analyse,
    clusters,
    data,
    demo,
    doctor,
    evaluate,
    join,
    lists,
    plot,
    predict,
    replay,
    runs,
    serve,
    shard,
    train,
)
from paragrad.errors import Interrupted, ParagradError, UsageError

BY_SIGNAL = 128
"""Added to the number of the signal that ended a command, as shells do: 130 after Ctrl-C, 143 after SIGTERM."""


class Commands(TyperGroup):
    """Turns the errors of paragrad into a message and an exit status: 2 for bad usage, 130 or 143 for a signal, else 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _fail(str(error), 2)
        except Interrupted as stop:
            _leave(str(stop), stop.signal)
        except ParagradError as error:
            _fail(str(error), 1)
        except KeyboardInterrupt:
            _leave("Interrupted before the run began.", SIGINT)


def _fail(message: str, status: int) -> NoReturn:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(message, err=True)
    raise typer.Exit(status)


def _leave(message: str, signal: int) -> NoReturn:
    """Exit as the user asked, without the word error."""
    typer.echo(message, err=True)
    raise typer.Exit(BY_SIGNAL + signal)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"paragrad {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="paragrad",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", no_args_is_help=True)(train.train)
app.command("serve", no_args_is_help=True)(serve.serve)
app.command("join", no_args_is_help=True)(join.join)
app.command("shard", no_args_is_help=True)(shard.shard)
app.command("replay", no_args_is_help=True)(replay.replay)
app.command("evaluate", no_args_is_help=True)(evaluate.evaluate)
app.command("predict", no_args_is_help=True)(predict.predict)
app.command("demo")(demo.demo)
app.command("analyse", no_args_is_help=True)(analyse.analyse)
app.command("plot", no_args_is_help=True)(plot.plot)
app.command("runs")(runs.runs)
app.command("schemes")(lists.schemes)
app.command("engines")(lists.engines)
app.command("clusters")(clusters.clusters)
app.command("codecs")(lists.codecs)
app.command("data")(data.data)
app.command("transforms")(lists.transforms)
app.command("models")(lists.models)
app.command("doctor")(doctor.doctor)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Parallel gradient descent for PyTorch and Keras: choose how workers cooperate, and train."""


def main() -> None:
    """Run the command line."""
    app(prog_name="paragrad")
