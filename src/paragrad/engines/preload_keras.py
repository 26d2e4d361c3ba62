"""What the fork server loads besides where the trainer has loaded Keras: its import takes longer than a worker's start."""

import contextlib
import os

from paragrad.errors import UsageError
from paragrad.learners.kerasmodel import library

# Of this process and its children, which are paragrad's own; the trainer checks what its Keras runs on.
os.environ["KERAS_BACKEND"] = "torch"
with contextlib.suppress(UsageError):  # a worker says it where it can be heard
    library()
