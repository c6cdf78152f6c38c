"""The options of a sweep on the command line, for the commands that run trials."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from ampatch.cli.option_types import name_and_value
from ampatch.config.sweep_options import flag, help_texts, of_command


def formatter(prog: str) -> argparse.HelpFormatter:
    """Has room for an option and its value in front of the text."""
    return argparse.HelpFormatter(prog, max_help_position=28)


def add_options(
    parser: argparse.ArgumentParser,
    leave_out: Collection[str] = (),
    other_texts: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Add the options of the table, but some, with its texts or others.

    Returns the group of those that a first run does not need.
    """
    later = parser.add_argument_group("more options")
    texts = {**help_texts(), **other_texts}
    for one in of_command():
        if one.name in leave_out:
            continue
        group: Any = parser if one.metadata["first"] else later
        group.add_argument(
            flag(one),
            dest=one.name,
            help=texts.get(one.name, "").replace("%", "%%"),  # none with python -OO
            default=argparse.SUPPRESS,  # the table's own
            **_taken(one),
        )
    return later


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the table that stand on the command line, by name."""
    named = {one.name for one in of_command()}
    return {name: value for name, value in vars(options).items() if name in named}


def _taken(option: dataclasses.Field[Any]) -> dict[str, Any]:
    """What follows the flag."""
    if isinstance(option.default, bool):
        return {"action": "store_const", "const": not option.default}
    metavar = option.metadata["metavar"]
    if option.default_factory is dict:
        return {"action": _Pairs, "type": name_and_value, "metavar": metavar}
    if option.name == "overrides":
        return {"action": "append", "metavar": metavar}
    return {"type": option.metadata["parse"], "metavar": metavar}


class _Pairs(argparse.Action):
    """Adds NAME=VALUE to a dictionary."""

    def __call__(self, parser: Any, options: Any, pair: Any, flag: Any = None) -> None:
        given = getattr(options, self.dest, {})
        setattr(options, self.dest, {**given, pair[0]: pair[1]})
