"""Rows x rules -> patches.

Installed once, when the first session that needs it opens, and taken out when
the last closes; sessions differ in their policies, not in what is patched.
What this torch lacks is left out and listed in `missing`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional
import wrapt

from ..log import logger
from ..torch_private.scripting import builtin_table
from . import backward_policy, linear_fast_path, rebind, special_ops, user_functions
from .autocast_regions import AutocastRegions
from .dynamo_tables import CONTEXT_MANAGERS, CompilerTables
from .handlers import fresh_tables, overridable
from .left_behind import Arrivals
from .library_ops import LibraryOps
from .patches import PatchSet
from .policy import CastState
from .rules import APEX_CHOOSERS, BEYOND_CHOOSERS, CHOOSERS, banned, refuse, replacement
from .tables import APEX, BANNED, BEYOND, BLACKLIST, BUILTINS, PROMOTE, WHITELIST, Row, Rule

_NAMESPACES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.Tensor")


def resolve(where: str) -> Any:
    """The module or class that a dotted place names: `torch.nn.functional`, `torch.Tensor`."""
    owner: Any = sys.modules[where.partition(".")[0]]
    for name in where.split(".")[1:]:
        owner = getattr(owner, name)
    return owner


def has(where: str, name: str = "__name__") -> bool:
    """Whether this torch has the place `where`, and `name` in it."""
    try:
        return hasattr(resolve(where), name)
    except AttributeError:
        return False


class Installation:
    """The patches that are in the process now, and what asked for them."""

    def __init__(self, state: CastState, ask_state: Callable[[], CastState]) -> None:
        self.missing: list[str] = []
        self._state = state
        self._ask_state = ask_state
        self._patches = PatchSet()
        self.regions = AutocastRegions(state)
        self._compiler = CompilerTables(
            self._patches,
            self.original,
            {
                CONTEXT_MANAGERS: lambda module, patches, original: self.regions.correct_dynamo(
                    module, patches, ask_state
                )
            },
        )
        self._originals: dict[int, tuple[Any, Any]] = {}  # id -> replacement, what it replaced
        self._arrivals = Arrivals()
        self._by_original: dict[int, Any] = {}  # id of an original -> its replacement
        self._library_ops = LibraryOps(state, self.regions, self._patches)
        self.has_tables = False
        self._has_apex_rows = False
        self._warned: set[str] = set()

    def install(self) -> None:
        """Patch everything the tables list.  Takes out what it put in if it fails halfway."""
        self.has_tables = True
        try:
            for row in (*WHITELIST, *BLACKLIST, *PROMOTE, *BANNED, *BEYOND):
                if not row.native:
                    self._put_row(row)
            for where, name, make in (
                *special_ops.module_parts(self._state),
                *self.regions.places(),
            ):
                self._put_if_there(where, name, make)
            for owner, name, make in backward_policy.parts(self._state):
                self._patches.replace(owner, name, make)
            self._library_ops.install()
            fresh_tables(self._patches)
            self._patches.on_undo(self._state.tables.give_back)
            rebind.rebind(self._patches, self._by_original)
        except BaseException:
            self.undo()
            raise
        if self.missing:
            logger.info(
                "This torch (%s) lacks, and ampatch leaves out: %s.",
                torch.__version__,
                ", ".join(self.missing),
            )

    def install_apex_rows(self, edits: Iterable[tuple[str, str, Rule | None]] = ()) -> None:
        """Add the rows that only apex's flavour has; they heed only policies of that flavour.

        `edits` give functions another rule than their row's; None: no cast.
        """
        if self._has_apex_rows:
            return
        self._has_apex_rows = True
        for row in APEX:
            self._put_row(row)
        for where, name, rule in edits:
            choose = CHOOSERS[rule] if rule is not None else lambda *call: None
            self.put_torch_function(resolve(where), name, choose)
        rebind.rebind(self._patches, self._by_original)

    def undo(self) -> None:
        """Leave torch, and what the user's modules bound of it, as found."""
        self.regions.end()
        self._patches.undo()
        if self._originals:
            rebind.give_back(
                [(made, self.original(made)) for made, _ in self._originals.values()],
                self._arrivals,
            )
        self._originals.clear()
        self._by_original.clear()
        self._patches.hand_over()
        self.missing.clear()
        self._warned.clear()
        self.has_tables = self._has_apex_rows = False

    def has_patches(self) -> bool:
        """Whether anything is patched now, be it by the tables or for an override."""
        return self.has_tables or len(self._patches) > 0

    def original(self, function: Any) -> Any:
        """What `function` replaced, if it is one of our replacements; else itself."""
        while id(function) in self._originals:
            function = self._originals[id(function)][1]
        return function

    def replaced_by(self, original: Any) -> Any:
        """The replacement of one of torch's functions, or None."""
        return self._by_original.get(id(original))

    def ensure(self, function: Callable) -> None:
        """Patch `function` where torch keeps it, so that overrides for it can act."""
        if id(function) not in self._by_original:
            for owner, name in _places_of(function):
                self._put(owner, name, self._maker(lambda *call: None), shared=True)
            rebind.rebind(self._patches, self._by_original)

    def can_patch(self, function: Callable) -> bool:
        """Whether `function` is one of torch's that we know where to find."""
        return id(function) in self._by_original or bool(_places_of(function))

    def put_user_function(self, owner: Any, name: str, rule: Rule) -> None:
        """Patch what the user registered: a function, a method, an autograd Function class."""
        choose, ask, found = CHOOSERS[rule], self._ask_state, raw_attribute(owner, name)
        if user_functions.is_function_class(found):
            for part, make in user_functions.class_parts(found, choose, ask).items():
                self._patches.replace(found, part, make)
        elif isinstance(found, (staticmethod, classmethod)):
            self._patches.replace(
                owner, name, lambda raw: user_functions.following(raw, choose, ask)
            )
        elif owner in map(resolve, _NAMESPACES):
            self.put_torch_function(owner, name, choose)
        else:
            self._put(owner, name, lambda raw: user_functions.user_function(raw, choose, ask))
            rebind.rebind(self._patches, {id(found): self._by_original[id(found)]})

    def put_torch_function(self, owner: Any, name: str, choose: Callable) -> None:
        """Have a function of torch's cast to what `choose` says, whatever the tables say of it."""
        found = raw_attribute(owner, name)
        self._put(
            owner,
            name,
            self._overridable(
                lambda raw, state: user_functions.torch_function(raw, choose, self._ask_state)
            ),
        )
        rebind.rebind(self._patches, {id(found): self._by_original[id(found)]})

    def _put_row(self, row: Row) -> None:
        for name in row.names:
            make = self._make_for(row, name)
            self._put_if_there(row.where, name, make, shared=row not in APEX)

    def _put_if_there(
        self, where: str, name: str, make: Callable[[Any], Any], shared: bool = False
    ) -> None:
        if has(where, name):
            self._put(resolve(where), name, make, shared)
        else:
            self.missing.append(f"{where}.{name}")

    def _make_for(self, row: Row, name: str) -> Callable[[Any], Any]:
        where = f"{row.where}.{name}"
        if row.rule is Rule.POWER:
            return self._overridable(special_ops.matrix_power)
        if row.rule in (Rule.BANNED, Rule.REFUSE_IN_PLACE):
            message = f"{_public_name(where)} was called with a half precision argument. {row.why}"
            choose = refuse(message, self._warn_once)
            if row.rule is Rule.REFUSE_IN_PLACE:
                return self._overridable(
                    lambda original, state: special_ops.refused(original, message, state)
                )
            return self._overridable(lambda original, state: banned(original, choose, state))
        if row.rule is Rule.HALF and name in linear_fast_path.NAMES:
            return lambda original: linear_fast_path.weighted(original, self._state)
        choosers = APEX_CHOOSERS if row in APEX else BEYOND_CHOOSERS if row in BEYOND else CHOOSERS
        return self._maker(choosers[row.rule])

    def _maker(self, choose: Callable) -> Callable[[Any], Any]:
        return lambda original: replacement(original, choose, self._state)

    def _overridable(self, make: Callable[[Any, CastState], Any]) -> Callable[[Any], Any]:
        return lambda original: overridable(make(original, self._state), original, self._state)

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any], shared: bool = False) -> None:
        def make_and_dress(original: Any) -> Any:
            found = self._by_original.get(id(original)) if shared else None
            if found is not None:  # one object under several names stays one
                return found
            made = make(original)
            _dress(made, original, owner, name)
            self._originals[id(made)] = (made, original)
            self._by_original.setdefault(id(original), made)
            self._register_for_script(made, original)
            return made

        self._compiler.keep()
        if not self._originals:
            self._arrivals = Arrivals()
        self._patches.replace(owner, name, make_and_dress)

    def _register_for_script(self, made: Any, original: Any) -> None:
        table = builtin_table()
        if id(original) in table:
            table[id(made)] = table[id(original)]
            self._patches.on_undo(lambda: table.pop(id(made), None))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(
                "%s It runs in FP32; pass allow_banned=False to have it refused.", message
            )


def _places_of(function: Any) -> list[tuple[Any, str]]:
    return [
        (owner, name)
        for owner in map(resolve, filter(has, _NAMESPACES))
        for name in dir(owner)
        if getattr(owner, name, None) is function
    ]


def _dress(made: Any, original: Any, owner: Any, name: str) -> None:
    """Name a replacement after its place, so that pickle stores it by reference to it."""
    if inspect.isfunction(original):  # jit reads the source behind __wrapped__, so not for builtins
        functools.update_wrapper(made, original)
        return
    is_class = inspect.isclass(owner)
    made.__name__ = name
    made.__qualname__ = f"{owner.__name__}.{name}" if is_class else name
    made.__module__ = owner.__module__ if is_class else owner.__name__
    made.__doc__ = getattr(original, "__doc__", None)


def _public_name(where: str) -> str:
    functional = "torch.nn.functional"
    return where.replace(f"{BUILTINS[functional]}.", f"{functional}.")


def parse_place(place: Any, name: str | None) -> tuple[Any, str]:
    """`(owner, attribute)` from a module and a name, or from one dotted string.

    The owner of a dotted string stays a string: it may not be imported yet.
    """
    if name is not None:
        return place, name
    owner, _, attribute = str(place).rpartition(".")
    if not isinstance(place, str) or not owner:
        raise ValueError(
            f"{place!r}: expected a module and a name, "
            'or one dotted string such as "package.module.function".'
        )
    return owner, attribute


def resolve_user_place(owner: Any) -> Any:
    """The module or class to patch, or None while the module it names is not imported."""
    if not isinstance(owner, str):
        return owner
    if owner in sys.modules:
        return sys.modules[owner]
    parent, _, name = owner.rpartition(".")
    return getattr(sys.modules[parent], name, None) if parent in sys.modules else None


def raw_attribute(owner: Any, name: str) -> Any:
    """`owner.name` as it is stored: a static method as such, not the function inside."""
    return wrapt.resolve_path(owner, name)[2]


def when_importable(module: str, action: Callable[[Any], None]) -> None:
    """Run `action(module)` as soon as the module is imported."""
    wrapt.register_post_import_hook(action, module)
