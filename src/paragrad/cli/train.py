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
"""Different defaults for toy problems."""
OF_ENGINE = ("workers", "threads", "device", "on_failure", "cluster")
"""Fields of the engine that have their own option."""
STOPPED = {
    "finished": "All epochs are done.",
    "seconds": "Stopped at the time limit.",
    "target": "Stopped at the target.",
    "patience": "Stopped early: validation did not improve.",
    "callback": "Stopped by a callback.",
}

FIELDS = "NAME:FIELD=VALUE,..."
WHAT = (
    Flag(
        "data",
        list[str],
        "The rows: digits, a file, a glob, a directory, or CLASS=FILE (see: paragrad data). Repeatable.",
        "NAME|FILE|CLASS=FILE",
    ),
    Flag(
        "validation",
        list[str],
        "Rows to validate on, read like --data. Repeatable. [default: the test part of the data, or a hold-out]",
        "FILE|CLASS=FILE",
    ),
    Flag("features", str, "Columns to learn from, or patterns such as 'jet_*'. [default: all others]", "A,B,...", parser=names),
    Flag("exclude", str, "Columns not to learn from, or patterns such as 'id_*'.", "A,B,...", parser=names),
    Flag("select", str, "Rows to use, by comparisons of columns, such as 'pt > 20 and njet >= 2'.", "EXPRESSION"),
    Flag("label", str, "The column to predict. [default: y, target or label]", "COLUMN"),
    Flag("weight", str, "The column with the weights of rows; weights may be negative.", "COLUMN"),
    Flag(
        "transform",
        list[str],
        "A transformation of columns, fitted on the training rows (see: paragrad transforms). Repeatable, in this order.",
        FIELDS,
    ),
    Flag("tree", str, "The tree of a ROOT file, or a group of an HDF5 file.", "NAME"),
    Flag("pad", str, "Cut lists, or pad them with zeros, to this length.", "LENGTH|COLUMN=LENGTH,...", parser=lengths),
    Flag(
        "stream",
        bool,
        "Read rows during training, or all before. [default: before, if they fit into half of the free memory]",
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
        "A name, or your own function (see: paragrad models). [default: chosen from the kind of label]",
        "NAME|FILE.py:FUNCTION",
    ),
    Flag(
        "metric",
        list[str],
        "A further metric on the validation rows: auc, f1, log_loss, mae, or a function of (output, target). Repeatable.",
        "NAME|FILE.py:FUNCTION",
    ),
    Flag("positive", str, "The class for F1. [default: the class named signal, else the second of two]", "CLASS"),
    Flag("optimizer", str, "Any of torch.optim, such as adam:lr=0.001, or cg (see: paragrad models). [default: adam]", FIELDS),
    Flag("schedule", str, "Learning-rate schedule, such as cosine:warmup=0.05 (see: paragrad models).", FIELDS),
    Flag("clip_norm", float, "Scale longer gradients down to this norm.", "NORM|none", parser=number),
    Flag("clip_value", float, "Limit each element of the gradient to this absolute value.", "VALUE|none", parser=number),
    Flag("epochs", int, "Passes over the data. [default: 1]"),
    Flag("batch_size", int, "Rows in one worker's mini-batch. [default: 32; toy problems: 1]"),
    Flag("seed", int, "Seed of the weights, the order of rows and the hold-out. [default: 0]"),
    Flag("holdout", float, "Share of rows held out for validation. [default: 0.2 if the data has no test part]"),
)
HOW = (
    Flag("scheme", str, "How workers cooperate, such as agn:window=15 (see: paragrad schemes). [default: syncsgd]", FIELDS),
    Flag("engine", str, "Where workers run (see: paragrad engines). [default: local]", FIELDS),
    Flag(
        "codec",
        str,
        "Send commits in fewer bytes, such as int8 or topk:share=0.01 (see: paragrad codecs). [default: uncompressed]",
        FIELDS,
    ),
    Flag(
        "cluster",
        str,
        "Simulated cluster for --engine vector, such as straggler:latency=0.1 (see: paragrad clusters).",
        f"{FIELDS}|FILE.toml",
    ),
    Flag("workers", int, "Number of workers; short for --engine local:workers=N."),
    Flag("threads", int, "Threads per worker. [default: the cores, divided among the workers]"),
    Flag("device", str, "Device of the workers. [default: cpu]", "cpu|cuda|cuda:N"),
    Flag(
        "on_failure", str, "If a worker's code raises: end the run, or start another worker. [default: raise]", "raise|replace"
    ),
    Flag(
        "partition",
        str,
        "How batches are distributed: in advance, next free one, sorted by label, or with unequal classes.",
        "dealt|stolen|label|dirichlet:alpha=A",
    ),
    Flag(
        "distances",
        bool,
        "Record how far the center moves between two replies to a worker (see: paragrad analyse).",
        spelled=("--distances",),
    ),
)
WHEN = (
    Flag(
        "validate_every",
        str,
        "When to validate: after each epoch, every 5 seconds, every 200 updates, only at the end. [default: epoch]",
        "epoch|5s|200|none",
    ),
    Flag("keep", str, "The weights of the result. [default: best with --patience, else last]", "best|last"),
    Flag("checkpoint_every", float, "Time between checkpoints. [default: 60]", "SECONDS|none", parser=number),
    Flag("max_seconds", float, "Stop after this time.", "SECONDS|none", parser=number),
    Flag("target_accuracy", float, "Stop when validation reaches this accuracy.", "SHARE|none", parser=number),
    Flag("target_loss", float, "Stop when validation reaches this loss.", "LOSS|none", parser=number),
    Flag("patience", int, "Stop after this many validations in a row without a lower loss."),
)
WHERE = (
    Flag("out", str, "The run directory. [default: runs/<date>-<time>-<scheme>]", "DIR"),
    Flag("resume", str, "Resume the run in DIR; auto: the run in --out, if it was started before.", "DIR|auto"),
)


@with_flags(
    ("Data, model and optimiser", WHAT),
    ("Workers", HOW),
    ("Validation, checkpoints and early stopping", WHEN),
    ("Run directory", WHERE),
)
def train(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="RUN.toml", help="A file with options, such as the run.toml of another run; flags override it."),
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
    """Return all settings of a run, and whether to resume it. Flags override the file, which overrides a resumed run's
    settings, which override the defaults."""
    from_file = {} if config is None else options.read_config(config)
    if config is not None and (config.parent / "record.jsonl").exists():
        from_file.pop("out", None)  # the directory of an earlier run: a repetition needs another one
    if resume is None:
        return _completed(from_file, given), False
    out = (from_file | dict(given)).get("out")
    if resume != "auto":
        if out is not None and Path(out).resolve() != Path(resume).resolve():
            raise UsageError(
                f"--resume {resume} and out {out!r} are two directories. A resumed run keeps its directory: do not give out."
            )
        out = resume
    if out is None:
        raise UsageError("--resume auto needs --out DIR, the directory of the run.")
    own = Path(out) / "run.toml"
    if resume != "auto" and not own.exists():
        raise UsageError(
            f"There is nothing to resume in {resume!r}: it has no run.toml. Give the directory of a run that was started."
        )
    before = options.read_config(own) if own.exists() else {}
    return _completed(before, from_file, {**given, "out": out}), "auto" if resume == "auto" else True


def _completed(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the layers, each of which overrides those before it, with defaults, which depend on the model.

    A field of the engine overrides the option of that name in earlier layers.
    """
    settings: dict[str, Any] = {}
    for layer in layers:
        for key in options.split_fields(layer.get("engine", ""))[1].keys() & set(OF_ENGINE):
            if key in layer:
                raise UsageError(
                    f"{key} is given twice, in engine {layer['engine']!r} and as {key}={layer[key]}: leave one out."
                )
            settings.pop(key, None)
        settings.update(layer)
    own: Mapping[str, Any] = {}
    if settings.get("model") is not None:
        from paragrad.models.toys import is_toy

        own = OF_A_TOY if is_toy(settings["model"]) else {}
    return {**DEFAULTS, **own, **settings}


def carry_out(
    settings: Mapping[str, Any],
    resume: bool | str,
    *,
    quiet: bool,
    table: bool = True,
    engine_fields: Mapping[str, Any] | None = None,
) -> Result:
    """Build what the settings name, train, and show the result. ``engine_fields`` override those of the engine."""
    if settings.get("data") is None:
        raise UsageError(
            "There is no data to train on. Give --data digits, --data file.npz, a RUN.toml that names data, or a toy problem, "
            "which needs none: --model beale."
        )

    from paragrad import cluster, codecs, engines, schemes
    from paragrad.run import Run, Stop
    from paragrad.rundir.display import Display

    # Check the options before reading the data, which may take long.
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
    fields = {key: settings[key] for key in of_run if key in settings}
    spelled = {key: settings[key] for key in ("data", "validation", "model", "loss") if settings.get(key) is not None}
    run = Run(out=settings.get("out"), resume=resume, stop=stop, callbacks=(display,), spelled=spelled, **fields)  # type: ignore[arg-type]

    from paragrad.jobs.recipe import build
    from paragrad.optim.choice import SETTINGS, Optimizer
    from paragrad.train import train as begin

    chosen = any(settings.get(key) is not None for key in SETTINGS)  # else a Keras model uses its own
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
        else:  # the summary holds the results of an earlier start
            display.note(f"Run directory: {result.directory}")
    return result


def costs(result: Result) -> tuple[str, str, str, str]:
    """Return seconds, samples per second, commits and mean staleness as cells of a table."""
    staleness = result.summary["staleness"]["mean"]
    return f"{result.seconds:.2f}", f"{result.samples_per_second:,.0f}", f"{result.commits:,}", f"{staleness:.2f}"


def show(result: Result, console: Console) -> None:
    """Print the main results of a run, and its directory."""
    from paragrad.cli.tables import table
    from paragrad.rundir.display import number as figure

    summary = result.summary
    seconds = "virtual seconds" if "wall_seconds" in summary else "seconds"
    rate = "samples per real second" if "wall_seconds" in summary else "samples/s"
    made = table("accuracy", "loss", seconds, rate, "commits", "mean staleness", right=0)
    made.columns[0].style = ""
    made.add_row(figure(result.accuracy), figure(result.loss), *costs(result))
    console.print(made)
    if result.metrics:
        metrics = ", ".join(f"{name} {figure(value)}" for name, value in result.metrics.items())
        console.print(f"Metrics: {metrics}", soft_wrap=True, markup=False)
    if summary.get("plain_over_sent") is not None:
        sent = f"{summary['bytes_sent'] / 1e6:,.3g}"
        console.print(f"Commits took {sent} MB; uncompressed they take {summary['plain_over_sent']:,.1f} times as much.")
    kept = result.kept
    best = f" Kept the best weights, of epoch {kept['epoch']:.4g}." if kept["weights"] == "best" else ""
    ended = STOPPED.get(result.stopped, result.stopped)
    console.print(f"{ended}{best} Run directory: {result.directory}", soft_wrap=True)
