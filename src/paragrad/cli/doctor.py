"""``paragrad doctor``: checks of this machine, with remedies."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import typer

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Result of one check. ``state`` is ok, warning (a limitation) or missing (paragrad cannot run)."""

    name: str
    found: str
    state: str = "ok"
    remedy: str = ""


def doctor() -> None:
    """Check whether this machine can run paragrad. The exit status is 1 if a requirement is missing."""
    from rich.text import Text

    from paragrad.cli.tables import console, table

    made = table("", "check", "found", "what to do")
    marks = {"ok": ("✓", "green"), "warning": ("!", "bold yellow"), "missing": ("✗", "bold red")}
    missing = False
    for check in CHECKS:
        try:
            finding = check()
        except Exception as error:
            finding = Finding(
                check.__name__, f"{type(error).__name__}: {error}", "missing", "The check itself failed; see the error."
            )
        missing |= finding.state == "missing"
        made.add_row(Text(*marks[finding.state]), finding.name, Text(finding.found), Text(finding.remedy))
    console.print(made)
    _show_extras()
    console.print("This machine cannot run paragrad yet." if missing else "This machine can run paragrad.")
    if missing:
        raise typer.Exit(1)


def _show_extras() -> None:
    """Print a table of the optional libraries."""
    from rich.text import Text

    from paragrad.cli.tables import show, table
    from paragrad.config.extras import EXTRAS, USES, command

    made = table("", "extra", "for", "installed", "to install it")
    for extra, requirements in EXTRAS.items():
        found = {requirement: installed(requirement) for requirement in requirements}
        ok = all(good for _, good in found.values())
        versions = ", ".join(f"{requirement.split('>=')[0]} {version}" for requirement, (version, _) in found.items())
        mark = Text("✓", "green") if ok else Text("–", "dim")
        made.add_row(mark, extra, Text(USES[extra]), Text(versions), Text("" if ok else command(extra)))
    show(made, "Extras (optional libraries)")


def installed(requirement: str) -> tuple[str, bool]:
    """Return the installed version of a library, and whether it satisfies ``name>=version``."""
    name, least = requirement.split(">=")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing", False
    ok = _ordered(version) >= _ordered(least)
    return version if ok else f"{version}, too old", ok


def _ordered(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def python() -> Finding:
    return Finding("Python", platform.python_version())


def system() -> Finding:
    return Finding("system", f"{platform.system()} {platform.release()}")


def pytorch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", f"cannot be imported: {error}", "missing", "pip install 'torch>=2.11'")
    devices = f", {torch.cuda.device_count()} GPU" if torch.cuda.is_available() else ", no GPU"
    if _ordered(torch.__version__) < (2, 11):
        return Finding(
            "torch", torch.__version__ + devices, "warning", "paragrad is tested with torch 2.11 and newer: upgrade."
        )
    return Finding("torch", torch.__version__ + devices)


def cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    found = f"{usable} of {os.cpu_count()} usable" + (f", {quota:g} by the container's quota" if quota is not None else "")
    limit = usable if quota is None else min(usable, quota)
    if limit < 2:
        return Finding(
            "cores", found, "warning", "Workers share one core and are no faster than one process. Use 2 or more cores."
        )
    return Finding("cores", found)


def threads() -> Finding:
    import torch

    usable, own = len(os.sched_getaffinity(0)), torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    found = f"{own} in a single process" + (f" (OMP_NUM_THREADS={setting})" if setting else "")
    if own > usable:
        remedy = f"More than the {usable} usable cores. Workers choose their own number; --threads sets it."
        return Finding("threads", found, "warning", remedy)
    return Finding("threads", found)


def memory() -> Finding:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    limit = _number("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limited = limit is not None and limit < total
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free" + (
        f", at most {limit / GIB:.1f} GiB here" if limited and limit else ""
    )
    if free < GIB:
        return Finding("memory", found, "warning", "Each worker needs about 0.3 GiB plus its model: use fewer workers.")
    return Finding("memory", found)


def shm() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "missing", "ok", "Not needed: the center is stored in a memfd.")
    size = stat.f_blocks * stat.f_frsize / GIB
    small = "Small, but not needed: the center is stored in a memfd." if size < 0.5 else ""
    return Finding("/dev/shm", f"{size:.2f} GiB", "ok", small)


def memfd() -> Finding:
    import mmap

    try:
        fd = os.memfd_create("paragrad-doctor")
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as memory_map:
                memory_map[:4] = b"test"
            os.close(os.eventfd(0))
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        remedy = "The kernel must allow memfd_create and eventfd (Linux 3.17, not blocked by seccomp)."
        return Finding("shared memory", str(error), "missing", remedy)
    return Finding("shared memory", "memfd and eventfd work")


def forkserver() -> Finding:
    began = time.monotonic()
    child = multiprocessing.get_context("forkserver").Process(target=_nothing)
    child.start()
    child.join(30)
    if child.exitcode is None:
        child.kill()
        child.join()
    if child.exitcode != 0:
        remedy = "Allow the start of processes (ulimit -u, seccomp)."
        return Finding("processes", f"a child ended with {child.exitcode}", "missing", remedy)
    return Finding("processes", f"a fork server and a child started in {time.monotonic() - began:.2f} s")


def disk() -> Finding:
    runs = Path("runs") if Path("runs").exists() else Path()
    where = str(runs.resolve())
    if not os.access(runs, os.W_OK):
        return Finding("run directory", f"{where} cannot be written to", "warning", "Change the directory, or give --out DIR.")
    stat = os.statvfs(runs)
    free = stat.f_bavail * stat.f_frsize / GIB
    if free < 1:
        remedy = "Checkpoints may not fit: give --out on another disk."
        return Finding("run directory", f"{free:.2f} GiB free in {where}", "warning", remedy)
    return Finding("run directory", f"{free:.0f} GiB free in {where}")


CHECKS: tuple[Callable[[], Finding], ...] = (python, system, pytorch, cores, threads, memory, shm, memfd, forkserver, disk)


def cpu_quota() -> float | None:
    """Return the cores that the container's quota allows; None without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us = _number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period_us = _number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(*paths: str) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None


def _nothing() -> None:
    return
