"""Seeds in the child: those that the sweep sets, and those that the script sets itself.

The sweep seeds torch, `random` and numpy before the script starts.  A script that seeds itself with
a constant undoes that.  `OwnSeeds` notes the first such call, and on request replaces each seed by
a number made of it and of the trial's seed: seeds that differ in the script (an epoch's, a rank's)
still differ.
Generators keep their seeds: fixed splits and made-up data come from them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from ampatch.device_figures import seeding_functions
from ampatch.sweep.execution.own_lines import own_line

_MOST = 64  # words
_GLOBAL = {
    "torch.manual_seed": ("torch", "torch.random"),
    "random.seed": ("random",),
    "numpy.random.seed": ("numpy.random",),
}
"""The functions that seed what is global, but for devices, and the modules that have them."""


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), `random` and, where it is installed, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(seed)


def drawn() -> int | None:
    """How many words of `random` imports have drawn since `seed_everything(0)`: `rich` draws one.

    None where they are too many, or where another generator has moved.
    """
    states = _states()
    seed_everything(0)
    for count in range(_MOST):
        if _states() == states:
            return count
        draw(1)
    return None


def draw(words: int) -> None:
    """Draw so many words of 32 bits, which nobody needs."""
    random.getrandbits(32 * words)


def _states() -> list[str]:
    numpy: Any = sys.modules.get("numpy.random")
    others = [] if numpy is None else [str(numpy.get_state())]
    return [str(random.getstate()), str(torch.get_rng_state().tolist()), *others]


class OwnSeeds:
    """What the script does about seeds in this process, from `watch` on.

    `first_call` is the first that gives another seed than the trial's, as
    `torch.manual_seed(42) at train.py:8`.
    """

    def __init__(self, seed: int, override: bool) -> None:
        self.first_call = ""
        self._seed, self._override = seed, override
        self._process, self._is_inside = os.getpid(), False

    def watch(self) -> None:
        for name, modules in {**_GLOBAL, **seeding_functions()}.items():
            for module in filter(None, map(sys.modules.get, modules)):
                attribute = name.rpartition(".")[2]
                setattr(module, attribute, self._seeding(name, getattr(module, attribute)))

    def _seeding(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            seed = next(iter([*args, *kwargs.values()]), None)  # None: of the system's choice
            if seed is None or self._is_inside or os.getpid() != self._process:
                return original(*args, **kwargs)
            self._is_inside = True  # what torch calls of its own is not the script's
            try:
                seed = self._noted(name, seed)
                if args:
                    return original(seed, *args[1:], **kwargs)
                return original(**{**kwargs, next(iter(kwargs)): seed})
            finally:
                self._is_inside = False

        return seeded

    def _noted(self, name: str, seed: Any) -> Any:
        """The seed to set, after that of the script has been noted."""
        if not self.first_call and repr(seed) != repr(self._seed):
            line = own_line(sys._getframe(1)) or "a library"
            self.first_call = f"{name}({repr(seed)[:40]}) at {line}"
        return self.of_trial(seed) if self._override else seed

    def of_trial(self, seed: Any) -> int:
        """The seed of this trial in the place of `seed`, a number, an array or a text."""
        seed = seed.tolist() if hasattr(seed, "tolist") else seed
        digest = hashlib.sha256(f"{self._seed} {seed!r}".encode()).digest()
        return int.from_bytes(digest[:4], "big")  # numpy takes no more than 32 bits
