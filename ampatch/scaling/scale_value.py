"""The value of a dynamic loss scale, its count of clean steps, and the rule by which it grows.

With losses on an accelerator both are tensors there, and nothing waits for them.
With losses on the CPU both are Python numbers and cost no operators.  They are equal, to
the bit, to what torch's kernels compute.

An overflow flag is a 0-dim FP32 tensor, not 0 for an overflow, or a `bool` where
the host knows already.
"""

from __future__ import annotations

import operator
import struct

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


def numbers_on(device: torch.device, scale: float, unskipped: int = 0) -> Numbers:
    """Scale and count, to live with losses on `device`."""
    if is_owned_by_host(device):
        return HostNumbers(scale, unskipped, device)
    return DeviceNumbers(scale, unskipped, device)


class HostNumbers:
    """Scale and count as numbers of the host."""

    def __init__(self, scale: float, unskipped: int, device: torch.device) -> None:
        self.device = device
        self.unskipped = unskipped
        self._zeros: list[Tensor] = []  # flags that were not set: each serves again
        one = torch.ones((), dtype=torch.float32, device="cpu")
        self._inverse: tuple[float, Tensor] = (1.0, one)
        self.fill(scale)

    def fill(self, scale: float) -> None:
        """Another scale."""
        self.scale = _float32(scale)

    def fill_count(self, unskipped: int) -> None:
        """Another count of clean steps."""
        self.unskipped = unskipped

    def snapshot(self) -> float:
        """The present scale."""
        return self.scale

    def read(self) -> tuple[float, int]:
        """Scale and count."""
        return self.scale, self.unskipped

    def unscale_(self, grads: list[Tensor], scale: float | Tensor) -> bool:
        """Divide gradients by `scale`, in place; whether an inf or NaN was met.

        Waits for gradients that live on an accelerator, and for a scale from there.
        """
        if isinstance(scale, Tensor):
            scale = scale.item()
        known, inverse = self._inverse
        if scale != known:
            inverse = torch.tensor(1.0 / scale, dtype=torch.float32, device="cpu")
            self._inverse = scale, inverse
        if part is not None:
            found = self._unset()
            met = part.unscale(grads, found, inverse)
            if not met:
                self._zeros.append(found)
            if met is not None:
                return met
        bad = False
        for device, group in alike(grads):
            if is_owned_by_host(device):
                found = self._unset()
                check_and_unscale_(group, found, inverse)
                if found.tolist():
                    bad = True
                else:
                    self._zeros.append(found)
            else:
                found = torch.zeros((), dtype=torch.float32, device=device)
                check_and_unscale_(group, found, inverse.to(device))
                bad = bool(found.item()) or bad
        return bad

    def _unset(self) -> Tensor:
        """A flag that is not set, and not in use."""
        try:
            return self._zeros.pop()
        except IndexError:  # none left, or another thread was faster
            return torch.zeros((), dtype=torch.float32, device="cpu")

    def update(self, found: Flag, rule: ScaleSettings) -> None:
        """The rule of `amp_kernels.update_scale_`, and the limits."""
        if found is not False and is_set(found):
            self.scale, self.unskipped = _float32(self.scale * rule.backoff_factor), 0
            self.clamp(rule)
        elif self.unskipped + 1 != rule.growth_interval:
            self.unskipped += 1
        else:
            grown = self.scale * rule.growth_factor
            if grown <= _LARGEST_FLOAT32:
                self.scale = _float32(grown)
            self.unskipped = 0
            self.clamp(rule)

    def clamp(self, rule: ScaleSettings) -> None:
        """Draw the scale within floor and cap."""
        low, high = _float32(rule.min_loss_scale), _float32(rule.max_loss_scale)
        self.scale = min(max(self.scale, low), high)


class DeviceNumbers:
    """Scale (FP32, 0-dim) and count (int32, 0-dim) on a device; only `read` waits for it.

    The tensors stay the same ones, because CUDA graphs may hold them.
    """

    def __init__(self, scale: float, unskipped: int, device: torch.device) -> None:
        self.device = device
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.unskipped = torch.tensor(unskipped, dtype=torch.int32, device=device)

    def fill(self, scale: float) -> None:
        """Another scale."""
        self.scale.fill_(scale)

    def fill_count(self, unskipped: int) -> None:
        """Another count of clean steps."""
        self.unskipped.fill_(unskipped)

    def snapshot(self) -> Tensor:
        """The present scale, in a tensor of its own."""
        return self.scale.clone()

    def read(self) -> tuple[float, int]:
        """Scale and count.  Waits."""
        return self.scale.item(), int(self.unskipped.item())

    def unscale_(self, grads: list[Tensor], scale: Tensor | float) -> Tensor:
        """Divide gradients by `scale`, in place; the flag is 1.0 if an inf or NaN was met."""
        if not isinstance(scale, Tensor):
            scale = torch.full_like(self.scale, scale)
        found = torch.zeros_like(scale)
        inverse = _reciprocal(scale)
        for device, group in alike(grads):
            found_here = found if device == found.device else found.to(device)
            check_and_unscale_(group, found_here, inverse.to(device))
            if found_here is not found:
                found = torch.maximum(found, found_here.to(found.device))
        return found

    def update(self, found: Flag, rule: ScaleSettings) -> None:
        """Back off where `found` is set; else count a clean step, and grow in time."""
        if not isinstance(found, Tensor):
            found = torch.full_like(self.scale, float(found))
        found = found.to(self.device)
        growth, backoff = rule.growth_factor, rule.backoff_factor
        update_scale_(self.scale, self.unskipped, found, growth, backoff, rule.growth_interval)
        self.clamp(rule)

    def clamp(self, rule: ScaleSettings) -> None:
        """Draw the scale within floor and cap."""
        self.scale.clamp_(rule.min_loss_scale, rule.max_loss_scale)


_reciprocal = torch.ops.aten.reciprocal.default
"""Not the function that is patched: reports would count the call as the script's."""


def _float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


Numbers = HostNumbers | DeviceNumbers


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
