"""The benchmark of accuracy counts, compares and writes what happened."""

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from repository import BENCHMARKS, DOCS

pytest.importorskip("sklearn")
sys.path.append(str(BENCHMARKS))

import accuracy
import run as runner
from accuracy import Result, Row, rows_of, train, welch
from accuracy_tasks import TASKS
from scipy.stats import ttest_ind

DIABETES = TASKS["diabetes"]


def plain_torch(task, seed, steps):
    run = task.make(seed, 1e-8)
    for _ in range(steps):
        inputs, targets = next(run.batches)
        run.optimizer.zero_grad()
        run.loss(run.model(inputs), targets).backward()
        run.optimizer.step()
    return run.metric()


@pytest.mark.parametrize("name", TASKS)
def test_o0_is_plain_torch_and_float16_o3_with_adam_diverges(name):
    task = TASKS[name]
    trained = train(task, Row("O0"), seed=3, steps=2)
    assert trained == Result(plain_torch(task, 3, 2), skipped=0)
    assert trained != train(task, Row("O0"), seed=4, steps=2), "the seed is without effect"
    if task.uses_adam:
        result = train(task, Row("O3"), seed=0, steps=3)
        assert math.isnan(result.metric) and result.diverged_at == 2
        assert math.isfinite(train(task, Row("O3", eps=1e-3), seed=0, steps=3).metric)


@pytest.mark.parametrize("row", [Row("O1"), Row("O2"), Row("autocast")], ids=lambda row: row.title)
def test_skipped_steps_are_counted(row):
    """A finite loss that overflows once it is scaled, at every step."""

    def make(seed, eps):
        run = DIABETES.make(seed, eps)
        return replace(run, loss=lambda output, target: 1e37 * F.mse_loss(output.float(), target))

    result = train(replace(DIABETES, make=make), row, seed=0, steps=3)
    assert (result.skipped, result.diverged_at) == (3, None)
    assert result.metric == pytest.approx(plain_torch(DIABETES, 0, 0), abs=1e-3)


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_welch_is_scipys(shift):
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(4, generator=generator).tolist()
    second = (3 * torch.randn(7, generator=generator) + shift).tolist()
    oracle = ttest_ind(second, first, equal_var=False)
    interval = oracle.confidence_interval()
    ours = welch(second, first)
    assert ours.p == pytest.approx(oracle.pvalue)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))
    assert welch([1.0, 1.0], [1.0, 1.0]).within_noise
    assert not welch([1.0, 1.0], [2.0, 2.0]).within_noise


@pytest.mark.parametrize(
    "metrics, higher, said",
    [
        ([5.0, 5.1, 5.2], True, "better"),
        ([5.0, 5.1, 5.2], False, "worse"),
        ([1.0, 1.1, 1.2], False, "within seed noise"),
        ([5.0, 5.1, math.nan], True, "diverged in 1 of 3 runs, at step 7; better"),
        ([1.0, math.nan, math.nan], True, "diverged in 2 of 3 runs, at step 7"),
    ],
)
def test_the_verdict(metrics, higher, said):
    results = [Result(value, 0, 7 if math.isnan(value) else None) for value in metrics]
    left = accuracy.finite(results)
    against = welch(left, [1.0, 1.05, 1.2]) if len(left) > 1 else None
    line = accuracy.Line(Row("O2"), results, against)
    assert accuracy.verdict(replace(DIABETES, higher_is_better=higher), line) == said


def test_a_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A row for each level, half dtype and peer; the words are those of the page in docs/."""
    out = tmp_path / "accuracy.md"
    arguments = ["--tasks", "diabetes", "--seeds", "1", "--steps", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["run.py", "accuracy", *arguments])
    runner.main()
    page, written = out.read_text(), (DOCS / "accuracy.md").read_text()
    assert page.strip() == capsys.readouterr().out.strip()
    titles = [
        "O0", "O1 float16", "O2 float16", "O3 float16", "O3 float16, eps=0.001",
        "torch.autocast float16 + GradScaler",
        "O1 bfloat16", "O2 bfloat16", "O3 bfloat16", "torch.autocast bfloat16",
    ]  # fmt: skip
    assert [row.title for row in rows_of(DIABETES)] == titles
    assert all(f"\n| {title} | " in page and f"\n| {title} | " in written for title in titles)
    assert "| O3 float16 |  |  | 0 |  |  | diverged in 1 of 1 runs, at step 2 | 0 of 2 |" in page
    assert "| one seed: no test | 0 of 2 |" in page
    told = " ".join(page.split())
    assert "Rows without a result, because all runs diverged: 1 (O3 float16)." in told
    for paragraph in accuracy.PAGE.read_text().split("\n\n"):
        assert "{" in paragraph or paragraph.strip() in written
    for task in TASKS.values():
        assert f"### {task.title}, {task.steps} steps\n\n{task.about}\n" in written
