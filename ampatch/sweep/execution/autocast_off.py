"""At O0 the script's own regions of torch.autocast are off, because O0 is the FP32 baseline.

A script may enter torch.autocast beside `initialize`.  In its O0 trial that would be half
precision under the name of FP32.  So there every region, and every function that torch.autocast
decorates, is as with `enabled=False`, of whatever device.  A GradScaler of the script stays: it
scales the loss and unscales the gradients, by powers of two.

Only trials of a sweep do this.  A script that a user runs at O0 keeps its regions.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ampatch.sweep.execution.own_lines import own_line

MOST_PLACES = 20  # that are kept


class AutocastOff:
    """Switches regions of torch.autocast off, from `install` to the end of the process.

    `places` are the lines of the script that led to regions, each once.
    """

    def __init__(self) -> None:
        self.places: list[str] = []

    def install(self) -> None:
        """Make each region that is made from now on a disabled one.

        `torch.cuda.amp.autocast` and its like derive from this class, and a name that was
        imported early is the class itself.
        """
        original = torch.autocast.__init__

        @functools.wraps(original)
        def __init__(
            region: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if enabled:
                self._note(own_line(sys._getframe(1)) or "a library")
            original(region, device_type, dtype, False, cache_enabled)

        torch.autocast.__init__ = __init__

    def _note(self, place: str) -> None:
        if place not in self.places and len(self.places) < MOST_PLACES:
            self.places.append(place)
