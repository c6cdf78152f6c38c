"""Switches the script's torch.amp off: at O0, and at levels that are applied from outside.

Otherwise the O0 trial of a script that enters torch.autocast would run in half, and in other
trials both autocast and the level would cast.  Every region, every function decorated with
torch.autocast and every GradScaler is disabled, on any device.  Functions that switch autocast on
directly, such as `torch.set_autocast_enabled`, raise.

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
from ampatch.sweep.execution.script_lines import script_line

MAX_LINES = 20  # the longest `AutocastOff.lines`


class AutocastOff:
    """Switches torch.autocast off, from `install` to the end of the process.

    `lines` are the lines of the script that entered regions, each once, and `dtypes` the half
    dtypes of these regions.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.dtypes: list[str] = []
        self._is_allowed = False
        self._requested_dtypes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Disable each region and GradScaler that is constructed from now on.

        The methods of the classes are replaced, so this reaches classes derived from them, such as
        `torch.cuda.amp.autocast`, and names that were imported earlier.
        """
        self._replace_autocast()
        init = torch.amp.GradScaler.__init__
        torch.amp.GradScaler.__init__ = _disable_scaler(init)  # type: ignore[method-assign]
        for name in dir(torch):
            if re.fullmatch(r"set_autocast_(\w+_)?enabled", name) and "cache" not in name:
                setattr(torch, name, self._refuse_switch(name, getattr(torch, name)))

    @contextlib.contextmanager
    def allow_autocast(self) -> Iterator[None]:
        """Context manager in which torch.autocast works, for regions that ampatch enters."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def _replace_autocast(self) -> None:
        init, enter = torch.autocast.__init__, torch.autocast.__enter__

        @functools.wraps(init)
        def __init__(
            region: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:  # fmt: skip
            if self._is_allowed:
                init(region, device_type, dtype, enabled, cache_enabled)
                return
            if enabled:
                requested = dtype or torch.get_autocast_dtype(device_type)
                self._requested_dtypes[region] = str(requested).removeprefix("torch.")
            init(region, device_type, dtype, False, cache_enabled)
            if enabled:  # a disabled region would switch off the casts of a level
                facade.ignore_region(region)

        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:
            dtype = self._requested_dtypes.get(region)
            if dtype is not None:
                self.record(dtype, sys._getframe(1))
            return enter(region)

        torch.autocast.__init__ = __init__
        torch.autocast.__enter__ = __enter__

    def _refuse_switch(self, name: str, switch: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(switch)
        def set_autocast_enabled(*args: Any, **named: Any) -> None:
            if named.get("enabled", args[-1] if args else False) and not self._is_allowed:
                raise AmpatchError(
                    f"torch.{name}(True): a sweep cannot switch this off at O0. Expected a region: "
                    "with torch.autocast(...)."
                )
            switch(*args, **named)

        return set_autocast_enabled

    def record(self, dtype: str, frame: Any) -> None:
        """Record that the script enters torch.autocast with this dtype at `frame`."""
        self.dtypes += [dtype] if dtype not in self.dtypes else []
        line = script_line(frame) or "a library"
        if line not in self.lines and len(self.lines) < MAX_LINES:
            self.lines.append(line)


def _disable_scaler(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(*args: Any, **named: Any) -> None:
        bound = signature.bind(*args, **named)
        bound.arguments["enabled"] = False
        init(*bound.args, **bound.kwargs)

    return __init__
