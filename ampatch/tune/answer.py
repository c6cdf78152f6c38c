"""The answer of a tuning, and the files it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import read_json, restored, write_json
from ampatch.tune.sensitivity import Sensitivity

ANSWER = "tune.json"
OVERRIDES = "overrides.json"
PASSES, CURED, NO_CURE, UNDECIDED = "passes", "cured", "no cure", "undecided"


@dataclass
class Answer:
    """The content of `tune.json`.

    `outcome` is "passes" (the level needs nothing), "cured" (`needed` brings it back), "no cure"
    (not even all modules in FP32 and the `settings_tried` do), or "undecided": the candidates were
    used up before one passed, or the seeds were too few to show that the level, or what is in
    `needed`, trains as O0 does: `not_shown`.  `speeds` are medians relative to O0, of the "level"
    and the "cure"; `paces` says what the machine tells of them.
    """

    script: str
    opt_level: str
    dtype: str
    outcome: str
    needed: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    line: str = ""
    settings_tried: dict[str, Any] = field(default_factory=dict)  # settings that the level lacks
    is_smallest: bool = True
    candidates: int = 0
    failure: str = ""  # how the level itself failed, where nothing cures it
    unseen: float | None = None  # the smallest difference in what is judged that would be seen
    judged: str = ""
    not_shown: str = ""  # what the seeds do not show about a level or cure that no test refuses
    modules: list[Sensitivity] = field(default_factory=list)  # the most sensitive first
    speeds: dict[str, float] = field(default_factory=dict)
    paces: dict[str, str] = field(default_factory=dict)


def write_answer(directory: Path, answer: Answer) -> None:
    """Write the answer, and what `initialize(overrides=...)` takes of one that has a line."""
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
        return None if data is None else restored(Answer, data)
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{path}: is damaged, or ampatch tune did not write it.") from None
