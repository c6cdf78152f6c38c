"""The logger "ampatch": rank 0 only, silent at verbosity 0, each message at most three times.

A leaf.  The engine does not print; applications decide what they show.  Scripts written for apex
decide nothing, and apex printed: for them, and under `ampatch run`, `show_without_handlers`.
"""

from __future__ import annotations

import collections
import logging
import os
import sys

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
        if logger.level == _SHOWN_FROM and record.levelno < logging.root.level and _is_shown():
            return False  # what the program has set up shows no such messages
        message = record.getMessage()
        if message in self._said_for_good:
            return False
        if hasattr(record, "ampatch_once"):
            self._said_for_good.add(message)
        self._said[message] += 1
        return self._said[message] <= _REPEATS


class _Stderr(logging.Handler):
    """Shows messages on stderr, unless the program shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_shown():
            try:
                print(self.format(record), file=sys.stderr, flush=True)
            except Exception:
                self.handleError(record)


_SHOWN_FROM = logging.INFO - 1
"""The logger's level where it is set here: not INFO, by which a program's own is told from it."""

logger = logging.getLogger("ampatch")
_stderr = _Stderr()
_noise = _Noise()
logger.addFilter(_noise)


def set_verbosity(verbosity: int) -> None:
    """0 logs nothing, any other number logs.  Repeated messages are counted anew."""
    _noise.reset(verbosity)


def show_without_handlers(is_on: bool) -> None:
    """Show messages from INFO on on stderr, as long as the program has no handler for them.

    That is one of the logger "ampatch" or of the root.  False ends it.
    """
    if is_on and not shows():
        logger.addHandler(_stderr)
        if logger.level == logging.NOTSET:
            logger.setLevel(_SHOWN_FROM)
    elif not is_on:
        logger.removeHandler(_stderr)
        if logger.level == _SHOWN_FROM:
            logger.setLevel(logging.NOTSET)


def shows() -> bool:
    """Whether `show_without_handlers` is on."""
    return _stderr in logger.handlers


def _is_shown() -> bool:
    """Whether the program has a handler for the messages."""
    own = [handler for handler in logger.handlers if handler is not _stderr]
    return bool(own or (logger.propagate and logging.root.handlers))


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
