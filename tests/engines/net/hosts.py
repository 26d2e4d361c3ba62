"""Several hosts on one machine: network namespaces, joined by a pair of virtual cables."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A namespace and its address."""

    name: str
    address: str


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, and nothing else; skips the test where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    number = os.getpid() % 250
    hosts = tuple(Host(f"paragrad-{os.getpid()}-{k}", f"10.213.{number}.{k + 1}") for k in range(2))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(subprocess.run, ["ip", "netns", "del", host.name], check=True)
        ends = [f"pg{os.getpid()}{k}"[:15] for k in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _ip("link", "set", end, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts
