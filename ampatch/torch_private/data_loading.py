"""Where a DataLoader prepares data: in this process, and in its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from .lookup import of_torch

_FUNCTIONS = (
    (DataLoader, "__iter__"),  # starts samplers, and workers: forked from here
    (of_torch("torch.utils.data.dataloader._BaseDataLoaderIter", None), "_next_index"),
    (of_torch("torch.utils.data._utils.fetch._MapDatasetFetcher", None), "fetch"),
    (of_torch("torch.utils.data._utils.fetch._IterableDatasetFetcher", None), "fetch"),
)

PREPARING: list[tuple[Any, str]] = [
    (owner, name) for owner, name in _FUNCTIONS if hasattr(owner, name)
]
"""`(owner, name)` of functions.  A torch without one of them casts in samplers or datasets, too."""
