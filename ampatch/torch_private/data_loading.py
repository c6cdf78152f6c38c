"""Where a DataLoader fetches items from a dataset and collates them."""

from __future__ import annotations

try:
    from torch.utils.data._utils import fetch as _fetch
except ImportError:
    _fetch = None  # type: ignore[assignment]

FETCHERS: list[type] = [
    found
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")
    if (found := getattr(_fetch, name, None)) is not None
]
"""Classes with a method `fetch`.  A torch without them casts in datasets, too."""
