"""Sets up this process, and the processes that the script spawns, for `ampatch run`.

A spawned child (a DataLoader worker, `torch.multiprocessing.spawn`) first imports the script again,
and would find no apex.  Before that, `multiprocessing` sends it a pickled dictionary.  An item of
this dictionary sets the child up while it is unpickled.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampatch import auto
from ampatch.compat import apex
from ampatch.config import environment
from ampatch.launch.script import PACKAGE_ROOT
from ampatch.log import show_without_handlers, shows_without_handlers

_IN_CHILD_FILE = str(Path(__file__).with_name("in_child.py"))


class _ChildSetUp:
    """Runs `in_child.py` by path when unpickled, because the child may not find ampatch yet."""

    def __init__(self, is_auto: bool) -> None:
        self._globals = {
            "PACKAGE_ROOT": PACKAGE_ROOT,
            "IS_AUTO": is_auto,
            "APEX_BEHIND": apex.hidden_folders(),
            "SHOWS_MESSAGES": shows_without_handlers(),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (_IN_CHILD_FILE, self._globals)


def check_environment(is_auto: bool) -> None:
    """Raise `ValueError` for environment variables that are invalid, or not allowed with --auto."""
    settings = environment.read()
    if is_auto:
        auto.check(settings)


def start(is_auto: bool, on_spawn: Callable[[], None] = lambda: None) -> None:
    """Set up this process, and make its children and their children do the same.

    `on_spawn` is called when this process spawns a child.
    """
    spawn = multiprocessing.spawn
    spawn.get_preparation_data = _with_set_up(spawn.get_preparation_data, is_auto, on_spawn)
    if is_auto:
        auto.start(environment.read())


def start_child(is_auto: bool, apex_behind: list[str] | None, shows_messages: bool) -> None:
    """Set up a spawned child.  `apex_behind`: the parent's `apex.hidden_folders()`."""
    show_without_handlers(shows_messages)
    if apex_behind is not None:
        apex.install_over(apex_behind)
    start(is_auto)


def _with_set_up(
    original: Callable[[str], dict], is_auto: bool, on_spawn: Callable[[], None]
) -> Callable[[str], dict]:
    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict:
        on_spawn()
        return {**original(name), "ampatch": _ChildSetUp(is_auto)}

    return get_preparation_data
