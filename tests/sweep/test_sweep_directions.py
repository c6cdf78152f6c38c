"""Which way a metric is better: by its name, by `--better`, or not known and never guessed."""

import csv
import io
import json

import pytest
from sweep_made import made_sweep, trained

from ampatch.sweep.measure.run_record import Series
from ampatch.sweep.report.directions import direction
from ampatch.sweep.report.margin import worst_difference
from ampatch.sweep.report.recommendation import missing_evidence, recommendation
from ampatch.sweep.report.result_files import as_csv, as_latex, as_markdown
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.report.table import notes, table
from ampatch.sweep.report.terminal import write_results
from ampatch.sweep.trial import BASE, Case, Trial
from ampatch.tune.verdict import TuneError, passes, row_of

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


def runs_of(name, shifts, first=()):
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


def advice(name, shifts, **options):
    return recommendation(summarize(runs_of(name, shifts), **options))


TWICE = "2.00 times as fast as O0 (2.00 to 2.00)"
WORSE = "Stay with O0: no row that may be faster is as accurate."
USE = "Use O1 in bfloat16"


@pytest.mark.parametrize(
    ("name", "shifts", "better", "said"),
    [
        *((n, UP, None, WORSE) for n in ("logloss", "valLoss", "testErr", "smape", "ece")),
        *((name, DOWN, None, USE) for name in ("logloss", "testErr", "ece")),
        ("spam", [float("nan")] * 3, None, "Stay with O0"),  # whichever way is better
        ("spam", [0.0] * 3, None, f"{USE}: {TWICE}; spam the same with each of 3 seeds."),
        *(("spam", *row) for row in ((DOWN, "lower", USE), (UP, "higher", USE))),
        *(("spam", *row) for row in ((UP, "lower", WORSE), (DOWN, "higher", WORSE))),
        ("logloss", UP, "higher", USE),
    ],
)
def test_a_row_that_is_worse_is_not_recommended(name, shifts, better, said):
    assert advice(name, shifts, better=better and {name: better}).startswith(said)


@pytest.mark.parametrize("shifts", [UP, DOWN, [0.02] * 3, [0.001, -0.001, 0.0005]])
def test_a_difference_without_a_direction_recommends_nothing_and_names_the_option(shifts):
    rows = summarize(runs_of("spam", shifts))
    said = recommendation(rows)
    assert said.startswith(f"Stay with O0 for now. Speed: O1 in bfloat16 is {TWICE}")
    assert "its spam differs from O0's by " in said
    assert "--better spam=lower or --better spam=higher" in said
    assert rows[1].outcome in ("different", "within")
    with pytest.raises(ValueError, match="spam: expected a direction"):
        worst_difference(rows[1].comparisons[0])
    assert rows[1].verdict.endswith(" (no known direction)")


def test_of_one_seed_both_are_asked_for():
    missing = missing_evidence(summarize(runs_of("spam", UP[:1]))[1])
    assert missing.text.startswith("its spam differs from O0's by +0.2, and the name does not say")
    assert missing.options == "--seeds 3 --better spam=lower or --better spam=higher"
    assert "--better 'my spam=lower' or --better" in advice("my spam", UP)


def test_a_row_that_differs_without_a_direction_is_not_named_for_its_memory():
    runs = runs_of("spam", UP)
    for run in runs:
        is_base = run.case == BASE
        run.measured.memory_bytes = 2**30 if is_base else 2**29
        run.measured.step_seconds = [None] + [0.001 if is_base else 0.002] * 39
    rows = summarize(runs)
    assert "memory" not in recommendation(rows)
    assert "memory" in recommendation(summarize(runs, better={"spam": "higher"}))


def test_table_and_files_say_the_direction_of_each_metric(tmp_path):
    others = {"spam": Series([40], [1.0]), "top1": Series([40], [0.5])}
    results = made_sweep(tmp_path, runs_of("logloss", UP, first=others))
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
        assert summarize(runs_of(name, UP))[1].verdict.endswith(f"] ({way} is better)")
    told = summarize(runs_of("spam", UP), better={"spam": "lower"})
    assert "↓ spam" in table(told).columns
    assert "--better" not in "".join(notes(told))


def test_a_terminal_without_arrows_still_gets_the_results(tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    write_results(made_sweep(tmp_path, runs_of("logloss", UP)), stream)
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
        assert passes(row_of(level, runs_of(name, shifts), None, better)) is answer
    for shifts in (UP, DOWN):
        with pytest.raises(TuneError, match="O1 bfloat16: its spam differs .* --better spam=lower"):
            passes(row_of(level, runs_of("spam", shifts), None, {}))
