"""DataLoader workers prepare data as they would without us: nothing is cast in them."""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils import worker

from ..casting.patches import PatchSet
from ..session import registry

_loop = worker._worker_loop


def put(patches: PatchSet) -> None:
    """Have workers start by `loop`, which a spawned one finds by its name."""
    patches.replace(worker, "_worker_loop", lambda original: loop)


def loop(*args: Any, **kwargs: Any) -> None:
    """What a worker runs."""
    for session in registry.sessions:
        session.stop_casting()
    _loop(*args, **kwargs)
