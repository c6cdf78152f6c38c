"""The logger "ampatch": rank 0 only, silent at verbosity 0, each message at most three times.

A leaf.  The package logs and does not print: applications decide what they show.  Scripts for apex
set up no handler, because apex printed.  `show_without_handlers` is for these scripts and for
`ampatch run`.
"""

from __future__ import annotations

import collections
import logging
import os
import sys

import torch.distributed

_MAX_REPEATS = 3  # so many times the same message is logged

LOG_ONCE = {"ampatch_once": True}
"""The `extra` of a message that is logged once per process, even if several sessions open."""


class _RepeatFilter(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self.verbosity = 1
        self._counts: collections.Counter[str] = collections.Counter()
        self._logged_once: set[str] = set()

    def reset(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._counts.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        if self.verbosity == 0 or _rank() != 0:
            return False
        if (
            logger.level == _DEFAULT_LEVEL
            and record.levelno < logging.root.level
            and _has_own_handler()
        ):
            return False  # the handlers of the program show no such messages
        message = record.getMessage()
        if message in self._logged_once:
            return False
        if hasattr(record, "ampatch_once"):
            self._logged_once.add(message)
        self._counts[message] += 1
        return self._counts[message] <= _MAX_REPEATS


class _StderrHandler(logging.Handler):
    """Prints messages to stderr, unless the program has a handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _has_own_handler():
            try:
                print(self.format(record), file=sys.stderr, flush=True)
            except Exception:
                self.handleError(record)


_DEFAULT_LEVEL = logging.INFO - 1
"""The level that `show_without_handlers` sets.  Not INFO, which the program may have set."""

logger = logging.getLogger("ampatch")
_stderr_handler = _StderrHandler()
_repeat_filter = _RepeatFilter()
logger.addFilter(_repeat_filter)


def set_verbosity(verbosity: int) -> None:
    """Log nothing if `verbosity` is 0.  Resets the counts of repeated messages."""
    _repeat_filter.reset(verbosity)


def show_without_handlers(is_on: bool) -> None:
    """Show messages of level INFO or higher on stderr while the program has no handler for them.

    The program's handlers are on the logger "ampatch" or on the root logger.  `is_on=False` undoes
    this.
    """
    if is_on and not shows_without_handlers():
        logger.addHandler(_stderr_handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(_DEFAULT_LEVEL)
    elif not is_on:
        logger.removeHandler(_stderr_handler)
        if logger.level == _DEFAULT_LEVEL:
            logger.setLevel(logging.NOTSET)


def shows_without_handlers() -> bool:
    """Whether `show_without_handlers` is on."""
    return _stderr_handler in logger.handlers


def _has_own_handler() -> bool:
    """Whether the program has a handler for the messages."""
    handlers = [handler for handler in logger.handlers if handler is not _stderr_handler]
    return bool(handlers or (logger.propagate and logging.root.handlers))


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
