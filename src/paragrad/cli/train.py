"""``paragrad train``: one run, from options and a run.toml to a table of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad.cli.flags import Flag, lengths, names, number, with_flags
from paragrad.config import options
from paragrad.engines.process.signals import not_ended_by_usr1
from paragrad.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from paragrad.result import Result

DEFAULTS: Mapping[str, Any] = {
    "model": "mlp",
    "scheme": "syncsgd",
    "engine": "local",
    "epochs": 1,
    "batch_size": 32,
    "seed": 0,
}
OF_A_TOY: Mapping[str, Any] = {"data": "noise", "loss": "value", "batch_size": 1}
"""The defaults that are others where the model is a toy problem."""
OF_ENGINE = ("workers", "threads", "device", "on_failure", "cluster")
"""Options that are fields of the engine, so common that they have a flag of their own."""
STOPPED = {
    "finished": "All epochs are done.",
    "seconds": "Stopped at the time limit.",
    "target": "Stopped at the target.",
    "patience": "Stopped early: validation got no better.",
    "callback": "Stopped by a callback.",
}

WHAT = (
    Flag(
        "data",
        list[str],
        "Rows: digits, a file, a glob, a directory, or CLASS=FILE (see: paragrad data). Repeatable.",
        "NAME|FILE|CLASS=FILE",
    ),
    Flag(
        "validation",
        list[str],
        "Rows to validate on, read as those to train on; as often as you like. [default: the data's test part, or a hold-out]",
        "FILE|CLASS=FILE",
    ),
    Flag("features", str, "Columns to learn from; also 'jet_*'. [default: all others]", "A,B,...", parser=names),
    Flag("exclude", str, "Columns that are no features; also 'id_*'.", "A,B,...", parser=names),
    Flag("select", str, "Which rows to use, as 'pt > 20 and njet >= 2': comparisons of columns.", "EXPRESSION"),
    Flag("label", str, "What to predict. [default: y, target or label]", "COLUMN"),
    Flag("weight", str, "How much a row counts; may be negative.", "COLUMN"),
    Flag(
        "transform",
        list[str],
        "What is done to columns, fitted on the rows trained on; one after another, as often as you like.",
        "NAME:FIELD=VALUE,...",
    ),
    Flag("tree", str, "The tree of a ROOT file, or a group of an HDF5 file.", "NAME"),
    Flag(
        "pad",
        str,
        "Lists of different lengths are cut, or filled up with zeros, to this one.",
        "LENGTH|COLUMN=LENGTH,...",
        parser=lengths,
    ),
    Flag(
        "stream",
        bool,
        "Read rows while training, or before. [default: before, if half of the free memory holds them]",
        spelled=("--stream/--no-stream",),
    ),
    Flag(
        "model",
        str,
        "mlp, mlp:1000-2000-1000, cnn, resnet8, beale, your function, or a .keras file (see: paragrad models). [default: mlp]",
        "NAME|FILE.py:FACTORY",
    ),
    Flag(
        "loss",
        str,
        "The loss, or a function of your own (see: paragrad models). [default: what the labels look like]",
        "NAME|FILE.py:FUNCTION",
    ),
    Flag(
        "metric",
        list[str],
        "A further figure of the test part: auc, f1, log_loss, mae, or a function of (output, target). Repeatable.",
        "NAME|FILE.py:FUNCTION",
    ),
    Flag("positive", str, "The class that F1 is of. [default: of two classes signal, or else the second]", "CLASS"),
    Flag(
        "optimizer",
        str,
        "Any of torch.optim, as adam:lr=0.001, or cg (see: paragrad models). [default: adam]",
        "NAME:FIELD=VALUE,...",
    ),
    Flag(
        "schedule",
        str,
        "How the learning rate goes by the progress of the run, as cosine:warmup=0.05 (see: paragrad models).",
        "NAME:FIELD=VALUE,...",
    ),
    Flag("clip_norm", float, "Scale longer gradients down to it.", "NORM|none", parser=number),
    Flag("clip_value", float, "Cut gradients off at it, element by element.", "VALUE|none", parser=number),
    Flag("epochs", int, "Passes over the data. [default: 1]"),
    Flag("batch_size", int, "Rows in one worker's mini-batch. [default: 32; toy problems: 1]"),
    Flag("seed", int, "Of the weights, the order of rows, the hold-out. [default: 0]"),
    Flag("holdout", float, "Share of rows kept for testing. [default: 0.2 where the data has no test part]"),
)
HOW = (
    Flag("scheme", str, "As agn:window=15 (see: paragrad schemes). [default: syncsgd]", "NAME:FIELD=VALUE,..."),
    Flag("engine", str, "Where workers run (see: paragrad engines). [default: local]", "NAME:FIELD=VALUE,..."),
    Flag(
        "codec",
        str,
        "Send commits in fewer bytes, as int8 or topk:share=0.01 (see: paragrad codecs). [default: as they are]",
        "NAME:FIELD=VALUE,...",
    ),
    Flag(
        "cluster",
        str,
        "The virtual cluster, as straggler:latency=0.1, for an engine that has one (see: paragrad clusters).",
        "NAME:FIELD=VALUE,...|FILE.toml",
    ),
    Flag("workers", int, "How many; short for --engine local:workers=N."),
    Flag("threads", int, "Of each worker. [default: the cores there are, shared out]"),
    Flag("device", str, "What workers compute on. [default: cpu]", "cpu|cuda|cuda:N"),
    Flag("on_failure", str, "When a worker's code raises. [default: raise]", "raise|replace"),
    Flag(
        "partition",
        str,
        "Which batches a worker gets: dealt beforehand, next free one, by label, or unequal classes.",
        "dealt|stolen|label|dirichlet:alpha=A",
    ),
    Flag(
        "distances",
        bool,
        "Record how far the center moves between a worker's answers (see: paragrad analyse).",
        spelled=("--distances",),
    ),
)
WHEN = (
    Flag(
        "validate_every",
        str,
        "When to validate: each epoch, every 5 seconds, every 200 updates. [default: epoch]",
        "epoch|5s|200|none",
    ),
    Flag(
        "keep",
        str,
        "Which weights are the result. [default: best with --patience, else last]",
        "best|last",
    ),
    Flag("checkpoint_every", float, "Time between checkpoints. [default: 60]", "SECONDS|none", parser=number),
    Flag("max_seconds", float, "Stop cleanly then.", "SECONDS|none", parser=number),
    Flag("target_accuracy", float, "Stop once the test part reaches it.", "SHARE|none", parser=number),
    Flag("target_loss", float, "Stop once the test part reaches it.", "LOSS|none", parser=number),
    Flag("patience", int, "Stop after so many validations in a row that are no better."),
)
WHERE = (
    Flag("out", str, "The run directory. [default: runs/<date>-<time>-<scheme>]", "DIR"),
    Flag("resume", str, "Go on with the run in DIR; auto: with that in --out if it has begun.", "DIR|auto"),
)


@with_flags(
    ("What is trained", WHAT),
    ("How the workers cooperate", HOW),
    ("When it is validated, and when it stops", WHEN),
    ("Where it is written", WHERE),
)
def train(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml", help="Options from a file, such as a run directory's own run.toml; flags override it."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    **flags: Any,
) -> None:
    """Train a model with several workers.

    paragrad train --data digits --model mlp --scheme agn:window=15 --workers 4 --epochs 20
    """
    given = {key: value for key, value in ctx.params.items() if key in options.CONFIG and value not in (None, [], ())}
    given = {
        key: None if value == "none" else list(value) if isinstance(value, tuple) else value for key, value in given.items()
    }
    for key in ("data", "validation"):
        if len(given.get(key, ())) == 1:
            given[key] = given[key][0]
    settings, going_on = gather(config, flags["resume"], given)
    if (positive := flags["positive"]) is not None:
        others = [one for one in settings.get("metric") or () if one.partition(":")[0] != "f1"]
        settings["metric"] = [*others, f"f1:positive={positive}"]
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
        from paragrad.models.toys import is_toy

        own = OF_A_TOY if is_toy(settings["model"]) else {}
    return {**DEFAULTS, **own, **settings}


def _lay_over(settings: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Settings that override others; an engine's own field overrides the short option for it below."""
    if "engine" in upper:
        for key in options.split_fields(upper["engine"])[1].keys() & set(OF_ENGINE):
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
    from paragrad.run import Run, Stop
    from paragrad.rundir.display import Display

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
    of_run = ("checkpoint_every", "validate_every", "keep", "partition", "distances")
    rhythm = {key: settings[key] for key in of_run if key in settings}
    spelled = {key: settings[key] for key in ("data", "validation", "model", "loss") if settings.get(key) is not None}
    run = Run(out=settings.get("out"), resume=resume, stop=stop, callbacks=(display,), spelled=spelled, **rhythm)  # type: ignore[arg-type]

    from paragrad.jobs.recipe import build
    from paragrad.optim.choice import SETTINGS, Optimizer
    from paragrad.train import train as begin

    chosen = any(settings.get(key) is not None for key in SETTINGS)  # a Keras model has an optimiser of its own
    optimizer = Optimizer.from_settings(settings) if chosen else None
    engine.prepare()
    try:
        with display.reads():
            model, rows = build(settings)
        result = begin(
            model,
            loss=settings.get("loss"),
            metrics=settings.get("metric"),
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
        if display.commits:
            show(result, display.console)
        else:  # its figures are those of an earlier start
            display.note(f"Run directory: {result.directory}")
    return result


def show(result: Result, console: Console) -> None:
    """The few numbers that a run is judged by, and where the rest lies."""
    from paragrad.cli.tables import table
    from paragrad.rundir.display import number as figure

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
    if summary["metrics"]:
        said = ", ".join(f"{name} {figure(value)}" for name, value in summary["metrics"].items())
        console.print(f"Metrics: {said}", soft_wrap=True, markup=False)
    if summary.get("plain_over_sent") is not None:
        sent = f"{summary['bytes_sent'] / 1e6:,.3g}"
        console.print(f"Commits were sent in {sent} MB; plain they are {summary['plain_over_sent']:,.1f} times as much.")
    kept = result.summary["kept"]
    best = f" Kept the best weights, of epoch {kept['epoch']:.4g}." if kept["weights"] == "best" else ""
    ended = STOPPED.get(result.stopped, result.stopped)
    console.print(f"{ended}{best} Run directory: {result.directory}", soft_wrap=True)
