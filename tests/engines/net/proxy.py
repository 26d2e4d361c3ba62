"""A small TCP proxy between a worker and its center: it delays, cuts, and stops reading."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time


class Proxy:
    """Listens on loopback and passes bytes on to ``target``, both ways, as long as it is allowed to."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay = 0.0
        """Seconds that every piece takes longer."""
        self.dark = False
        """Nothing goes through, and nobody is told: as where a cable is out."""
        self.deaf = False
        """Nothing that the center sends is read: what the worker sends still goes through."""
        self.cut_after: int | None = None
        """Bytes after which every connection is cut."""
        self.passed = 0
        self._over = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._all: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for pair in self._all:
            for end in pair:
                end.close()

    def cut(self) -> None:
        """Break every connection that there is."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def _listen(self) -> None:
        while not self._over.is_set():
            if not _is_readable(self._listener, 100):
                continue
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                if self.dark:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                self._all.append((near, far))
                for source, sink, back in ((near, far, False), (far, near, True)):
                    self._threads.append(threading.Thread(target=self._carry, args=(source, sink, back), daemon=True))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while not self._over.is_set():
                if self.dark or (back and self.deaf) or not _is_readable(source, 50):
                    time.sleep(0.005)
                    continue
                data = source.recv(1 << 16)
                if not data:
                    break
                time.sleep(self.delay)
                self.passed += len(data)
                if self.cut_after is not None and self.passed > self.cut_after:
                    self.passed = 0
                    sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _is_readable(end: socket.socket, milliseconds: int) -> bool:
    ready = select.poll()  # select() knows no descriptor above 1023
    ready.register(end, select.POLLIN)
    return bool(ready.poll(milliseconds))
