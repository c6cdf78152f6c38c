"""What a cure costs: its speed beside the level and O0, in rounds of their own."""

from __future__ import annotations

from typing import Any

from ampatch.config.sweep_options import SweepOptions
from ampatch.sweep.report.pace import in_words
from ampatch.sweep.trial import BASE, Case
from ampatch.tune.answer import Answer
from ampatch.tune.trials import Task

SPEED = "speed"  # its directory

_OF_ACCURACY = frozenset(("seeds", "judge", "margin", "better", "jobs", "devices"))
"""Options that the timing does not share."""


def add_speeds(answer: Answer, task: Task, cure: Case, level_trains: bool, rounds: int) -> None:
    """Time the cure, and put its speed into the answer.

    Steps of a level that has failed are no training, and are not timed.
    """
    place = task.directory / SPEED
    rows = [BASE, task.level, cure] if level_trains else [BASE, cure]
    task.say("Timing: " + ", ".join(case.label for case in rows))
    sweep = task.sweep(
        rows,
        place,
        task.options.keys() - _OF_ACCURACY,
        rounds=rounds,
        resume=(place / "summary.json").exists(),
        **_one_at_a_time(task),
    ).run()
    names = {BASE.label: "O0", task.level.label: "level", cure.label: "cure"}
    for row in sweep.rows:
        if row.speed is not None:
            answer.speeds[names[row.label]] = row.speed
            answer.paces[names[row.label]] = in_words(row)


def _one_at_a_time(task: Task) -> dict[str, Any]:
    asked = SweepOptions(devices=task.options.get("devices") or ())
    if asked.devices:
        return {"devices": asked.devices[: task.options.get("nproc_per_node") or 1]}
    return {"jobs": 1}
