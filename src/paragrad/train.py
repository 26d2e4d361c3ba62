"""train(...): wires the rooms together, from a model and its data to a run directory and a trained model."""

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
from paragrad.core.rounds import check_quorum
from paragrad.data import load
from paragrad.data.partition import PartitionedPlan
from paragrad.data.plan import Plan
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
from paragrad.rundir.directory import RunDirectory
from paragrad.rundir.notices import Notices, Verbose
from paragrad.rundir.outcome import bring_to_result, summarise, traffic, trained
from paragrad.rundir.session import Session
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import name_of
from paragrad.types import Vector

PLAIN = ("optimizer='sgd:lr=...'", "keras.optimizers.SGD(learning_rate=...)")
"""How a user asks for plain SGD, of torch and of Keras."""
OF_THE_MACHINE = ("wall_seconds", "samples_per_second")
"""What the summary of a simulated run says of the real time that it took."""


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

    model       a torch module, or a compiled Keras model, which brings loss, optimiser and metrics (either is left as it
                is: ``result.model`` is the trained one); or a function without arguments that makes a ``Learner``
    data        (x, y) as NumPy arrays or torch tensors, nested for several inputs; a torch Dataset or DataLoader; a pandas or
                polars frame; files (.csv, .parquet, .h5, .root, .npy) by path, glob, directory or list, and ``pg.Table`` to
                say which columns are what; ``pg.Weighted`` for rows with weights, ``pg.Generated`` for a generator,
                ``pg.Streamed`` for rows that you read yourself, piece by piece; ``"digits"``; the path of an .npz with x_train,
                y_train and perhaps x_test, y_test; ``"noise"`` for a toy problem, such as ``paragrad.models.toys.Beale()``
    validation  like ``data``; or ``holdout``: a share of the rows to keep for it
    loss        a callable (output, target) -> one number, or a name; by default from the kind of target
    metrics     further figures of the validation rows: a list of names ("auc", "f1:positive=signal", "mae") and functions, or
                functions (output, target) -> number of all rows by name; or metrics with ``reset``, ``update`` and ``compute``
    optimizer   a name (``"adam:lr=0.001"``), a factory that takes parameters, or one that takes the ``model``; with a
                learning-rate schedule or gradient clipping: ``pg.Optimizer("adam", schedule="cosine", clip_norm=1.0)``
    scheme      how the workers cooperate, e.g. ``pg.AGN(window=15)`` or ``"agn:window=15"``
    engine      where they run, e.g. ``pg.Local(workers=4)`` or ``"local:workers=4"``
    codec       how commits are made shorter, e.g. ``pg.TopK(0.01)`` or ``"topk:share=0.01"``; a worker's next commit holds what
                this one leaves out
    batch_size  rows in one worker's mini-batch; by default that of a DataLoader, else 32
    verbose     "auto": progress and notes are shown, live in a terminal, as plain lines elsewhere; 1: always as plain lines; 0:
                nothing. Warnings are ``pg.ParagradWarning``, and the log is ``logging.getLogger("paragrad")``
    run         the run directory; or ``pg.Run(...)``: also checkpoints, validation, when to stop
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
    plan, learner = job.plan, job.make_learner("cpu")
    job.check(learner)
    check_quorum(scheme, engine.workers)
    engine.check(job, learner)
    if isinstance(learner, TorchLearner) and isinstance(model, nn.Module):
        check_fit(learner, parts)
    if isinstance(learner, TorchLearner | KerasLearner) and scheme.plain_sgd and not learner.is_plain_sgd:
        chosen = describe_optimizer(optimizer, model)
        raise UsageError(
            f"{type(scheme).__name__} is an equation of plain SGD, but the optimiser is {chosen}: use "
            f"{PLAIN[isinstance(learner, KerasLearner)]} without momentum, weight decay and clipping."
        )
    if isinstance(learner, KerasLearner):
        job.center_optimizer(learner)  # raises where this model has none that could step at the center
    if (run.stop.looks or run.keep == "best") and parts.validation is None:
        needs = "keep='best'" if run.keep == "best" else "A target or patience"
        raise UsageError(f"{needs} needs validation rows: give validation= or holdout=.")
    axis = 1
    if isinstance(learner, TorchLearner | KerasLearner) and isinstance(model, nn.Module):
        axis = rehearse(learner, parts, EVALUATION_BATCH)

    known = [*parts.warnings, *scheme.warnings(outlook(plan, engine.workers, optimizer, model))]
    notices.before(known)
    identity = {
        "scheme": options.describe(scheme),
        "workers": engine.workers,
        "rows": plan.rows,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "parameters": learner.weights.numel(),
        "buffers": learner.buffers.numel(),
        "data": load.fingerprint(parts.train),
        **({"partition": run.partition} if isinstance(plan, PartitionedPlan) else {}),
        "codec": None if codec is None else options.describe(codec),
    }
    directory = RunDirectory.open(run, name_of(scheme))
    left = engine.recall(directory.path) if run.resume and isinstance(engine, Recalls) else None
    resumed = directory.checkpoint(identity, notes, left) if run.resume else None
    if resumed is not None and (done := resumed.numbers["tally"]["samples"] // plan.rows) >= epochs:
        notes.append(
            f"The run has {counted(done, 'epoch')} behind it, and epochs={epochs}: nothing is left to train. Give epochs above "
            f"{done} to go on."
        )
    spelled = {"data": str(data) if isinstance(data, str | Path) else parts.name, "validation": paths_of(validation)}
    config = settings_of(run, spelled, parts, model, loss, metrics, optimizer, scheme, engine, codec, plan, holdout)
    directory.write_config(config)
    card = card_of(model, getattr(learner, "loss", None), parts, axis, positive_in(getattr(learner, "metrics", {})))
    fitted = transforms_of(parts)
    if fitted is not None and card.head == "numbers" and fitted.changes(card.label):
        notes.append(
            f"The label {card.label!r} is transformed: loss and metrics of your own are in its new units; predictions "
            "and the errors of pg.load and paragrad evaluate are in those of the data."
        )
    directory.write_model_facts(card.to_json(), None if fitted is None else fitted.to_json())
    facts = _facts(scheme, engine, codec, plan, learner)
    held = 0 if parts.validation is None else len(parts.validation)
    session = Session(directory.path, run, plan, identity=identity, held=held)
    session.resumed, session.anew = resumed, directory.used and resumed is None
    session.settings = config
    session.checkpoints.names = learner.layout if isinstance(learner, Flattened) else {}
    for source in (parts.train, parts.validation):
        if isinstance(source, Reporting):
            source.report = ReportHere(lambda message: session.emit("warning", message=message))
    if isinstance(learner, Reports):
        learner.report = cache(lambda message: session.emit("warning", message=message))
    try:
        with Signals(session):
            session.say("directory", path=str(directory.path))
            session.emit(
                "start",
                **facts,
                rows=plan.rows,
                batches=plan.batches,
                threads=engine.threads_for(learner),
                fingerprint=identity["data"],
                weights=digest(learner.weights),
                loss=config.get("loss"),
                **{key: config[key] for key in SETTINGS if key in config},
                partition=run.partition,
                distances=run.distances,
                overlap=scheme.overlap,
                torch=torch.__version__,
                **({"cluster": config["cluster"]} if "cluster" in config else {}),
            )
            for note in notes:
                session.emit("note", message=note)
            for warning in known:
                session.emit("warning", message=warning)
            try:
                center = engine.run(job, session, learner)
            except Exception as error:
                session.time.end()
                # What nobody foresaw may have broken more than itself: that must not hide it.
                foreseen = isinstance(error, ParagradError)
                with contextlib.nullcontext() if foreseen else contextlib.suppress(Exception):
                    session.checkpoint(wait=True)
                session.emit("end", reason=type(error).__name__)
                raise
            stopped = session.stopped
            session.checkpoint(wait=True)
            if stopped == "interrupted":
                session.emit("end", reason="interrupted")
                raise Interrupted(
                    f"The run was stopped at update {center.clock}{_how_to_go_on(session, engine)}",
                    str(directory.path),
                    session.interrupted_by,
                )
            found, kept = bring_to_result(session, learner, parts.validation, EVALUATION_BATCH)
            final = trained(model, learner, center)
            summary = summarise(facts, session, found, kept) | traffic(job, session, learner)
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
            # The record of a simulated run holds nothing of the machine that it ran on, so that it repeats to the byte.
            real = OF_THE_MACHINE if session.time.virtual else ()
            session.emit("end", reason=result.stopped, summary={k: v for k, v in summary.items() if k not in real})
    except Interrupted:
        raise
    except KeyboardInterrupt:  # a second one: nothing more is waited for, nor written
        session.time.end()
        session.emit("end", reason="ended at once")
        raise Interrupted(
            f"The run was ended at once{_how_to_go_on(session, engine)}", str(directory.path), session.interrupted_by
        ) from None
    finally:
        notices.close()
        session.close()
    return result


def digest(weights: Vector) -> str:
    """A short text that changes with the weights: what a run began from."""
    return f"{zlib.crc32(weights.detach().numpy().tobytes()):08x}"


def _how_to_go_on(session: Session, engine: Engine) -> str:
    """The rest of a sentence about where a run ended: what is kept of it, and what goes on from there."""
    out, recalls = session.directory, isinstance(engine, Recalls)
    if session.saved == session.clock:
        kept = " and has a checkpoint"
    elif recalls:
        kept = "; what it came to is in the memory of this machine"
    elif session.saved is None:
        return ", and there is no checkpoint of it."
    else:
        kept = f"; its last checkpoint is that of update {session.saved}"
    ways = [] if session.run.spelled else [f"call pg.train again with run=pg.Run(out={str(out)!r}, resume=True)"]
    if not any(str(value).startswith("python:") for value in session.settings.values()):
        ways.append(f"paragrad {'serve' if recalls else 'train'} --resume {out}")
    return f"{kept}. To go on: {', or: '.join(ways)}"


def _facts(scheme: Scheme, engine: Engine, codec: Codec | None, plan: Plan, learner: Learner) -> dict[str, Any]:
    """What both the record's first line and the summary say of a run."""
    return {
        "scheme": options.describe(scheme),
        "engine": options.describe(engine),
        **({} if codec is None else {"codec": options.describe(codec)}),
        "workers": engine.workers,
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "parameters": learner.weights.numel(),
        "seed": plan.seed,
    }
