"""The exceptions of ampatch, and helpers for their messages.  A leaf.

Wrong values raise `ValueError`, wrong types `TypeError`, and calls in the wrong order or on the
wrong object `AmpatchError` (a `RuntimeError`).  Each message says what was done, what was expected
and what to do.
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Callable, Iterable
from typing import Any


class AmpatchError(RuntimeError):
    """A call came at the wrong time, or with an object that ampatch does not manage."""


class BannedFunctionError(AmpatchError, NotImplementedError):
    """A function that is unsafe in half precision was called with half arguments.

    Also a `NotImplementedError`, as in apex.
    """


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """Return `' Did you mean "x"?'`, or `''` if no known word is similar to `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f' Did you mean "{close[0]}"?' if close else ""


def type_name(value: object) -> str:
    """The dotted name of the type of `value`: `torch.nn.Linear`, `str`."""
    cls = type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


class UndoAll:
    """Runs all steps of an undo, even if some raise.  The errors are raised at the end.

    A step that KeyboardInterrupt interrupts is run again from its beginning.  `what` begins the
    message if there are several errors: the user's call or a description of the undo.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._errors: list[BaseException] = []

    def do(self, action: Callable[..., Any], *args: Any) -> Any:
        """Return `action(*args)`, or None if it raises."""
        for _ in range(2):
            try:
                return action(*args)
            except BaseException as error:
                if not any(_are_alike(error, known) for known in self._errors):
                    self._errors.append(error)
                if isinstance(error, Exception):
                    break
        return None

    def end(self) -> None:
        """Raise a single error as it is, and several as an `ExceptionGroup`.

        Before Python 3.11 several errors are raised as an `AmpatchError` that names them.
        """
        if not self._errors:
            return
        interrupts = [error for error in self._errors if not isinstance(error, Exception)]
        if len(self._errors) == 1 or interrupts:
            raise (interrupts or self._errors)[0]
        message = (
            f"{self._what}: {len(self._errors)} changes could not be undone; all others are undone."
        )
        group = getattr(builtins, "ExceptionGroup", None)
        if group is not None:
            raise group(message, self._errors)
        others = "; ".join(f"{type(error).__name__}: {error}" for error in self._errors)
        raise AmpatchError(f"{message} {others}") from self._errors[0]


def _are_alike(first: BaseException, second: BaseException) -> bool:
    """Whether two errors have the same type and arguments, as if one fault had caused both."""
    return type(first) is type(second) and first.args == second.args
