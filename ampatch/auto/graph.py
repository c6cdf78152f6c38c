"""The tensors that get gradients from a backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def leaves(roots: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """The leaves that `roots` reach, and whether a hidden graph may have further leaves.

    A Python `autograd.Function` may run a backward pass of its own over a graph that `roots` do
    not show, as `torch.utils.checkpoint(use_reentrant=True)` does.
    """
    reached = [root for root in roots if root.is_leaf and root.requires_grad]
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    # Keeps the nodes alive: a dropped node would come back as a new Python object.
    seen = set(pending)
    is_hidden = False
    while pending:
        node = pending.pop()
        edges = node.next_functions
        if not edges:
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                reached.append(variable)
            continue
        is_hidden = is_hidden or isinstance(node, BackwardCFunction)
        for next_node, _ in edges:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)
    return reached, is_hidden


class UnmanagedGradients:
    """Context manager for one scaled pass: unscales gradients of tensors that no optimizer has.

    Examples: inputs that a script perturbs, weights that it updates by hand or not at all, and
    results with `retain_grad`.  An overflow in their gradients does not change the loss scale.
    """

    def __init__(self, managed_ids: set[int], scaler: Any, scale: Any) -> None:
        self._managed_ids = managed_ids  # ids of the optimizers' tensors
        self._scaler = scaler
        self._scale = scale
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Save the earlier gradients of tensors; the end of the pass adds the new gradients."""
        for tensor in tensors:
            if id(tensor) not in self._managed_ids and id(tensor) not in self._saved:
                self._saved[id(tensor)] = (tensor, tensor.grad)
                tensor.grad = None

    def __enter__(self) -> UnmanagedGradients:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *details: object) -> None:
        if exc_type is None:
            new_grads = [t.grad for t, _ in self._saved.values() if t.grad is not None]
            with torch.no_grad():
                self._scaler.unscale_(new_grads, self._scale)
        for tensor, earlier in self._saved.values():
            if exc_type is not None or tensor.grad is None:
                tensor.grad = earlier
            elif earlier is not None:
                tensor.grad = earlier.add_(tensor.grad)
