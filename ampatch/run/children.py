"""Processes that the script spawns (DataLoader workers, `torch.multiprocessing.spawn`).

Such a child imports the script anew before it does anything else, and finds no
apex.  What `multiprocessing` sends it first is a pickled dictionary; an item of
ours in there sets the child up while the dictionary is unpickled.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampatch.run.script import PACKAGE_ROOT, install_apex

_IN_CHILD = str(Path(__file__).with_name("in_child.py"))


class _SetUp:
    """Unpickled, it runs `in_child.py`, by its path: the child may not find ampatch yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (_IN_CHILD, {"PACKAGE_ROOT": PACKAGE_ROOT})


def set_up() -> None:
    """Have the children of this process, and theirs, set up as it is."""
    spawn = multiprocessing.spawn
    spawn.get_preparation_data = _with_set_up(spawn.get_preparation_data)


def _with_set_up(original: Callable[[str], dict]) -> Callable[[str], dict]:
    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict:
        return {**original(name), "ampatch": _SetUp()}

    return get_preparation_data


def start_child() -> None:
    """What a child does first."""
    set_up()
    install_apex()
