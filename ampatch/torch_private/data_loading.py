"""Where a DataLoader prepares data: in this process, and in its workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from .torch_attributes import torch_attribute

_FUNCTIONS = (
    (DataLoader, "__iter__"),  # starts samplers and forks workers
    (torch_attribute("torch.utils.data.dataloader._BaseDataLoaderIter", None), "_next_index"),
    (torch_attribute("torch.utils.data._utils.fetch._MapDatasetFetcher", None), "fetch"),
    (torch_attribute("torch.utils.data._utils.fetch._IterableDatasetFetcher", None), "fetch"),
)

DATA_PREPARATION_FUNCTIONS: list[tuple[Any, str]] = [
    (owner, name) for owner, name in _FUNCTIONS if hasattr(owner, name)
]
"""`(owner, name)` of functions.  If torch lacks one, calls in samplers or datasets are cast too."""
