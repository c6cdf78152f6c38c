"""The tensors that get gradients from a backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def leaves(roots: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """The leaves that `roots` reach, and whether there may be leaves that the graph hides.

    A Python `autograd.Function` may run a backward pass of its own over a hidden graph, as
    `torch.utils.checkpoint(use_reentrant=True)` does.
    """
    reached = [root for root in roots if root.is_leaf and root.requires_grad]
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)  # holds the nodes: a dropped one would come back as a new Python object
    hidden = False
    while todo:
        node = todo.pop()
        following = node.next_functions
        if not following:
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                reached.append(variable)
            continue
        hidden = hidden or isinstance(node, BackwardCFunction)
        for other, _ in following:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
    return reached, hidden


class UnmanagedGradients:
    """Context manager for one scaled pass: gradients of tensors that no optimizer has.

    They are unscaled too: gradients of inputs that a script perturbs, of weights that it updates by
    hand or not at all, of results with `retain_grad`.  An overflow in them does not change the loss
    scale.
    """

    def __init__(self, managed_ids: set[int], scaler: Any, scale: Any) -> None:
        self._managed_ids = managed_ids  # ids of the optimizers' tensors
        self._scaler = scaler
        self._scale = scale
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Save the earlier gradients of these tensors; the end of the pass adds the new ones."""
        for tensor in tensors:
            if id(tensor) not in self._managed_ids and id(tensor) not in self._saved:
                self._saved[id(tensor)] = (tensor, tensor.grad)
                tensor.grad = None

    def __enter__(self) -> UnmanagedGradients:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            new = [t.grad for t, _ in self._saved.values() if t.grad is not None]
            with torch.no_grad():
                self._scaler.unscale_(new, self._scale)
        for tensor, earlier in self._saved.values():
            if kind is not None or tensor.grad is None:
                tensor.grad = earlier
            elif earlier is not None:
                tensor.grad = earlier.add_(tensor.grad)
