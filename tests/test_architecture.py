"""Imports go one way: a room may use those below it, never those above."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paragrad.types import COMMIT, REPLY

PACKAGE = Path(__file__).parents[1] / "src" / "paragrad"
LEVELS = [
    {"errors", "rundir.claim", "config.extras", "config.lazy", "core.layout"},
    {"types", "config", "models.ownfile", "plotting.canvas"},
    {"core.kernels", "core.flat", "core.snapshot", "rundir.record", "rundir.runs", "rundir.grid", "cluster"},
    {"core.state", "core.replica", "run", "codecs", "rundir.checkpoint"},
    {"data", "schemes", "optim", "models", "evaluation.metrics", "evaluation.predictions"},
    {"learners", "rundir.tally", "rundir.explosion", "rundir.best", "result"},
    {"core"},
    {"evaluation", "rundir.directory", "rundir.display", "analysis", "plotting", "laws.bowl"},
    {"rundir", "jobs"},
    {"engines.process"},
    {"engines.rowfeed"},
    {"engines.exchange", "engines.sim", "engines.serial", "engines.engine"},
    {"engines.transport"},
    {"engines.sharding"},
    {"engines.net"},
    {"engines"},
    {"jobs.named", "rundir.notices"},
    {"train"},
    {"replay", "laws", "load", "fit", "join"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
NEVER = {
    "codecs": {"core.replica", "run", "core.flat", "rundir", "cluster", "config.options"},
    "schemes": {"learners", "engines", "data", "optim"},
    "learners": {"schemes", "engines", "core.center"},
    "rundir.display": {"train", "engines"},
    "rundir.record": {"train", "engines"},
    "analysis": {"train", "engines"},
}
HEAVY = {"sklearn", "ray", "pyspark", "mpi4py", "keras", "h5py", "uproot", "awkward", "pyarrow", "matplotlib"}
OF_ONE_FILE = {"h5py", "uproot", "awkward", "pyarrow", "cryptography"}
OF_FLIGHT = "engines/transport/flight.py"
"""All about Flight, whose classes it inherits: imported itself only where an engine is about to listen or to connect."""
NEVER_IMPORTED = {"pandas", "polars"}


def place_of(parts: tuple[str, ...]) -> str:
    """The entry of LEVELS that a module belongs to: the longest that its name begins with."""
    names = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVEL), parts[0])


def room_of(path: Path) -> str:
    return place_of(path.relative_to(PACKAGE).with_suffix("").parts)


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


def is_module(parts: tuple[str, ...]) -> bool:
    return PACKAGE.joinpath(*parts).with_suffix(".py").exists()


def rooms_used(path: Path) -> set[str]:
    """Packages count by their modules: the package's own name says nothing."""
    parts = [tuple(name.split(".")[1:]) for name in imports(path) if name.startswith("paragrad.")]
    return {place_of(part) for part in parts if is_module(part)}


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
        assert "paragrad.engines.transport.flight" not in imports(path, top_only=True)


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


def test_flight_is_known_in_one_package():
    transport = PACKAGE / "engines" / "transport"
    for path in FILES:
        if path.parent == transport:
            continue
        assert not {name for name in imports(path) if "flight" in name.lower()}, path
        assert "Flight" not in {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}, path


MADE_IN = {"Commit": {"core/worker.py"}, "Reply": {"core/replies.py"}}
"""Files in which a commit or a reply is made of its parts; elsewhere it is read from a layout."""


def test_the_fields_of_a_commit_and_a_reply_are_named_in_one_layout():
    fields = {*COMMIT.numbers, *COMMIT.lists} | {*REPLY.numbers, *REPLY.lists}
    for path in FILES:
        place = str(path.relative_to(PACKAGE))
        if place in ("types.py", "core/layout.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                items = [key for key in node.keys if key] if isinstance(node, ast.Dict) else node.elts
                named = [item.value for item in items if isinstance(item, ast.Constant) and item.value in fields]
                allowed = ALLOWED.get(place, 5)
                assert len(named) < allowed, f"{place}:{node.lineno} names {named}: use types.COMMIT or types.REPLY"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MADE_IN:
                given = [keyword.arg for keyword in node.keywords if keyword.arg in fields]
                assert len(given) < 2 or place in MADE_IN[node.func.id], f"{place}:{node.lineno} spells out {given}"


ALLOWED = {"replay/engine.py": 7}
"""A replay compares what it makes with what the record says, field by field."""
