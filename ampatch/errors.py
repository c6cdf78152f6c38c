"""What ampatch raises, and how its messages are put together.  A leaf.

Wrong values are `ValueError`, wrong types `TypeError`, and calls in the wrong
order or on the wrong object `AmpatchError` (a `RuntimeError`).  Each message
says what was done, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AmpatchError(RuntimeError):
    """A call came at the wrong time, or on an object ampatch does not manage."""


class BannedFunctionError(AmpatchError, NotImplementedError):
    """A function that is unsafe in half precision was called with half arguments.

    Also a `NotImplementedError`, which is what apex raised here.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`' Did you mean "x"?'`, or `''` when nothing known is close to `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""


def type_name(value: object) -> str:
    """The type of `value` as a reader would write it: `torch.nn.Linear`, `str`."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"
