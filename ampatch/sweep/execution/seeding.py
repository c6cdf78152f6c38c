"""Seeds in the child: those that the sweep sets, and those that the script sets itself.

The sweep seeds torch, `random` and numpy before the script starts.  A script that seeds
itself with a constant undoes that.  `OwnSeeds` notes such calls, each with the line of the
script that led to it, and on request replaces their seeds by ones of the trial:

* the first seed that the script gives becomes the trial's seed, wherever it is given;
* any other becomes a number made of it and of the trial's seed, so that seeds that differ in
  the script (an epoch's) still differ.  Of several ranks each may give another seed first, so
  there every seed becomes such a number: ranks that differ still differ, and equal ones agree.

Generators (`torch.Generator`, `numpy.random.default_rng`) keep their seeds: fixed splits and
made-up data come from them, and must not move to other examples.  Those that a library makes for
itself, as scipy does when it is imported and a DataLoader for its order, are not noted.

Only this process is watched.  Workers of a DataLoader seed themselves from it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampatch.sweep.execution.own_lines import own_line
from ampatch.sweep.measure.record import SeedCall
from ampatch.sweep.plan import SEED_VARIABLE
from ampatch.torch_private.devices import seeding_functions

MOST_CALLS = 50  # that are kept; a script may seed in each step
_GLOBAL = {
    "torch.manual_seed": ("torch", "torch.random"),
    "random.seed": ("random",),
    "numpy.random.seed": ("numpy.random",),
}
"""The functions that seed what is global, but for devices, and the modules that have them."""
_OF_GENERATOR = "torch.Generator().manual_seed"


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), `random` and, where it is installed, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(seed)


class OwnSeeds:
    """What the script does about seeds, from `watch` to the end of the process.

    `seed_read` says whether it has read `AMPATCH_SEED`.
    """

    def __init__(self, seed: int, override: bool, ranked: bool = False) -> None:
        self.seed_read = False
        self._noted_calls: list[SeedCall] = []
        self._generators: list[tuple[Any, str]] = []  # torch's, and the lines that made them
        self._unseeded = torch.Generator().initial_seed()  # what one has that was given no seed
        self._names_to_copy: collections.deque[str] = collections.deque()  # all, in their order
        self._of_devices = seeding_functions()
        self._seed = seed
        self._override = override
        self._ranked = ranked
        self._first: int | None = None  # the first seed that the script gave
        self._process = os.getpid()
        self._inside = False  # a call of torch's own inside one that is noted

    def watch(self) -> None:
        """Replace the functions that seed, and watch `os.environ`, in this process."""
        for name, modules in {**_GLOBAL, **self._of_devices}.items():
            for module in filter(None, map(sys.modules.get, modules)):
                attribute = name.rpartition(".")[2]
                setattr(module, attribute, self._seeding(name, getattr(module, attribute)))
        vars(torch)["Generator"] = self._generator_class(torch.Generator)
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.default_rng = self._default_rng(numpy_random.default_rng)
        os.environ.__class__ = self._environment_class(type(os.environ))

    @property
    def calls(self) -> list[SeedCall]:
        """The seeds that the script has set: what is global, then its generators' last ones."""
        seeds = [(generator.initial_seed(), place) for generator, place in self._generators]
        of_generators = dict.fromkeys(
            SeedCall(_OF_GENERATOR, str(seed), place, is_generator=True)
            for seed, place in seeds
            if seed != self._unseeded
        )
        return [*self._noted_calls, *of_generators]

    def _seeding(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            with self._outermost() as is_outermost:
                if is_outermost:
                    args, kwargs = self._noted(name, args, kwargs)
                return original(*args, **kwargs)

        return seeded

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[bool]:
        """Whether a call is the script's: not torch's own inside another, nor a worker's."""
        is_outermost = not self._inside and os.getpid() == self._process
        before, self._inside = self._inside, True
        try:
            yield is_outermost
        finally:
            self._inside = before

    def _noted(self, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments to call with, after the seed among them has been noted."""
        given = [*args[:1], *kwargs.values()]
        if not given or given[0] is None:  # a seed of the operating system's choice
            return args, kwargs
        if name not in self._of_devices:  # torch.manual_seed stands beside it
            place = own_line(sys._getframe(1)) or "a library"
            self._note(SeedCall(name, _text(given[0]), place, is_generator=False))
        if not self._override:
            return args, kwargs
        seed = self._of_trial(given[0])
        return ((seed, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): seed})

    def _of_trial(self, given: Any) -> int:
        """The seed of this trial in the place of `given`, a number, an array or a text."""
        given = given.tolist() if hasattr(given, "tolist") else given
        if self._first is None and not self._ranked:
            self._first = given
        if self._first is not None and given == self._first:
            return self._seed
        digest = hashlib.sha256(f"{self._seed} {given!r}".encode()).digest()
        return int.from_bytes(digest[:4], "big")  # numpy takes no more than 32 bits

    def _note(self, call: SeedCall) -> None:
        if call not in self._noted_calls and len(self._noted_calls) < MOST_CALLS:
            self._noted_calls.append(call)

    def _default_rng(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def default_rng(seed: Any = None) -> Any:
            place = own_line(sys._getframe(1), nearest=True)
            if isinstance(seed, int) and place and os.getpid() == self._process:
                call = SeedCall("numpy.random.default_rng", _text(seed), place, is_generator=True)
                self._note(call)
            return original(seed)

        return default_rng

    def _generator_class(self, plain: Any) -> Any:
        """What makes generators of the class `plain` and keeps those that the script makes.

        They are asked for their seeds at the end.  A class of our own, with a `manual_seed` that
        notes, would not do: torch.compile takes generators of exactly this class.
        """
        made, process = self._generators, self._process

        class Kind(type(plain)):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                generator = plain(*args, **kwargs)
                place = own_line(sys._getframe(1), nearest=True)
                if place and os.getpid() == process and len(made) < MOST_CALLS:
                    made.append((generator, place))
                return generator

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, plain)

        # pickle looks for it under this name, which in a worker is torch's own class.
        names = {"__module__": "torch", "__qualname__": "Generator", "__doc__": plain.__doc__}
        return Kind("Generator", (plain,), names)

    def _environment_class(self, plain: Any) -> Any:
        """A class for `os.environ` that notes who asks for the seed, but not a copy of it all."""
        own_seeds, copied = self, self._names_to_copy

        class Environment(plain):
            def __iter__(self) -> Iterator[str]:
                copied.clear()
                copied.extend(super().__iter__())
                return iter(list(copied))

            def __getitem__(self, name: str) -> str:
                if copied and copied[0] == name:
                    copied.popleft()
                else:
                    copied.clear()
                    own_seeds.seed_read |= name == SEED_VARIABLE
                return super().__getitem__(name)

        return Environment


def _text(seed: Any) -> str:
    return repr(seed)[:40]
