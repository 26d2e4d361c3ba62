"""A run's directory: everything about the run, and nothing about it anywhere else."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragrad.config import options
from paragrad.core.flat import plain_state
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner, Saves
from paragrad.run import Run
from paragrad.rundir import checkpoint
from paragrad.rundir.record import plain


@dataclass(frozen=True)
class RunDirectory:
    """``run.toml``, ``model.json``, ``transforms.json``, ``record.jsonl``, ``checkpoints/``, ``logs/``, ``model.safetensors``,
    ``summary.json``."""

    path: Path
    used: bool = False
    """Whether a run has begun in it before."""

    @classmethod
    def open(cls, run: Run, name: str) -> RunDirectory:
        """Make the directory, or, to resume, take the one that is there."""
        path = Path(run.out) if run.out is not None else _unused(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        if path.exists() and not path.is_dir():
            raise UsageError(f"The run directory {path} is a file; give another --out.")
        has_run = (path / "record.jsonl").exists()
        if run.resume is True and not has_run:
            raise UsageError(f"There is no run to resume in {path}: it has no record.jsonl.")
        if not run.resume and path.exists() and any(path.iterdir()):
            raise UsageError(
                f"The run directory {path} is already used. Give another out=, or resume the run in it "
                f"(pg.Run(out={str(path)!r}, resume=True), paragrad train --resume {path})."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UsageError(f"The run directory {path} cannot be written to ({error.strerror}); give another out=.") from error
        return cls(path, used=has_run)

    def checkpoint(
        self, identity: dict[str, Any], notes: list[str], left: checkpoint.Checkpoint | None = None
    ) -> checkpoint.Checkpoint | None:
        """The newest sound checkpoint of this very run, or what its center ``left`` in memory, if that is newer; its training,
        not its length, must be the same."""
        found, passed = checkpoint.newest(self.path / "checkpoints")
        notes += passed
        if left is not None and (found is None or left.numbers["clock"] >= found.numbers["clock"]):
            found = left
        if found is None:
            if self.used:
                notes.append(f"{self.path} has no sound checkpoint: the run begins anew.")
            return None
        before = found.numbers["identity"]
        for key, value in identity.items():
            if before.get(key) != value:
                raise UsageError(
                    f"The run in {self.path} was made with {key} {before.get(key)!r}, but now it is {value!r}: that would be "
                    "another run. Give the same value, or another out=."
                )
        where = "as its center left it" if found is left else f"checkpoint {found.path.name}"
        notes.append(f"The run goes on from update {found.numbers['clock']} ({where}).")
        return found

    def write_config(self, config: dict[str, Any]) -> None:
        """run.toml: everything needed to repeat the run."""
        with self._at_the_start("run.toml") as aside:
            options.write_config(aside, config)

    def write_model_facts(self, card: str, transforms: str | None) -> None:
        """model.json and, where columns are transformed, transforms.json: what is needed to use the model later."""
        with self._at_the_start("model.json") as aside:
            aside.write_text(card, encoding="utf-8")
        if transforms is not None:
            with self._at_the_start("transforms.json") as aside:
                aside.write_text(transforms, encoding="utf-8")

    @contextlib.contextmanager
    def _at_the_start(self, name: str) -> Iterator[Path]:
        """A file without which a run does not begin."""
        try:
            with self._whole(name) as aside:
                yield aside
        except OSError as error:
            raise UsageError(
                f"The run directory {self.path} cannot be written to ({error.strerror}); make room, or give another out=."
            ) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """summary.json: what was measured."""
        with self._whole("summary.json") as aside:
            aside.write_text(json.dumps(plain(summary), indent=2) + "\n", encoding="utf-8")

    def save_model(self, learner: Learner) -> None:
        """model.safetensors: the module's own names, tied tensors once, aliases in the metadata. Of Keras, also model.keras."""
        tensors, aliases = named_tensors(learner)
        # safetensors writes several entries of metadata in an order of chance: one alone, where that is enough.
        metadata = {"format": "pt"} | ({"aliases": json.dumps(aliases)} if aliases else {})
        with self._whole("model.safetensors") as aside:
            checkpoint.write_tensors(aside, tensors, metadata=metadata)
        if isinstance(learner, Saves) and learner.file is not None:
            with self._whole(learner.file) as aside:
                learner.save(aside)

    @contextlib.contextmanager
    def _whole(self, name: str) -> Iterator[Path]:
        """A file that is written whole or not at all: what was there before stays on a full disk."""
        aside = self.path / f".tmp-{name}"  # the ending stays: Keras goes by it
        try:
            yield aside
            aside.rename(self.path / name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def named_tensors(learner: Learner) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What is kept of a trained model: its tensors by name, tied ones once, and the further names of those."""
    module = getattr(learner, "module", None)
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    if isinstance(learner, Saves):
        named = learner.tensors()
    else:
        named = plain_state(module) if module is not None else {"weights": learner.weights, "buffers": learner.buffers}
    for name, tensor in named.items():
        original = first.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if original != name:
            aliases[name] = original
        else:
            tensors[name] = tensor.detach().cpu().clone()
    return tensors, aliases


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
