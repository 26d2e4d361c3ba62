"""A pipe of JSON lines from a child to its parent: warnings, an exception's traceback, a validation's result."""

from __future__ import annotations

import json
import os
from typing import Any


class Notes:
    """The parent's end of the pipe."""

    def __init__(self) -> None:
        self.fd, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.ended = False
        self._rest = b""
        self._closed = False

    def seal(self) -> None:
        """Close the write end here once the child has it, so that the pipe ends with the child."""
        os.close(self.write_end)

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines that have arrived."""
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
        """Close the pipe."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)
