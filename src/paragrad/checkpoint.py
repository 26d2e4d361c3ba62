"""Checkpoints: written aside, synced, renamed, with a checksum; the newest sound one is found again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

KEPT = 2
TENSORS, MANIFEST = "state.safetensors", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from."""

    path: Path
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]


class Damaged(Exception):
    """A checkpoint that cannot be trusted, and why."""


def save(folder: Path, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> Path:
    """Write a checkpoint; on any failure the ones before it stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{numbers['clock']:010d}"
    aside = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        write_tensors(aside / TENSORS, tensors)
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
    for old in sorted(_all(folder))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


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
        return Checkpoint(path, load_file(path / TENSORS), manifest["numbers"])
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


def _all(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("[0-9]*") if path.is_dir())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
