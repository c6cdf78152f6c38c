"""The rows: the figures of all runs of a case, compared with O0's.

Losses, metrics, memory, steps and skips are of whole runs; times and speed of runs that ran alone.
Speed is relative to O0 of the same round, so a change in the machine's speed affects both.  For
accuracy each seed gives one value: the last value of a metric, or the last loss; their mean if the
seed ran several times.  `comparisons.py` compares these values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pandas import DataFrame

from ampatch.sweep.measure.run_record import Measured, Run
from ampatch.sweep.report.comparisons import Samples, compare, corrected, directions, judged_row
from ampatch.sweep.report.first_loss_check import other_starts
from ampatch.sweep.report.margin import LOSS, ONE_PERCENT, Margin
from ampatch.sweep.report.numbers import mean
from ampatch.sweep.report.pace import SLOWER, is_surely_faster, pace_of, reach_of
from ampatch.sweep.report.results import Row, Spread
from ampatch.sweep.report.run_figures import (
    OK,
    SHARE,
    cpu_ms,
    first_and_last,
    main_losses,
    spread_of,
    status,
    step_ms,
    step_times,
)
from ampatch.sweep.trial import BASE, Case

FIRST = "loss at the start"
NEAR = 2  # rounds' durations: the speeds of runs further apart are not compared
ENOUGH_ROUNDS = 3  # for O0's noise from round to round, if it ran once in each
Milliseconds = Callable[[Measured | None, int | None], float | None]
"""Milliseconds of the first N steps."""


def summarize(
    runs: Sequence[Run],
    judged: str | None = None,
    better: Mapping[str, str] | None = None,
    margin: Margin = ONE_PERCENT,
) -> list[Row]:
    """A row per case, in the order in which they first ran.

    `judged` is the quantity that the verdict is about, by default the first metric, or
    the last loss.  `better` maps metrics to "higher" or "lower"; for other metrics their
    name decides (`directions.py`).  `margin` is the smallest difference that matters.
    """
    by_case: dict[Case, list[Run]] = {}
    for run in runs:
        by_case.setdefault(run.case, []).append(run)
    base, values, asked = by_case.get(BASE, []), values_of(runs), better or {}
    starts = {run.case: difference for run, difference in reversed(other_starts(runs))}
    round_seconds: Counter[tuple[int, int]] = Counter()
    for run in runs:
        round_seconds[run.trial.round] += run.seconds
    samples, means = samples_of(values), _means(values, ["row", "name"]).value.to_dict()
    rows = [
        _row(case, case_runs, base, round_seconds, means, samples, starts.get(case, ""), asked)
        for case, case_runs in by_case.items()
    ]
    criteria = judged, asked, seeds_matter(base), margin
    compared = [
        [] if case == BASE or case in starts else compare(samples, case.label, *criteria)
        for case in by_case
    ]
    judged_rows = list(map(judged_row, rows, corrected(compared)))
    return [
        row if row.outcome == "baseline" else _with_equals(row, judged_rows) for row in judged_rows
    ]


def _with_equals(row: Row, rows: Sequence[Row]) -> Row:
    """The row, whose verdict now names faster rows that train exactly the same."""
    faster = [
        other.name
        for other in rows
        if _training_figures(other) == _training_figures(row) is not None
        and (row.pace == SLOWER if other.outcome == "baseline" else is_surely_faster(other, row))
    ]
    more = f"; trains the same as {' and '.join(faster)}, and is slower" if faster else ""
    return dataclasses.replace(row, verdict=row.verdict + more)


def _training_figures(row: Row) -> tuple | None:
    """The figures of a row's training; None if none were recorded or a run failed."""
    if row.last_loss is None or row.outcome == "failed":
        return None
    return row.seeds, row.first_loss, row.last_loss, row.metrics


def values_of(runs: Iterable[Run]) -> DataFrame:
    """A line for each last value of a whole run, and for its loss at the start.

    The latter is a mean over as many losses in each run.  `is_ok` is whether the run went well,
    `steps` how many steps it took.
    """
    whole = [run for run in runs if run.measured and not run.trial.short]
    counts = [len(main_losses(run.measured).values) for run in whole if status(run) == OK]
    window = max(1, min(filter(None, counts), default=0) // SHARE) if any(counts) else None
    lines = [
        (run.case.label, run.trial.seed, name, value, status(run) == OK, float(run.steps))
        for run in whole
        for name, value in _last_values(run.measured, window).items()
    ]
    columns = ["row", "seed", "name", "value", "is_ok", "steps"]
    return DataFrame(lines, columns=columns).astype({"is_ok": bool})


def samples_of(values: DataFrame) -> Samples:
    """By row and quantity: one value for each seed, from the runs with status "ok"."""
    good = values[values.is_ok & (values.name != FIRST)]
    seeds = _means(good, ["row", "name", "seed"]).reset_index("seed")
    return {key: part.set_index("seed") for key, part in seeds.groupby(["row", "name"], sort=False)}


def seeds_matter(runs: Iterable[Run]) -> bool:
    """Whether runs of O0 with different seeds differ in a loss at the end or start, or a metric."""
    base = _of_base(runs)
    return base.seed.nunique() < 2 or bool((base.groupby("name").value.nunique() > 1).any())


def has_quality(runs: Iterable[Run]) -> bool:
    """Whether a loss or a metric was measured at O0."""
    return not _of_base(runs).empty


def _of_base(runs: Iterable[Run]) -> DataFrame:
    values = values_of(run for run in runs if run.case == BASE)
    return values[values.is_ok]


def _row(
    case: Case,
    runs: Sequence[Run],
    base: Sequence[Run],
    round_seconds: Mapping[tuple[int, int], float],
    means: Mapping[tuple[str, str], float],
    samples: Samples,
    start: str,
    better: Mapping[str, str],
) -> Row:
    measured = [run.measured for run in runs if run.measured and not run.trial.short]
    trouble = [text for text in map(status, runs) if text != OK]
    runs_alone, base_alone = map(_timed_runs, (runs, base))
    times = DataFrame(filter(None, (step_times(run.measured) for run in runs_alone)))
    pairs = _pairs(case, runs_alone, base_alone, round_seconds)
    speeds, cpu_speeds = (spread_of(_ratios(pairs, ms)) for ms in (step_ms, cpu_ms))
    pairs = _pairs(BASE, base_alone, base_alone, round_seconds)
    reach, cpu_reach = (reach_of(_ratios(pairs, ms)) for ms in (step_ms, cpu_ms))
    is_paced = case != BASE and not trouble
    pace, by_cpu = pace_of(speeds, reach, cpu_speeds, cpu_reach) if is_paced else ("", False)
    metrics = {name: value for (row, name), value in means.items() if row == case.label}
    names = [name for name in metrics if name != FIRST]
    by_seed = {name: frame for (row, name), frame in samples.items() if row == case.label}
    return Row(
        label=case.label,
        opt_level=case.level_name,
        dtype=case.dtype or "float32",
        engine=case.engine,
        settings=dict(case.settings),
        status=trouble[0] if trouble else OK,
        runs=len(runs),
        good_runs=len(runs) - len(trouble),
        seeds=len({run.trial.seed for run in runs}),
        step_ms=None if times.empty else times["median"].median(),
        step_times=None
        if times.empty
        else Spread(*times[["median", "low", "high"]].median(), int(times.n.sum())),
        cpu_ms=_median(cpu_ms(run.measured) for run in runs_alone),
        speed=speeds and speeds.median,
        speeds=speeds,
        cpu_speeds=cpu_speeds,
        reach=reach,
        cpu_reach=cpu_reach,
        pace=pace,
        by_cpu=by_cpu,
        memory_bytes=max((m.memory_bytes for m in measured if m.memory_bytes), default=None),
        memory_kind=measured[0].memory_kind if measured else "resident",
        first_loss=metrics.pop(FIRST, None),
        last_loss=metrics.pop(LOSS, None),
        metrics=metrics,
        sds={
            name: frame.value.std()
            for name, frame in by_seed.items()
            if not trouble and frame.value.nunique() > 1 and all(map(math.isfinite, frame.value))
        },
        better=directions(names, better),
        steps=round(_median(len(m.skipped) for m in measured) or 0),
        all_steps=sum(len(m.skipped) for m in measured),
        skipped=sum(sum(m.skipped) for m in measured),
        loss_scale=measured[0].loss_scale if measured else None,
        seconds=sum(run.seconds for run in runs),
        outcome="failed" if trouble else "baseline" if case == BASE else "untested",
        start=start,
    )


def _timed_runs(runs: Iterable[Run]) -> list[Run]:
    """The runs whose times count."""
    return [run for run in runs if run.alone and run.measured]


def _last_values(measured: Measured, window: int | None = None) -> dict[str, float]:
    """The last value of each metric, and the last loss; with a `window` also the first loss."""
    first, last = first_and_last(measured, window)
    last_values = {name: series.values[-1] for name, series in measured.metrics.items()}
    if last is not None:
        last_values |= {LOSS: last, **({FIRST: first} if window else {})}
    return last_values


def _means(values: DataFrame, by: list[str]) -> DataFrame:
    """The means of values and steps; inf and NaN stay what they are."""
    return values.groupby(by, sort=False)[["value", "steps"]].agg(mean)


def _pairs(
    case: Case,
    runs: Sequence[Run],
    base: Sequence[Run],
    round_seconds: Mapping[tuple[int, int], float],
) -> list[tuple[Run, Run]]:
    """The runs whose speed counts, each with O0's run of the same round.

    For O0 these are its second runs; if rounds lack one, also each round's run and the next one's.
    """
    base_runs = {run.trial.round: run for run in base if not run.trial.again and status(run) == OK}
    short = {run.trial.round for run in runs if run.trial.short}  # a whole run came much later
    compared = [run for run in runs if run.trial.short or run.trial.round not in short]
    compared = [run for run in runs if run.trial.again] if case == BASE else compared
    pairs = [
        (run, base_runs[run.trial.round])
        for run in compared
        if run.trial.round in base_runs and status(run) == OK
    ]
    pairs = [
        pair for pair in pairs if _seconds_apart(*pair) <= NEAR * round_seconds[pair[0].trial.round]
    ]
    if case == BASE and len(pairs) < len(base_runs) >= ENOUGH_ROUNDS:
        pairs += itertools.pairwise(base_runs.values())
    return pairs


def _seconds_apart(run: Run, other: Run) -> float:
    """Seconds between the beginnings of two runs; 0 if these are unknown."""
    began = [trained.measured.machine.get("began") for trained in (run, other)]
    return 0.0 if None in began else abs(began[0] - began[1])


def _ratios(pairs: Iterable[tuple[Run, Run]], ms: Milliseconds) -> list[float]:
    """The speed of the first run of each pair relative to the second."""
    ratios = (_speed(run, beside, ms) for run, beside in pairs)
    return [ratio for ratio in ratios if ratio is not None]


def _speed(run: Run, base: Run, ms: Milliseconds) -> float | None:
    """One run's speed relative to another's; if one is short, over as many steps of both."""
    both = run, base
    is_short = any(timed.trial.short for timed in both)
    first = min(len(timed.measured.step_seconds) for timed in both) if is_short else None
    own, of_base = ms(run.measured, first), ms(base.measured, first)
    return of_base / own if own and of_base else None


def _median(values: Iterable[float | None]) -> float | None:
    known = DataFrame({"value": list(values)}, dtype=float).value.dropna()
    return None if known.empty else known.median()
