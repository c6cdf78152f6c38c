"""Where a DataLoader prepares data: in this process, and in its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

try:
    from torch.utils.data._utils import fetch as _fetch
except ImportError:
    _fetch = None  # type: ignore[assignment]

try:
    from torch.utils.data.dataloader import _BaseDataLoaderIter as _Iterator
except ImportError:
    _Iterator = None  # type: ignore[assignment, misc]

_PLACES = (
    (DataLoader, "__iter__"),  # starts samplers, and workers: forked from here
    (_Iterator, "_next_index"),
    (getattr(_fetch, "_MapDatasetFetcher", None), "fetch"),
    (getattr(_fetch, "_IterableDatasetFetcher", None), "fetch"),
)

PREPARING: list[tuple[Any, str]] = [
    (owner, name) for owner, name in _PLACES if hasattr(owner, name)
]
"""`(owner, name)` of functions.  A torch without one of them casts in samplers or datasets, too."""
