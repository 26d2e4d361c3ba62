"""The format of checkpoints: written to a temporary folder, synced, renamed, with checksums; and how to find the newest one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

KEPT = 2
TENSORS, MANIFEST = "state.safetensors", "manifest.json"
NAMES = "names"
"""Metadata entry with the place of each tensor of the model in its vectors."""


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run can be resumed."""

    path: Path
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    names: Mapping[str, Any] = field(default_factory=dict)
    """Place of each tensor of the model: vector, first and last element, shape, type."""

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model by name: trained parameters and buffers."""
        return {
            name: self.tensors[vector][lo:hi].view(shape).to(getattr(torch, dtype), copy=True)
            for name, (vector, lo, hi, shape, dtype) in self.names.items()
        }


class Damaged(Exception):
    """A checkpoint cannot be trusted; the message says why."""


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, Any],
    names: Mapping[str, Any] | None = None,
    kept: Collection[int] | None = None,
) -> Path:
    """Write a checkpoint, then remove those of all updates but the ``kept`` ones, by default the newest.

    If the write fails, the earlier checkpoints stay. ``names`` (see ``Checkpoint``) become metadata of the tensor file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / name_of(numbers["clock"])
    aside = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        write_tensors(aside / TENSORS, tensors, {NAMES: json.dumps(names or {})})
        text = json.dumps({"tensors_sha256": _digest(aside / TENSORS), "numbers": dict(numbers)})
        (aside / MANIFEST).write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}))
        for path in (aside / TENSORS, aside / MANIFEST, aside):
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    there = clocks(folder)
    for clock in set(there).difference(there[-KEPT:] if kept is None else kept):
        shutil.rmtree(folder / name_of(clock), ignore_errors=True)
    return final


def name_of(clock: int) -> str:
    """Return the folder name of the checkpoint of an update."""
    return f"{clock:010d}"


def clocks(folder: Path) -> list[int]:
    """Return the updates that have a checkpoint, in order."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit() and path.is_dir())


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; raise ``OSError`` if the disk is full, as for any other file."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; raise ``Damaged`` if a checksum does not match."""
    try:
        outer = json.loads((path / MANIFEST).read_text())
        text = outer["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise Damaged("wrong checksum of the manifest")
        manifest = json.loads(text)
        if _digest(path / TENSORS) != manifest["tensors_sha256"]:
            raise Damaged("wrong checksum of the tensors")
        with safe_open(path / TENSORS, framework="pt") as opened:
            names = json.loads((opened.metadata() or {})[NAMES])
        return Checkpoint(path, load_file(path / TENSORS), manifest["numbers"], names)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint, and a note on each damaged one that was skipped."""
    notes: list[str] = []
    for clock in reversed(clocks(folder)):
        path = folder / name_of(clock)
        try:
            return load(path), notes
        except Damaged as error:
            notes.append(f"Checkpoint {path.name} is damaged ({error}); the one before it is used.")
    return None, notes


def of(folder: Path, which: str | int) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint of an update, or the newest valid one ("latest"), and notes on damaged ones."""
    if which == "latest":
        return newest(folder)
    path = folder / name_of(int(which))
    try:
        return (load(path), []) if path.is_dir() else (None, [])
    except Damaged as error:
        return None, [f"Checkpoint {path.name} is damaged ({error})."]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
