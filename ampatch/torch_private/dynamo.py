"""torch.compile's frame evaluation.  Dynamo is never imported here: its import takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import wrapt

from .lookup import of_torch

_context = of_torch("torch._guards.CompileContext", None)
_compiled_now = getattr(_context, "try_get", lambda: None)


def is_compiling() -> bool:
    """Whether this thread is within torch.compile's compiler, and not in code that it made.

    Without a way to ask, nothing is being compiled.
    """
    return _compiled_now() is not None


def run_eagerly(codes: Callable[[], Iterable[CodeType]]) -> None:
    """Once Dynamo is imported, have it run these functions as they are where it meets them as
    frames; traced code still goes through them.

    A torch without a way to say so compiles them, which works too.
    """

    def mark(eval_frame: Any) -> None:
        skip_code = getattr(eval_frame, "skip_code", None)
        if skip_code is not None:
            for code in codes():
                skip_code(code)

    wrapt.register_post_import_hook(mark, "torch._dynamo.eval_frame")
