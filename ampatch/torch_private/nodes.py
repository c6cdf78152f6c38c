"""The order in which autograd runs the nodes of a graph."""

from __future__ import annotations

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
