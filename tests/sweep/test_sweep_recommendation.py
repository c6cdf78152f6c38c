"""A row is recommended only if it was shown to be as accurate and faster; else what is missing.

Which way a metric is better: by its name, by `--better`, or not known and never guessed.
"""

import csv
import io
import json
import math
import statistics
from types import SimpleNamespace

import pytest
from sweep_made import made_sweep, trained

from ampatch.sweep.execution.notes import tune_note
from ampatch.sweep.kinds import AMPATCH, NO_AMP, TORCH_AMP, UNKNOWN_KIND, Kind
from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.options import SweepOptions
from ampatch.sweep.report.directions import direction
from ampatch.sweep.report.margin import Margin, worst_difference
from ampatch.sweep.report.paired_test import smallest_detectable
from ampatch.sweep.report.recommendation import missing_evidence, recommendation
from ampatch.sweep.report.result_files import as_csv, as_latex, as_markdown
from ampatch.sweep.report.results import Row
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.report.table import notes, table
from ampatch.sweep.report.terminal import write_results
from ampatch.sweep.trial import BASE, Case, Trial
from ampatch.tune.verdict import TuneError, passes, row_of


def runs_of(level, accuracies, losses, ms=1.0, **trial):
    """One run for each seed; its steps take `ms` milliseconds."""
    case = Case(level) if level == "O0" else Case(level, "bfloat16")
    return [
        trained(Trial(case, seed, **trial), [1.0] + [loss] * 39, ms=ms, accuracy=accuracy)
        for seed, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True))
    ]


SCORES = [0.970, 0.980, 0.975]
LOSSES = [0.20, 0.22, 0.21]
SO_FAR = "Stay with O0 for now. Speed:"
AGAIN = {"short": True, "again": True}


def advice(*rows, margin=None, base=SCORES, losses=LOSSES, kind=UNKNOWN_KIND):
    """What is said of O0 and of rows `(level, gains, losses, speed)`; O0 agrees with itself."""
    runs = runs_of("O0", base, losses) + runs_of("O0", base, losses, **AGAIN)
    for level, gains, its_losses, speed in rows:
        scores = [score + gain for score, gain in zip(base, gains, strict=True)]
        runs += runs_of(level, scores, its_losses, 1 / speed)
    return recommendation(summarize(runs, margin=Margin.of(margin)), kind)


NEAR = [0.0002, -0.0003, 0.0001]  # a difference of .001 would have been seen
COARSE = [0.01, -0.015, 0.004]  # .05
LESS, MORE = [-0.0004, 0.0001, 0.0002], [0.01, 0.011, 0.012]
SLIGHTLY = [1.0003 * loss + noise for loss, noise in zip(LOSSES, (0, 1e-5, -1e-5))]  # p = .008
LOUDER = [loss + shift for loss, shift in zip(LOSSES, (0.05, 0.05, 0.051))]  # by 24 %
USE = "Use O1 in bfloat16: 1.50 times as fast as O0 (1.50 to 1.50); accuracy "
TWICE = "Use O1 in bfloat16: 2.00 times as fast as O0"
LESS_ACCURATE = "Stay with O0: no row that may be faster is as accurate"
SLOW = "Stay with O0: no row is at least 1.05 times as fast. The fastest, O1 "


@pytest.mark.parametrize(
    "gains, losses, speed, margin, begins, ends",
    [
        (LESS, LOSSES, 1.5, None, f"{USE}-3.3e-05 [-0.00083, +0.00077]", " 1 % that matters."),
        (MORE, LOSSES, 1.5, "0.02", f"{USE}+0.011 [+0.0085, +0.013]", ", no worse than O0's."),
        (NEAR, LOSSES, 1.5, "0.02", USE, ", below the 0.02 that matters."),
        (NEAR, LOSSES, 1.5, "2%", USE, ", below the 2 % that matters."),
        (COARSE, LOSSES, 1.5, "0.2", USE, ""),
        (COARSE, LOSSES, 1.5, "20%", USE, ""),
        (COARSE, LOSSES, 1.5, "0.02", f"{SO_FAR} O1", ""),
        # the loss: a margin that is a number is one of the accuracy, of the loss 1 % matters then
        (NEAR, SLIGHTLY, 2.0, None, TWICE, ""),
        (NEAR, SLIGHTLY, 2.0, "0.2", TWICE, ""),
        (NEAR, SLIGHTLY, 2.0, "0.01%", LESS_ACCURATE, ""),
        (NEAR, SLIGHTLY, 0.12, "0.01%", SLOW, ""),
        (NEAR, LOUDER, 2.0, "30%", TWICE, ""),
        (NEAR, LOUDER, 2.0, "0.2", LESS_ACCURATE, ""),
        (NEAR, LOUDER, 0.12, None, SLOW, ""),
        # one number as each difference: three seeds without scatter say enough
        ([0.0] * 3, LOSSES, 1.5, None, USE, " the same with each of 3 seeds."),
    ],
)
def test_a_faster_row_as_accurate_is_recommended(gains, losses, speed, margin, begins, ends):
    said = advice(("O1", gains, losses, speed), margin=margin)
    assert said.startswith(begins) and said.endswith(ends)


def test_one_number_as_each_difference_may_say_little():
    said = advice(("O1", [-0.05] * 3, LOSSES, 1.5), base=[0.8, 0.9, 0.85])
    assert said.startswith(SO_FAR) and "its accuracy differs by -0.05 with each of 3 seeds" in said
    said = advice(("O1", [0.0] * 2, LOSSES[:2], 1.5), base=SCORES[:2], losses=LOSSES[:2])
    assert (
        "2 seeds are too few, although the difference in accuracy is the same with each. To" in said
    )


def test_a_margin_is_a_number_or_a_share():
    assert "even 50 seeds" in advice(("O1", COARSE, LOSSES, 1.5), margin="1e-5")
    assert Margin.of("1E-3") == Margin(0.001, is_relative=False)
    for wrong in ("much", "-1", "0", "1 %%", "", "inf", "1e400"):
        with pytest.raises(ValueError, match="--margin"):
            Margin.of(wrong)


def test_the_example_of_the_readme_gets_no_recommendation():
    """O3: 4 points of accuracy could have gone unnoticed, and its loss is 45 % above O0's."""
    louder = [1.45 * loss for loss in LOSSES]
    said = advice(("O3", COARSE, louder, 2.0))
    assert said.startswith("Stay with O0: no row that may be faster is as accurate. O3 in bfloat16")
    assert "worse than O0: last loss 0.3045 against 0.21" in said
    said = advice(("O3", COARSE, LOSSES, 2.0))
    assert said.startswith(f"{SO_FAR} O3 in bfloat16 is 2.00 times as fast as O0 (2.00 to 2.00). ")
    mean, scatter = statistics.mean(COARSE), statistics.stdev(COARSE)
    end = 4.3027 * scatter / math.sqrt(3) - mean  # Student's t, two degrees of freedom
    assert f"the 95 % interval of its accuracy reaches {end:.2g} to the worse side of" in said
    assert f"the margin of {0.01 * statistics.mean(SCORES):.2g} (--margin)" in said
    seeds = next(n for n in range(4, 99) if smallest_detectable(scatter, n) <= 0.00975 + mean)
    assert said.endswith(f"To settle it: --resume --seeds {seeds}.")
    said = advice(("O3", COARSE, LOSSES, 1.0))  # each seed is a round
    assert said.endswith(f"To settle it, on an idle machine: --resume --seeds {seeds}.")


def test_a_worse_loss_is_enough_against_a_row():
    worse = [loss + 0.05 for loss in LOSSES[:2]] + [LOSSES[2] + 0.051]
    assert advice(("O1", NEAR, worse, 2.0), ("O2", NEAR, LOSSES, 1.2)).startswith("Use O2 in")


@pytest.mark.parametrize("seeds", [3, 8, 20])
def test_more_evidence_of_less_than_matters_changes_no_answer(seeds):
    """Twice as fast and .0002 less accurate, where .0095 matters."""
    base = [0.95 + 0.001 * (seed % 3) for seed in range(seeds)]
    gains = [-0.0002 + 0.0001 * (seed % 3 - 1) for seed in range(seeds)]
    losses = [0.2 + 0.01 * seed for seed in range(seeds)]
    row = ("O1", gains, losses, 2.0)
    said = advice(row, margin="0.0095", base=base, losses=losses)
    assert said.startswith("Use O1 in bfloat16: 2.00 times as fast as O0")
    assert "accuracy -0.0002" in said and said.endswith("below the 0.0095 that matters.")
    refused = "worse than O0: accuracy" in advice(row, margin="0.0001", base=base, losses=losses)
    assert refused == (seeds > 3)


def test_where_no_row_is_told_apart_the_one_with_most_fp32_is_named_first():
    runs = runs_of("O0", SCORES, LOSSES) + runs_of("O0", SCORES, LOSSES, ms=1.5, **AGAIN)
    for level, speed in (("O3", 1.3), ("O2", 1.2), ("O1", 1.1)):
        runs += runs_of(level, SCORES, LOSSES, 1 / speed)
    said = recommendation(summarize(runs))
    assert said.startswith(f"{SO_FAR} O1 in bfloat16 is 1.10 times as fast as O0 (1.10 to 1.10), ")
    assert "; not shown to be faster than O0: O3 in bfloat16, O2 in bfloat16. " in said


@pytest.mark.parametrize(
    "ms, said",
    [
        (0.5, "below the 1 % that matters. It takes 50 % less memory than O0."),
        (30, "O2 in bfloat16 takes 50 % less memory: 0.033 times as fast as O0 (0.033 to 0.033)."),
    ],
)
def test_memory_that_is_saved_is_told_and_of_a_slow_row_with_its_speed(ms, said):
    accuracies = [score + gain for score, gain in zip(SCORES, NEAR)]
    base = runs_of("O0", SCORES, LOSSES) + runs_of("O0", SCORES, LOSSES, **AGAIN)
    others = runs_of("O2", accuracies, LOSSES, ms)
    for runs, size in ((base, 400), (others, 200)):
        for run in runs:
            run.measured.memory_bytes = size
    assert recommendation(summarize(base + others)).endswith(f" {said}")


def test_of_rows_that_are_equally_fast_that_with_more_fp32_is_named():
    """Rounds of one speed are told apart by anything; where they overlap they are not."""
    rows = [(level, NEAR, LOSSES, 1.5) for level in ("O3", "O2", "O1")]
    said = advice(*rows)
    assert said.startswith("Use O1 in bfloat16: 1.50 times") and "surely" not in said
    assert advice(("O3", NEAR, LOSSES, 2.0), ("O1", NEAR, LOSSES, 1.5)).startswith("Use O3 in")
    overlapping = []
    for level, speeds in (("O1", (1.5, 1.6, 1.7)), ("O3", (1.55, 1.65, 1.75))):
        for seed, speed in enumerate(speeds):
            runs = runs_of(
                level, [score + gain for score, gain in zip(SCORES, NEAR)], LOSSES, 1 / speed
            )
            overlapping.append(runs[seed])
    base = runs_of("O0", SCORES, LOSSES) + runs_of("O0", SCORES, LOSSES, **AGAIN)
    said = recommendation(summarize([*base, *overlapping]))
    assert said.startswith("Use O1 in bfloat16: 1.60 times as fast")
    assert said.endswith("O3 in bfloat16 may be as fast or faster.")


@pytest.mark.parametrize(
    "kind, named", [(AMPATCH, "O1"), (TORCH_AMP, "autocast"), (NO_AMP, "autocast")]
)
def test_of_autocast_and_o1_the_one_that_the_script_has_is_named(kind, named):
    for first in ("O1", "autocast"):
        second = "O1" if first == "autocast" else "autocast"
        rows = [(first, NEAR, LOSSES, 1.5), ("O2", NEAR, LOSSES, 1.5), (second, NEAR, LOSSES, 1.5)]
        assert advice(*rows, kind=Kind(kind)).startswith(f"Use {named} in bfloat16: 1.50 times")


# What a sweep points to where a level fails

GOOD = Row("O0", "O0", "float32", outcome="baseline")
WORSE = Row("O1-bfloat16", "O1", "bfloat16", outcome="worse")
CRASHED = Row("O3-float16", "O3", "float16", status="crashed: RuntimeError", outcome="failed")
DIVERGED = Row("O2-float16", "O2", "float16", status="diverged at step 3", outcome="failed")
KILLED = Row("O3-float16", "O3", "float16", status="killed: by SIGKILL", outcome="failed")
PLAN = SimpleNamespace(kind=UNKNOWN_KIND)


def note(*rows: Row, arguments=(), **options) -> str:
    return tune_note("train.py", list(arguments), SweepOptions(**options), PLAN, rows)


@pytest.mark.parametrize("row", (WORSE, CRASHED, DIVERGED))
def test_a_level_that_fails_points_to_tune(row):
    said = note(GOOD, KILLED, row)
    assert f"--opt-level {row.opt_level} --dtype {row.dtype}" in said


@pytest.mark.parametrize("rows", ((GOOD,), (WORSE,), (CRASHED, WORSE), (GOOD, KILLED)))
def test_no_pointer_where_tune_has_no_answer(rows):
    assert not note(*rows)
    failed = Row("O0", "O0", "float32", status="crashed: no data", outcome="failed")
    assert not note(failed, *rows)


def test_the_command_has_what_the_script_was_given():
    said = note(GOOD, WORSE, arguments=["--name", "a b", "--seed", "{seed}"], module=True)
    assert said.endswith(
        "ampatch tune -m train.py --opt-level O1 --dtype bfloat16 -- --name 'a b' --seed '{seed}'"
    )


LOWER = """
    loss losses Loss_1 val_loss val/loss val_loss_total train_loss_epoch logloss valLoss valloss
    lossval trainLosses MSELoss dice_loss loss_score valMAE error errors testErr error_rate
    testerrors top5_error error/top1 val_accuracy_error inaccuracy perplexity perplexities ppl mse
    rmse mae mape sMAPE MAPEs rmsle nll neg_log_likelihood bpc wer cer ter fid fid_score lpips ece
    brier brier_score eer epe mpjpe kl KLDivergence crossEntropy cross_entropy regret distance
    seconds
"""
HIGHER = """
    accuracy accuracies acc valAcc valaccuracy acc@1 acc_norm top1 top-5 top_5 f1 macroF1 f1_score
    auc roc_auc ap AP50 map mAP mAP50 mAP50_95 mAP@0.5 iou mIoU miou dice bleu BLEU-4 rouge rougeL
    ROUGE-L psnr ssim r2 R2Score recall recall@5 precision_at_k score lossless_score mrr ndcg
    NDCG@10 hits@10 reward episodeReward return returns dice_coef Prec@1
"""
NEITHER = """
    answer lr epochs account snapshot mapping heatmap timeline across capacity flossy gloss
    lossless terror underscore fps loss_scale lossScale lossscale acc_std acc_stderr loss_weight
    accuracy_drop 1-ssim one_minus_acc neg_mean_squared_error negative_recall tpr@fpr
    accuracy_over_time loss_dice loss/accuracy loss_coef Verlust 損失
"""


@pytest.mark.parametrize(
    ("names", "way"), [(LOWER, "lower"), (HIGHER, "higher"), (NEITHER, None)], ids=str
)
def test_the_words_of_a_name_say_which_way_is_better(names, way):
    assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), way)


BASE_VALUES = [0.30, 0.32, 0.31]
UP = [0.2, 0.205, 0.21]
DOWN = [-shift for shift in UP]


def runs_off(name, shifts, first=()):
    """O0, and an O1 that is twice as fast and whose metric `name` is off by these shifts."""
    runs = []
    for seed, (base, shift) in enumerate(zip(BASE_VALUES, shifts)):
        for trial, value, ms in (
            (Trial(BASE, seed), base, 1.0),
            (Trial(BASE, seed, short=True, again=True), base, 1.0),
            (Trial(Case("O1", "bfloat16"), seed), base + shift, 0.5),
        ):
            run = trained(trial, [1.0] + [0.2 + seed / 100] * 39, ms=ms)
            run.measured.metrics.update({**dict(first), name: Series([40], [value])})
            runs.append(run)
    return runs


def advised(name, shifts, **options):
    return recommendation(summarize(runs_off(name, shifts), **options))


SPEED = "2.00 times as fast as O0 (2.00 to 2.00)"
STAY = "Stay with O0: no row that may be faster is as accurate."
TAKE = "Use O1 in bfloat16"


@pytest.mark.parametrize(
    ("name", "shifts", "better", "said"),
    [
        *((n, UP, None, STAY) for n in ("logloss", "valLoss", "testErr", "smape", "ece")),
        *((name, DOWN, None, TAKE) for name in ("logloss", "testErr", "ece")),
        ("spam", [float("nan")] * 3, None, "Stay with O0"),  # whichever way is better
        ("spam", [0.0] * 3, None, f"{TAKE}: {SPEED}; spam the same with each of 3 seeds."),
        *(("spam", *row) for row in ((DOWN, "lower", TAKE), (UP, "higher", TAKE))),
        *(("spam", *row) for row in ((UP, "lower", STAY), (DOWN, "higher", STAY))),
        ("logloss", UP, "higher", TAKE),
    ],
)
def test_a_row_that_is_worse_is_not_recommended(name, shifts, better, said):
    assert advised(name, shifts, better=better and {name: better}).startswith(said)


@pytest.mark.parametrize("shifts", [UP, DOWN, [0.02] * 3, [0.001, -0.001, 0.0005]])
def test_a_difference_without_a_direction_recommends_nothing_and_names_the_option(shifts):
    rows = summarize(runs_off("spam", shifts))
    said = recommendation(rows)
    assert said.startswith(f"Stay with O0 for now. Speed: O1 in bfloat16 is {SPEED}")
    assert "its spam differs from O0's by " in said
    assert "--better spam=lower or --better spam=higher" in said
    assert rows[1].outcome in ("different", "within")
    with pytest.raises(ValueError, match="spam: expected a direction"):
        worst_difference(rows[1].comparisons[0])
    assert rows[1].verdict.endswith(" (no known direction)")


def test_of_one_seed_both_are_asked_for():
    missing = missing_evidence(summarize(runs_off("spam", UP[:1]))[1])
    assert missing.text.startswith("its spam differs from O0's by +0.2, and the name does not say")
    assert missing.options == "--seeds 3 --better spam=lower or --better spam=higher"
    assert "--better 'my spam=lower' or --better" in advised("my spam", UP)


def test_a_row_that_differs_without_a_direction_is_not_named_for_its_memory():
    runs = runs_off("spam", UP)
    for run in runs:
        is_base = run.case == BASE
        run.measured.memory_bytes = 2**30 if is_base else 2**29
        run.measured.step_seconds = [None] + [0.001 if is_base else 0.002] * 39
    rows = summarize(runs)
    assert "memory" not in recommendation(rows)
    assert "memory" in recommendation(summarize(runs, better={"spam": "higher"}))


def test_table_and_files_say_the_direction_of_each_metric(tmp_path):
    others = {"spam": Series([40], [1.0]), "top1": Series([40], [0.5])}
    results = made_sweep(tmp_path, runs_off("logloss", UP, first=others))
    assert {"? spam", "↑ top1", "↓ logloss"} < set(table(results.rows).columns)
    explained = notes(results.rows)
    assert "; ↓: lower is better; ↑: higher is better" in explained[0]
    assert "(spam)" in explained[1] and "--better spam=lower" in explained[1]
    text = as_markdown(results)
    assert "| ↓ logloss |" in text and explained[1] in text
    assert r"$\downarrow$ logloss" in as_latex(results) and r"$\uparrow$ top1" in as_latex(results)
    rows = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["rows"]
    ways = {"logloss": "lower", "last loss": "lower", "spam": None, "top1": "higher"}
    assert [row["better"] for row in rows] == [ways, ways]
    assert {metric["name"]: metric["better"] for metric in rows[1]["comparisons"]} == ways
    judged = [line["judged_better"] for line in csv.DictReader(io.StringIO(as_csv(results)))]
    assert judged == ["", ""]  # O0 is not compared, and of spam it is not known
    for name, way in (("logloss", "lower"), ("top1", "higher")):
        assert summarize(runs_off(name, UP))[1].verdict.endswith(f"] ({way} is better)")
    told = summarize(runs_off("spam", UP), better={"spam": "lower"})
    assert "↓ spam" in table(told).columns
    assert "--better" not in "".join(notes(told))


def test_a_terminal_without_arrows_still_gets_the_results(tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    write_results(made_sweep(tmp_path, runs_off("logloss", UP)), stream)
    stream.flush()
    assert b"\\u2193 logloss" in stream.buffer.getvalue()


def test_tune_asks_for_a_direction_where_values_differ():
    level = Case("O1", "bfloat16")
    for name, shifts, better, answer in (
        ("logloss", UP, {}, False),
        ("logloss", DOWN, {}, True),
        ("spam", UP, {"spam": "lower"}, False),
        ("spam", UP, {"spam": "higher"}, True),
        ("spam", [0.0] * 3, {}, True),
    ):
        assert passes(row_of(level, runs_off(name, shifts), None, better)) is answer
    for shifts in (UP, DOWN):
        with pytest.raises(TuneError, match="O1 bfloat16: its spam differs .* --better spam=lower"):
            passes(row_of(level, runs_off("spam", shifts), None, {}))
