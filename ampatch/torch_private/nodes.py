"""Nodes of a graph: the order in which autograd runs them, and those of compiled functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_FIRST = 2**62


def run_when_ready(tensor: Tensor) -> None:
    """Have the node that made `tensor` run before all other nodes that are ready.

    Where this torch does not let one choose, it runs by the order of making: right, only later.
    """
    node = tensor.grad_fn
    put = getattr(node, "_set_sequence_nr", None)
    if put is not None:
        put(_FIRST)


def leads_to_compiled(node: Any) -> bool:
    """Whether a graph has the backward of a compiled function, whose buffers may serve one pass.

    Where this torch names it otherwise: False, and a pass that retains the graph is torch's error.
    """
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CompiledFunctionBackward":
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False
