"""``paragrad train``: one run, from options and a run.toml to a table of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad import options
from paragrad.engines.signals import not_ended_by_usr1
from paragrad.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from paragrad.result import Result

WHAT, HOW, WHEN, WHERE = "What is trained", "How the workers cooperate", "When it looks and stops", "Where it is written"
DEFAULTS: Mapping[str, Any] = {
    "model": "mlp",
    "scheme": "agn",
    "engine": "local",
    "epochs": 1,
    "batch_size": 32,
    "seed": 0,
}
OF_A_TOY: Mapping[str, Any] = {"data": "noise", "loss": "value", "batch_size": 1}
"""The defaults that are others where the model is a toy problem."""
OF_ENGINE = ("workers", "threads", "on_failure", "cluster")
"""Options that are fields of the engine, so common that they have a flag of their own."""
STOPPED = {
    "finished": "All epochs are done.",
    "seconds": "Stopped at the time limit.",
    "target": "Stopped at the target.",
    "patience": "Stopped early: validation got no better.",
    "callback": "Stopped by a callback.",
}


def number(text: str) -> float | str:
    """A number, or the word none."""
    if text.lower() == "none":
        return "none"
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'none'.") from None


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def lengths(text: str) -> int | dict[str, int]:
    """One length, or lengths by column."""
    try:
        if "=" not in text:
            return int(text)
        return {name.strip(): int(length) for name, _, length in (piece.partition("=") for piece in text.split(","))}
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither a length, such as 10, nor lengths by column, as jet_pt=4,jet_eta=4."
        ) from None


def train(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml", help="Options from a file, such as a run directory's own run.toml; flags override it."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE|CLASS=FILE",
            help="What to train on: digits, a file, a glob or a directory of files (see: paragrad data), or signal='sig*.root' "
            "for the files of one class; give it as often as you like. Toy problems need none.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            parser=names,
            metavar="A,B,...",
            help="Columns to learn from; also 'jet_*'. \\[default: all others]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="What to predict. \\[default: y, target or label]", rich_help_panel=WHAT),
    ] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="How much a row counts; may be negative.", rich_help_panel=WHAT)
    ] = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...",
            help="What is done to columns, fitted on the rows trained on; one after another, as often as you like.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The tree of a ROOT file, or a group of an HDF5 file.", rich_help_panel=WHAT),
    ] = None,
    pad: Annotated[
        str | None,
        typer.Option(
            parser=lengths,
            metavar="LENGTH|COLUMN=LENGTH,...",
            help="Lists of different lengths are cut, or filled up with zeros, to this one.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Read rows while training, or before. \\[default: before, if half of the free memory holds them]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FACTORY",
            help="mlp, mlp:1000-2000-1000, cnn, resnet8, beale, your function, or a .keras file (see: paragrad models). "
            "\\[default: mlp]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="NAME", help="The loss. \\[default: what the labels look like]", rich_help_panel=WHAT)
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...",
            help="Any of torch.optim, as adam:lr=0.001, or cg (see: paragrad models). \\[default: adam]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...",
            help="How the learning rate goes by the progress of the run, as cosine:warmup=0.05 (see: paragrad models).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(parser=number, metavar="NORM|none", help="Scale longer gradients down to it.", rich_help_panel=WHAT),
    ] = None,
    clip_value: Annotated[
        float | None,
        typer.Option(
            parser=number, metavar="VALUE|none", help="Cut gradients off at it, element by element.", rich_help_panel=WHAT
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data. \\[default: 1]", rich_help_panel=WHAT)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows in one worker's mini-batch. \\[default: 32; toy problems: 1]", rich_help_panel=WHAT)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the weights, the order of rows, the hold-out. \\[default: 0]", rich_help_panel=WHAT)
    ] = None,
    holdout: Annotated[
        float | None,
        typer.Option(
            help="Share of rows kept for testing. \\[default: 0.2 where the data has no test part]", rich_help_panel=WHAT
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...",
            help="As agn:window=15 (see: paragrad schemes). \\[default: agn]",
            rich_help_panel=HOW,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...",
            help="Where workers run (see: paragrad engines). \\[default: local]",
            rich_help_panel=HOW,
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...",
            help="Send commits in fewer bytes, as int8 or topk:share=0.01 (see: paragrad codecs). \\[default: as they are]",
            rich_help_panel=HOW,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:FIELD=VALUE,...|FILE.toml",
            help="The virtual cluster, as straggler:latency=0.1, for an engine that has one (see: paragrad clusters).",
            rich_help_panel=HOW,
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="How many; short for --engine local:workers=N.", rich_help_panel=HOW)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Of each worker. \\[default: the cores there are, shared out]", rich_help_panel=HOW)
    ] = None,
    on_failure: Annotated[
        str | None,
        typer.Option(metavar="raise|replace", help="When a worker's code raises. \\[default: raise]", rich_help_panel=HOW),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            metavar="dealt|stolen|label|dirichlet:alpha=A",
            help="Batches dealt beforehand, or taken by whoever is ready; or each worker on rows of its own, sorted by label, "
            "or with shares of the classes drawn from a Dirichlet distribution.",
            rich_help_panel=HOW,
        ),
    ] = None,
    distances: Annotated[
        bool | None,
        typer.Option(
            "--distances",
            help="Record how far the center moves between a worker's answers (see: paragrad analyse).",
            rich_help_panel=HOW,
        ),
    ] = None,
    validate_every: Annotated[
        float | None,
        typer.Option(
            parser=number,
            metavar="SECONDS|none",
            help="Time between looks at the test part. \\[default: 5]",
            rich_help_panel=WHEN,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(
            parser=number, metavar="SECONDS|none", help="Time between checkpoints. \\[default: 60]", rich_help_panel=WHEN
        ),
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(parser=number, metavar="SECONDS|none", help="Stop cleanly then.", rich_help_panel=WHEN)
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(parser=number, metavar="SHARE|none", help="Stop once the test part reaches it.", rich_help_panel=WHEN),
    ] = None,
    target_loss: Annotated[
        float | None,
        typer.Option(parser=number, metavar="LOSS|none", help="Stop once the test part reaches it.", rich_help_panel=WHEN),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many validations in a row that are no better.", rich_help_panel=WHEN)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The run directory. \\[default: runs/<date>-<time>-<scheme>]", rich_help_panel=WHERE),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|auto",
            help="Go on with the run in DIR; auto: with that in --out if it has begun.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=WHERE)] = False,
) -> None:
    """Train a model with several workers.

    paragrad train --data digits --model mlp --scheme agn:window=15 --workers 4 --epochs 20
    """
    given = {key: value for key, value in ctx.params.items() if key in options.CONFIG and value not in (None, [], ())}
    given = {
        key: None if value == "none" else list(value) if isinstance(value, tuple) else value for key, value in given.items()
    }
    if len(given.get("data", ())) == 1:
        given["data"] = given["data"][0]
    settings, going_on = gather(config, resume, given)
    with not_ended_by_usr1():
        carry_out(settings, going_on, quiet=quiet)


def gather(config: Path | None, resume: str | None, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool | str]:
    """All settings of a run: the defaults, under those of a run that is resumed, under the file's, under the flags;
    and whether it goes on from a checkpoint."""
    settings: dict[str, Any] = {}
    if config is not None:
        from_file = options.read_config(config)
        if (config.parent / "record.jsonl").exists():
            from_file.pop("out", None)  # the directory of a run that was: repeating it needs another
        _lay_over(settings, from_file)
    _lay_over(settings, given)
    if resume is None:
        return _completed(settings), False
    out = settings.get("out")
    if resume != "auto":
        if out is not None and Path(out).resolve() != Path(resume).resolve():
            raise UsageError(
                f"--resume {resume} and out {out!r} are two directories. A resumed run goes on in its own: leave out away."
            )
        out = resume
    if out is None:
        raise UsageError("--resume auto needs --out DIR, the directory to look into.")
    own = Path(out) / "run.toml"
    if resume != "auto" and not own.exists():
        raise UsageError(
            f"There is nothing to resume in {resume!r}: it has no run.toml. Give the directory of a run that has begun."
        )
    settings = {}
    if own.exists():
        _lay_over(settings, options.read_config(own))
    if config is not None:
        _lay_over(settings, options.read_config(config))
    _lay_over(settings, given)
    return _completed(settings | {"out": out}), "auto" if resume == "auto" else True


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the defaults below them, which go by the model."""
    own: Mapping[str, Any] = {}
    if settings.get("model") is not None:
        from paragrad.toys import is_toy

        own = OF_A_TOY if is_toy(settings["model"]) else {}
    return {**DEFAULTS, **own, **settings}


def _lay_over(settings: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Settings that override others; an engine's own field overrides the short option for it below."""
    if "engine" in upper:
        for key in options.split_fields(upper["engine"])[1].keys() & set(OF_ENGINE):  # shards of rows are no shards of a center
            if key in upper:
                raise UsageError(
                    f"{key} is given twice, in engine {upper['engine']!r} and as {key}={upper[key]}: leave one out."
                )
            settings.pop(key, None)
    settings.update(upper)


def carry_out(
    settings: Mapping[str, Any],
    resume: bool | str,
    *,
    quiet: bool,
    table: bool = True,
    engine_fields: Mapping[str, Any] | None = None,
) -> Result:
    """Build what the settings name, train, and show the result. ``engine_fields`` go over those of the engine."""
    if settings.get("data") is None:
        raise UsageError(
            "Nothing says what to train on. Give --data digits, --data file.npz, a RUN.toml that has data, or a toy problem, "
            "which needs none: --model beale."
        )

    from paragrad import cluster, codecs, engines, schemes
    from paragrad.display import Display
    from paragrad.run import Run, Stop

    # The cheap checks come before the data is read.
    scheme = options.parse(settings["scheme"], "scheme", schemes)
    engine = options.parse(settings["engine"], "engine", engines)
    codec = options.parse(settings["codec"], "codec", codecs) if settings.get("codec") is not None else None
    for key in OF_ENGINE:
        if settings.get(key) is not None:
            if not hasattr(engine, key):
                remedy = "give --engine vector, which simulates one" if key == "cluster" else "leave it out"
                raise UsageError(f"{key}={settings[key]}, but engine {settings['engine']!r} has no such field: {remedy}.")
            value = cluster.from_config(settings[key]) if key == "cluster" else settings[key]
            engine = replace(engine, **{key: value})
    engine = replace(engine, **(engine_fields or {}))
    stop = Stop(
        seconds=settings.get("max_seconds"),
        accuracy=settings.get("target_accuracy"),
        loss=settings.get("target_loss"),
        patience=settings.get("patience"),
    )
    display = Display(quiet=quiet, max_seconds=stop.seconds)
    rhythm = {key: settings[key] for key in ("checkpoint_every", "validate_every", "shards", "distances") if key in settings}
    spelled = {key: settings[key] for key in ("data", "model", "loss") if settings.get(key) is not None}
    run = Run(out=settings.get("out"), resume=resume, stop=stop, callbacks=(display,), spelled=spelled, **rhythm)  # type: ignore[arg-type]

    from paragrad.optim.choice import SETTINGS, Optimizer
    from paragrad.recipe import build
    from paragrad.train import train as begin

    chosen = any(settings.get(key) is not None for key in SETTINGS)  # a Keras model has an optimiser of its own
    optimizer = Optimizer.from_settings(settings) if chosen else None
    engine.prepare()
    try:
        model, rows = build(settings)
        result = begin(
            model,
            loss=settings.get("loss"),
            optimizer=optimizer,
            scheme=scheme,
            engine=engine,
            codec=codec,
            epochs=settings["epochs"],
            batch_size=settings["batch_size"],
            seed=settings["seed"],
            run=run,
            **rows,
        )
    finally:
        display.close()
    if table and not quiet:
        show(result, display.console)
    return result


def show(result: Result, console: Console) -> None:
    """The few numbers that a run is judged by, and where the rest lies."""
    from paragrad.cli.tables import table
    from paragrad.display import number as figure

    summary = result.summary
    seconds = "virtual seconds" if "wall_seconds" in summary else "seconds"
    rate = "samples per real second" if "wall_seconds" in summary else "samples/s"
    made = table("accuracy", "loss", seconds, rate, "commits", "mean staleness")
    for column in made.columns:
        column.style, column.justify = "", "right"
    made.add_row(
        figure(summary["test_accuracy"]),
        figure(summary["test_loss"] if summary["test_loss"] is not None else summary["train_loss"]),
        f"{summary['seconds']:.2f}",
        f"{summary['samples_per_second']:,.0f}",
        f"{summary['commits']:,}",
        f"{summary['staleness']['mean']:.2f}",
    )
    console.print(made)
    if summary.get("plain_over_sent") is not None:
        sent = f"{summary['bytes_sent'] / 1e6:,.3g}"
        console.print(f"Commits were sent in {sent} MB; plain they are {summary['plain_over_sent']:,.1f} times as much.")
    console.print(f"{STOPPED.get(result.stopped, result.stopped)} The run lies in {result.directory}", soft_wrap=True)
