"""A DataLoader prepares data without casts, in this process or in its workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import fetch

from ..session.facade import PatchSet, casts_off


def put(patches: PatchSet) -> None:
    """Cast nothing while items are fetched from a dataset and collated."""
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patches.replace(fetcher, "fetch", _uncast)


def _uncast(original: Callable) -> Callable:
    @functools.wraps(original)
    def fetch(*args: Any, **kwargs: Any) -> Any:
        with casts_off():
            return original(*args, **kwargs)

    return fetch
