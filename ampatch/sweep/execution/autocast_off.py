"""At O0 the script's own regions of torch.autocast are off, because O0 is the FP32 baseline.

A script may enter torch.autocast beside `initialize`.  In its O0 trial that would be half
precision under the name of FP32.  So there every region, and every function that torch.autocast
decorates, is as with `enabled=False`, of whatever device, and the switches below a region,
such as `torch.set_autocast_enabled`, only switch off.  A GradScaler of the script stays: it
scales the loss and unscales the gradients, by powers of two.

Only trials of a sweep do this.  A script that a user runs at O0 keeps its regions.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ampatch.sweep.execution.own_lines import own_line

MOST_PLACES = 20  # that are kept


class AutocastOff:
    """Switches torch.autocast off, from `install` to the end of the process.

    `places` are the lines of the script that entered regions or turned a switch on, each once.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()  # regions that would be on

    def install(self) -> None:
        """Make each region that is made from now on a disabled one, and each switch one to off.

        `torch.cuda.amp.autocast` and its like derive from the class, and a name that was
        imported early is the class itself.
        """
        self._replace_regions()
        for name in dir(torch):
            if re.fullmatch(r"set_autocast_(\w+_)?enabled", name) and "cache" not in name:
                setattr(torch, name, self._off(getattr(torch, name)))

    def _replace_regions(self) -> None:
        make, enter = torch.autocast.__init__, torch.autocast.__enter__

        @functools.wraps(make)
        def __init__(
            region: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if enabled:
                self._asked.add(region)
            make(region, device_type, dtype, False, cache_enabled)

        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:
            if region in self._asked:
                self._note()
            return enter(region)

        torch.autocast.__init__ = __init__
        torch.autocast.__enter__ = __enter__

    def _off(self, switch: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(switch)
        def set_autocast_enabled(*args: Any, **named: Any) -> None:
            if (*args, *named.values())[-1]:  # no region of torch's, which are all disabled
                self._note()
            last = dict.fromkeys(list(named)[-1:], False)
            switch(*(args if named else (*args[:-1], False)), **{**named, **last})

        return set_autocast_enabled

    def _note(self) -> None:
        if len(self.places) == MOST_PLACES:
            return
        place = own_line(sys._getframe(2)) or "a library"
        if place not in self.places:
            self.places.append(place)
