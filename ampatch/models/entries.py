"""Entries of many modules' tables (parameters, hooks), looked at and exchanged together.

An entry is a table and a name in it; entries are given as two lists.  The native part does the
same in one call for all of them.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from itertools import repeat
from typing import Any

from torch import Tensor

from .. import native

Tables = list[dict[Any, Any]]


def are(tables: Tables, names: list[Any], values: list[Any]) -> bool:
    """Whether each entry is this very value."""
    return all(map(operator.is_, map(dict.get, tables, names), values))


def exchange(
    tables: Tables, names: list[Any], sources: list[int], new: list[Any], old: list[Any] | None
) -> bool:
    """Entry number i becomes `new[sources[i]]`; `tables` have these names.

    With `old` only if each of them is `old[sources[i]]` now; else nothing is done.  Whether it was.
    """
    if old is not None:
        found, known = map(dict.get, tables, names), map(old.__getitem__, sources)
        if not all(map(operator.is_, found, known)):
            return False
    deque(map(dict.__setitem__, tables, names, map(new.__getitem__, sources)), maxlen=0)
    return True


def put_in(tables: list[OrderedDict], names: list[Any], values: list[Any]) -> None:
    """Add entries, behind all others of their tables."""
    deque(map(OrderedDict.__setitem__, tables, names, values), maxlen=0)


def take_out(tables: list[OrderedDict], names: list[Any]) -> None:
    """Remove entries, where they are there."""
    deque(map(OrderedDict.pop, tables, names, repeat(None)), maxlen=0)


def share_attributes(tensors: list[Tensor], attributes: list[dict[str, Any]]) -> None:
    """Give tensors these dictionaries of attributes, but for those of other types than Tensor."""
    for tensor, one in zip(tensors, attributes, strict=True):
        if type(tensor) is Tensor:
            tensor.__dict__ = one


if native.part is not None:
    are, exchange = native.part.entries_are, native.part.exchange_entries
    share_attributes = native.part.share_attributes
    put_in, take_out = native.part.put_entries_in, native.part.take_entries_out
