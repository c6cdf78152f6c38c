"""The answer of a tuning, and its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import from_json, read_json, write_json
from ampatch.tune.sensitivity import Sensitivity

ANSWER = "tune.json"
OVERRIDES = "overrides.json"
PASSES, CURED, NO_CURE, UNDECIDED = "passes", "cured", "no cure", "undecided"


@dataclass
class Answer:
    """The content of `tune.json`.

    `outcome` is one of

    * "passes": the level trains as O0 does;
    * "cured": it does so with `needed`;
    * "no cure": it does not, even with all modules in FP32 and the `settings_tried`;
    * "undecided": the limit of candidates was reached before one passed.  Or too few seeds ran to
      show that the level or the cure trains as O0 does; then `not_shown` says what is missing.

    `speeds` are those of the "level" and the "cure" relative to O0, as medians; `paces` are the
    verdicts on them, as text.
    """

    script: str
    opt_level: str
    dtype: str
    outcome: str
    needed: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    line: str = ""  # to paste into the script; "" without a cure
    settings_tried: dict[str, Any] = field(default_factory=dict)  # settings that the level lacks
    is_smallest: bool = True  # whether the search ended before its limit
    candidates: int = 0  # how many were tried
    failure: str = ""  # how the level itself failed, where nothing cures it
    unseen: float | None = None  # the smallest difference that the trials would have shown
    judged: str = ""  # the quantity that was compared: a metric, or the last loss
    not_shown: str = ""  # of a level or cure that passed: what too few seeds leave open
    modules: list[Sensitivity] = field(default_factory=list)  # the most sensitive first
    speeds: dict[str, float] = field(default_factory=dict)
    paces: dict[str, str] = field(default_factory=dict)


def write_answer(directory: Path, answer: Answer) -> None:
    """Write the answer; if it is a cure, also the file for `initialize(overrides=...)`."""
    write_json(directory / ANSWER, answer)
    if answer.line:
        write_json(directory / OVERRIDES, answer.overrides)
    else:
        (directory / OVERRIDES).unlink(missing_ok=True)


def read_answer(directory: str | Path) -> Answer | None:
    """The answer in a directory of `ampatch tune`; None if there is none.

    Raises `ValueError` for a file that `ampatch tune` did not write.
    """
    path = Path(directory) / ANSWER
    try:
        data = read_json(path)
        return None if data is None else from_json(Answer, data)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{path}: is damaged, or ampatch tune did not write it.") from None
