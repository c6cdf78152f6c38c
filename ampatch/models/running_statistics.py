"""Restores running statistics of batch norms that overflowed in a forward.

An inf in the input of a norm makes the running statistics inf or NaN for good.  The skipped step
does not change the weights, but every later evaluation gives NaN.  So after a skipped step, values
that are inf or NaN are replaced by the values after the last step, or by values loaded since then.
Finite statistics and the count of batches are kept, as in torch.amp.

The values are recorded after each step, not around the forward, because submodules may be called by
themselves, and may be compiled.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import foreach

# The originals, bound before any patch: cast reports count calls of patches as calls of the script.
_cat = torch.cat
_sub = torch.sub
_logical_or = torch.logical_or
_logical_not = torch.logical_not
_where = torch.where


class RunningStatistics:
    """The running statistics of one model's norms.  This object keeps their buffers alive."""

    def __init__(self, norms: list[nn.Module]) -> None:
        self._norms = [weakref.ref(norm) for norm in norms]
        self._record_statistics()

    def on_load(self, root: nn.Module) -> None:
        """Record the statistics again, after values were loaded into `root`."""
        norms = [norm() for norm in self._norms]
        if any(module is norm for module in root.modules() for norm in norms):
            self._record_statistics()

    def _record_statistics(self) -> None:
        self._groups = self._group_buffers()
        self._recorded_statistics = [_cat(buffers) for buffers in self._groups]

    def _group_buffers(self) -> list[list[Tensor]]:
        """The buffers, in one list per device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for norm in self._norms:
            for buffer in _statistics(norm()):
                groups.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return list(groups.values())

    def after_step(self, skipped: bool | Tensor) -> None:
        """Restore the statistics if the step was skipped, and record them; called after each step.

        Does not synchronize, even if `skipped` is a tensor.
        """
        first = getattr(self._norms[0](), "running_mean", None)
        if type(first) is Tensor and first is not self._groups[0][0]:  # the model was moved
            self._groups = self._group_buffers()
            if len(self._groups) != len(self._recorded_statistics):
                self._record_statistics()
        for index, buffers in enumerate(self._groups):
            now = _cat(buffers)
            is_finite = _logical_not(_sub(now, now))  # two kernels; isfinite has four
            # Instead of inf or NaN, the value that was recorded before.
            finite = _where(is_finite, now, self._recorded_statistics[index].to(now))
            self._recorded_statistics[index] = finite
            if skipped is False:
                continue
            if isinstance(skipped, Tensor):
                stays = _logical_or(is_finite, _logical_not(skipped.to(now.device)))
                finite = _where(stays, now, finite)
            values = finite.split([buffer.numel() for buffer in buffers])
            # Through `.data`, because a graph whose backward pass comes later may need the buffers.
            foreach.copy_([buffer.data for buffer in buffers], list(values))


def norms_of(model: nn.Module) -> list[nn.Module]:
    """The modules that keep running statistics."""
    return [module for module in model.modules() if _statistics(module)]


def _statistics(module: Any) -> list[Tensor]:
    """The running mean and variance of a norm; an empty list if `module` is not a norm."""
    values = [getattr(module, name, None) for name in ("running_mean", "running_var")]
    return [value for value in values if type(value) is Tensor and value.dim() == 1]
