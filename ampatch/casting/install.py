"""Installs the patches: for each row of the op tables, a replacement that follows the row's rule.

The patches are installed when the first session that needs them opens, and undone when the last
such session closes.  They are installed anew if a session needs more of them.  Sessions differ in
their policies; an O2 or O3 session alone needs only the rows of `EVERY_LEVEL`.  Functions
that this torch lacks are left out; `ampatch doctor` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import special_ops, user_functions
from .autocast_interop import AutocastInterop
from .calls import CastState
from .dynamo_patches import DynamoPatches
from .handlers import refill_override_caches
from .patches import MakeReplacement, PatchSet
from .places import (
    NAMESPACES,
    Replacements,
    exists,
    places_of,
    public_name,
    raw_attribute,
    resolve,
    user_place,
)
from .rules import (
    BEYOND_CHOOSERS,
    CHOOSERS,
    ChooseDtype,
    banned,
    banned_in_place,
    choose_float,
    no_rule,
    with_overrides,
)
from .tables import (
    APEX,
    BANNED,
    BEYOND,
    BLACKLIST,
    EVERY_LEVEL,
    PROMOTE,
    WHITELIST,
    Row,
    Rule,
)
from .wrapper import replacement


class Installation:
    """The patches that are in the process now."""

    def __init__(self, state: CastState, get_state: Callable[[], CastState]) -> None:
        self.has_every_level_rows = False  # whether the rows of EVERY_LEVEL are installed
        self.has_cast_tables = False  # whether the rows of all op tables are installed
        # By overridden function: whether it runs in FP32 internally, because a session without cast
        # tables (O2, O3) overrides it.
        self.overridden_functions: dict[Any, bool] = {}
        self._state = state
        self._get_state = get_state
        self._patches = PatchSet()
        self.replacements = Replacements(self._patches)
        self.autocast = AutocastInterop(state)
        self._dynamo = DynamoPatches(self._patches, self.replacements.original_of, get_state)

    def install(self, with_tables: bool, overridden_functions: dict[Any, bool]) -> None:
        """Install the rows of all op tables, or, without `with_tables`, of `EVERY_LEVEL` only.

        `overridden_functions` is the attribute's new value.  An exception undoes all patches.
        """
        self.has_every_level_rows, self.has_cast_tables, self.overridden_functions = (
            True,
            with_tables,
            overridden_functions,
        )
        try:
            self._dynamo.correct_from_now()
            special = [*special_ops.embedding_forwards(), *self.autocast.regions()]
            if with_tables:
                special += [
                    *special_ops.module_functions(self._state),
                    *self.autocast.state_functions(),
                ]
            for where, name in _TABLES | _AT_EVERY_LEVEL if with_tables else _AT_EVERY_LEVEL:
                self._replace_if_exists(where, name, self._maker_for_rows(where, name), shared=True)
            for owner, name in places_of(overridden_functions) if overridden_functions else ():
                self.replacements.replace(owner, name, self._maker_for_rule(no_rule), shared=True)
            for where, name, make in special:
                self._replace_if_exists(where, name, make)
            if with_tables:
                refill_override_caches(self._patches)
                self._patches.on_undo(self._state.handler_containers.restore)
            self.replacements.rebind()
        except BaseException:
            self.undo()
            raise

    def apex_functions(
        self, edits: Iterable[tuple[str, str, Rule | None]]
    ) -> dict[Any, ChooseDtype]:
        """The rules of functions that only apex's tables have, for `Policy.functions`.

        `edits`: `(where, name, rule)` that replace rules of rows; None as the rule means no cast.
        """
        rules: dict[tuple[str, str], ChooseDtype] = {}
        for row in APEX:
            for name in row.names:
                is_float = row.rule is Rule.FLOAT
                rules[row.where, name] = (
                    choose_float if is_float else banned_in_place(_half_argument_message(row, name))
                )
        for where, name, rule in edits:
            rules[where, name] = no_rule if rule is None else CHOOSERS[rule]
        original_of = self.replacements.original_of
        return {
            original_of(getattr(resolve(where), name)): choose
            for (where, name), choose in rules.items()
            if exists(where, name)
        }

    def undo(self) -> None:
        """Restore torch, and the globals of the user's modules that are functions of torch."""
        self.autocast.exit_regions()
        self._patches.undo()
        self.replacements.restore_bindings()
        self.has_every_level_rows = self.has_cast_tables = False
        self.overridden_functions = {}

    def patch_user_function(self, owner: Any, name: str, rule: Rule) -> None:
        """Patch a function, method or autograd Function class that the user registered."""
        choose, get_state = CHOOSERS[rule], self._get_state
        function = raw_attribute(owner, name)
        if user_functions.is_function_class(function):
            for method, make in user_functions.function_class_replacements(
                function, choose, get_state
            ).items():
                self._patches.replace(function, method, make)
        elif isinstance(function, (staticmethod, classmethod)):
            self._patches.replace(
                owner, name, lambda raw: user_functions.casting_wrapper(raw, choose, get_state)
            )
        else:

            def make(raw: Any) -> Callable:
                if owner in map(resolve, NAMESPACES):
                    return replacement(
                        raw, choose, self._state, disables_casts_inside=lambda policy: True
                    )
                return user_functions.user_function(raw, choose, get_state)

            self.replacements.replace(owner, name, make)
            self.replacements.rebind(function)

    def _replace_if_exists(
        self, where: str, name: str, make: MakeReplacement, shared: bool = False
    ) -> None:
        if exists(where, name):
            self.replacements.replace(resolve(where), name, make, shared)

    def _maker_for_rows(self, where: str, name: str) -> MakeReplacement:
        """Return the `make(original)` for `where.name`, according to all rows that name it."""
        row = _TABLES.get((where, name))
        at_every_level = _AT_EVERY_LEVEL.get((where, name))
        choose: ChooseDtype = no_rule
        if row is not None and row.rule is Rule.BANNED:
            choose = banned(_half_argument_message(row, name))
        elif row is not None:
            choose = (BEYOND_CHOOSERS if row in BEYOND else CHOOSERS)[row.rule]
        call_original = at_every_level and special_ops.make_call_in_fp32(
            at_every_level, name, self._state
        )
        return self._maker_for_rule(choose, call_original, name if row in BLACKLIST else "")

    def _maker_for_rule(
        self, choose: ChooseDtype, call_original: Callable | None = None, name: str = ""
    ) -> MakeReplacement:
        """Return the `make(original)` of a replacement.

        `name` is the function's name if its row casts to FP32, else "".
        """

        def make(original: Any) -> Callable:
            function = self.replacements.original_of(original)
            call = call_original
            disables_casts_inside = None
            if self.overridden_functions.get(function):
                call = special_ops.make_call_in_fp32(special_ops.OVERRIDE_ROW, "", self._state)
            rule, call = special_ops.with_fp32_kernels(name, choose, call)
            if function in self.overridden_functions:
                rule, disables_casts_inside = with_overrides(function, rule)
            return replacement(original, rule, self._state, call, disables_casts_inside)

        return make


def _half_argument_message(row: Row, name: str) -> str:
    title = public_name(f"{row.where}.{name}")
    return f"{title} was called with a half precision argument. {row.why}"


_TABLES = {
    (row.where, name): row
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE, *BANNED, *BEYOND)
    if not row.done_by_torch
    for name in row.names
}
_AT_EVERY_LEVEL = {(row.where, name): row for row in EVERY_LEVEL for name in row.names}


class RegisteredFunctions:
    """Where the user's functions are, and their rules."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._rules: dict[tuple[Any, str], Rule] = {}  # the rule of a function, by owner and name

    def register(self, place: Any, name: str | None, rule: Rule) -> bool:
        """Have a function follow a rule from now on.  Returns whether the patches must be renewed.

        Raises `AttributeError` if `place` has no such name, and `TypeError` if its value cannot
        follow a rule.
        """
        user_call = f"ampatch.register_{rule.value}_function"
        owner, attribute = user_place(user_call, place, name)
        if not hasattr(owner, attribute):
            raise AttributeError(
                f"{_title(owner)} has no attribute {attribute!r}; nothing was registered."
            )
        user_call += f"({_title(owner)}, {attribute!r})"
        user_functions.check_can_follow_rule(raw_attribute(owner, attribute), user_call)
        previous = self._rules.get((owner, attribute))
        self._rules[owner, attribute] = rule
        if previous is None and self._installation.has_cast_tables:
            self._installation.patch_user_function(owner, attribute, rule)
        return previous not in (None, rule)

    def forget(self, place: Any, name: str | None) -> None:
        """Remove a registration.  Raises `ValueError` if there is none."""
        user_call = "ampatch.unregister_function"
        owner, attribute = user_place(user_call, place, name)
        if self._rules.pop((owner, attribute), None) is None:
            known = [f"{_title(owner)}.{attribute}" for owner, attribute in self._rules]
            raise ValueError(
                f"{user_call}: {_title(owner)}.{attribute} is not registered. "
                f"Registered: {', '.join(known) or 'nothing'}."
            )

    def patch_all(self) -> None:
        """Patch the registered functions.  To be called after `Installation.install`."""
        for (owner, name), rule in self._rules.items():
            self._installation.patch_user_function(owner, name, rule)


def _title(owner: Any) -> Any:
    return getattr(owner, "__name__", owner)
