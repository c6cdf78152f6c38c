"""The rows: the figures of all runs of a case, compared with O0's.

Losses, metrics, memory, steps and skips come from full runs, times and speed from runs that ran
alone.  Speed is relative to O0 of the same round, so a change in the machine's speed affects both.
For accuracy each seed gives one value: the last value of a metric, or the last loss; if the seed
ran several times, the mean of these values.  `comparisons.py` compares them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pandas import DataFrame

from ampatch.sweep.measure.run_record import Measured, Run
from ampatch.sweep.report import comparisons
from ampatch.sweep.report.comparisons import Samples
from ampatch.sweep.report.first_loss_check import first_loss_differences
from ampatch.sweep.report.margin import LAST_LOSS, ONE_PERCENT, Margin
from ampatch.sweep.report.numbers import mean
from ampatch.sweep.report.pace import SLOWER, is_surely_faster, pace_of, reach_of
from ampatch.sweep.report.results import Row, Spread
from ampatch.sweep.report.run_figures import (
    LOSS_WINDOW_DIVISOR,
    OK,
    cpu_ms,
    first_and_last,
    main_losses,
    spread_of,
    status,
    step_ms,
    step_times,
)
from ampatch.sweep.trial import BASE, Case

FIRST_LOSS = "loss at the start"
MAX_GAP_IN_ROUNDS = 2  # in durations of a round: runs further apart are not compared for speed
MIN_NOISE_ROUNDS = 3  # rounds that show O0's noise if it ran once in each
StepTimeFunction = Callable[[Measured | None, int | None], float | None]
"""Returns the median milliseconds of a run's first N steps; of all steps if N is None."""


def summarize(
    runs: Sequence[Run], judged: str | None = None, better: Mapping[str, str] | None = None,
    margin: Margin = ONE_PERCENT,
) -> list[Row]:  # fmt: skip
    """A row per case, in the order in which they first ran.

    `judged` is the quantity that the verdict is about, by default the first metric, or
    the last loss.  `better` maps metrics to "higher" or "lower"; for other metrics their
    name decides (`directions.py`).  `margin` is the smallest difference that matters.
    """
    by_case: dict[Case, list[Run]] = {}
    for run in runs:
        by_case.setdefault(run.case, []).append(run)
    base_runs, values, better = by_case.get(BASE, []), values_of(runs), better or {}
    # In reverse, so that the first difference of a case stays.
    first_loss_texts = {run.case: text for run, text in reversed(first_loss_differences(runs))}
    round_seconds: Counter[tuple[int, int]] = Counter()
    for run in runs:
        round_seconds[run.trial.round] += run.seconds
    samples, means = samples_of(values), _means(values, ["row", "name"]).value.to_dict()
    rows = [
        _row(
            *(case, case_runs, base_runs, round_seconds, means, samples),
            *(first_loss_texts.get(case, ""), better),
        )
        for case, case_runs in by_case.items()
    ]
    uncompared = {BASE, *first_loss_texts}
    compare = functools.partial(
        comparisons.compare, samples, judged=judged, better=better,
        seeds_matter=seeds_matter(base_runs), margin=margin,
    )  # fmt: skip
    by_row = [[] if case in uncompared else compare(case.label) for case in by_case]
    rows = list(map(comparisons.with_verdict, rows, comparisons.with_corrected_p(by_row)))
    return [row if row.outcome == "baseline" else _with_faster_equals(row, rows) for row in rows]


def _with_faster_equals(row: Row, rows: Sequence[Row]) -> Row:
    """The row, whose verdict now names faster rows that train exactly the same."""
    figures = _training_figures(row)
    faster = [
        other.name
        for other in rows
        if figures is not None
        and _training_figures(other) == figures
        and (row.pace == SLOWER if other.outcome == "baseline" else is_surely_faster(other, row))
    ]
    suffix = f"; trains the same as {' and '.join(faster)}, and is slower" if faster else ""
    return dataclasses.replace(row, verdict=row.verdict + suffix)


def _training_figures(row: Row) -> tuple | None:
    """The figures of a row's training; None if none were recorded or a run failed."""
    if row.last_loss is None or row.outcome == "failed":
        return None
    return row.seeds, row.first_loss, row.last_loss, row.metrics


def values_of(runs: Iterable[Run]) -> DataFrame:
    """A line for each last value of a full run, and for its loss at the start.

    The loss at the start is a mean over the same number of losses in every run.  `is_ok` is whether
    the run went well, `steps` how many steps it took.
    """
    full_runs = [run for run in runs if run.measured and not run.trial.short]
    counts = [len(main_losses(run.measured).values) for run in full_runs if status(run) == OK]
    window = (
        max(1, min(filter(None, counts), default=0) // LOSS_WINDOW_DIVISOR) if any(counts) else None
    )
    lines = [
        (run.case.label, run.trial.seed, name, value, status(run) == OK, float(run.steps))
        for run in full_runs
        for name, value in _first_and_last_values(run.measured, window).items()
    ]
    columns = ["row", "seed", "name", "value", "is_ok", "steps"]
    return DataFrame(lines, columns=columns).astype({"is_ok": bool})


def samples_of(values: DataFrame) -> Samples:
    """The samples of each row and quantity, from the runs with status "ok"."""
    ok_values = values[values.is_ok & (values.name != FIRST_LOSS)]
    seeds = _means(ok_values, ["row", "name", "seed"]).reset_index("seed")
    by_name = seeds.groupby(["row", "name"], sort=False)
    return {key: sample.set_index("seed") for key, sample in by_name}


def seeds_matter(runs: Iterable[Run]) -> bool:
    """Whether runs of O0 with different seeds differ in the first or last loss, or in a metric."""
    values = _base_values(runs)
    return values.seed.nunique() < 2 or bool((values.groupby("name").value.nunique() > 1).any())


def has_accuracy(runs: Iterable[Run]) -> bool:
    """Whether a loss or a metric was measured at O0."""
    return not _base_values(runs).empty


def _base_values(runs: Iterable[Run]) -> DataFrame:
    values = values_of(run for run in runs if run.case == BASE)
    return values[values.is_ok]


def _row(
    case: Case, runs: Sequence[Run], base_runs: Sequence[Run],
    round_seconds: Mapping[tuple[int, int], float], means: Mapping[tuple[str, str], float],
    samples: Samples, start: str, better: Mapping[str, str],
) -> Row:  # fmt: skip
    measured = [run.measured for run in runs if run.measured and not run.trial.short]
    failures = [text for text in map(status, runs) if text != OK]
    timed_runs, timed_base = map(_timed_runs, (runs, base_runs))
    times = DataFrame(filter(None, (step_times(run.measured) for run in timed_runs)))
    pairs = _pairs(case, timed_runs, timed_base, round_seconds)
    speeds, cpu_speeds = (spread_of(_ratios(pairs, step_time)) for step_time in (step_ms, cpu_ms))
    base_pairs = _pairs(BASE, timed_base, timed_base, round_seconds)
    reach, cpu_reach = (reach_of(_ratios(base_pairs, step_time)) for step_time in (step_ms, cpu_ms))
    has_pace = case != BASE and not failures
    pace, by_cpu = pace_of(speeds, reach, cpu_speeds, cpu_reach) if has_pace else ("", False)
    metrics = {name: value for (row, name), value in means.items() if row == case.label}
    names = [name for name in metrics if name != FIRST_LOSS]
    by_seed = {name: frame for (row, name), frame in samples.items() if row == case.label}
    return Row(
        label=case.label, opt_level=case.level_name, dtype=case.dtype or "float32",
        engine=case.engine, settings=dict(case.settings), status=failures[0] if failures else OK,
        runs=len(runs), good_runs=len(runs) - len(failures),
        seeds=len({run.trial.seed for run in runs}),
        step_ms=None if times.empty else times["median"].median(),
        step_times=None
        if times.empty
        else Spread(*times[["median", "low", "high"]].median(), int(times.n.sum())),
        cpu_ms=_median(cpu_ms(run.measured) for run in timed_runs), speed=speeds and speeds.median,
        speeds=speeds, cpu_speeds=cpu_speeds, reach=reach, cpu_reach=cpu_reach, pace=pace,
        by_cpu=by_cpu,
        memory_bytes=max((m.memory_bytes for m in measured if m.memory_bytes), default=None),
        memory_kind=measured[0].memory_kind if measured else "resident",
        first_loss=metrics.pop(FIRST_LOSS, None), last_loss=metrics.pop(LAST_LOSS, None),
        metrics=metrics,
        sds={
            name: frame.value.std()
            for name, frame in by_seed.items()
            if not failures and frame.value.nunique() > 1 and all(map(math.isfinite, frame.value))
        },
        better=comparisons.resolve_directions(names, better),
        steps=round(_median(len(m.skipped) for m in measured) or 0),
        all_steps=sum(len(m.skipped) for m in measured),
        skipped=sum(sum(m.skipped) for m in measured),
        loss_scale=measured[0].loss_scale if measured else None,
        seconds=sum(run.seconds for run in runs),
        outcome="failed" if failures else "baseline" if case == BASE else "untested", start=start,
    )  # fmt: skip


def _timed_runs(runs: Iterable[Run]) -> list[Run]:
    """The runs whose times count."""
    return [run for run in runs if run.alone and run.measured]


def _first_and_last_values(measured: Measured, window: int | None = None) -> dict[str, float]:
    """The last value of each metric, and the last loss; with a `window` also the first loss."""
    first_loss, last_loss = first_and_last(measured, window)
    last_values = {name: series.values[-1] for name, series in measured.metrics.items()}
    if last_loss is not None:
        last_values |= {LAST_LOSS: last_loss, **({FIRST_LOSS: first_loss} if window else {})}
    return last_values


def _means(values: DataFrame, by: list[str]) -> DataFrame:
    """The means of values and steps, by these columns; a mean may be inf or NaN."""
    return values.groupby(by, sort=False)[["value", "steps"]].agg(mean)


def _pairs(
    case: Case, runs: Sequence[Run], base_runs: Sequence[Run],
    round_seconds: Mapping[tuple[int, int], float],
) -> list[tuple[Run, Run]]:  # fmt: skip
    """The runs whose speed counts, each with O0's run of the same round.

    For O0: the second and the first run of each round.  If a round lacks a second run, the runs
    of successive rounds are paired too.
    """
    base_by_round = {r.trial.round: r for r in base_runs if not r.trial.again and status(r) == OK}
    if case == BASE:
        runs = [run for run in runs if run.trial.again]
    else:  # if a round has a short and a full run, the full run came much later
        short_rounds = {run.trial.round for run in runs if run.trial.short}
        runs = [run for run in runs if run.trial.short or run.trial.round not in short_rounds]
    pairs = [
        (run, base_by_round[run.trial.round])
        for run in runs
        if run.trial.round in base_by_round and status(run) == OK
    ]
    pairs = [
        (run, base_run)
        for run, base_run in pairs
        if _seconds_apart(run, base_run) <= MAX_GAP_IN_ROUNDS * round_seconds[run.trial.round]
    ]
    if case == BASE and len(pairs) < len(base_by_round) >= MIN_NOISE_ROUNDS:
        pairs += itertools.pairwise(base_by_round.values())
    return pairs


def _seconds_apart(run: Run, other: Run) -> float:
    """Seconds from the beginning of one run to that of the other; 0 if a beginning is unknown."""
    began = [timed.measured.machine.get("began") for timed in (run, other)]
    return 0.0 if None in began else abs(began[0] - began[1])


def _ratios(pairs: Iterable[tuple[Run, Run]], step_time: StepTimeFunction) -> list[float]:
    """The speed of the first run of each pair relative to the second."""
    ratios = (_speed(run, base_run, step_time) for run, base_run in pairs)
    return [ratio for ratio in ratios if ratio is not None]


def _speed(run: Run, base_run: Run, step_time: StepTimeFunction) -> float | None:
    """The speed of one run relative to another.

    If one is short, both are measured over the same number of first steps.
    """
    is_short = run.trial.short or base_run.trial.short
    counts = [len(timed.measured.step_seconds) for timed in (run, base_run)]
    num_steps = min(counts) if is_short else None
    ms, base_ms = (step_time(timed.measured, num_steps) for timed in (run, base_run))
    return base_ms / ms if ms and base_ms else None


def _median(values: Iterable[float | None]) -> float | None:
    present = DataFrame({"value": list(values)}, dtype=float).value.dropna()
    return None if present.empty else present.median()
