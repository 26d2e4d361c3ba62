"""train(...): from a model and its data to a run directory and a trained model."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad.codecs.codec import Codec
from paragrad.config import keywords, options
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.rounds import check_quorum
from paragrad.data import load
from paragrad.data.partition import PartitionedPlan
from paragrad.data.source import ReportHere, Reporting
from paragrad.engines.engine import Engine, Recalls
from paragrad.engines.process.signals import Signals
from paragrad.errors import Interrupted, NotWritten, ParagradError, UsageError, counted
from paragrad.evaluation.card import card_of, transforms_of
from paragrad.evaluation.figures import MetricsLike, positive_in
from paragrad.jobs import named
from paragrad.jobs.build import EVALUATION_BATCH, build_job, read_rows
from paragrad.jobs.rehearsal import check_fit, rehearse
from paragrad.jobs.settings import describe_optimizer, outlook, paths_of, settings_of
from paragrad.learners.criterion import Loss
from paragrad.learners.flattened import Flattened
from paragrad.learners.keras import KerasLearner
from paragrad.learners.learner import Learner, Reports
from paragrad.learners.torch import TorchLearner
from paragrad.models import toys
from paragrad.models.builtin import is_keras
from paragrad.optim.choice import SETTINGS
from paragrad.optim.optimizer import OptimizerLike
from paragrad.result import Result
from paragrad.run import Run
from paragrad.rundir.checkpoint import Checkpoint
from paragrad.rundir.directory import RunDirectory
from paragrad.rundir.notices import Notices, Verbose
from paragrad.rundir.outcome import bring_to_result, summarise, traffic, trained
from paragrad.rundir.session import Session
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import name_of
from paragrad.types import Vector

PLAIN = ("optimizer='sgd:lr=...'", "keras.optimizers.SGD(learning_rate=...)")
"""Plain SGD as a user writes it, for torch and for Keras."""
OF_THE_MACHINE = ("wall_seconds", "samples_per_second")
"""Entries of a simulated run's summary that depend on the machine."""


@keywords.guarded(keywords.TRAIN, "Give the model and the data, arrays as one pair: pg.train(model, (x, y)).")
def train(
    model: nn.Module | Callable[[], Learner],
    data: Any,
    *,
    validation: Any = None,
    holdout: float | None = None,
    loss: Loss | str | None = None,
    metrics: MetricsLike | None = None,
    optimizer: OptimizerLike | None = None,
    scheme: Scheme | str = "syncsgd",
    engine: Engine | str = "local",
    codec: Codec | str | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
    seed: int = 0,
    run: Run | str | Path | None = None,
    verbose: Verbose = "auto",
) -> Result:
    """Train a model with several workers.

    model       a torch module; a compiled Keras model, with its loss, optimiser and metrics; or a function without arguments
                that returns a ``Learner``. The model itself is not changed: ``result.model`` is the trained one
    data        (x, y) as NumPy arrays or torch tensors, nested for several inputs; a torch Dataset or DataLoader; a pandas or
                polars frame; files (.csv, .parquet, .h5, .root, .npy) as a path, glob, directory or list; ``pg.Table`` to
                choose columns; ``pg.Weighted`` for weighted rows, ``pg.Generated`` for a generator, ``pg.Streamed`` for rows
                that you read yourself, piece by piece; ``"digits"``; the path of an .npz with x_train, y_train and optionally
                x_test, y_test; ``"noise"`` for a toy problem, such as ``paragrad.models.toys.Beale()``
    validation  rows to validate on, like ``data``; or ``holdout``: the share of the rows to hold out for validation
    loss        a function (output, target) -> number, or a name; by default chosen from the kind of target
    metrics     further metrics on the validation rows: a list of names ("auc", "f1:positive=signal", "mae") and functions; or
                a dict of functions (output, target) -> number of all rows; or objects with ``reset``, ``update``, ``compute``
    optimizer   a name (``"adam:lr=0.001"``), a factory that takes parameters, or one that takes the ``model``; for a
                learning-rate schedule or gradient clipping: ``pg.Optimizer("adam", schedule="cosine", clip_norm=1.0)``
    scheme      how workers cooperate, e.g. ``pg.AGN(window=15)`` or ``"agn:window=15"``
    engine      where workers run, e.g. ``pg.Local(workers=4)`` or ``"local:workers=4"``
    codec       how commits are compressed, e.g. ``pg.TopK(0.01)`` or ``"topk:share=0.01"``; the part that is not sent is
                added to the worker's next commit
    batch_size  rows in one worker's mini-batch; by default that of a DataLoader, else 32
    run         the run directory; or ``pg.Run(...)``, which also sets checkpoints, validation and early stopping
    verbose     "auto": show progress and notes, live in a terminal, else as plain lines; 1: always plain lines; 0: nothing.
                Warnings are ``pg.ParagradWarning``; the log is ``logging.getLogger("paragrad")``
    """
    scheme, engine, codec = named.scheme(scheme), named.engine(engine), named.codec(codec)
    run = Run.of(run)
    notices = Notices(run, verbose)
    run = replace(run, callbacks=(notices, *run.callbacks))
    engine.prepare()
    loss = toys.LOSS if isinstance(model, toys.Toy) and loss is None else loss
    if optimizer is None and not is_keras(model):
        optimizer = "adam"
    with notices.reads():
        parts = read_rows(model, data, validation=validation, holdout=holdout, seed=seed, loss=loss)
    notes = list(parts.notes)
    job = build_job(
        model,
        parts,
        scheme=scheme,
        codec=codec,
        loss=loss,
        optimizer=optimizer,
        metrics=metrics,
        workers=engine.workers,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        partition=run.partition,
        distances=run.distances,
        notes=notes,
    )
    learner = job.make_learner("cpu")
    axis = _check(model, optimizer, parts, job, learner, engine, run)
    warnings = [*parts.warnings, *scheme.warnings(outlook(job.plan, engine.workers, optimizer, model))]
    notices.before(warnings)

    identity = _identity(job, learner, engine, run)
    directory = RunDirectory.open(run, name_of(scheme))
    resumed = _checkpoint(directory, identity, job, engine, run, notes)
    spelled = {"data": str(data) if isinstance(data, str | Path) else parts.name, "validation": paths_of(validation)}
    config = settings_of(run, spelled, parts, model, loss, metrics, optimizer, scheme, engine, codec, job.plan, holdout)
    directory.write_config(config)
    _write_model_facts(directory, model, learner, parts, axis, notes)

    session = Session(
        directory.path, run, job.plan, identity=identity, held=0 if job.validation is None else len(job.validation)
    )
    session.resumed, session.anew = resumed, directory.used and resumed is None
    session.settings = config
    session.checkpoints.names = learner.layout if isinstance(learner, Flattened) else {}
    for source in (job.train, job.validation):
        if isinstance(source, Reporting):
            source.report = ReportHere(lambda message: session.emit("warning", message=message))
    if isinstance(learner, Reports):
        learner.report = cache(lambda message: session.emit("warning", message=message))
    try:
        with Signals(session):
            _emit_start(session, job, learner, engine)
            for note in notes:
                session.emit("note", message=note)
            for warning in warnings:
                session.emit("warning", message=warning)
            center = _run(engine, job, session, learner)
            return _finish(model, job, learner, engine, center, session, directory)
    except Interrupted:
        raise
    except KeyboardInterrupt:  # a second Ctrl-C: do not wait for anything, and write no checkpoint
        session.time.end()
        session.emit("end", reason="ended at once")
        raise Interrupted(
            f"The run was ended at once{_how_to_go_on(session, engine)}", str(directory.path), session.interrupted_by
        ) from None
    finally:
        notices.close()
        session.close()


def _check(
    model: Any, optimizer: OptimizerLike | None, parts: load.Split, job: Job, learner: Learner, engine: Engine, run: Run
) -> int:
    """Raise if the parts of a training do not fit together; return the axis of the outputs along which classes are compared."""
    job.check(learner)
    check_quorum(job.scheme, engine.workers)
    engine.check(job, learner)
    if isinstance(learner, TorchLearner) and isinstance(model, nn.Module):
        check_fit(learner, parts)
    if isinstance(learner, TorchLearner | KerasLearner) and job.scheme.plain_sgd and not learner.is_plain_sgd:
        raise UsageError(
            f"{type(job.scheme).__name__} is defined for plain SGD, but the optimiser is "
            f"{describe_optimizer(optimizer, model)}: use {PLAIN[isinstance(learner, KerasLearner)]} without momentum, weight "
            "decay and clipping."
        )
    if isinstance(learner, KerasLearner):
        job.center_optimizer(learner)  # raises if the model's optimiser cannot step at the center
    if (run.stop.looks or run.keep == "best") and parts.validation is None:
        needs = "keep='best'" if run.keep == "best" else "A target or patience"
        raise UsageError(f"{needs} needs validation rows: give validation= or holdout=.")
    if isinstance(learner, TorchLearner | KerasLearner) and isinstance(model, nn.Module):
        return rehearse(learner, parts, EVALUATION_BATCH)
    return 1


def _identity(job: Job, learner: Learner, engine: Engine, run: Run) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the run before it."""
    plan = job.plan
    return {
        "scheme": options.describe(job.scheme),
        "workers": engine.workers,
        "rows": plan.rows,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "parameters": learner.weights.numel(),
        "buffers": learner.buffers.numel(),
        "data": load.fingerprint(job.train),
        **({"partition": run.partition} if isinstance(plan, PartitionedPlan) else {}),
        "codec": None if job.codec is None else options.describe(job.codec),
    }


def _checkpoint(
    directory: RunDirectory, identity: dict[str, Any], job: Job, engine: Engine, run: Run, notes: list[str]
) -> Checkpoint | None:
    """Return the checkpoint to resume from, if there is one; add notes about it."""
    if not run.resume:
        return None
    left = engine.recall(directory.path) if isinstance(engine, Recalls) else None
    found = directory.checkpoint(identity, notes, left)
    if found is not None and (done := found.numbers["tally"]["samples"] // job.plan.rows) >= job.plan.epochs:
        notes.append(
            f"The run has already trained {counted(done, 'epoch')}, and epochs={job.plan.epochs}: nothing is left to train. "
            f"Give epochs above {done} to go on."
        )
    return found


def _write_model_facts(
    directory: RunDirectory, model: Any, learner: Learner, parts: load.Split, axis: int, notes: list[str]
) -> None:
    card = card_of(model, getattr(learner, "loss", None), parts, axis, positive_in(getattr(learner, "metrics", {})))
    fitted = transforms_of(parts)
    if fitted is not None and card.head == "numbers" and fitted.changes(card.label):
        notes.append(
            f"The label {card.label!r} is transformed: the loss and your own metrics are in the transformed units; "
            "predictions, and the errors of pg.load and paragrad evaluate, are in the units of the data."
        )
    directory.write_model_facts(card.to_json(), None if fitted is None else fitted.to_json())


def _facts(job: Job, learner: Learner, engine: Engine) -> dict[str, Any]:
    """Return the settings that both the start event and the summary hold."""
    return {
        "scheme": options.describe(job.scheme),
        "engine": options.describe(engine),
        **({} if job.codec is None else {"codec": options.describe(job.codec)}),
        "workers": engine.workers,
        "epochs": job.plan.epochs,
        "batch_size": job.plan.batch_size,
        "parameters": learner.weights.numel(),
        "seed": job.plan.seed,
    }


def _emit_start(session: Session, job: Job, learner: Learner, engine: Engine) -> None:
    config = session.settings
    session.say("directory", path=str(session.directory))
    session.emit(
        "start",
        **_facts(job, learner, engine),
        rows=job.plan.rows,
        batches=job.plan.batches,
        threads=engine.threads_for(learner),
        fingerprint=session.identity["data"],
        weights=digest(learner.weights),
        loss=config.get("loss"),
        **{key: config[key] for key in SETTINGS if key in config},
        partition=session.run.partition,
        distances=session.run.distances,
        overlap=job.scheme.overlap,
        torch=torch.__version__,
        **({"cluster": config["cluster"]} if "cluster" in config else {}),
    )


def _run(engine: Engine, job: Job, session: Session, learner: Learner) -> Center:
    """Run the engine; after an error write a checkpoint and the end of the record first."""
    try:
        return engine.run(job, session, learner)
    except Exception as error:
        session.time.end()
        # After an unexpected error the checkpoint may fail as well. That must not hide the first error.
        expected = isinstance(error, ParagradError)
        with contextlib.nullcontext() if expected else contextlib.suppress(Exception):
            session.checkpoint(wait=True)
        session.emit("end", reason=type(error).__name__)
        raise


def _finish(
    model: Any, job: Job, learner: Learner, engine: Engine, center: Center, session: Session, directory: RunDirectory
) -> Result:
    """Write the last checkpoint, validate and save the model; raise Interrupted if a signal stopped the run."""
    stopped = session.stopped
    session.checkpoint(wait=True)
    if stopped == "interrupted":
        session.emit("end", reason="interrupted")
        raise Interrupted(
            f"The run was stopped at update {center.clock}{_how_to_go_on(session, engine)}",
            str(directory.path),
            session.interrupted_by,
        )
    found, kept = bring_to_result(session, learner, job.validation, EVALUATION_BATCH)
    final = trained(model, learner, center)
    summary = summarise(_facts(job, learner, engine), session, found, kept) | traffic(job, session, learner)
    result = Result(
        model=final,
        directory=directory.path,
        summary=summary,
        staleness=session.tally.staleness,
        history=session.tally.validations,
        stopped=stopped or "finished",
    )
    try:
        directory.save_model(learner)
        directory.write_summary(summary)
    except OSError as error:
        session.emit("end", reason="not written")
        raise NotWritten(
            f"The training is done, but the model or its summary could not be written to {directory.path} ({error}). "
            f"Make room on the disk. The run ended at update {center.clock}{_how_to_go_on(session, engine)}",
            result,
        ) from error
    # The record of a simulated run leaves out what depends on the machine, so that it repeats to the byte.
    real = OF_THE_MACHINE if session.time.virtual else ()
    session.emit("end", reason=result.stopped, summary={k: v for k, v in summary.items() if k not in real})
    return result


def digest(weights: Vector) -> str:
    """Return a checksum of the weights that a run starts from."""
    return f"{zlib.crc32(weights.detach().numpy().tobytes()):08x}"


def _how_to_go_on(session: Session, engine: Engine) -> str:
    """Return the rest of a sentence on the end of a run: what was saved, and how to resume."""
    out, recalls = session.directory, isinstance(engine, Recalls)
    if session.saved == session.clock:
        kept = " and has a checkpoint"
    elif recalls:
        kept = "; its state is in the memory of this machine"
    elif session.saved is None:
        return ", without a checkpoint."
    else:
        kept = f"; its last checkpoint is from update {session.saved}"
    ways = [] if session.run.spelled else [f"call pg.train again with run=pg.Run(out={str(out)!r}, resume=True)"]
    if not any(str(value).startswith("python:") for value in session.settings.values()):
        ways.append(f"paragrad {'serve' if recalls else 'train'} --resume {out}")
    return f"{kept}. To go on: {', or: '.join(ways)}"
