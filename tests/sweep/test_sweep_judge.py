"""Verdicts and plans of sweeps, of records made by hand: statistics against formulas.

Paired tests over seeds: p, intervals, Holm's correction and power.
"""

import itertools
import math
import random
import statistics

import pandas
import pytest
from sweep_made import trained

from ampatch.sweep.cases_and_trials import cases
from ampatch.sweep.measure.output_metrics import read_metrics
from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.report.paired_test import (
    POWER,
    SIGNIFICANCE_LEVEL,
    holm,
    paired_t_test,
    smallest_detectable,
)
from ampatch.sweep.report.recommendation import missing_evidence, recommendation
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.report.table import table
from ampatch.sweep.trial import Case, Trial


def run_of(level, seed, accuracy=None, ms=1.0, loss=1.0, repeat=0, error="", **kind):
    """A run whose steps take `ms` milliseconds."""
    case = Case(level) if level == "O0" else Case(level, "bfloat16")
    losses, more = [1.0] + [loss] * 39, {"error": error, "memory_bytes": 2**20}  # all start alike
    return trained(Trial(case, seed, repeat, **kind), losses, ms=ms, accuracy=accuracy, **more)


def again(seed, ms=1.0, repeat=0):
    """The second O0 of a round."""
    return run_of("O0", seed, ms=ms, repeat=repeat, short=True, again=True)


def rows_of(base, ours, **options):
    runs = [run_of("O0", seed, value, loss=1 + seed) for seed, value in enumerate(base)]
    runs += [again(seed) for seed in range(len(base))]
    runs += [run_of("O1", seed, value, ms=0.5) for seed, value in enumerate(ours)]
    return summarize(runs, **options)


def test_accuracy_is_within_noise_worse_or_better():
    base = [0.90, 0.91, 0.92]
    for ours, outcome in (
        ([0.91, 0.90, 0.92], "within"),
        ([0.80, 0.81, 0.821], "worse"),
        ([0.98, 0.99, 0.999], "better"),
    ):
        first, row = rows_of(base, ours)
        assert (first.outcome, row.outcome) == ("baseline", outcome)
        metric = row.comparisons[0]
        assert (metric.name, metric.n, metric.better) == ("accuracy", 3, "higher")
        assert metric.difference == pytest.approx(statistics.mean(ours) - statistics.mean(base))
        assert metric.low < metric.difference < metric.high
        assert row.verdict.startswith("2.00 times as fast as O0 (2.00 to 2.00); ")
    assert rows_of(base, [0.8, 0.81, 0.821], better={"accuracy": "lower"})[1].outcome == "better"


def test_a_lower_loss_is_no_worse():
    row = rows_of([0.9, 0.91, 0.92], [0.9, 0.91, 0.92], judged="last loss")[1]
    assert (row.comparisons[0].name, row.comparisons[0].mean) == ("last loss", 1.0)
    assert row.comparisons[0].base_mean == 2.0 and row.comparisons[1].name == "accuracy"


def test_a_loss_that_is_worse_stands_beside_the_accuracy():
    runs = [run_of("O0", seed, 0.9, loss=1 + seed / 100) for seed in range(3)]
    runs += [run_of("O1", seed, 0.9, loss=2 + seed / 90) for seed in range(3)]
    row = summarize(runs)[1]
    assert row.outcome == "within" and "accuracy 0.9; worse than O0: last loss" in row.verdict


def test_repeats_of_a_seed_are_one_value():
    """Else the same run ten times over would look like evidence."""
    runs = [
        run_of(level, seed, 0.9 + seed / 100 + repeat / 1000, loss=seed, repeat=repeat)
        for level, seed, repeat in itertools.product(("O0", "O1"), range(2), range(5))
    ]
    metric = summarize(runs)[1].comparisons[0]
    assert (metric.n, metric.mean, metric.p) == (2, pytest.approx(0.907), 1.0)


@pytest.mark.parametrize("seeds", [1, 2])
def test_nothing_is_tested_with_one_seed_or_seeds_without_effect(seeds):
    runs = [run_of("O0", seed, 0.9) for seed in range(seeds)]
    row = summarize(runs + [run_of("O1", seed, 0.1) for seed in range(seeds)])[1]
    assert (row.outcome, row.comparisons[0].p) == ("untested", None)
    assert "not tested" in row.verdict


def test_a_row_with_a_bad_run_has_failed():
    runs = [run_of("O0", 0, 0.9), run_of("O0", 1, 0.91, loss=2.0), run_of("O1", 0, 0.9, ms=0.1)]
    runs.append(run_of("O1", 1, error="RuntimeError: no"))
    _, row = summarize(runs)
    assert (row.outcome, row.status) == ("failed", "crashed: RuntimeError: no")
    assert row.verdict == "crashed: RuntimeError: no (1 of 2 runs)"


def test_one_seed_recommends_nothing_however_fast():
    runs = []
    for repeat in range(3):
        runs += [run_of("O0", 0, 0.9, repeat=repeat), again(0, repeat=repeat)]
        runs.append(run_of("O1", 0, 0.85, ms=0.5, repeat=repeat))
    assert recommendation(summarize(runs)) == (
        "Stay with O0 for now. Speed: O1 in bfloat16 is 2.00 times as fast as O0 (2.00 to 2.00). "
        "Accuracy: O1 in bfloat16: its accuracy is not tested (one seed). To settle it: --resume "
        "--seeds 3."
    )


def fixed_time(counts, accuracies=None):
    """Runs of O0 and O2 that took so many steps with each seed, of the loss `1 / (1 + step)`."""
    runs = []
    for level, of_seeds in counts.items():
        case = Case(level) if level == "O0" else Case(level, "bfloat16")
        for seed, steps in enumerate(of_seeds):
            losses = [1 / (1 + seed / 100 + step) for step in range(steps)]
            accuracy = accuracies and accuracies[level][seed]
            runs.append(trained(Trial(case, seed), losses, steps=steps, accuracy=accuracy))
    return summarize(runs)


def test_losses_after_unequal_numbers_of_steps_are_shown_and_not_tested():
    counts = {"O0": (1140, 1130, 1150), "O2": (373, 370, 375)}
    base, row = fixed_time(counts)
    assert row.outcome == "untested"
    said = "last loss 0.002747 against 0.0008994, not tested (it took 373 steps and O0 1140)"
    assert said in row.verdict
    assert "have the script report a metric" in recommendation([base, row])
    assert base.first_loss == row.first_loss  # over the shortest row's window
    assert list(table([base, row])["steps"]) == ["1140", "373"]


def test_accuracy_is_what_rows_of_unequal_length_are_judged_by():
    accuracies = {"O0": (0.97, 0.98, 0.975), "O2": (0.9702, 0.9797, 0.9751)}
    _, row = fixed_time({"O0": (1140, 1130, 1150), "O2": (373, 370, 375)}, accuracies)
    assert row.outcome == "within" and missing_evidence(row) is None
    assert [metric.outcome for metric in row.comparisons] == ["within", "untested"]
    _, row = fixed_time({"O0": (100, 98, 99), "O2": (99, 98, 100)}, accuracies)
    assert [metric.outcome for metric in row.comparisons] == ["within"] * 2  # 1 %: no difference
    assert "steps" not in table([row]).columns
    _, row = fixed_time({"O0": (100, 80, 90), "O2": (80, 100, 90)}, accuracies)  # ended early
    assert [metric.outcome for metric in row.comparisons] == ["within", "untested"]


def test_rows_share_one_level_of_significance():
    """Alone O1 differs: p = 0.049 (t = 4.35, two degrees of freedom).  Beside O2 it does not."""
    base = [run_of("O0", seed, 0.5, loss=seed) for seed in range(3)]
    first = [run_of("O1", seed, 0.5 + gain) for seed, gain in enumerate((0.05, 0.07, 0.11))]
    second = [run_of("O2", seed, 0.5 + gain) for seed, gain in enumerate((0.05, -0.05, 0.01))]
    [alone] = summarize([*base, *first])[1].comparisons[:1]
    assert alone.p == alone.corrected_p < 0.05 and alone.outcome == "better"
    both = [row.comparisons[0] for row in summarize([*base, *first, *second])[1:]]
    assert [metric.outcome for metric in both] == ["within", "within"]
    assert (both[0].p, both[0].corrected_p) == (alone.p, pytest.approx(2 * alone.p))
    assert both[0].smallest > alone.smallest


def test_a_row_is_compared_over_the_seeds_that_it_shares_with_o0():
    base = [run_of("O0", seed, 0.5 + seed / 10, loss=seed) for seed in (0, 1, 2)]
    ours = [run_of("O1", seed, 0.6 + seed / 10) for seed in (1, 2, 3)]
    metric = summarize([*base, *ours])[1].comparisons[0]
    assert metric.n == 2 and (metric.mean, metric.base_mean) == pytest.approx((0.75, 0.65))


def test_values_that_are_one_number_have_no_interval():
    row = rows_of([0.9] * 3, [0.9] * 3)[1]
    assert row.verdict.endswith("; equal to O0 with each of 3 seeds: accuracy 0.9")
    row = rows_of([0.9] * 3, [0.1] * 3)[1]
    assert row.outcome == "worse" and "difference -0.8 with each seed" in row.verdict
    assert paired_t_test([0.5, 0.7], [0.5, 0.7]).p == paired_t_test([0.1, 0.1], [0.1, 0.1]).p == 1.0
    assert paired_t_test([0.1, 0.1], [0.9, 0.9]).p == 0.0


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_worse_and_not_recommended(lost):
    base = [run_of("O0", seed, 0.9 + seed / 100, loss=seed) for seed in range(3)]
    ours = [run_of("O1", seed, ms=0.5, accuracy=lost if seed else -lost) for seed in range(3)]
    timing = [again(seed) for seed in range(3)]
    for runs in ([*base, *ours, *timing], [base[0], ours[0], *timing]):  # three seeds, one seed
        rows = summarize(runs)
        assert rows[1].outcome == "worse" and "not all values are finite" in rows[1].verdict
        assert "no row that may be faster is as accurate. O1 in bfloat16: " in recommendation(rows)


def test_losses_of_both_infinities_end_no_sweep():
    run = run_of("O1", 0)
    run.measured.losses["0"].values[-2:] = [math.inf, -math.inf]
    assert summarize([run_of("O0", 0), run])[1].status == "diverged at step 39: loss inf"


def test_with_nothing_to_compare_nothing_is_recommended():
    base, row = run_of("O0", 0, 0.9), run_of("O1", 0, error="RuntimeError: no")
    for runs, lacking in (
        ([], "no run has ended"),
        ([run_of("O1", 0, 0.9)], "O0 has not run"),
        ([base], "O0 alone has run"),
        ([base, row], "no row other than O0 ran without a failure"),
    ):
        rows = summarize(runs)
        assert recommendation(rows) == f"Nothing to compare yet: {lacking}."
        assert not any(row.speed for row in rows)


def test_rows_beside_the_levels():
    halves, own = ["float16", "bfloat16"], "keep_batchnorm_fp32=False-loss_scale=dynamic"
    overrides = ["O2 keep_batchnorm_fp32=False loss_scale=dynamic"]
    chosen = cases(["O0", "O2", "O0"], halves, overrides, autocast=True, tf32=True)
    rows = ["O2-float16", "O2-bfloat16", "autocast-float16", "autocast-bfloat16"]
    own_rows = [f"{row}-{own}" for row in rows[:2]]
    assert [case.label for case in chosen] == ["O0", "O0+tf32", *rows, *own_rows]
    assert dict(chosen[-1].settings) == {"keep_batchnorm_fp32": False, "loss_scale": "dynamic"}
    assert "autocast" not in [case.opt_level for case in cases(["O0"], ["float16"], autocast=True)]


def test_file_names_are_plain_and_differ():
    stems = [Trial(Case("O1", settings=(("overrides", text),))).file_stem for text in "/:"]
    assert stems[0] != stems[1] and not any(set(stem) & set("/: '") for stem in stems)


def test_metrics_are_found_in_the_output(tmp_path):
    log = tmp_path / "log"
    log.write_bytes("accuracy 0.1 \u00e4\nbetween\naccuracy 0.5\naccuracy 1e-1\n".encode())
    patterns = {"acc": r"^accuracy (\S+)", "mantissa": r"^accuracy ([\d.]+)", "other": r"x(\d)"}
    expected = Series([0, 1, 2], [0.1, 0.5, 0.1])
    assert read_metrics(log, patterns) == {"acc": expected, "mantissa": expected}
    log.write_text("acc 77.539%\nacc (88.5),\nacc 90;\nacc -1e-1%\n")
    values = read_metrics(log, {"acc": r"acc (\S+)"})["acc"].values
    assert values == [77.539, 88.5, 90.0, -0.1]
    log.write_text("between\n")
    with pytest.raises(ValueError, match="found 'between' .* expected a number"):
        read_metrics(log, {"acc": "^(b.*)"})


# Paired tests


def within(t, freedom, parts=4000):
    """The probability of a Student-distributed value between -t and t, by Simpson's rule."""

    def density(x):
        return (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    front = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    front /= math.sqrt(freedom * math.pi)
    width = t / parts
    inner = sum((4 if n % 2 else 2) * density(n * width) for n in range(1, parts))
    return 2 * front * width / 3 * (density(0) + inner + density(t))


def test_the_test_is_students_integral_of_the_differences():
    chance = random.Random(0)
    for _ in range(30):
        n = chance.randint(2, 9)
        base = [chance.gauss(0, 5) for _ in range(n)]
        ours = [value + chance.gauss(0.5, 1) for value in base]
        differences = [a - b for a, b in zip(ours, base)]
        error = statistics.stdev(differences) / math.sqrt(n)
        test = paired_t_test(ours, base)
        assert test.difference == pytest.approx(statistics.mean(differences))
        assert test.p == pytest.approx(1 - within(abs(test.difference) / error, n - 1), abs=1e-9)
        assert within((test.high - test.difference) / error, n - 1) == pytest.approx(0.95)
        assert test.high - test.difference == pytest.approx(test.difference - test.low)


def test_one_number_as_each_difference_is_compared_as_unpaired():
    """Means 2 and 5, variances 1 and 1, n = 3: t = 3 / sqrt(2/3) with 4 degrees of freedom.

    p and the quantile 2.776 are those of the tables; four degrees have a closed form.
    """
    test = paired_t_test([1, 2, 3], [4, 5, 6])
    t = 3 / (2 / 3) ** 0.5
    x = t / (4 + t * t) ** 0.5
    assert test.p == pytest.approx(1 - x * (3 - x * x) / 2)
    assert test.high - test.low == pytest.approx(2 * 2.7764451 * (2 / 3) ** 0.5)
    assert test.scatter == 0
    almost = paired_t_test([0.51, 0.71], [0.5, 0.7])  # one number but for its last digit
    assert almost.p > 0.9 and almost.scatter == 0


def test_holm_by_hand():
    """The smallest of four times 4, the next times 3, ...; never below one before it."""
    for p, corrected in (
        ([0.04, 0.01, 0.03, 0.5], [0.09, 0.04, 0.09, 0.5]),
        ([0.9, 0.8], [1.0, 1.0]),
        ([], []),
    ):
        assert list(holm(pandas.Series(p, dtype=float))) == pytest.approx(corrected)


@pytest.mark.parametrize(("n", "rows"), [(2, 1), (3, 1), (3, 9), (8, 3)])
def test_the_smallest_difference_is_found_with_the_power_it_claims(n, rows):
    """Of many samples with that mean so many are significant, at the level of one of the rows."""
    numpy, stats = pytest.importorskip("numpy"), pytest.importorskip("scipy.stats")
    scatter, samples = 0.3, 4000
    draws = numpy.random.default_rng(0).normal(
        smallest_detectable(scatter, n, rows), scatter, (samples, n)
    )
    error = draws.std(axis=1, ddof=1) / math.sqrt(n)
    t = numpy.abs(draws.mean(axis=1)) / error
    share = (t > stats.t.ppf(1 - SIGNIFICANCE_LEVEL / rows / 2, n - 1)).mean()
    assert share == pytest.approx(POWER, abs=4 * math.sqrt(POWER * (1 - POWER) / samples))
