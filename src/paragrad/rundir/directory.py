"""The run directory, which holds every file of a run."""

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
from safetensors import safe_open

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
    """True if a run was started in it before."""

    @classmethod
    def open(cls, run: Run, name: str) -> RunDirectory:
        """Create the directory, or reuse it to resume its run."""
        path = Path(run.out) if run.out is not None else _unused(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        if path.exists() and not path.is_dir():
            raise UsageError(f"The run directory {path} is a file; give another --out.")
        has_run = (path / "record.jsonl").exists()
        if run.resume is True and not has_run:
            raise UsageError(f"There is no run to resume in {path}: record.jsonl is missing.")
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
        """Return the newest valid checkpoint, or the state that the center ``left`` in memory if that is not older.

        Raise if the settings of the training (``identity``) have changed; the length of the run may change.
        """
        found, damaged = checkpoint.newest(self.path / "checkpoints")
        notes += damaged
        if left is not None and (found is None or left.numbers["clock"] >= found.numbers["clock"]):
            found = left
        if found is None:
            if self.used:
                notes.append(f"{self.path} has no valid checkpoint: the run starts from the beginning.")
            return None
        before = found.numbers["identity"]
        for key, value in identity.items():
            if before.get(key) != value:
                raise UsageError(
                    f"The run in {self.path} was made with {key} {before.get(key)!r}, and cannot be resumed with {value!r}. "
                    "Give the same value, or another out=."
                )
        origin = "the state that its center left" if found is left else f"checkpoint {found.path.name}"
        notes.append(f"The run resumes at update {found.numbers['clock']} ({origin}).")
        return found

    def write_config(self, config: dict[str, Any]) -> None:
        """Write run.toml: the settings that repeat the run."""
        with self._required("run.toml") as aside:
            options.write_config(aside, config)

    def write_model_facts(self, card: str, transforms: str | None) -> None:
        """Write model.json and, if columns are transformed, transforms.json: what ``pg.load`` needs."""
        with self._required("model.json") as aside:
            aside.write_text(card, encoding="utf-8")
        if transforms is not None:
            with self._required("transforms.json") as aside:
                aside.write_text(transforms, encoding="utf-8")

    @contextlib.contextmanager
    def _required(self, name: str) -> Iterator[Path]:
        """Write a file that a run cannot start without."""
        try:
            with self._written_whole(name) as aside:
                yield aside
        except OSError as error:
            raise UsageError(
                f"The run directory {self.path} cannot be written to ({error.strerror}); make room, or give another out=."
            ) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json: the measured results."""
        with self._written_whole("summary.json") as aside:
            aside.write_text(json.dumps(plain(summary), indent=2) + "\n", encoding="utf-8")

    def save_model(self, learner: Learner) -> None:
        """Write model.safetensors with the module's names, tied tensors once; for Keras also model.keras."""
        tensors, aliases = named_tensors(learner)
        # safetensors writes metadata entries in random order: with a single entry the file is reproducible. It sorts tensors
        # by name, and names of Keras layers depend on how many were made before: such a model is matched by order.
        metadata = {"order": json.dumps(list(tensors))} if isinstance(learner, Saves) else {"format": "pt"}
        metadata |= {"aliases": json.dumps(aliases)} if aliases else {}
        with self._written_whole("model.safetensors") as aside:
            checkpoint.write_tensors(aside, tensors, metadata=metadata)
        if isinstance(learner, Saves) and learner.file is not None:
            with self._written_whole(learner.file) as aside:
                learner.save(aside)

    @contextlib.contextmanager
    def _written_whole(self, name: str) -> Iterator[Path]:
        """Write a file completely or not at all: on a full disk the earlier file stays."""
        aside = self.path / f".tmp-{name}"  # with the same suffix, from which Keras takes the format
        try:
            yield aside
            aside.rename(self.path / name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what ``save_model`` wrote: the tensors by name, in the order of the model if it counts, and names of tied ones."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        order = json.loads(metadata.get("order", "[]")) or opened.keys()
        return {name: opened.get_tensor(name) for name in order}, json.loads(metadata.get("aliases", "{}"))


def named_tensors(learner: Learner) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a trained model by name, tied ones once, and the other names of those."""
    module = getattr(learner, "module", None)
    if isinstance(learner, Saves):
        named = learner.tensors()
    else:
        named = plain_state(module) if module is not None else {"weights": learner.weights, "buffers": learner.buffers}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
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
