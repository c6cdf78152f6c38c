"""Each `loss.backward()` call as a separate `scale_loss` block.

The script finds unscaled gradients in `.grad`, added to earlier gradients, as in FP32.  The session
keeps the overflow flag until the step.

A pass is not scaled if scaling cannot be undone or is of no use: with `create_graph`, with roots
that are not floating tensors, and if it reaches no parameter of an optimizer (an update by hand
cannot be skipped after an overflow).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..log import logger
from ..session.facade import ManagedOptimizer, OutermostForwards, Session
from ..torch_private.probes import current_backward_pass
from .graph import UnmanagedGradients, leaves


class _Targets(NamedTuple):
    """The tensors (as far as the graph shows) and optimizers that get gradients from a pass."""

    reached: list[Tensor]
    optimizers: list[ManagedOptimizer]


class BackwardPasses:
    """The backward passes of a process, one at a time."""

    def __init__(self, session: Session, forwards: OutermostForwards) -> None:
        self._session, self._forwards = session, forwards
        self._scaler = session.scalers[0]
        self._lock = threading.RLock()
        self._has_warned_unscaled = False
        self._has_warned_without_casts = False
        self._unmanaged: UnmanagedGradients | None = None  # for the running scaled pass
        self.scale: Any = None  # the scale of the running pass, or None if the pass is not scaled
        self.deferred_hooks: list[Callable[[], None]] = []  # called after the pass has unscaled

    def wrap_backward(self, original: Callable) -> Callable:
        """The replacement of `torch.autograd.backward`."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._warn_without_casts()
            if is_dynamo_compiling() or self._scaler.is_one or not self._session.is_open:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            roots = _as_list(bound.arguments["tensors"])
            if current_backward_pass() != -1:
                self._prepare_nested(bound.arguments, roots)
                return original(*bound.args, **bound.kwargs)
            with self._lock:
                targets = self._targets(bound.arguments, roots)
                if targets is None:
                    return original(*args, **kwargs)
                self._run(original, bound, targets)

        return backward

    def wrap_grad(self, original: Callable) -> Callable:
        """The replacement of `torch.autograd.grad`."""

        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            self._warn_without_casts()
            return original(*args, **kwargs)

        return grad

    def _warn_without_casts(self) -> None:
        """Warn once that a backward pass begins before anything has been cast."""
        if self._has_warned_without_casts or self._forwards.has_cast or is_dynamo_compiling():
            return
        self._has_warned_without_casts = True
        logger.warning(
            "ampatch run --auto: a backward pass begins, and nothing is cast so far. Casts begin "
            "where an nn.Module that has parameters is called; a script that trains bare tensors "
            "runs in FP32. Make them nn.Parameters of a module, and compute in its forward."
        )

    def _targets(self, arguments: dict, roots: list[Any]) -> _Targets | None:
        """The targets of a pass, or None if the pass must not be scaled."""
        if arguments.get("create_graph") or not all(map(_is_loss, roots)):
            return None
        inputs = arguments.get("inputs")
        reached, is_hidden = (_as_list(inputs), False) if inputs is not None else leaves(roots)
        ids = {id(tensor) for tensor in reached}
        optimizers = [
            optimizer
            for optimizer in self._session.optimizers
            if is_hidden or any(id(param) in ids for param in optimizer.parameters())
        ]
        if optimizers:
            return _Targets(reached, optimizers)
        self._warn_unscaled()
        return None

    def _warn_unscaled(self) -> None:
        if not self._has_warned_unscaled and self._forwards.has_cast:
            self._has_warned_unscaled = True
            logger.warning(
                "ampatch run --auto: a backward() reached no parameter of a torch.optim.Optimizer. "
                "Such losses are not scaled, because no step can be skipped after an overflow; "
                "gradients that float16 cannot hold are lost there. --dtype bfloat16 holds them."
            )

    def _managed_ids(self) -> set[int]:
        return {id(param) for o in self._session.optimizers for param in o.parameters()}

    def _run(self, original: Callable, bound: inspect.BoundArguments, targets: _Targets) -> None:
        roots = _as_list(bound.arguments["tensors"])
        block = self._session.scale_loss_block(
            roots[0], targets.optimizers, 0, delay_unscale=False, delay_overflow_check=False
        )
        scale = self._scaler.snapshot()
        unmanaged = UnmanagedGradients(self._managed_ids(), self._scaler, scale)
        try:
            # The script may have turned grad mode off.
            with torch.enable_grad(), unmanaged, block as scaled_loss:
                unmanaged.add(targets.reached)
                self._unmanaged, self.scale = unmanaged, self._scaler.snapshot()
                other_losses = [self._scaler.scale(root)[0] for root in roots[1:]]
                bound.arguments["tensors"] = (scaled_loss, *other_losses)
                original(*bound.args, **bound.kwargs)
        finally:
            self._unmanaged = self.scale = None
            hooks, self.deferred_hooks = self.deferred_hooks, []
        with torch.no_grad():  # as within the pass
            for hook in hooks:
                hook()

    def _prepare_nested(self, arguments: dict, roots: list[Any]) -> None:
        """Prepare a pass inside another pass.  If it starts from losses, the losses are scaled.

        Otherwise it starts from gradients of the outer pass, which are scaled already.
        """
        if self._unmanaged is None:
            return
        inputs = arguments.get("inputs")
        tensors = [root for root in roots if isinstance(root, Tensor)]
        self._unmanaged.add(_as_list(inputs) if inputs is not None else leaves(tensors)[0])
        if arguments.get("grad_tensors") is None and all(map(_is_loss, roots)):
            with torch.enable_grad():
                arguments["tensors"] = tuple(self._scaler.scale(root)[0] for root in roots)


def _as_list(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _is_loss(root: Any) -> bool:
    return isinstance(root, Tensor) and root.is_floating_point() and root.requires_grad
