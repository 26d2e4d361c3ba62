"""train(...): wires the rooms together, from a model and its data to a run directory and a trained model."""

from __future__ import annotations

import contextlib
import copy
import platform
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from paragrad import __version__, options, toys
from paragrad.card import card_of, transforms_of
from paragrad.center import Center, check_quorum
from paragrad.checkpoint import Checkpoint
from paragrad.cluster import to_config
from paragrad.codecs.codec import Codec
from paragrad.data import load
from paragrad.data.plan import Plan
from paragrad.data.shards import ShardPlan, sharded
from paragrad.data.source import plan_of
from paragrad.data.stream import Streamed
from paragrad.directory import RunDirectory
from paragrad.engines.local import Local
from paragrad.engines.signals import Signals
from paragrad.errors import Interrupted, NotWritten, ParagradError, UsageError
from paragrad.factories import learner_factory
from paragrad.job import Job
from paragrad.learners import kerasmodel
from paragrad.learners.keras import KerasLearner
from paragrad.learners.kerasoptimizer import KerasCenter
from paragrad.learners.learner import Learner
from paragrad.learners.torch import Loss, Metric, TorchLearner, call, split
from paragrad.models import is_keras
from paragrad.optim.choice import SETTINGS, Optimizer, spelling
from paragrad.optim.optimizer import OptimizerLike
from paragrad.result import Result
from paragrad.run import Run
from paragrad.schemes.agn import AGN
from paragrad.schemes.scheme import Scheme
from paragrad.session import Session
from paragrad.types import Vector

EVALUATION_BATCH = 512
PLAIN = ("optimizer='sgd:lr=...'", "keras.optimizers.SGD(learning_rate=...)")
"""How a user asks for plain SGD, of torch and of Keras."""
OF_THE_MACHINE = ("wall_seconds", "samples_per_second")
"""What the summary of a simulated run says of the real time that it took."""


class Engine(Protocol):
    """Where workers run."""

    @property
    def workers(self) -> int:
        """How many."""

    def threads_for(self, learner: Learner) -> int:
        """Threads that a worker's model computes with."""

    def prepare(self) -> None:
        """Begin to start what takes time."""

    def check(self, job: Job, learner: Learner) -> None:
        """Raise where it cannot do what the job asks for; nothing has been written yet."""

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; return the center as it is in the end."""


@runtime_checkable
class Recalls(Protocol):
    """An engine whose center leaves its state in memory when it is killed."""

    def recall(self, directory: Path) -> Checkpoint | None:
        """What it has left in this run directory."""


def train(
    model: nn.Module | Callable[[], Learner],
    data: Any,
    *,
    validation: Any = None,
    holdout: float | None = None,
    loss: Loss | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    optimizer: OptimizerLike | None = None,
    scheme: Scheme | None = None,
    engine: Engine | None = None,
    codec: Codec | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    run: Run | None = None,
) -> Result:
    """Train a model with several workers.

    model       a torch module, or a compiled Keras model, which brings loss, optimiser and metrics (either is left as it
                is: ``result.model`` is the trained one); or a function without arguments that makes a ``Learner``
    data        (x, y) as NumPy arrays or torch tensors, nested for several inputs; a torch Dataset or DataLoader; a pandas or
                polars frame; files (.csv, .parquet, .h5, .root, .npy) by path, glob, directory or list, and ``pg.Table`` to
                say which columns are what; ``pg.Weighted`` for rows with weights, ``pg.Generated`` for a generator,
                ``pg.Streamed`` for rows that you read yourself, piece by piece; ``"digits"``; the path of an .npz with x_train,
                y_train and perhaps x_test, y_test; ``"noise"`` for a toy problem, such as ``paragrad.toys.Beale()``
    validation  like ``data``; or ``holdout``: a share of the rows to keep for it
    loss        a callable (output, target) -> one number, or a name; by default from the kind of target
    metrics     further callables (output, target) -> number, by name
    optimizer   a name (``"adam:lr=0.001"``), a factory that takes parameters, or one that takes the ``model``; with a
                learning-rate schedule or gradient clipping: ``pg.Optimizer("adam", schedule="cosine", clip_norm=1.0)``
    scheme      how the workers cooperate, e.g. ``pg.AGN(window=15)``
    engine      where they run, e.g. ``pg.Local(workers=4)``
    codec       how commits are made shorter, e.g. ``pg.TopK(0.01)``; what that leaves out goes into a worker's next commit
    batch_size  rows in one worker's mini-batch
    run         where the run is written, checkpoints, validation, when to stop: ``pg.Run(...)``
    """
    scheme, engine, run = scheme or AGN(), engine or Local(), run or Run()
    if not isinstance(scheme, Scheme):
        raise UsageError(f"scheme={scheme!r} is not a scheme; give an object such as pg.AGN(window=15).")
    if codec is not None and not isinstance(codec, Codec):
        raise UsageError(f"codec={codec!r} is not a codec; give an object such as pg.TopK(0.01).")
    engine.prepare()
    toy = model if isinstance(model, toys.Toy) else None
    loss = toys.LOSS if toy is not None and loss is None else loss
    width = toy.size if toy is not None else None
    # Keras has a meaning of its own for weights: they are left as they are.
    parts = load.split(data, validation, holdout, seed, width=width, scaled=not is_keras(model))
    plan = plan_of(parts.train, batch_size=batch_size, epochs=epochs, seed=seed)
    if engine.workers > plan.batches:
        raise UsageError(
            f"{engine.workers} workers, but an epoch of {plan.rows:,} rows has only {plan.batches} mini-batches of "
            f"{batch_size}. Use at most {plan.batches} workers or a smaller batch_size."
        )
    plan = sharded(plan, parts.train, run.shards, engine.workers)
    notes = list(parts.notes)
    if optimizer is None and not is_keras(model):
        optimizer = "adam"
    make_learner = learner_factory(model, loss, optimizer, metrics, parts, scheme, notes)
    job = Job(scheme, make_learner, parts.train, parts.validation, plan, EVALUATION_BATCH, distances=run.distances, codec=codec)
    learner = make_learner("cpu")
    job.check(learner)
    check_quorum(scheme, engine.workers)
    engine.check(job, learner)
    if isinstance(learner, TorchLearner) and isinstance(model, nn.Module):
        _check_fit(learner, parts)
    if isinstance(learner, TorchLearner | KerasLearner) and scheme.plain_sgd and not learner.is_plain_sgd:
        raise UsageError(
            f"{type(scheme).__name__} is an equation of plain SGD, but the optimiser is {_described(optimizer, model)}: use "
            f"{PLAIN[isinstance(learner, KerasLearner)]} without momentum, weight decay and clipping."
        )
    if isinstance(learner, KerasLearner):
        job.center_optimizer(learner)  # raises where this model has none that could step at the center
    if run.stop.looks and parts.validation is None:
        raise UsageError("A target or patience needs validation rows: give validation= or holdout=.")

    identity = {
        "scheme": options.describe(scheme),
        "workers": engine.workers,
        "rows": plan.rows,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "parameters": learner.weights.numel(),
        "data": load.fingerprint(parts.train),
        **({"shards": run.shards} if isinstance(plan, ShardPlan) else {}),
        "codec": None if codec is None else options.describe(codec),
    }
    directory = RunDirectory.open(run, scheme.name)
    left = engine.recall(directory.path) if run.resume and isinstance(engine, Recalls) else None
    resumed = directory.checkpoint(identity, notes, left) if run.resume else None
    spelled = str(data) if isinstance(data, str | Path) else parts.name
    config = _config(run, spelled, parts, model, loss, optimizer, scheme, engine, codec, plan, holdout)
    directory.write_config(config)
    card = card_of(model, getattr(learner, "loss", None), parts)
    fitted = transforms_of(parts)
    directory.write_model_facts(card.to_json(), None if fitted is None else fitted.to_json())
    facts = _facts(scheme, engine, codec, plan, learner)
    session = Session(directory.path, run, plan, identity=identity)
    session.resumed, session.anew = resumed, directory.used and resumed is None
    session.settings = config
    for source in (parts.train, parts.validation):
        if isinstance(source, Streamed):
            source.report = lambda message: session.emit("warning", message=message)
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
                shards=run.shards,
                distances=run.distances,
                overlap=scheme.overlap,
                torch=torch.__version__,
                **({"cluster": config["cluster"]} if "cluster" in config else {}),
            )
            for note in notes:
                session.emit("note", message=note)
            for warning in scheme.warnings(engine.workers):
                session.emit("warning", message=warning)
            try:
                center = engine.run(job, session, learner)
            except Exception as error:
                session.end()
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
                    f"The run was stopped at update {center.clock}{_how_to_go_on(session, engine)}", str(directory.path)
                )
            final = trained(model, learner, center)
            found = _final_validation(session, learner, parts, center)
            summary = _summary(facts, session, found) | _traffic(job, session, learner)
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
            real = OF_THE_MACHINE if session.virtual else ()
            session.emit("end", reason=result.stopped, summary={k: v for k, v in summary.items() if k not in real})
    except Interrupted:
        raise
    except KeyboardInterrupt:  # a second one: nothing more is waited for, nor written
        session.end()
        session.emit("end", reason="ended at once")
        raise Interrupted(f"The run was ended at once{_how_to_go_on(session, engine)}", str(directory.path)) from None
    finally:
        session.close()
    return result


# -- before ---------------------------------------------------------------------------------------------------------


def digest(weights: Vector) -> str:
    """A short text that changes with the weights: what a run began from."""
    return f"{zlib.crc32(weights.detach().numpy().tobytes()):08x}"


def _check_fit(learner: TorchLearner, parts: load.Split) -> None:
    """Try two rows before any process is started: a model that does not fit its data fails here, in the caller."""
    rows = np.arange(min(2, len(parts.train)), dtype=np.int64)
    inputs, _ = split(parts.train.batch(rows))
    learner.module.eval()
    try:
        with torch.no_grad():
            output = call(learner.module, inputs)
    except UsageError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"The model does not take these rows: {type(error).__name__}: {error}") from error
    finally:
        learner.module.train()
    if isinstance(output, torch.Tensor) and output.ndim == 2 and isinstance(learner.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        for source in (parts.train, parts.validation):
            if source is not None:
                load.check_labels(source, output.shape[1])


def _config(
    run: Run,
    data: str,
    parts: load.Split,
    model: Any,
    loss: Any,
    optimizer: Any,
    scheme: Scheme,
    engine: Engine,
    codec: Codec | None,
    plan: Plan,
    holdout: float | None,
) -> dict[str, Any]:
    spelled, cluster = run.spelled, getattr(engine, "cluster", None)
    table = None if parts.opened is None else parts.opened.table.config()
    config: dict[str, Any] = {
        "data": spelled.get("data", data),
        **(table or {}),
        "model": spelled.get("model", model.spelled() if isinstance(model, toys.Toy) else f"python:{type(model).__name__}"),
        "loss": spelled.get("loss", spelling(loss)),
        **_settings(optimizer, model),
        "scheme": options.describe(scheme),
        "engine": options.describe(engine),
        "codec": None if codec is None else options.describe(codec),
        "cluster": None if cluster is None else to_config(cluster),
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "shards": run.shards,
        "distances": run.distances or None,
        "holdout": holdout,
        "checkpoint_every": run.checkpoint_every,
        "validate_every": run.validate_every,
        "max_seconds": run.stop.seconds,
        "target_accuracy": run.stop.accuracy,
        "target_loss": run.stop.loss,
        "patience": run.stop.patience,
    }
    meant = ("checkpoint_every", "validate_every")  # None is a choice here, and not the default
    return {key: value for key, value in config.items() if value is not None or key in meant}


def _settings(optimizer: OptimizerLike | None, model: Any) -> dict[str, Any]:
    """What a run.toml says of the optimiser; a Keras model has its own."""
    return {} if optimizer is None and is_keras(model) else Optimizer.of(optimizer).spelled()


def _described(optimizer: OptimizerLike | None, model: Any) -> str:
    if optimizer is None and is_keras(model):
        return type(model.optimizer).__name__
    said = {key: value for key, value in Optimizer.of(optimizer).spelled().items() if value is not None}
    return ", ".join(str(value) if key == "optimizer" else f"{key}={value}" for key, value in said.items())


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


# -- after ----------------------------------------------------------------------------------------------------------


def trained(model: Any, learner: Learner, center: Center) -> Any:
    """Bring the learner to the center; returns the model as the user gave it, trained, or the user's own learner."""
    learner.weights.copy_(center.value)
    learner.buffers.copy_(center.state.buffers)
    learner.integers.copy_(center.state.integers)
    learner.spread()
    if isinstance(learner, KerasLearner) and is_keras(model):
        if isinstance(center.optimizer, KerasCenter):
            learner.load(center.optimizer.state())
        return learner.copy(kerasmodel.device_of(model))
    if not isinstance(learner, TorchLearner) or not isinstance(model, nn.Module):
        return learner
    result = copy.deepcopy(model)
    result.load_state_dict(learner.module.state_dict())
    return result


def _how_to_go_on(session: Session, engine: Engine) -> str:
    """The rest of a sentence about where a run ended: what is kept of it, and the command that goes on from there."""
    out, recalls = session.directory, isinstance(engine, Recalls)
    if session.saved == session.clock:
        kept = " and has a checkpoint"
    elif recalls:
        kept = "; what it came to is in the memory of this machine"
    elif session.saved is None:
        return ", and there is no checkpoint of it."
    else:
        kept = f"; its last checkpoint is that of update {session.saved}"
    command = "serve" if recalls else "train"
    return f"{kept}. Go on with pg.Run(out={str(out)!r}, resume=True), or: paragrad {command} --resume {out}"


def _final_validation(session: Session, learner: Learner, parts: load.Split, center: Center) -> dict[str, float]:
    if parts.validation is None:
        return {}
    began = time.monotonic()
    found = learner.evaluate(parts.validation, EVALUATION_BATCH)
    session.validated(found, center.clock, time.monotonic() - began, last=True)
    return found


def _traffic(job: Job, session: Session, learner: Learner) -> dict[str, Any]:
    """Bytes of the vectors that workers sent, those of buffers left aside; and how many times as many they would be plain."""
    tally, scheme = session.tally, job.scheme
    sent = tally.commits + tally.refused + tally.dropped
    vectors = 0 if scheme.aliased else 1 + len(scheme.sends)
    plain = sent * vectors * learner.weights.numel() * learner.weights.element_size() // scheme.parts
    if job.codec is None:
        return {"bytes_sent": plain}
    return {"bytes_sent": tally.bytes, "plain_over_sent": round(plain / tally.bytes, 2) if tally.bytes else None}


def _summary(facts: dict[str, Any], session: Session, found: dict[str, float]) -> dict[str, Any]:
    tally = session.tally
    return {
        **facts,
        "steps": tally.steps,
        "commits": tally.commits,
        "samples": tally.samples,
        "seconds": round(session.seconds, 4),
        "samples_per_second": round(session.rate, 2),
        "train_loss": tally.train_loss,
        "test_loss": found.get("loss"),
        "test_accuracy": found.get("accuracy"),
        "metrics": {name: value for name, value in found.items() if name not in ("loss", "accuracy")},
        "staleness": tally.staleness.summary(),
        "refused_commits": tally.refused,
        "dropped_commits": tally.dropped,
        "lost_workers": tally.lost,
        "stopped": session.stopped or "finished",
        **session.measured,
        "versions": {
            "paragrad": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
