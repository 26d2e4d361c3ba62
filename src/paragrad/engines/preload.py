"""What the fork server loads once, so that no worker has to: torch, its optimisers, and the worker itself."""

import signal

# A Ctrl-C is for the trainer, which stops its workers; the server would print a traceback while it still imports. A SIGTERM
# goes to all processes of a job: with the server all workers would end, and what they have not brought to the center yet.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.optim  # noqa: E402

import paragrad.engines.exchange.worker  # noqa: E402
import paragrad.engines.rowfeed.reader  # noqa: E402
import paragrad.learners.torch  # noqa: E402

__all__ = ["paragrad", "torch"]
