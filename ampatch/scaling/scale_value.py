"""The value of a dynamic loss scale, its count of clean steps, and the rule by which both move.

With losses on an accelerator both are tensors there, and nothing waits for them.  With losses on
the CPU both are Python numbers and cost no operators.  They are equal, to the bit.

An overflow flag is a 0-dim FP32 tensor, not 0 for an overflow, or a `bool` where
the host knows already.
"""

from __future__ import annotations

import operator
import struct
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
    """The scale and the count of clean steps after one more step, of numbers or of FP64 tensors.

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


def numbers_on(device: torch.device, scale: float, clean: int = 0) -> Numbers:
    """Scale and count, to live with losses on `device`."""
    if is_owned_by_host(device):
        return HostNumbers(scale, clean, device)
    return DeviceNumbers(scale, clean, device)


class HostNumbers:
    """Scale and count as numbers of the host."""

    def __init__(self, scale: float, clean: int, device: torch.device) -> None:
        self.device = device
        self._zeros: list[Tensor] = []  # flags that were not set: each serves again
        self._inverses: dict[float, Tensor] = {}  # of the last scales
        self.scale, self.clean = _float32(scale), clean

    def fill(self, scale: float, clean: int | None = None) -> None:
        """Another scale, another count."""
        self.scale = _float32(scale)
        self.clean = self.clean if clean is None else clean

    def snapshot(self) -> float:
        """The present scale."""
        return self.scale

    def read(self) -> tuple[float, int]:
        """Scale and count."""
        return self.scale, self.clean

    def unscale_(self, grads: list[Tensor], scale: float | Tensor) -> bool:
        """Divide gradients by `scale`, in place; whether an inf or NaN was met.

        Waits for gradients that live on an accelerator, and for a scale from there.
        """
        if isinstance(scale, Tensor):
            scale = scale.item()
        inverse = self._inverses.get(scale)
        if inverse is None:
            if len(self._inverses) > 3:
                self._inverses.clear()
            inverse = torch.tensor(1.0 / scale, dtype=torch.float32, device="cpu")
            self._inverses[scale] = inverse
        try:
            found = self._zeros.pop()
        except IndexError:  # none left, or another thread was faster
            found = torch.zeros((), dtype=torch.float32, device="cpu")
        bad = None if part is None else part.unscale(grads, found, inverse)
        if bad is None:
            found = multiplied(grads, inverse, found)
            bad = found.tolist() != 0
        if not bad:
            self._zeros.append(found)
        return bad

    def update(self, found: Flag, rule: ScaleSettings) -> None:
        """One more step."""
        overflowed = found is not False and is_set(found)
        scale, self.clean = moved(self.scale, self.clean, overflowed, rule)
        if scale != self.scale:
            self.scale = _float32(scale)
            self.clamp(rule)

    def clamp(self, rule: ScaleSettings) -> None:
        """Draw the scale within floor and cap."""
        low, high = _float32(rule.min_loss_scale), _float32(rule.max_loss_scale)
        self.scale = min(max(self.scale, low), high)


class DeviceNumbers:
    """Scale (FP32, 0-dim) and count (int32, 0-dim) on a device; only `read` waits for it.

    The tensors stay the same ones, because CUDA graphs may hold them.
    """

    def __init__(self, scale: float, clean: int, device: torch.device) -> None:
        self.device = device
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

    def unscale_(self, grads: list[Tensor], scale: Tensor | float) -> Tensor:
        """Divide gradients by `scale`, in place; the flag is 1.0 if an inf or NaN was met."""
        if not isinstance(scale, Tensor):
            scale = torch.full_like(self.scale, scale)
        return multiplied(grads, _reciprocal(scale), torch.zeros_like(scale))

    def update(self, found: Flag, rule: ScaleSettings) -> None:
        """One more step."""
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
        """Draw the scale within floor and cap."""
        self.scale.clamp_(rule.min_loss_scale, rule.max_loss_scale)


_reciprocal = torch.ops.aten.reciprocal.default
"""Not the function that is patched: reports would count the call as the script's."""


def _float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


Numbers = HostNumbers | DeviceNumbers


def multiplied(grads: list[Tensor], inverse: Tensor, found: Tensor) -> Tensor:
    """Multiply gradients by `inverse`, in place; whether an inf or NaN was met.

    `found` is the flag, not set yet, that is set where the gradients are on its device.
    """
    for device, group in alike(grads):
        here = found if device == found.device else torch.zeros_like(found, device=device)
        check_and_unscale_(group, here, inverse.to(device))
        if here is not found:
            found = torch.maximum(found, here.to(found.device))
    return found


def alike(grads: list[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    """The tensors that hold their numbers, in lists that one kernel takes together."""
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
