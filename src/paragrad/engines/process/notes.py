"""A pipe of JSON lines from one child to its parent: an exception's traceback, a validation's result."""

from __future__ import annotations

import json
import os
from typing import Any


class Notes:
    """The parent's end."""

    def __init__(self) -> None:
        self.fd, self.mouth = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.ended = False
        self._rest = b""
        self._closed = False

    def seal(self) -> None:
        """The child has its end: close ours, so that its death is seen."""
        os.close(self.mouth)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines that have arrived."""
        while not self.ended and not self._closed:
            try:
                data = os.read(self.fd, 65_536)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Let go of the pipe."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)
