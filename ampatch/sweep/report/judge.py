"""The verdicts: does a row reach O0's accuracy, and which row is recommended?

Accuracy is compared over seeds by Welch's two-sided t test at 5 % (`welch.py`).
"Within seed noise" means that the test found no difference.  A difference may
still exist; the 95 % confidence interval says how large it can be.  Each metric
of a row is tested alone and the verdict is about one of them, so of twenty rows
that are as good as O0, one is called different by chance.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence

from ampatch.sweep.report import pace, welch
from ampatch.sweep.report.results import Comparison, Row

LOSS = "last loss"
LEVEL = 0.05  # of significance
METHOD = (
    "Accuracy: one value per seed, O0's and the row's compared by Welch's two-sided t test "
    f"(Biometrika 34, 1947) at {LEVEL:.0%}; in brackets the 95 % confidence interval of the "
    'difference. "Within seed noise" means that the test found none.'
)
Samples = dict[str, list[float]]  # one value per seed, by quantity

_LOWER = {"loss", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "nll", "bpc", "bpb"}
_LOWER |= {"wer", "cer", "fid", "bits", "seconds", "time"}


def compare(
    sample: Samples,
    base: Samples,
    judged: str | None,
    better: Mapping[str, str],
    seeds_matter: bool = True,
) -> list[Comparison]:
    """Comparisons of each quantity that both have, the judged one first."""
    names = [name for name in sample if name in base]
    first = judged if judged in names else next(iter(names), None)
    names.sort(key=lambda name: name != first)
    return [
        _compared(name, sample[name], base[name], better.get(name) or direction(name), seeds_matter)
        for name in names
    ]


def direction(name: str) -> str:
    """Whether a metric of this name is better when "higher" or "lower"."""
    return "lower" if _LOWER & set(re.split(r"[^a-z]+", name.lower())) else "higher"


def outcome_of(is_base: bool, failed: bool, compared: Sequence[Comparison]) -> str:
    if failed:
        return "failed"
    if is_base:
        return "baseline"
    return compared[0].outcome if compared else "untested"


def verdict_of(row: Row) -> Row:
    """The row with its verdict in words."""
    said = (pace.in_words(row), _quality(row))
    ordered = said[::-1] if row.outcome == "baseline" else said
    return dataclasses.replace(row, verdict="; ".join(filter(None, ordered)))


def recommendation(rows: Sequence[Row]) -> str:
    """One line: what to train with, and why."""
    if all(row.outcome != "baseline" for row in rows):
        return "none, for there is no O0 that went well to compare with."
    fit = [row for row in rows if row.outcome in ("within", "better", "untested")]
    faster = pace.worthwhile(fit)
    base = next(row for row in rows if row.outcome == "baseline")
    if not faster:
        return pace.none_recommended(fit, base) + _smaller(fit, base)
    best = max(faster, key=lambda row: row.speeds.median)
    return f"{_name(best)}: {best.verdict}.{_memory(best, base)}{_caveats(best)}"


def _compared(
    name: str, sample: list[float], base: list[float], better: str, seeds_matter: bool
) -> Comparison:
    mean, base_mean = statistics.fmean(sample), statistics.fmean(base)
    plain = Comparison(
        name=name, better=better, mean=mean, sd=_sd(sample), n=len(sample),
        base_mean=base_mean, base_sd=_sd(base), base_n=len(base), difference=mean - base_mean,
    )  # fmt: skip
    finite = all(map(math.isfinite, [*sample, *base]))
    if min(len(sample), len(base)) < 2 or not (seeds_matter and finite and welch.available()):
        return plain
    tested = welch.welch(sample, base)
    outcome = "within"
    if tested.p < LEVEL:
        outcome = "better" if (tested.difference > 0) == (better == "higher") else "worse"
    return dataclasses.replace(
        plain, p=tested.p, low=tested.low, high=tested.high,
        pooled_sds=tested.pooled_sds, outcome=outcome,
    )  # fmt: skip


def _quality(row: Row) -> str:
    if row.outcome == "baseline":
        return "the baseline"
    if row.outcome == "failed":
        bad = row.runs - row.good_runs
        return row.status + (f" ({bad} of {row.runs} runs)" if row.runs > 1 else "")
    if not row.comparisons:
        return "accuracy not compared"
    one = row.comparisons[0]
    against = f"{one.name} {one.mean:.4g} against {one.base_mean:.4g}"
    if one.p is None:
        return f"{against}, not tested (n={one.n} and {one.base_n})"
    detail = f"[{one.low:+.2g}, {one.high:+.2g}], p={one.p:.2g}, n={one.n} and {one.base_n}"
    if one.outcome == "within":
        return f"within seed noise of O0: {against}, difference {one.difference:+.2g} {detail}"
    return f"{one.outcome} by {abs(one.difference):.2g}: {against} {detail}"


def _caveats(row: Row) -> str:
    few = []
    if row.outcome == "untested":
        few.append("accuracy is untested: use --seeds 3 or more, and have them reach the script")
    if row.speeds.n < 3:
        few.append("the speed-up rests on two rounds: use --rounds 3 or more")
    return f" But {', and '.join(few)}." if few else ""


def _memory(row: Row, base: Row) -> str:
    if not (row.memory_bytes and base.memory_bytes):
        return ""
    much = _less(row, base)
    return f" It takes {much} {'as' if much.startswith('as') else 'than'} O0."


def _smaller(fit: Sequence[Row], base: Row) -> str:
    """The row that saves most memory, where no row saves time."""
    sizes = [row for row in fit if row.memory_bytes and base.memory_bytes]
    least = min(sizes, key=lambda row: row.memory_bytes, default=None)
    if least is None or least.memory_bytes > 0.95 * base.memory_bytes:
        return ""
    return f" {_name(least)} takes {_less(least, base)} than O0."


def _less(row: Row, base: Row) -> str:
    """How much less memory the row takes: `38 % less memory`."""
    percent = round(100 * (1 - row.memory_bytes / base.memory_bytes))
    if not percent:
        return "as much memory"
    return f"{abs(percent)} % {'less' if percent > 0 else 'more'} memory"


def _name(row: Row) -> str:
    return f"{row.opt_level} in {row.dtype}"


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
