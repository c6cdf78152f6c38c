"""TorchDispatchModes, which see each operator, and torch's stack of them.  For `ampatch.debug`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import AmpatchError
from .torch_attributes import torch_attribute


class _Missing:
    def __init__(self) -> None:
        raise AmpatchError(
            f"ampatch.debug: this torch ({torch.__version__}) has no TorchDispatchMode, "
            "which shows each operator. ampatch.gradient_range works without it."
        )


TorchDispatchMode = torch_attribute("torch.utils._python_dispatch.TorchDispatchMode", _Missing)


try:
    from torch.utils._python_dispatch import (
        _get_current_dispatch_mode_stack,
        _pop_mode,
        _push_mode,
    )
except ImportError:

    def exit_mode(mode: Any) -> None:
        """Do nothing: without access to torch's stack, `mode` stays in it."""

else:

    def exit_mode(mode: Any) -> None:
        """Exit `mode`, even below modes that were entered later.

        Does nothing if `mode` is in another thread's stack.
        """
        if not any(other is mode for other in _get_current_dispatch_mode_stack()):
            return
        above = []
        while _get_current_dispatch_mode_stack()[-1] is not mode:
            above.append(_pop_mode())
        mode.__exit__(None, None, None)
        for other in reversed(above):
            _push_mode(other)


_current_node = torch_attribute("torch._C._current_autograd_node", lambda: None)
_next_number = torch_attribute("torch.autograd._get_sequence_nr", lambda: 0)


def running_backward_node() -> tuple[bool, int]:
    """Return whether an autograd node is running, and its number, or (False, -1)."""
    node = _current_node()
    if node is None:
        return False, -1
    number = getattr(node, "_sequence_nr", None)
    return True, -1 if number is None else number()


def newest_node() -> int:
    """The number of the node that was made last in this thread, or -1 if torch cannot tell."""
    return _next_number() - 1
