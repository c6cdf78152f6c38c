"""Compares half weights with the rounding of their masters, many weights at once.

Values are compared, bit by bit, since `.data` writes, numpy, collectives and fused kernels raise no
version.  The weights are put together in scratch memory, a bounded part at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ...native import part
from ...torch_private import foreach
from ...torch_private.devices import is_read_by_host
from ...torch_private.dtensors import any_dtensor, local_of
from ..tensor_lists import places


class _Sizes(NamedTuple):
    """How many elements of weights are compared at once, which bounds the scratch memory."""

    row: int  # small weights together
    small: int  # the largest of these
    large: int  # of one weight


_OF_HOST = _Sizes(2**16, 2**15, 2**18)
"""Half a megabyte of scratch memory: it stays in the cache."""
_OF_DEVICE = _Sizes(2**22, 2**20, 2**24)
"""Some 100 MB: an accelerator wants few and large kernels."""

plain_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""`.data`, past the property that watches reads of it."""
set_plain_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _own_data(tensor: Tensor) -> Tensor:
    """Its data, of a DTensor those of this rank: half and master have the same part of it."""
    own = local_of(tensor)
    return plain_data(tensor) if own is tensor else own


class Pair(NamedTuple):
    """A half parameter of the model and its FP32 master."""

    half: Tensor
    master: Parameter


class Comparison:
    """A comparison of `pairs`, good for as long as `is_current`."""

    def __init__(self, pairs: list[Pair]) -> None:
        self._halves = [pair.half for pair in pairs]
        self._masters = [pair.master for pair in pairs]
        self._are_split = any_dtensor(self._masters)
        self._pointers = self._places()
        self._odd: list[Pair] = []
        self._parts: list[_Row | _Large] = []
        rows: dict[tuple, _Row] = {}
        for pair in pairs:
            flat = _flat(pair)
            if flat is None:
                self._odd.append(pair)
                continue
            sizes = _OF_HOST if is_read_by_host(pair.half) else _OF_DEVICE
            if flat[0].numel() > sizes.small:
                self._parts.append(_Large(pair, *flat, sizes.large))
            else:
                self._add_small(rows, pair, flat, sizes.row)
        for row in rows.values():
            row.fill_up()

    def _add_small(
        self, rows: dict[tuple, _Row], pair: Pair, flat: tuple[Tensor, Tensor], limit: int
    ) -> None:
        key = (pair.half.device, pair.half.dtype)
        row = rows.get(key)
        if row is None or row.size + flat[0].numel() > limit:
            if row is not None:
                row.fill_up()
            row = rows[key] = _Row()
            self._parts.append(row)
        row.add(pair, *flat)

    def _places(self) -> list[int]:
        return places(list(map(local_of, self._halves)) if self._are_split else self._halves)

    def is_current(self) -> bool:
        """Whether the half weights lie where they lay."""
        return self._pointers == self._places()

    def differing(self) -> Iterator[Pair]:
        """Pairs that do not agree, as far as the host can know without waiting for a device.

        On an accelerator differing elements of masters are made those of their halves at once.
        """
        for some in self._parts:
            if not is_read_by_host(some.pairs[0].half):
                some.sync_masters()
            elif not some.agrees():
                yield from (pair for pair in some.pairs if not agrees(pair))
        for pair in self._odd:
            if not is_read_by_host(pair.half):
                sync_master_from_half(pair)
            elif not agrees(pair):
                yield pair


class _Row:
    """Small weights of one device and type, laid in a row to be compared."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.size = 0
        self._halves: list[Tensor] = []
        self._masters: list[Tensor] = []

    def add(self, pair: Pair, half: Tensor, master: Tensor) -> None:
        """One more, and both of it flat."""
        self.pairs.append(pair)
        self.size += half.numel()
        self._halves.append(half)
        self._masters.append(master)

    def fill_up(self) -> None:
        """It is complete.  Zeros fill it up to whole words, eight bytes of halves."""
        lacking = -self.size % 4
        if lacking:  # an empty tensor would lead torch.cat off its fast path
            self._halves.append(self._halves[0].new_zeros(lacking))
            self._masters.append(self._masters[0].new_zeros(lacking))

    def agrees(self) -> bool:
        """Whether all bits are those of the masters' rounding."""
        if part is not None and part.are_rounded(self._halves, self._masters):
            return True
        halves = torch.cat(self._halves)
        rounded = torch.cat(self._masters).to(halves.dtype)
        return torch.equal(halves.view(torch.int64), rounded.view(torch.int64))

    def sync_masters(self) -> None:
        """As `sync_master_from_half`, for all, without waiting for the device."""
        masters = torch.cat(self._masters)
        chosen = _choose(torch.cat(self._halves), masters, out=masters)
        parts = chosen.split(list(map(Tensor.numel, self._masters)))
        foreach.copy_(self._masters, list(parts))


class _Large:
    """One weight, compared where it lies, a part at a time."""

    def __init__(self, pair: Pair, half: Tensor, master: Tensor, size: int) -> None:
        self.pairs = [pair]
        self._half, self._master = half, master
        whole = half.numel() % 4 == 0 and half.storage_offset() % 4 == 0
        self._kind = torch.int64 if whole else torch.int16
        halves = half.view(self._kind).split(size * 2 // self._kind.itemsize)
        self._parts = list(zip(halves, master.split(size), strict=True))
        self._dtype = half.dtype

    def agrees(self) -> bool:
        """Whether all bits are those of the master's rounding."""
        if part is not None and part.are_rounded([self._half], [self._master]):
            return True
        rounded = torch.empty_like(self._parts[0][1], dtype=self._dtype)
        words = rounded.view(self._kind)
        for half, master in self._parts:
            if len(half) != len(words):  # the last
                rounded, words = rounded[: len(master)], words[: len(half)]
            rounded.copy_(master)
            if not torch.equal(half, words):
                return False
        return True

    def sync_masters(self) -> None:
        """As `sync_master_from_half`, without waiting for the device."""
        for half, master in self._parts:
            _choose(half.view(self._dtype), master, out=master)


def agrees(pair: Pair) -> bool:
    """Whether a half weight is what its master rounds to.  Waits for the device."""
    half, master = _own_data(pair.half), _own_data(pair.master)
    if half.is_meta:
        return True
    if half.shape != master.shape:
        return False
    return bool(_alike(half, master.to(half.dtype)).all())


def is_unchanged(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor still is what it was, to the bit.  Waits for the device."""
    now, before = _own_data(tensor), local_of(before)
    same_kind = (
        now.shape == before.shape and now.dtype is before.dtype and now.device == before.device
    )
    return same_kind and bool(_alike(now, before).all())


def sync_master_from_half(pair: Pair) -> None:
    """Give the master what was written into the half, where it differs from the master's rounding.

    Elsewhere the master keeps its precision.
    """
    half, master = _own_data(pair.half), _own_data(pair.master)
    with torch.no_grad():
        if half.shape != master.shape:
            pair.master.data = half.to(master.dtype, copy=True)
        else:
            _choose(half, master, out=master)


def _choose(half: Tensor, master: Tensor, out: Tensor) -> Tensor:
    """Elementwise the master where the half has its rounding, else the half.

    Some NaN may be taken for another: either way the result is NaN.
    """
    same = _bits(half) == _bits(master.to(half.dtype))
    return torch.where(same, master, half.to(master.dtype), out=out)


def _alike(half: Tensor, rounded: Tensor) -> Tensor:
    """Elementwise: equal to the bit (-0.0 is not 0.0), any NaN like any other."""
    return (_bits(half) == _bits(rounded)) | (half.isnan() & rounded.isnan())


def _bits(tensor: Tensor) -> Tensor:
    """The bits of half numbers, so that -0.0 is not 0.0; of others the numbers."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.view(torch.int16) if is_half else tensor


def _flat(pair: Pair) -> tuple[Tensor, Tensor] | None:
    """Both in a row, in the order in which their numbers lie; None where these differ."""
    half, master = _own_data(pair.half), _own_data(pair.master)
    if (
        type(half) is not Tensor
        or type(master) is not Tensor
        or half.layout is not torch.strided
        or half.dtype not in (torch.float16, torch.bfloat16)
        or half.is_meta
        or half.shape != master.shape
        or half.device != master.device
        or not _is_dense(half)
        or (half.dim() > 1 and half.stride() != master.stride())
    ):
        return None
    return _in_a_row(half), _in_a_row(master)


def _in_a_row(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
