"""A DataLoader prepares data without casts, in this process or in its workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..session.facade import PatchSet, casts_off
from ..torch_private.data_loading import FETCHERS


def put(patches: PatchSet) -> None:
    """Cast nothing while items are fetched from a dataset and collated."""
    for fetcher in FETCHERS:
        patches.replace(fetcher, "fetch", _uncast)


def _uncast(original: Callable) -> Callable:
    @functools.wraps(original)
    def fetch(*args: Any, **kwargs: Any) -> Any:
        with casts_off():
            return original(*args, **kwargs)

    return fetch
