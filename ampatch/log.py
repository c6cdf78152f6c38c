"""The logger "ampatch": rank 0 only, silent at verbosity 0, each message at most three times.

A leaf.  The engine does not print; applications decide what they show.
"""

from __future__ import annotations

import collections
import logging
import os

import torch.distributed

_REPEATS = 3  # times that the same message is logged

ONCE = {"ampatch_once": True}
"""As `extra` of a message: it is logged once per process, however often sessions open."""


class _Noise(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self.verbosity = 1
        self._said: collections.Counter[str] = collections.Counter()
        self._said_for_good: set[str] = set()

    def reset(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._said.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        if self.verbosity == 0 or _rank() != 0:
            return False
        message = record.getMessage()
        if message in self._said_for_good:
            return False
        if hasattr(record, "ampatch_once"):
            self._said_for_good.add(message)
        self._said[message] += 1
        return self._said[message] <= _REPEATS


logger = logging.getLogger("ampatch")
_noise = _Noise()
logger.addFilter(_noise)


def set_verbosity(verbosity: int) -> None:
    """0 logs nothing, any other number logs.  Repeated messages are counted anew."""
    _noise.reset(verbosity)


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
