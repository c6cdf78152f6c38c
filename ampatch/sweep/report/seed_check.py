"""Does the sweep's seed reach the script?  What the records of O0 say, from the first run on.

A trial's seed can come into the script in three ways: by `{seed}` among its arguments, by the
variable `AMPATCH_SEED`, and by the generators, which are seeded before it starts.  So a seed that
the script sets while it uses neither of the first two is the same in each trial; the first run
shows it.  Where it uses one of them, a second seed's run shows which calls get the same again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampatch.sweep.measure.record import Run, SeedCall

HOW = (
    "pass the seed on among the script's arguments (-- --seed {seed}), or have the script read "
    "the variable AMPATCH_SEED"
)
NOT_REACHED = (
    "The seed does not reach the script: O0 is the same with each. Accuracy is not tested like this"
)


def constant_seeds(runs: Sequence[Run], arguments: Sequence[str]) -> list[SeedCall]:
    """The script's calls that set the same seed in each trial, as far as `runs` can tell.

    `runs` are those of one row, in their order.  A script that uses the trial's seed and makes a
    generator with a fixed one means it so: a split of the data, most often.
    """
    by_seed = {run.trial.seed: run.measured for run in runs if run.measured is not None}
    if not by_seed:
        return []
    first, *others = by_seed.values()
    is_used = first.seed_read or any("{seed}" in argument for argument in arguments)
    if is_used and not others:
        return []
    return [
        call
        for call in first.seed_calls
        if all(call in one.seed_calls for one in others) and not (is_used and call.is_generator)
    ]


def notice(script: str, constant: Sequence[SeedCall], overridden: bool) -> str:
    """What a user with several seeds should know of these calls; "" if there is nothing."""
    everywhere = [call for call in constant if not call.is_generator]
    of_generators = [call for call in constant if call.is_generator]
    parts = []
    if everywhere and not overridden:
        parts.append(
            f"{script} seeds itself with a constant: {_listed(everywhere)}. What it draws after "
            "that is the same with each seed of the sweep. --override-seeds gives these calls the "
            f"trial's seed; or {HOW}."
        )
    if of_generators and not overridden:
        parts.append(
            f"The same in each trial: what is drawn by {_listed(of_generators)}. --override-seeds "
            "leaves generators as they are, because fixed splits and data come from them."
        )
    return " ".join(parts)


def not_reached(constant: Sequence[SeedCall], overridden: bool) -> str:
    """The note for a sweep whose O0 is the same with each seed."""
    if overridden or any(not call.is_generator for call in constant):
        return f"{NOT_REACHED}."
    return f"{NOT_REACHED}: {HOW}."


def _listed(calls: Iterable[SeedCall]) -> str:
    """`random.seed(1), torch.manual_seed(1) at train.py:12`, each place once."""
    by_place: dict[str, list[str]] = {}
    for call in calls:
        by_place.setdefault(call.place, []).append(f"{call.function}({call.seed})")
    places = [f"{', '.join(_few(texts))} at {place}" for place, texts in by_place.items()]
    return "; ".join(_few(places))


def _few(texts: list[str], most: int = 4) -> list[str]:
    return texts if len(texts) <= most else [*texts[:most], "..."]
