"""The options of a sweep on the command line, for the commands that run trials."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from ampatch.cli.ending import cause
from ampatch.cli.option_types import name_and_value
from ampatch.cli.script_options import program_of
from ampatch.sweep.options import command_options, flag, help_texts

Task = TypeVar("Task")  # a sweep or a tuning


def add_options(
    parser: argparse.ArgumentParser,
    leave_out: Collection[str] = (),
    other_texts: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Add the options of `SweepOptions`, with the help texts there or in `other_texts`.

    Returns the group of options that a first sweep does not need.
    """
    later = parser.add_argument_group("more options")
    texts = {**help_texts(), **other_texts}
    for option in command_options():
        if option.name in leave_out:
            continue
        group: Any = parser if option.metadata["first"] else later
        group.add_argument(
            flag(option),
            dest=option.name,
            help=texts.get(option.name, "").replace("%", "%%"),  # python -OO drops the texts
            default=argparse.SUPPRESS,  # then the default of `SweepOptions` applies
            **_argument_settings(option),
        )
    return later


def construct(options: argparse.Namespace, make: Callable[..., Task], **added: Any) -> Task:
    """Call `make` with the script and the options; errors end the command."""
    program = program_of(options)
    for option in command_options():
        if option.name in vars(options):
            value = getattr(options, option.name)
            added[option.name] = dict(value) if option.default_factory is dict else value
    parser: argparse.ArgumentParser = options.parser
    try:
        return make(program.name, options.arguments, module=program.is_module, **added)
    except OSError as error:
        parser.error(cause(error))
    except (ImportError, ValueError) as error:
        parser.error(str(error))


def _argument_settings(option: dataclasses.Field[Any]) -> dict[str, Any]:
    """The settings of `add_argument` for an option."""
    if isinstance(option.default, bool):
        return {"action": "store_const", "const": not option.default}
    metavar = option.metadata["metavar"]
    if option.metadata["parse"] is bool:
        return {"action": argparse.BooleanOptionalAction}
    if option.default_factory is dict:
        return {"action": "append", "type": partial(name_and_value, metavar), "metavar": metavar}
    if option.name == "overrides":
        return {"action": "append", "metavar": metavar}
    return {"type": option.metadata["parse"], "metavar": metavar}
