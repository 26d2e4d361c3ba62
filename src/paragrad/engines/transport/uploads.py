"""Uploads of one worker, of which only the latest may write."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from paragrad.engines.transport.message import Refused


class Uploads:
    """Numbers the uploads of one worker. A thread that still reads an earlier one stops at its next piece."""

    def __init__(self) -> None:
        self.latest = 0
        self._writing = threading.Lock()

    def begin(self) -> int:
        """Return the number of a new upload: from here on, no earlier one writes."""
        with self._writing:
            self.latest += 1
            return self.latest

    def check(self, number: int) -> None:
        """Raise ``Refused`` if a later upload has begun."""
        if number != self.latest:
            raise Refused("gone: a later exchange of the same worker has begun.")

    @contextlib.contextmanager
    def write(self, number: int) -> Iterator[None]:
        """Guard the writing of one piece; raise ``Refused`` if a later upload has begun."""
        with self._writing:
            self.check(number)
            yield
