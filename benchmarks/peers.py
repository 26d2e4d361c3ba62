"""What paragrad is measured against: plain copies, plain PyTorch, and the ways to exchange that torch and Ray offer.

Each function makes one process's step (see ``measure.together``); it is called in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from paragrad.models import builtin

Step = Callable[[], None]


# -- exchanges of one vector ----------------------------------------------------------------------------------------


def memcpy(rank: int, workers: int, shared: Any, length: int) -> Step:
    """Copy the shared vector to private memory, then private memory to a shared slot of one's own."""
    memory = mmap.mmap(shared.open(), length * 4 * (workers + 1))
    vectors = torch.frombuffer(memory, dtype=torch.float32)
    center, slot = vectors[:length], vectors[length * (rank + 1) : length * (rank + 2)]
    mine = torch.ones(length)

    def step() -> None:
        mine.copy_(center)
        slot.copy_(mine)

    return step


_center: torch.Tensor


def _make_center(length: int) -> None:
    global _center
    _center = torch.zeros(length)


def _push(vector: torch.Tensor) -> torch.Tensor:
    return _center.add_(vector)


def rpc(rank: int, processes: int, meeting: str, length: int) -> Step | None:
    """torch.distributed.rpc: the last process holds the vector; the others send theirs and get the sum back."""
    import torch.distributed.rpc as torch_rpc

    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", num_worker_threads=4, _transports=["uv"], _channels=["basic"]
    )
    server = processes - 1
    torch_rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"bench{rank}", rank=rank, world_size=processes, rpc_backend_options=options
    )
    if rank == server:
        return None
    if rank == 0:
        torch_rpc.rpc_sync(f"bench{server}", _make_center, args=(length,))
    mine = torch.full((length,), 1e-6)
    while True:
        try:
            torch_rpc.rpc_sync(f"bench{server}", _push, args=(mine,))
            break
        except NameError:
            time.sleep(0.05)

    def step() -> None:
        mine.copy_(torch_rpc.rpc_sync(f"bench{server}", _push, args=(mine,))).mul_(1e-6)

    return step


def tcp(rank: int, processes: int, meeting: str, length: int) -> Step | None:
    """Bare sockets: the last process takes a vector and gives one back, a thread for each connection, and does nothing else."""
    if rank == processes - 1:
        door = socket.create_server(("127.0.0.1", 0))
        with open(f"{meeting}.tmp", "w", encoding="ascii") as file:
            file.write(str(door.getsockname()[1]))
        os.rename(f"{meeting}.tmp", meeting)
        threading.Thread(target=_answer, args=(door, length), daemon=True).start()
        return None
    while not os.path.exists(meeting):
        time.sleep(0.05)
    with open(meeting, encoding="ascii") as file:
        line = socket.create_connection(("127.0.0.1", int(file.read())))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = memoryview(np.full(length, 1e-6, dtype=np.float32)).cast("B")  # type: ignore[arg-type]

    def step() -> None:
        line.sendall(mine)
        _fill(line, mine)

    return step


def _answer(door: socket.socket, length: int) -> None:
    while True:
        line, _ = door.accept()
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_echo, args=(line, length), daemon=True).start()


def _echo(line: socket.socket, length: int) -> None:
    room = memoryview(bytearray(4 * length))
    while True:
        _fill(line, room)
        line.sendall(room)


def _fill(line: socket.socket, room: memoryview) -> None:
    got = 0
    while got < room.nbytes:
        count = line.recv_into(room[got:])
        if not count:
            raise ConnectionError("the other side hung up")
        got += count


def flight(rank: int, processes: int, meeting: str, length: int) -> Step | None:
    """paragrad's transport alone: the last process takes a vector and gives it back, and does nothing else."""
    from paragrad.engines.transport.flight import FlightTransport

    torch.ones(length)  # what was freed once, malloc keeps from then on: so it is in every process that has trained
    if rank == processes - 1:
        global _serving
        _serving = FlightTransport().listen(_Echoes(length, processes - 1), "127.0.0.1:0", "bench")  # type: ignore[arg-type]
        with open(f"{meeting}.tmp", "w", encoding="ascii") as file:
            file.write(str(_serving.port))
        os.rename(f"{meeting}.tmp", meeting)
        return None
    while not os.path.exists(meeting):
        time.sleep(0.05)
    with open(meeting, encoding="ascii") as file:
        client = FlightTransport().connect(f"127.0.0.1:{file.read()}", "bench")
    mine, back = torch.full((length,), 1e-6), torch.zeros(length)

    def step() -> None:
        client.exchange({"rank": rank}, {"value": mine}, lambda head: {"value": back}, timeout=60)

    return step


_serving: Any = None


class _Echoes:
    """Gives back what comes, in a place of its own for each client."""

    def __init__(self, length: int, clients: int) -> None:
        self._rooms = [torch.zeros(length) for _ in range(clients)]

    def exchange(self, peer: str) -> _Echoes:
        return self

    def begin(self, head: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"value": self._rooms[head["rank"]]}

    def filling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, head: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, {"value": self._rooms[head["rank"]]}


def all_reduce(rank: int, workers: int, meeting: str, length: int) -> Step:
    """gloo: every process ends up with the sum; one all-reduce counts as one exchange of each process."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    mine = torch.zeros(length)
    return lambda: dist.all_reduce(mine)


def ray_actor(workers: int, length: int, seconds: float) -> dict[int, list[tuple[float, int]]] | None:
    """A Ray actor that holds the vector; None where Ray is not installed."""
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        return None
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, configure_logging=False)

    @ray.remote(num_cpus=1)
    class Center:
        def __init__(self) -> None:
            self.value = np.zeros(length, dtype=np.float32)

        def push(self, vector: Any) -> Any:
            self.value += vector
            return self.value

    @ray.remote(num_cpus=1)
    class Worker:
        def __init__(self, center: Any) -> None:
            self.center, self.mine = center, np.full(length, 1e-6, dtype=np.float32)

        def ready(self) -> None:
            self.exchange()

        def exchange(self) -> None:
            np.copyto(self.mine, ray.get(self.center.push.remote(self.mine)))

        def run(self, began: float) -> list[float]:
            stamps = []
            while time.monotonic() < began + seconds:
                self.exchange()
                stamps.append(time.monotonic() - began)
            return stamps

    try:
        center = Center.remote()  # type: ignore[attr-defined]
        crew = [Worker.remote(center) for _ in range(workers)]  # type: ignore[attr-defined]
        ray.get([worker.ready.remote() for worker in crew])
        began = time.monotonic() + 0.1
        found = ray.get([worker.run.remote(began) for worker in crew])
    finally:
        ray.shutdown()
    return {rank: [(at, 1) for at in stamps] for rank, stamps in enumerate(found)}


# -- training -------------------------------------------------------------------------------------------------------

ROWS = 60_000


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of MNIST's shape."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(ROWS, 784, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator)


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """The optimisers that are measured."""
    return torch.optim.SGD(parameters, lr=0.01) if name == "sgd" else torch.optim.Adam(parameters, lr=1e-3)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, seed: int) -> Step:
    x, y = images()
    loss = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(seed)
    order: list[torch.Tensor] = []

    def step() -> None:
        if not order:
            order.extend(torch.split(torch.randperm(ROWS, generator=generator), batch))
        rows = order.pop()
        optimizer.zero_grad()
        loss(model(x.index_select(0, rows)), y.index_select(0, rows)).backward()
        optimizer.step()

    return step


def plain(rank: int, workers: int, spec: str, optimizer: str, batch: int) -> Step:
    """A plain PyTorch loop that never talks to anyone."""
    model = builtin.build(spec, (784,), 10)
    return _loop(model, optimizer_of(optimizer, model.parameters()), batch, rank)


def plain_on_threads(rank: int, workers: int, threads: int, spec: str, optimizer: str, batch: int) -> Step:
    """The same with more threads than one."""
    torch.set_num_threads(threads)
    return plain(rank, workers, spec, optimizer, batch)


def plain_keeping_heap(rank: int, workers: int, spec: str, optimizer: str, batch: int) -> Step:
    """The same with a malloc that keeps large blocks, as paragrad's workers have it: the advantage is not the exchange's."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 1 << 30)
    mallopt(-1, (1 << 31) - 1)
    return plain(rank, workers, spec, optimizer, batch)


def ddp(rank: int, workers: int, meeting: str, spec: str, optimizer: str, batch: int) -> Step:
    """torch DistributedDataParallel over gloo: ``batch`` rows a process, so the global batch is SyncSGD's."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    model = DistributedDataParallel(builtin.build(spec, (784,), 10))
    return _loop(model, optimizer_of(optimizer, model.parameters()), batch, rank)


# -- on a device ----------------------------------------------------------------------------------------------------


def replica(rank: int, workers: int, sizes: str, batch: int, device: str) -> Step:
    """A step of one model of its own in plain PyTorch, its rows on the device already."""
    count, module, step = _on_device(sizes, device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return lambda: step(module, optimizer, torch.randint(0, count, (batch,), device=device))


def replica_waited_for(rank: int, workers: int, sizes: str, batch: int, device: str) -> Step:
    """The same, each step to its end: for processes whose steps are counted by the clock."""
    step = replica(rank, workers, sizes, batch, device)

    def waited() -> None:
        step()
        if device != "cpu":
            torch.cuda.synchronize()

    return waited


def member_on_device(rank: int, workers: int, sizes: str, batch: int, device: str, meeting: str) -> Step:
    """One of a DistributedDataParallel group whose members share a device (gloo: NCCL wants a device for each)."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    count, inner, step = _on_device(sizes, device)
    module = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def waited() -> None:
        step(module, optimizer, torch.randint(0, count, (batch,), device=device))
        if device != "cpu":
            torch.cuda.synchronize()

    return waited


def _on_device(sizes: str, device: str) -> tuple[int, nn.Module, Callable[..., None]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 784, generator=generator).to(device)
    y = torch.randint(0, 10, (8192,), generator=generator).to(device)
    loss = nn.CrossEntropyLoss()

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, mine: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(module(x.index_select(0, mine)), y.index_select(0, mine)).backward()
        optimizer.step()

    return len(x), builtin.build(sizes, (784,), 10).to(device), step
