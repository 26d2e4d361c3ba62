"""Imports go one way: a room may use those below it, never those above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "paragrad"
LEVELS = [
    {"errors"},
    {"types", "options", "canvas"},
    {"kernels", "flat", "record", "cluster"},
    {"replica", "run", "state", "codecs"},
    {"data", "schemes", "optim", "models", "losses", "toys", "metrics", "predictions"},
    {"center", "view", "update", "learners", "arrivals", "checkpoint", "tally", "result", "display"},
    {"job", "factories", "card", "outputs", "directory", "bowl", "analysis", "plot"},
    {"session", "worker", "transport"},
    {"engines"},
    {"train", "check", "checkengine", "trials", "replay", "recipe", "trained", "fit", "joining"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
NEVER = {
    "codecs": {"replica", "run", "state", "flat", "record", "cluster", "options"},
    "schemes": {"learners", "engines", "data", "optim"},
    "learners": {"schemes", "engines", "center"},
    "display": {"train", "engines", "session"},
    "record": {"train", "engines", "session"},
    "analysis": {"train", "engines", "session"},
}
HEAVY = {"sklearn", "ray", "pyspark", "mpi4py", "keras", "h5py", "uproot", "awkward", "pyarrow", "matplotlib"}
OF_ONE_FILE = {"h5py", "uproot", "awkward", "pyarrow", "cryptography"}
OF_FLIGHT = "transport/flight.py"
"""All about Flight, whose classes it inherits: imported itself only where an engine is about to listen or to connect."""
NEVER_IMPORTED = {"pandas", "polars"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms_used(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path) if name.startswith("paragrad.")]
    return {part[1] for part in parts if (PACKAGE / part[1]).is_dir() or (PACKAGE / f"{part[1]}.py").exists()}


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_lies_below_it(path):
    room = room_of(path)
    assert room in LEVEL, f"{room} has no place in the house: add it to LEVELS"
    above = {used for used in rooms_used(path) if used != room and LEVEL[used] >= LEVEL[room]}
    peers = {used for used in above if LEVEL[used] == LEVEL[room]}
    assert not above - peers, f"{path.name} imports {above - peers}, which lie above {room}"
    assert not rooms_used(path) & NEVER.get(room, set())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_heavy_library_is_not_imported_at_the_top_of_a_file(path):
    if path != PACKAGE / OF_FLIGHT:
        assert not {name.split(".")[0] for name in imports(path, top_only=True)} & HEAVY
        assert "paragrad.transport.flight" not in imports(path, top_only=True)


def test_a_library_that_reads_files_is_imported_in_one_file_and_frames_are_told_by_what_they_can_do():
    used = {path.name: {name.split(".")[0] for name in imports(path)} for path in FILES if path != PACKAGE / OF_FLIGHT}
    for library in OF_ONE_FILE | NEVER_IMPORTED:
        users = [name for name, libraries in used.items() if library in libraries]
        assert len(users) == (library in OF_ONE_FILE), (library, users)


def test_engines_use_no_lock_queue_or_event_of_multiprocessing():
    forbidden = {
        "Lock",
        "RLock",
        "Event",
        "Barrier",
        "Condition",
        "Queue",
        "SimpleQueue",
        "Manager",
        "Semaphore",
        "shared_memory",
    }
    for path in (PACKAGE / "engines").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "threading":
                assert node.attr not in forbidden, f"{path.name}:{node.lineno} uses {node.attr}"
            if isinstance(node, ast.ImportFrom):
                assert not {alias.name for alias in node.names} & forbidden, f"{path.name}:{node.lineno}"


def test_schemes_do_no_io_and_know_no_network():
    for path in (PACKAGE / "schemes").glob("*.py"):
        names = {name.split(".")[0] for name in imports(path)} | imports(path)
        assert not names & {"os", "io", "socket", "threading", "logging", "multiprocessing", "torch.nn"}, path.name
