"""Rows that are not what they are called: O0 in half, or from another row's weights."""

import math

import pytest
from sweep_made import trained
from sweep_runs import INITIALIZE, TRAINING, Said, planned, written

from ampatch.cli.main import main
from ampatch.sweep import read_runs
from ampatch.sweep.execution.runner import Runner
from ampatch.sweep.report.first_loss_check import first_loss_differences
from ampatch.sweep.report.recommendation import recommendation
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.trial import Case, Trial

O0, BFLOAT16, FLOAT16 = Case("O0"), Case("O1", "bfloat16"), Case("O1", "float16")


def run_of(case, first, then=(1.0,) * 30, seed=0, **kind):
    return trained(Trial(case, seed, **kind), [first, *then])


TF32, WITH_SETTING = Case("O0", tf32=True), Case("O0", settings=(("loss_scale", 2.0),))
NEAR_ZERO, NOISY = (0.02, -0.03) * 10, (1.5, 2.1) * 10  # as a policy's loss; other noise in half


@pytest.mark.parametrize(
    "base, first, then, case, apart",
    [  # 32 units of roundoff: of 2**-11 and 2**-8 relative to the loss; FP32 2**-10
        *((2.0, 2.0 * (1 + 31 * 2**-11), (1.0,), case, False) for case in (FLOAT16, TF32)),
        *((2.0, 2.0 * (1 + 34 * 2**-11), (1.0,), case, True) for case in (FLOAT16, TF32)),
        (2.0, 2.0 * (1 - 31 * 2**-8), (1.0,), BFLOAT16, False),
        (2.0, 2.0 * (1 - 34 * 2**-8), (1.0,), BFLOAT16, True),
        (1e-9, 1e-3, NEAR_ZERO, BFLOAT16, False),
        (1e-9, 1e-3, (1e-3,) * 20, BFLOAT16, True),
        (2.0, 1.6, NOISY, BFLOAT16, False),
        (2.0, 1.2, NOISY, BFLOAT16, True),
        (2.0, 1.6, NOISY, WITH_SETTING, True),
        *((2.0, lost, (1.0,), FLOAT16, False) for lost in (math.nan, math.inf)),  # an overflow
        *((lost, 2.0, (1.0,), FLOAT16, False) for lost in (math.nan, math.inf)),
    ],
)
def test_half_may_round_and_no_more(base, first, then, case, apart):
    """A loss is measured by its later size, and by how much it differs from step to step."""
    runs = [run_of(O0, base, then=then * 30), run_of(case, first, then=then * 30)]
    assert bool(first_loss_differences(runs)) == apart


def test_the_second_o0_is_compared_too():
    again = run_of(O0, 2.003, short=True, again=True)
    [(run, _said)] = first_loss_differences([run_of(O0, 2.0), again])
    assert run is again
    assert not first_loss_differences([run_of(O0, 2.0), run_of(O0, 2.001, short=True, again=True)])
    assert not first_loss_differences([run_of(O0, 2.0), run_of(O0, 3.0, seed=1)])  # another seed


def test_losses_behind_a_step_say_nothing_of_the_start():
    """A generator's first loss comes behind the discriminator's step, which float16 may skip."""
    base, row = run_of(O0, 2.0), run_of(FLOAT16, 0.7)
    of_base, of_row = base.measured.losses, row.measured.losses
    of_row["1"] = of_row.pop("0")
    assert not first_loss_differences([base, row])
    of_base["1"] = of_base.pop("0")
    assert first_loss_differences([base, row])
    of_base["1"].steps = of_row["1"].steps = list(range(1, 32))
    assert not first_loss_differences([base, row])


def test_nothing_is_recommended_where_a_row_starts_elsewhere():
    base, row = rows = summarize([run_of(O0, 2.0), run_of(BFLOAT16, 0.5)])
    assert "first loss 0.5 against 2 of O0 with seed 0" in row.verdict
    assert recommendation(rows).startswith("None") and "first loss 0.5" in recommendation(rows)
    assert (base.outcome, row.outcome, row.comparisons) == ("baseline", "untested", [])
    rows = summarize([run_of(O0, 2.0), run_of(O0, 0.1, short=True, again=True)])
    assert "0.1 against 2 of its first run with seed 0" in rows[0].verdict
    assert recommendation(rows).startswith("None")


def test_weights_from_another_rows_file_are_said_once(tmp_path, monkeypatch):
    first = {"O0": 2.0, "O1": 0.5}
    monkeypatch.setattr(
        Runner, "run", lambda runner, trial, *_: run_of(trial.case, first[trial.case.opt_level])
    )
    sweep, said = planned(tmp_path, "", levels=["O0", "O1"], autocast=False), Said()
    sweep.run(said)
    assert sweep.results.recommendation.startswith("None: the rows' first losses differ by more")
    assert "TRIAL_DIR" not in sweep.results.recommendation
    [text] = [text for text in said.events if "AMPATCH_TRIAL_DIR" in text]
    assert text in sweep.results.notes


def test_steps_without_a_loss_are_said_once(tmp_path, monkeypatch):
    """As where gradients come by torch.autograd.grad: nothing can be judged by the loss."""
    monkeypatch.setattr(Runner, "run", lambda runner, trial, *_: trained(trial))
    sweep, said = planned(tmp_path, "", levels=["O0"], seeds=2), Said()
    sweep.run(said)
    [text] = [text for text in said.events if "no loss was recorded" in text]
    assert text in sweep.results.notes
    for remedy in ("--metric", "ampatch.log_metrics(loss=...)"):
        assert remedy in text


@pytest.mark.usefixtures("warm_trials")
def test_o0_is_fp32_where_the_script_enters_autocast(tmp_path, monkeypatch, capsys):
    body = """
        from torch import autocast as early
        from torch.amp import autocast
        from torch.cuda.amp import autocast as of_cuda
        from torch.cpu.amp import autocast as of_cpu

        inputs = torch.randn(64, 8)

        @autocast("cpu", dtype=torch.bfloat16)
        def decorated():
            return inputs @ inputs.T

        dtypes = {str(decorated().dtype)}
        for region in (
            early("cpu", dtype=torch.bfloat16),
            torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True),
            of_cpu(dtype=torch.bfloat16),
            of_cuda(),
        ):
            with region:
                dtypes.add(str((inputs @ inputs.T).dtype))
                assert not (os.environ["AMPATCH_OPT_LEVEL"] == "O0" and torch.is_autocast_enabled())
        never_entered = torch.autocast("cpu", dtype=torch.bfloat16)
        amp.log_metrics(kinds=len(dtypes), halves=sum(dtype != "torch.float32" for dtype in dtypes))
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step()
    """
    written(tmp_path, TRAINING, INITIALIZE, body)
    monkeypatch.chdir(tmp_path)
    words = "--levels O0,O1 --dtypes bfloat16 --rounds 1 --no-autocast --out results".split()
    assert main(["sweep", "train.py", *words]) == 0
    results = tmp_path / "results"
    base, other = (next(read_runs(results, label)).measured for label in ("O0", "O1-bfloat16"))
    assert base.metrics["halves"].values == [0] and base.metrics["kinds"].values == [1]
    assert other.metrics["halves"].values == [1] and not other.autocast_off
    lines = (tmp_path / "train.py").read_text().splitlines()
    noted = {lines[int(place.partition(":")[2]) - 1].strip() for place in base.autocast_off}
    assert noted == {
        "dtypes = {str(decorated().dtype)}",
        "with region:",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
    }
    said = capsys.readouterr().err
    for text in (said, (results / "report.html").read_text(), (results / "summary.md").read_text()):
        assert "train.py enters torch.autocast itself (train.py:" in text
