"""The value of a dynamic loss scale, its count of clean steps, and the rule by which both move.

Both are tensors where the losses live, and nothing waits for them on an accelerator.

An overflow flag is a 0-dim FP32 tensor, not 0 for an overflow, or a `bool` where
the host knows already.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..config.scale_settings import ScaleSettings
from ..native import part
from ..torch_private.amp_kernels import check_and_unscale_, update_scale_
from ..torch_private.devices import is_owned_by_host
from ..torch_private.dtensors import local_of

Flag = Tensor | bool

_is_cpu = operator.attrgetter("is_cpu")
_is_sparse = operator.attrgetter("is_sparse")
_dtype = operator.attrgetter("dtype")
_LARGEST_FLOAT32 = 3.4028234663852886e38


def moved(scale: Any, clean: Any, overflowed: Any, rule: ScaleSettings) -> tuple[Any, Any]:
    """The scale and the count of clean steps after one more step; numbers or FP64 tensors.

    Section 3.2 of Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740): back off
    when a gradient has `overflowed` (1 or 0), grow after `growth_interval` clean steps, unless FP32
    could not hold that.  `update_scale_` is torch's kernel for the same.
    """
    taken = 1 - overflowed
    clean = (clean + 1) * taken
    can_grow = scale * rule.growth_factor <= _LARGEST_FLOAT32
    grows = taken * (clean == rule.growth_interval) * can_grow
    scale = scale * rule.backoff_factor**overflowed * rule.growth_factor**grows
    return scale, clean % rule.growth_interval


def either(first: Flag, second: Flag) -> Flag:
    """A flag that is set where one of the two is."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.maximum(first, second.to(first.device))
    if isinstance(first, Tensor):
        return torch.ones_like(first) if second else first
    if isinstance(second, Tensor):
        return torch.ones_like(second) if first else second
    return first or second


def is_set(flag: Flag) -> bool:
    """Whether the flag is set.  Waits for the device, if the flag is a tensor there."""
    return flag if isinstance(flag, bool) else bool(flag.item())


class Numbers:
    """Scale (FP32, 0-dim) and count (int32, 0-dim) on a device; only `read` waits for it.

    The tensors stay the same ones, because CUDA graphs may hold them.
    """

    def __init__(self, device: torch.device, scale: float, clean: int = 0) -> None:
        self.device = device
        self._is_hosts = is_owned_by_host(device)
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.clean = torch.tensor(clean, dtype=torch.int32, device=device)

    def fill(self, scale: float, clean: int | None = None) -> None:
        """Another scale, another count."""
        self.scale.fill_(scale)
        if clean is not None:
            self.clean.fill_(clean)

    def snapshot(self) -> Tensor:
        """The present scale, in a tensor of its own."""
        return self.scale.clone()

    def read(self) -> tuple[float, int]:
        """Scale and count.  Waits."""
        return self.scale.item(), int(self.clean.item())

    def unscale_(self, grads: list[Tensor], scale: Tensor) -> Flag:
        """Divide gradients by `scale`, in place.  Returns the flag of an inf or NaN in them.

        It is a `bool` where the host owns the memory, else a tensor.
        """
        if self._is_hosts and part is not None and (bad := part.unscale(grads, scale)) is not None:
            return bad
        found = multiplied(grads, _reciprocal(scale), torch.zeros_like(scale))
        return found.tolist() != 0 if self._is_hosts else found

    def update(self, found: Flag, rule: ScaleSettings) -> None:
        """One more step."""
        if self._is_hosts:  # nothing waits, and arithmetic on numbers costs no operators
            before = self.scale.tolist()
            scale, clean = moved(before, self.clean.tolist(), is_set(found), rule)
            self.clean.fill_(clean)
            if scale != before:
                self.scale.fill_(scale)
                self.clamp(rule)
            return
        if not isinstance(found, Tensor):
            found = torch.full_like(self.scale, float(found))
        found = found.to(self.device)
        if update_scale_ is None:
            scale, clean = moved(self.scale.double(), self.clean, found.double(), rule)
            self.scale.copy_(scale)
            self.clean.copy_(clean)
        else:
            factors = rule.growth_factor, rule.backoff_factor
            update_scale_(self.scale, self.clean, found, *factors, rule.growth_interval)
        self.clamp(rule)

    def clamp(self, rule: ScaleSettings) -> None:
        """Bring the scale between floor and cap."""
        self.scale.clamp_(rule.min_loss_scale, rule.max_loss_scale)


_reciprocal = torch.ops.aten.reciprocal.default
"""Not the function that is patched: reports would count the call as the script's."""


def multiplied(grads: list[Tensor], inverse: Tensor, found: Tensor) -> Tensor:
    """Multiply gradients by `inverse`, in place.  Returns the flag of an inf or NaN in them.

    `found` is a flag that is not set; gradients on its device set it in place.
    """
    for device, group in alike(grads):
        here = found if device == found.device else torch.zeros_like(found, device=device)
        check_and_unscale_(group, here, inverse.to(device))
        if here is not found:
            found = torch.maximum(found, here.to(found.device))
    return found


def alike(grads: list[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    """The tensors behind gradients (`values`), in lists that one kernel takes together."""
    are_together = len(grads) == 1 or (grads and all(map(_is_cpu, grads)))
    if are_together and _are_plain(grads):  # the usual case, without a look at each
        return [(grads[0].device, grads)]
    groups: dict[tuple[torch.device, type], list[Tensor]] = {}
    for grad in map(values, grads):
        groups.setdefault((grad.device, type(grad)), []).append(grad)
    return [(device, group) for (device, _), group in groups.items()]


def _are_plain(grads: list[Tensor]) -> bool:
    """Whether each is its own tensor of real numbers."""
    if set(map(type, grads)) != {Tensor} or any(map(_is_sparse, grads)):
        return False
    return not any(dtype.is_complex for dtype in set(map(_dtype, grads)))


def values(grad: Tensor) -> Tensor:
    """The tensor of real numbers that a gradient consists of.

    A sparse one's values, this rank's of a DTensor, real and imaginary parts as they are in memory.
    """
    grad = local_of(grad)
    grad = grad._values() if grad.is_sparse else grad
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
