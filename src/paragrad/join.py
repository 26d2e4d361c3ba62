"""join(...): a worker for a center in another process or on another machine, which defines what is trained and how."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paragrad import codecs, schemes
from paragrad.codecs.codec import Codec
from paragrad.config import options
from paragrad.core.job import Job
from paragrad.engines.exchange.worker import warm_learner
from paragrad.engines.net.worker import same_as, work_on
from paragrad.engines.process import devices
from paragrad.engines.process.devices import usable_cores
from paragrad.engines.process.signals import sigterm_as_ctrl_c
from paragrad.engines.transport.connection import PATIENCE, Connection, RunEnded
from paragrad.engines.transport.endpoint import Endpoint, address_of, read_token, split_address
from paragrad.errors import UsageError
from paragrad.jobs import recipe
from paragrad.jobs.build import build_job, read_rows
from paragrad.learners.criterion import Loss
from paragrad.learners.learner import Learner
from paragrad.models.builtin import is_keras
from paragrad.optim.choice import Optimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.schemes.scheme import Scheme

FROM_FILES = (".py", ".keras")
"""Endings of files whose code runs when a model is built."""


def join(
    where: str | Path,
    model: nn.Module | Callable[[], Learner] | str | None = None,
    data: Any = None,
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    certificate: str | Path | None = None,
    holdout: float | None = None,
    loss: Loss | str | None = None,
    optimizer: OptimizerLike | None = None,
    scheme: Scheme | None = None,
    codec: Codec | None = None,
    allow_import: Sequence[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    shared: bool = True,
    patience: float = PATIENCE,
    say: Callable[[str], None] = print,
) -> str:
    """Work for the center of a run until it ends; return why it ended ("left": by Ctrl-C or SIGTERM).

    where       the run directory, if this machine sees it, or HOST:PORT
    model, data, holdout, loss, optimizer, scheme, codec    as they were given to ``pg.train``; None: as in the center's
                run.toml
    token       the center's token; by default read from ``token_file``, or from the file token in the run directory
    certificate the PEM file to trust, for HOST:PORT; a run directory contains it
    allow_import    files that a model named by the center may be imported from; no other file is imported
    shared      use the center's memory, if it is on this machine
    patience    seconds to wait for a center that cannot be reached
    """
    found, token = _find(where, certificate), _token(token, token_file, where)
    connection = Connection(found, token, patience=patience, shared=shared, say=say)
    threads = threads or _cores_of_a_task()
    torch.set_num_threads(threads or usable_cores())
    devices.check(device)
    try:
        with sigterm_as_ctrl_c():
            job = _job(connection.about(), model, data, holdout, loss, optimizer, scheme, codec, allow_import)
            learner = warm_learner(job, device)
            same = same_as(job, learner)
            try:
                work_on(job, learner, connection, same, shares_cores=threads is None)
            except RunEnded:
                raise
            except Exception:
                connection.leave(traceback.format_exc())
                raise
    except RunEnded as ended:
        return str(ended)
    except KeyboardInterrupt:
        connection.leave(early=True)
        return "left"
    finally:
        connection.close()
    return "finished"


def _find(where: str | Path, certificate: str | Path | None) -> Path | Endpoint:
    if _is_directory(where):
        return Path(where)
    host, port = split_address(str(where))
    try:
        pem = None if certificate is None else Path(certificate).read_text(encoding="ascii")
    except OSError as error:
        raise UsageError(f"The certificate {str(certificate)!r} cannot be read ({error.strerror}).") from None
    return Endpoint(address_of(host, port), pem)


def _is_directory(where: str | Path) -> bool:
    """Return whether this names a directory, which may not exist yet."""
    return isinstance(where, Path) or "/" in where or ":" not in where or Path(where).is_dir()


def _token(token: str | None, file: str | Path | None, where: str | Path) -> str | None:
    if token is not None and file is not None:
        raise UsageError("Both token and token_file are given: give one of them.")
    if file is not None:
        return read_token(Path(file))
    if token is None and not _is_directory(where):
        raise UsageError(f"{where} needs a token: give --token-file FILE, a copy of the file token in its run directory.")
    return token


def _job(
    about: Mapping[str, Any],
    model: Any,
    data: Any,
    holdout: float | None,
    loss: Any,
    optimizer: OptimizerLike | None,
    scheme: Scheme | None,
    codec: Codec | None,
    allow_import: Sequence[str],
) -> Job:
    """Build the center's job from the files of this machine."""
    settings: dict[str, Any] = dict(about["settings"])
    if isinstance(data, str | list) or hasattr(data, "__fspath__"):
        settings["data"] = data if isinstance(data, list) else os.fspath(data)
        data = None
    if isinstance(model, str):
        settings["model"] = model
        model = None
    elif model is None:
        _check_import(str(settings["model"]), allow_import)
    if settings.pop("validation", None) is not None:
        settings["holdout"] = 0.0  # the center validates, on files that a worker need not have
    if holdout is not None:
        settings["holdout"] = holdout
    scheme = scheme or options.parse(settings["scheme"], "scheme", schemes)
    if codec is None and settings.get("codec") is not None:
        codec = options.parse(settings["codec"], "codec", codecs)
    if model is None and data is None:
        model, given = recipe.build(settings | ({"loss": loss} if isinstance(loss, str) else {}))
        data, settings["holdout"] = given["data"], given["holdout"]
    elif model is None or data is None:
        raise UsageError("Give both model and data, as they were given to pg.train, or neither.")
    wanted = settings.get("loss") if loss is None else loss
    parts = read_rows(model, data, holdout=settings.get("holdout"), seed=settings["seed"], loss=wanted)
    if optimizer is None and not is_keras(model):
        _check_python(settings, "optimizer", "schedule")
        optimizer = Optimizer.from_settings(settings)
    if loss is None:
        _check_python(settings, "loss")
        loss = settings.get("loss")
    return build_job(
        model,
        replace(parts, validation=None),
        scheme=scheme,
        codec=codec,
        loss=loss,
        optimizer=optimizer,
        workers=about["workers"],
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        seed=settings["seed"],
        partition=settings["partition"],
        distances=bool(settings.get("distances")),
    )


def _check_import(model: str, allowed: Sequence[str]) -> None:
    """Raise unless the user has allowed the code that the center's model would run."""
    file = model.rpartition(":")[0] if ".py:" in model else model
    if not file.endswith(FROM_FILES):
        return
    if any(Path(entry).expanduser().resolve() == Path(file).expanduser().resolve() for entry in allowed):
        return
    raise UsageError(
        f"The center names the model {model!r}, whose code this worker would run. A worker imports only what its own command "
        f"line allows: give --model {model}, or --allow-import {file}."
    )


def _check_python(settings: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if str(settings.get(key)).startswith("python:"):
            raise UsageError(
                f"The center's {key} is {settings[key]!r}, made in Python, which has no name: join from Python, with "
                f"pg.join(..., {key}=...), or give the run's {key} by name."
            )


def _cores_of_a_task() -> int | None:
    """Return the cores that Slurm reserves for this worker; None: it shares those of the machine with other workers."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(int(cores), usable_cores()) if cores.isdecimal() and int(cores) else None
