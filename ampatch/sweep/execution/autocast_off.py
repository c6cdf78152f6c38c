"""Switches the script's own torch.amp off: at O0, and at levels applied from outside.

Otherwise the O0 trial of a script that enters torch.autocast would run in half, and in other
trials both autocast and the level would cast.  Every region, every function that torch.autocast
decorates and every GradScaler is disabled, on any device.  Lower switches, such as
`torch.set_autocast_enabled`, raise.

Only trials of a sweep do this.  A script that a user runs at O0 keeps its torch.amp.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampatch.errors import AmpatchError
from ampatch.session import facade
from ampatch.sweep.execution.own_lines import own_line

MOST_LINES = 20  # of `AutocastOff.lines`


class AutocastOff:
    """Switches torch.autocast off, from `install` to the end of the process.

    `lines` are the lines of the script that entered regions, each once, and `dtypes` the half
    dtypes of these regions.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.dtypes: list[str] = []
        self._is_lifted = False
        self._requested_dtypes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Disable each region and GradScaler that is constructed from now on.

        `torch.cuda.amp.autocast` and the others derive from the class, and a name that was
        imported early is the class itself.
        """
        self._replace_regions()
        init = torch.amp.GradScaler.__init__
        torch.amp.GradScaler.__init__ = _disabled(init)  # type: ignore[method-assign]
        for name in dir(torch):
            if re.fullmatch(r"set_autocast_(\w+_)?enabled", name) and "cache" not in name:
                setattr(torch, name, self._refused(name, getattr(torch, name)))

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Context manager: torch.autocast works, for regions of our own."""
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def _replace_regions(self) -> None:
        init, enter = torch.autocast.__init__, torch.autocast.__enter__

        @functools.wraps(init)
        def __init__(
            region: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if self._is_lifted:
                init(region, device_type, dtype, enabled, cache_enabled)
                return
            if enabled:
                half = dtype or torch.get_autocast_dtype(device_type)
                self._requested_dtypes[region] = str(half).removeprefix("torch.")
            init(region, device_type, dtype, False, cache_enabled)
            if enabled:  # it is off, and must not switch the casts of a level off
                facade.ignore_region(region)

        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:
            half = self._requested_dtypes.get(region)
            if half is not None:
                self.record(half, sys._getframe(1))
            return enter(region)

        torch.autocast.__init__ = __init__
        torch.autocast.__enter__ = __enter__

    def _refused(self, name: str, switch: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(switch)
        def set_autocast_enabled(*args: Any, **named: Any) -> None:
            if named.get("enabled", args[-1] if args else False) and not self._is_lifted:
                raise AmpatchError(
                    f"torch.{name}(True): a sweep cannot switch this off at O0. Expected a region: "
                    "with torch.autocast(...)."
                )
            switch(*args, **named)

        return set_autocast_enabled

    def record(self, half: str, frame: Any) -> None:
        """Record that the script enters torch.autocast in a half dtype at `frame`."""
        self.dtypes += [half] if half not in self.dtypes else []
        line = own_line(frame) or "a library"
        if line not in self.lines and len(self.lines) < MOST_LINES:
            self.lines.append(line)


def _disabled(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(*args: Any, **named: Any) -> None:
        bound = signature.bind(*args, **named)
        bound.arguments["enabled"] = False
        init(*bound.args, **bound.kwargs)

    return __init__
