"""FP32 copies of half tensors without a master; writes into a copy reach the half tensor.

In plain PyTorch a `state_dict()` aliases the weights.  A half weight without a master
(O3, frozen weights) has no FP32 memory to alias, so the copies that were handed out are watched.
They are held until the model is used next, and then followed for as long as the user's code holds
them.  Each time both are compared with what was handed out: what was written into the copy goes
into the half tensor, what was written into the half tensor goes into the copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ..torch_private.dtensors import local_of
from ..torch_private.probes import computes_with_fakes


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Tensors made inside have versions, also if the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise: different numbers (-0.0 is not 0.0); any NaN is like any other."""
    differ = (one != other) | (one.signbit() != other.signbit())
    return differ & ~(one.isnan() & other.isnan())


def _is_rounding_exact(half: Tensor, original: Tensor) -> bool:
    return torch.equal(half.detach().to(original.dtype), original)


class _Copy:
    """One copy, and the half tensor and its values at that time."""

    __slots__ = ("half", "held", "of_then", "value", "version")

    def __init__(self, half: Tensor, value: Tensor) -> None:
        self.half = half
        self.value = weakref.ref(value)
        self.held: Tensor | None = value
        self.of_then = half.detach().clone()
        self.version = value._version


class WidenedCopies:
    """The copies of a session's half tensors; `copies` is empty while there are none to look at.

    Some half tensors have FP32 originals here: elements that still equal their rounding
    are widened to them, so that converting a model loses nothing.
    """

    def __init__(self) -> None:
        self.copies: dict[int, _Copy] = {}
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}

    def keep_original(self, half: Tensor, original: Tensor) -> None:
        """`half` was rounded from `original`."""
        has_values = not half.is_meta and not computes_with_fakes()
        if has_values and not _is_rounding_exact(local_of(half), local_of(original)):
            self._originals[id(half)] = half, original

    def forget_original(self, half: Tensor) -> None:
        """The FP32 values of `half` are elsewhere now, or nobody needs them any more."""
        self._originals.pop(id(half), None)

    def _original(self, half: Tensor) -> Tensor | None:
        known, original = self._originals.get(id(half), (None, None))
        return original if known is half else None

    def load(self, half: Tensor, values: Tensor) -> None:
        """A checkpoint's `values` are about to be copied into `half`."""
        original = self._original(half)
        if original is None:
            return
        with _plain_tensors():
            original.copy_(values)
            copy = self.copies.get(id(half))
            value = None if copy is None or copy.half is not half else copy.value()
            if copy is not None and value is not None:  # it shows what is loaded, as an alias would
                value.data.copy_(values)
                copy.of_then.copy_(values)
                copy.version = value._version

    def value(self, half: Tensor) -> Tensor:
        """What `half` holds, in FP32, to be read."""
        copy = self.copies.get(id(half))
        with _plain_tensors():
            if copy is not None and copy.half is half:
                self._compared(copy)
            return self._widen(half, half)

    def _widen(self, half: Tensor, values: Tensor) -> Tensor:
        """`values`, those that `half` has or had, in FP32."""
        original = self._original(half)
        wide = values.detach().float()
        if original is None or original.shape != values.shape:
            return wide
        original = original.to(values.device)
        return torch.where(values == original.to(values.dtype), original, wide)

    def give(self, half: Tensor) -> Tensor:
        """The FP32 copy of `half`, up to date; the same one for as long as it lives."""
        with _plain_tensors():
            copy = self.copies.get(id(half))
            value = self._compared(copy) if copy is not None and copy.half is half else None
            if copy is None or value is None:
                value = self._widen(half, half)
                copy = self.copies[id(half)] = _Copy(half, value)
            copy.held = value
        return value

    def take_over(self) -> None:
        """Take over what was written into copies; those that nothing else holds are dropped."""
        with _plain_tensors():
            for key, copy in list(self.copies.items()):
                value, copy.held = self._compared(copy), None
                if value is None:
                    del self.copies[key]
                del value
                if copy.value() is None:
                    self.copies.pop(key, None)

    def release(self, half: Tensor) -> Tensor:
        """The FP32 values of `half`: its copy, if there is one.  The copy is watched no longer."""
        copy = self.copies.pop(id(half), None)
        with _plain_tensors():
            value = self._compared(copy) if copy is not None and copy.half is half else None
            if value is None:
                value = self._widen(half, half)
        self._originals.pop(id(half), None)
        return value

    def hand_over(self, half: Tensor) -> Tensor | None:
        """The copy of `half` that is held, up to date, to be the memory of its master; or None.

        It is watched no longer.
        """
        copy = self.copies.pop(id(half), None)
        if copy is None or copy.half is not half:
            return None
        with _plain_tensors():
            value = self._compared(copy)
        return value if value is not None and value.device == half.device else None

    def _compared(self, copy: _Copy) -> Tensor | None:
        """Bring a copy and its half tensor together; returns the copy, None if it is gone."""
        value, half = copy.value(), copy.half
        if value is None or value.shape != half.shape:
            return None
        written = _differ(value, self._widen(half, copy.of_then)).to(half.device)
        merged = torch.where(written, value.to(half.device, half.dtype), half)
        if value._version != copy.version:
            half.copy_(merged)
        else:  # as a write through `.data`: no version rises, no graph becomes invalid
            half.data.copy_(merged)
        value.data.copy_(self._widen(half, half))
        copy.of_then.copy_(half)
        copy.version = value._version
        return value
