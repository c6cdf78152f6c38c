"""The rows: the figures of all runs of a case, compared with O0's.

Losses, metrics, memory, steps and skips are of whole runs; times and speed of runs that ran alone.
Speed is relative to O0 of the same round, so a machine that changes its speed changes both.  For
accuracy each seed gives one value: a metric's last value, or the last loss; the mean, if the seed
ran several times.  `judge.py` compares these values.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from ampatch.sweep.measure.record import Measured, Run
from ampatch.sweep.report.figures import (
    OK,
    cpu_ms,
    first_and_last,
    spread_of,
    status,
    step_ms,
    step_times,
)
from ampatch.sweep.report.judge import Samples, compare, corrected, directions, judged_row
from ampatch.sweep.report.margin import LOSS, ONE_PERCENT, Margin
from ampatch.sweep.report.numbers import mean
from ampatch.sweep.report.pace import SLOWER, pace_of, reach_of, told_apart
from ampatch.sweep.report.results import Row, Spread
from ampatch.sweep.report.start_check import other_starts
from ampatch.sweep.trial import BASE, Case

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
    base = by_case.get(BASE, [])
    starts = {run.case: difference for run, difference in reversed(other_starts(runs))}
    rows = [_row(case, of_case, base, starts.get(case, "")) for case, of_case in by_case.items()]
    given = better or {}
    rows = [dataclasses.replace(row, better=directions(_quantities(row), given)) for row in rows]
    how = judged, given, seeds_matter(base), margin
    compared = [
        [] if case == BASE or case in starts else compare(samples_of(of), samples_of(base), *how)
        for case, of in by_case.items()
    ]
    judged_rows = [judged_row(row, ones) for row, ones in zip(rows, corrected(compared))]
    return [row if row.outcome == "baseline" else _beside(row, judged_rows) for row in judged_rows]


def _beside(row: Row, rows: Sequence[Row]) -> Row:
    """The row, whose verdict says beside which others it trains the same and is slower."""
    slower = [
        other.name
        for other in rows
        if _trained(other) == _trained(row) is not None
        and (row.pace == SLOWER if other.outcome == "baseline" else told_apart(other, row))
    ]
    said = f"; trains the same as {' and '.join(slower)}, and is slower" if slower else ""
    return dataclasses.replace(row, verdict=row.verdict + said)


def _trained(row: Row) -> tuple | None:
    """What a row has learned; None where that was not recorded, or a run has failed."""
    if row.last_loss is None or row.outcome == "failed":
        return None
    return row.seeds, row.first_loss, row.last_loss, row.metrics


def alone(runs: Iterable[Run]) -> list[Run]:
    """The runs whose times count: those that had their devices for themselves."""
    return [run for run in runs if run.alone and run.measured is not None]


def samples_of(runs: Iterable[Run]) -> Samples:
    """For each quantity one value per seed, from the runs with status "ok"."""
    values: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        if run.trial.short or status(run) != OK:
            continue
        for name, value in _finals(run.measured or Measured()).items():
            values.setdefault(name, {}).setdefault(run.trial.seed, []).append(value)
    return {
        name: {seed: mean(of_seed) for seed, of_seed in seeds.items()}
        for name, seeds in values.items()
    }


def seeds_matter(runs: Iterable[Run]) -> bool:
    """Whether runs with different seeds differ in any measured loss or metric."""
    first, *others = list(_of_seeds(runs).values()) or [None]
    return not others or any(other != first for other in others)


def says_how_well(runs: Iterable[Run]) -> bool:
    """Whether a loss or a metric was measured at O0."""
    return any(losses or finals for losses, finals in _of_seeds(runs).values())


def _of_seeds(runs: Iterable[Run]) -> dict[int, tuple[list[list[float]], dict[str, float]]]:
    """Losses and last values of each seed, of whole runs at O0."""
    return {
        run.trial.seed: (
            [series.values for series in run.measured.losses.values()],
            _finals(run.measured),
        )
        for run in runs
        if status(run) == OK and run.case == BASE and not run.trial.short and run.measured
    }


def _row(case: Case, runs: Sequence[Run], base: Sequence[Run], start: str) -> Row:
    measured = [run.measured for run in runs if run.measured and not run.trial.short]
    trouble = [said for said in map(status, runs) if said != OK]
    runs_alone, base_alone = alone(runs), alone(base)
    timed = [run.measured for run in runs_alone]
    times, both = _times(timed), (step_ms, cpu_ms)
    speeds, cpu_speeds = (spread_of(_ratios(case, runs_alone, base_alone, ms)) for ms in both)
    reach, cpu_reach = (reach_of(_ratios(BASE, base_alone, base_alone, ms)) for ms in both)
    is_paced = case != BASE and not trouble
    pace, by_cpu = pace_of(speeds, reach, cpu_speeds, cpu_reach) if is_paced else ("", False)
    firsts, lasts = zip(*map(first_and_last, measured)) if measured else ((), ())
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
        step_ms=times and times.median,
        step_times=times,
        cpu_ms=_median(map(cpu_ms, timed)),
        speed=speeds and speeds.median,
        speeds=speeds,
        cpu_speeds=cpu_speeds,
        reach=reach,
        cpu_reach=cpu_reach,
        pace=pace,
        by_cpu=by_cpu,
        memory_bytes=max((m.memory_bytes for m in measured if m.memory_bytes), default=None),
        memory_kind=measured[0].memory_kind if measured else "resident",
        first_loss=_mean(firsts),
        last_loss=_mean(lasts),
        metrics=_metrics(measured),
        sds=_sds(runs),
        steps=int(_median(len(m.skipped) for m in measured) or 0),
        all_steps=sum(len(m.skipped) for m in measured),
        skipped=sum(sum(m.skipped) for m in measured),
        loss_scale=measured[0].loss_scale if measured else None,
        seconds=sum(run.seconds for run in runs),
        outcome="failed" if trouble else "baseline" if case == BASE else "untested",
        start=start,
    )


def _finals(measured: Measured) -> dict[str, float]:
    _, last = first_and_last(measured)
    finals = {name: series.values[-1] for name, series in measured.metrics.items()}
    return finals if last is None else {**finals, LOSS: last}


def _quantities(row: Row) -> list[str]:
    return [*row.metrics, *([] if row.last_loss is None else [LOSS])]


def _metrics(measured: Sequence[Measured]) -> dict[str, float]:
    """The mean of the last values of each metric."""
    names = dict.fromkeys(name for one in measured for name in one.metrics)
    lasts = ([m.metrics[name].values[-1] for m in measured if name in m.metrics] for name in names)
    return dict(zip(names, map(mean, lasts)))


def _sds(runs: Sequence[Run]) -> dict[str, float]:
    """Standard deviations over the seeds, where they differ; none of a row with failed runs."""
    if any(status(run) != OK for run in runs):
        return {}
    samples = {name: list(seeds.values()) for name, seeds in samples_of(runs).items()}
    return {
        name: statistics.stdev(values)
        for name, values in samples.items()
        if len(set(values)) > 1 and all(map(math.isfinite, values))
    }


def _times(measured: Sequence[Measured]) -> Spread | None:
    """Medians over the runs of their medians and quartiles."""
    spreads = [spread for spread in map(step_times, measured) if spread is not None]
    if not spreads:
        return None
    columns = ([getattr(spread, name) for spread in spreads] for name in ("median", "low", "high"))
    return Spread(*map(statistics.median, columns), sum(spread.n for spread in spreads))


def _ratios(case: Case, runs: Sequence[Run], base: Sequence[Run], ms: Milliseconds) -> list[float]:
    """The speeds relative to O0 of the same round; for O0 those of its second run."""
    of_round = {one.trial.round: one for one in base if not one.trial.again and status(one) == OK}
    timed = {run.trial.round for run in runs if run.trial.short}  # a whole run came much later
    compared = [run for run in runs if run.trial.short or run.trial.round not in timed]
    compared = [run for run in runs if run.trial.again] if case == BASE else compared
    ratios = (
        _speed(run, of_round[run.trial.round], ms)
        for run in compared
        if run.trial.round in of_round and status(run) == OK
    )
    return [ratio for ratio in ratios if ratio is not None]


def _speed(run: Run, base: Run, ms: Milliseconds) -> float | None:
    """One run's speed relative to another's; a short run is compared over as many steps."""
    first = min(len(one.measured.step_seconds) for one in (run, base)) if run.trial.short else None
    own, of_base = ms(run.measured, first), ms(base.measured, first)
    return of_base / own if own and of_base else None


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if there else None


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
