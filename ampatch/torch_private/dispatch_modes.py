"""Modes that see each operator, and torch's stack of them: what `ampatch.debug` is made of."""

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
        """Without torch's stack, `mode` stays in it to the end of the thread."""

else:

    def exit_mode(mode: Any) -> None:
        """Leave `mode`, also from below modes that were entered later.

        A mode of another thread stays there.
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
    """Whether a node of the graph is running, and its number; without a way to ask, none is."""
    node = _current_node()
    if node is None:
        return False, -1
    number = getattr(node, "_sequence_nr", None)
    return True, -1 if number is None else number()


def newest_node() -> int:
    """The number of the node that was made last in this thread; -1 without a way to ask."""
    return _next_number() - 1
