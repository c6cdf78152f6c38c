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
    * "cured": the level trains as O0 does with the remedies in `needed`;
    * "no cure": it does not, even with all modules in FP32 and the `settings_tried`;
    * "undecided": the limit of candidates was reached before a candidate passed, or too few seeds
      ran to show that the level or the cure trains as O0 does (`not_shown` says what is missing).

    `speeds` has the median speeds of the "level" and the "cure" relative to O0, `paces` the
    verdicts on these speeds, as text.
    """

    script: str
    opt_level: str
    dtype: str
    outcome: str
    needed: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    line: str = ""  # the line to paste into the script, or "" without a cure
    settings_tried: dict[str, Any] = field(default_factory=dict)  # every setting that was tried
    is_smallest: bool = True  # False if the limit of candidates ended the search
    candidates: int = 0  # the number of candidates that ran
    failure: str = ""  # how the level itself fails, if no cure was found
    unseen: float | None = None  # the smallest difference that the trials could show
    judged: str = ""  # the compared quantity: a metric, or the last loss
    not_shown: str = ""  # what too few seeds leave open of a level or cure that passed
    modules: list[Sensitivity] = field(default_factory=list)  # the most sensitive first
    speeds: dict[str, float] = field(default_factory=dict)
    paces: dict[str, str] = field(default_factory=dict)


def write_answer(directory: Path, answer: Answer) -> None:
    """Write the answer and, for a cure, the file for `initialize(overrides=...)`."""
    write_json(directory / ANSWER, answer)
    if answer.line:
        write_json(directory / OVERRIDES, answer.overrides)
    else:
        (directory / OVERRIDES).unlink(missing_ok=True)


def read_answer(directory: str | Path) -> Answer | None:
    """The answer in a directory of `ampatch tune`, or None if there is none.

    Raises `ValueError` for a file that `ampatch tune` did not write.
    """
    path = Path(directory) / ANSWER
    try:
        data = read_json(path)
        return None if data is None else from_json(Answer, data)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{path}: is damaged, or ampatch tune did not write it.") from None
