"""What torch can run on this CPU, asked by a tiny case: never by a name or the CPU's flags."""

from __future__ import annotations

from collections.abc import Callable


def refusal(case: Callable[[], object]) -> str:
    """Why torch cannot run `case`, in its words; empty if it can.

    `case` has nothing of ampatch's in it, or a mistake there would pass for torch's.
    """
    try:
        case()
    except (RuntimeError, NotImplementedError) as error:
        return f"torch cannot run this here: {error}"
    return ""
