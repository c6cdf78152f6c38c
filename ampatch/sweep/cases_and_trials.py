"""The cases (rows) of a sweep, from levels, dtypes and settings, and its trials in their order.

Accuracy needs full runs, one for each case and seed.  Speed needs rounds: in a round every case
runs once, close together in time, and O0 runs twice, so that each round has its own comparison
with O0 and its own measure of the machine's noise.

The full runs with one seed are a round.  If there are fewer seeds than rounds, rounds of short
runs follow, which end after a few seconds of training (`execution/budget.py`).  The second O0 of a
round is always short.  Without O0, for O0 alone, and with `rounds=1` there are no short runs.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ampatch.config.opt_levels import LEVELS, did_you_mean_level, properties_for
from ampatch.errors import did_you_mean
from ampatch.sweep.kinds import UNKNOWN_KIND, Kind
from ampatch.sweep.options import ROUNDS
from ampatch.sweep.trial import AS_IT_IS, BASE, Case, Trial

LEVELS_FROM_OUTSIDE = ("O0", "O1")  # levels that can be applied without a line in the script
DTYPES = ("float16", "bfloat16")
AUTOCAST = "autocast"
SUBJECT = "The script"  # the subject of messages, until its name is known
SEED_VARIABLE = "AMPATCH_SEED"


def cases(
    levels: Iterable[str] | None, dtypes: Iterable[str], overrides: Iterable[str] = (),
    autocast: bool = False, tf32: bool = False, kind: Kind = UNKNOWN_KIND,
) -> list[Case]:  # fmt: skip
    """The cases: every level in every dtype, O0 once.  `levels=None` means all of this kind.

    `overrides` such as `"O2 loss_scale=128"` add a case for each dtype.  `autocast` adds cases of
    torch.autocast if O1, O2 or O3 is a level, `tf32` a case `O0+tf32` if O0 is.  Raises
    `ValueError`, also for levels that this kind of script cannot run at.
    """
    possible = LEVELS_FROM_OUTSIDE if kind.is_plain else LEVELS
    chosen = list(possible) if levels is None else check_names(levels, LEVELS, "levels")
    half_dtypes = check_names(dtypes, DTYPES, "dtypes")
    listed = []
    for level in chosen:
        listed += [Case(level, dtype) for dtype in _dtypes(level, half_dtypes)]
        if level == "O0" and tf32:
            listed.append(Case("O0", tf32=True))
    if autocast and set(chosen) - {"O0"}:
        listed += _autocast_cases(kind, half_dtypes)
    for text in overrides:
        level, settings = level_and_settings(text)
        for dtype in _dtypes(level, half_dtypes):
            _check_settings(text, level, dtype, settings)
            listed.append(Case(level, dtype, settings=tuple(settings.items())))
    return check_possible(list(dict.fromkeys(listed)), kind)


def check_possible(cases: list[Case], kind: Kind) -> list[Case]:
    """Returns `cases`.  Raises `ValueError` if empty, or if this kind of script cannot run one."""
    if not cases:
        raise ValueError("sweep(rows=[]): nothing to run. Expected cases, such as Case('O0').")
    possible = {*LEVELS_FROM_OUTSIDE, AUTOCAST}
    if kind.is_plain and any(case.opt_level not in possible or case.settings for case in cases):
        raise ValueError(f"{SUBJECT} {kind.description()}. {kind.needs}")
    return cases


def _autocast_cases(kind: Kind, half_dtypes: Sequence[str]) -> list[Case]:
    """The autocast baseline in each half dtype, or the script unchanged if it has autocast."""
    if not kind.lacks_initialize:
        return [Case(AUTOCAST, dtype, engine=AUTOCAST) for dtype in half_dtypes]
    return [Case(AUTOCAST, "+".join(kind.dtypes), engine=AS_IT_IS)] if kind.places else []


def trials(
    cases: Sequence[Case], seeds: int, rounds: int = ROUNDS, side_by_side: bool = False,
    fewer_seeds: Mapping[Case, int] | None = None, again: bool = True,
) -> list[Trial]:  # fmt: skip
    """The trials in order: a round of full runs for each seed, then short rounds up to `rounds`.

    Every second round is reversed, so that a machine that gets slower slows all cases alike.
    `fewer_seeds` maps cases to their number of seeds.  With `seeds=0` only O0 has a full run.  With
    `side_by_side` full runs have no speed, so there are `rounds` short rounds.  The second trial is
    O0 with another seed, if it has one.  Without `again` O0 runs once in each round.
    """
    times_speed = rounds > 1 and BASE in cases and len(cases) > 1
    full_rounds = [(0, seed) for seed in range(max(1, seeds))]
    missing = rounds - (0 if side_by_side else len(full_rounds))
    short_rounds = [(1 + number, 0) for number in range(missing if times_speed else 0)]
    planned = []
    for number, (repeat, seed) in enumerate([*full_rounds, *short_rounds]):
        is_short = number >= len(full_rounds)
        in_round = [
            Trial(case, seed, repeat, short=is_short or not (seeds or case == BASE))
            for case in cases
            if seed < (fewer_seeds or {}).get(case, max(1, seeds))
        ]
        if again and times_speed and (is_short or not side_by_side):
            in_round.append(Trial(BASE, seed, repeat, short=True, again=True))
        planned += in_round if number % 2 == 0 else in_round[::-1]
    first, second = Trial(BASE), Trial(BASE, 1)
    if {first, second} <= set(planned):  # show early whether the seed reaches the script
        planned.remove(second)
        planned.insert(planned.index(first) + 1, second)
    return planned


def level_and_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Level and settings of `"O2 loss_scale=128 verbosity=0"`.  Raises `ValueError`."""
    level, *pairs = shlex.split(text) or [""]
    if level not in LEVELS or not pairs or not all("=" in pair for pair in pairs):
        raise ValueError(
            f"--with {text!r}: expected an opt level and settings of ampatch.initialize, "
            f'such as "O2 loss_scale=128"; levels are {", ".join(LEVELS)}.'
        )
    return level, {
        name: parse_literal(value) for name, _, value in (p.partition("=") for p in pairs)
    }


def fill_placeholders(
    arguments: Sequence[str], seed: int, steps: int | None, directory: str
) -> list[str]:
    """The script's arguments with `{seed}`, `{steps}` and `{trial_dir}` replaced."""
    values = {"{seed}": str(seed), "{trial_dir}": directory}
    if steps is not None:
        values["{steps}"] = str(steps)
    filled = []
    for argument in arguments:
        for name, value in values.items():
            argument = argument.replace(name, value)
        filled.append(argument)
    return filled


def counts_its_steps(arguments: Sequence[str]) -> bool:
    """Whether the script gets the number of steps, and ends by itself."""
    return any("{steps}" in argument for argument in arguments)


def check_names(names: Iterable[str], expected: Sequence[str], argument: str) -> list[str]:
    """`names` as a list.  Raises `ValueError` if empty, or if a name is not in `expected`."""
    listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if name not in expected:
            raise ValueError(
                f"sweep({argument}={listed}): unknown {argument[:-1]} {name!r}.\n"
                f"Expected some of {', '.join(expected)}."
                f"{did_you_mean_level(name) or did_you_mean(name, expected, 0.6)}"
            )
    if not listed:
        raise ValueError(f"sweep({argument}=[]): nothing to run.\nExpected some of {expected}.")
    return list(dict.fromkeys(listed))


def _dtypes(level: str, half_dtypes: Sequence[str]) -> Sequence[str | None]:
    return [None] if level == "O0" else half_dtypes


def parse_literal(text: str) -> Any:
    """`text` as a Python literal, or `text` itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check_settings(text: str, level: str, dtype: str | None, settings: dict[str, Any]) -> None:
    """Check the settings of a row by the rules of `initialize`, before anything runs."""
    arguments = {name: value for name, value in settings.items() if name != "overrides"}
    try:
        properties_for(level, dtype or torch.float16, **arguments)
    except KeyError as error:
        [name] = error.args
        raise ValueError(f"--with {text!r}: initialize has no setting {name!r}.") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"--with {text!r}: {error}") from None
