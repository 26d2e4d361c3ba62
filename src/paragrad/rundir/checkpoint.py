"""Checkpoints: written aside, synced, renamed, with a checksum; the newest sound one is found again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

KEPT = 2
TENSORS, MANIFEST = "state.safetensors", "manifest.json"
NAMES = "names"
"""The entry of the metadata that says where each tensor of the model lies."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    path: Path
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    names: Mapping[str, Any] = field(default_factory=dict)
    """Where each tensor of the model lies: its vector, first and last element, shape and type."""

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors of the model by name: all that training changes, and its buffers."""
        return {
            name: self.tensors[vector][lo:hi].view(shape).to(getattr(torch, dtype), copy=True)
            for name, (vector, lo, hi, shape, dtype) in self.names.items()
        }


class Damaged(Exception):
    """A checkpoint that cannot be trusted, and why."""


def save(
    folder: Path, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], names: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint, and remove those that are too old; on any failure the ones before it stay as they are.

    ``names`` say where the tensors of the model lie in its vectors; they are written as the metadata of the tensors' file.
    """
    final = write(folder, tensors, numbers, names)
    remove_but(folder, clocks(folder)[-KEPT:])
    return final


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], names: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint beside the others."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / name_of(numbers["clock"])
    aside = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        write_tensors(aside / TENSORS, tensors, {NAMES: json.dumps(names or {})})
        manifest = {"tensors_sha256": _digest(aside / TENSORS), "numbers": dict(numbers)}
        text = json.dumps(manifest)
        (aside / MANIFEST).write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}))
        for name in (TENSORS, MANIFEST):
            _sync(aside / name)
        _sync(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def name_of(clock: int) -> str:
    """The name of the checkpoint of an update."""
    return f"{clock:010d}"


def clocks(folder: Path) -> list[int]:
    """The updates that there are checkpoints of, in order."""
    return sorted(int(path.name) for path in _all(folder))


def remove_but(folder: Path, kept: Collection[int]) -> None:
    """Remove the checkpoints of all other updates."""
    for clock in set(clocks(folder)).difference(kept):
        shutil.rmtree(folder / name_of(clock), ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file; a disk that does not take it is an ``OSError``, as with any other file."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def load(path: Path) -> Checkpoint:
    """Read one checkpoint; raise ``Damaged`` unless every checksum holds."""
    try:
        outer = json.loads((path / MANIFEST).read_text())
        text = outer["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise Damaged("the manifest's checksum does not hold")
        manifest = json.loads(text)
        if _digest(path / TENSORS) != manifest["tensors_sha256"]:
            raise Damaged("the tensors' checksum does not hold")
        with safe_open(path / TENSORS, framework="pt") as opened:
            names = json.loads((opened.metadata() or {})[NAMES])
        return Checkpoint(path, load_file(path / TENSORS), manifest["numbers"], names)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint, and what to say of those that were passed over."""
    passed: list[str] = []
    for path in sorted(_all(folder), reverse=True):
        try:
            return load(path), passed
        except Damaged as error:
            passed.append(f"Checkpoint {path.name} is damaged ({error}); the one before it is used.")
    return None, passed


def of(folder: Path, which: str | int) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint of an update, or the newest sound one ("latest"), and what to say of those that were passed over."""
    if which == "latest":
        return newest(folder)
    path = folder / name_of(int(which))
    try:
        return (load(path), []) if path.is_dir() else (None, [])
    except Damaged as error:
        return None, [f"Checkpoint {path.name} is damaged ({error})."]


def _all(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("[0-9]*") if path.name.isdigit() and path.is_dir())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
