"""Any script: which mixed precision it brings is recognized, and the rows follow from that.

Rows beside the levels: settings, and autocast's against plain PyTorch.
"""

import importlib.util
import itertools
import json
import textwrap
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ranks import slow
from sweep_runs import PLAIN, Said, log_of, planned
from warm_python import python

from ampatch.sweep import SweepError, read_runs
from ampatch.sweep.cases_and_trials import cases
from ampatch.sweep.execution.plain_training import PlainTraining
from ampatch.sweep.kinds import AMPATCH, FRAMEWORK, NO_AMP, TORCH_AMP, Kind

pytestmark = pytest.mark.usefixtures("warm_trials")

# The third step meets an overflow; the region is entered after a step in FP32.
TORCH_AMP_SCRIPT = """
    import sys
    import torch
    torch.manual_seed(0)
    enabled = "fp32" not in sys.argv
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    for step in range(10):
        x = torch.randn(16, 8) * (1e6 if step == 2 else 1)
        if step:
            with torch.autocast("cpu", torch.float16, enabled=enabled):
                loss = model(x).float().pow(2).mean()
        else:
            loss = model(x).float().pow(2).mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            assert model(torch.ones(1, 8)).dtype is torch.float32
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(loss.item(), scaler.get_scale())
"""


def printed(plan, label):
    return list(map(float, log_of(plan, label).split()))


def test_a_script_without_amp_code_needs_no_flag_and_its_kind_is_kept(tmp_path):
    """The losses are those that it prints; O0 is what plain Python trains, to the bit."""
    plan, said = planned(tmp_path, PLAIN), Said()
    runs = {run.case.label: run for run in plan.run(said).runs}
    assert list(runs) == ["O0", "O1-bfloat16"]
    [why] = [event for event in said.events if "which module is the model" in event]
    assert "it can run O0 and O1, but not O2, O3 or the row autocast. " in why
    assert why in plan.results.notes
    assert "ampatch.initialize(model, optimizer); and instead of loss.backward(): with " in why
    assert "ampatch.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()" in why
    plain = python("train.py", cwd=tmp_path).stdout.split()
    assert printed(plan, "O0") == list(map(float, plain))
    for label, run in runs.items():
        assert run.measured.losses["0"].values == pytest.approx(printed(plan, label), rel=1e-6)
    assert printed(plan, "O0") != printed(plan, "O1-bfloat16")
    assert printed(plan, "O0") == pytest.approx(printed(plan, "O1-bfloat16"), rel=0.05)
    assert plan.results.machine["script"] == "has no mixed precision of its own"

    (plan.directory / f"runs/{plan.trials[1].file_stem}.json").unlink()
    again = planned(tmp_path, PLAIN, resume=True)
    assert again.trials == plan.trials and [run.trial for run in again.runs] == plan.trials[:1]
    assert [run.trial for run in again.run().runs] == plan.trials


def test_torch_amp_is_a_row_as_it_is_and_off_in_the_others(tmp_path):
    """Also where it begins after steps; and a region that is off is off at O1, too."""
    plan = planned(tmp_path, TORCH_AMP_SCRIPT, dtypes=["float16"]).run()
    rows = [("O0", "ok"), ("O1-float16", "ok"), ("autocast-float16", "ok")]
    assert [(row.label, row.status) for row in plan.rows] == rows
    own = python("train.py", cwd=tmp_path).stdout.split()
    in_fp32 = python("train.py", "fp32", cwd=tmp_path).stdout.split()
    assert log_of(plan, "autocast-float16").split() == own != in_fp32
    assert log_of(plan, "O0").split() == in_fp32 != log_of(plan, "O1-float16").split()
    as_it_is = plan.runs[-1].measured
    losses, scales = (list(map(float, own[column::2])) for column in (0, 1))
    assert as_it_is.losses["0"].values == pytest.approx(losses, rel=1e-6, nan_ok=True)  # not scaled
    assert as_it_is.skipped == [scale < before for before, scale in pairwise([65536.0, *scales])]
    assert as_it_is.skipped[2] and not all(as_it_is.skipped)
    said = plan.results.machine["script"]
    assert said.startswith(
        "uses torch.amp (train.py:12): the row autocast runs it unchanged; in all other"
    )


def test_losses_are_those_before_scaling_however_they_are_scaled(monkeypatch):
    """Alone, in a list or a tuple, and in what the script makes of scaled ones."""
    for owner, names in ((torch.autograd, ["backward"]), (torch.amp.GradScaler, ["scale", "step"])):
        for name in names:  # put back at the end: a trial never does
            monkeypatch.setattr(owner, name, getattr(owner, name))
    said, scaler = [], torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorder = SimpleNamespace(
        on_loss=lambda loss: said.append(loss.item()), on_backward=lambda: None,
        on_unscaled=lambda: None, on_scale=lambda scale: None,
    )  # fmt: skip
    weight = torch.ones((), requires_grad=True)
    plain = PlainTraining(recorder, "O0")
    plain.start()
    try:
        scaler.scale(weight * 2).backward()
        for kind in (list, tuple):
            scaled = scaler.scale(kind([weight * 3, weight * 4]))
            assert type(scaled) is kind
            for scaled_loss in scaled:
                scaled_loss.backward()
        (scaler.scale(weight * 6) / 2).backward()
        (weight * 7).backward()
    finally:
        plain.mute()
    assert said == [2, 3, 4, 3, 4, 3, 7]


def test_a_switch_that_a_sweep_cannot_turn_off_is_refused_with_the_remedy(tmp_path):
    switched = PLAIN.replace("for _", 'torch.set_autocast_enabled("cpu", True)\n    for _')
    with pytest.raises(SweepError, match=r"Expected a region: with torch.autocast\(\.\.\.\)"):
        planned(tmp_path, switched).run()


def test_half_weights_of_the_script_are_no_fp32_baseline(tmp_path):
    in_half = PLAIN.replace("Linear(8, 1)", "Linear(8, 1).bfloat16()").replace(
        "16, 8)", "16, 8).bfloat16()"
    )
    plan = planned(tmp_path, in_half).run()
    assert plan.results.recommendation.startswith("None: O0 is not FP32. ")
    assert "checked" not in plan.results.machine


def test_what_a_kind_cannot_have_ends_the_sweep_with_the_line_to_write(tmp_path):
    with pytest.raises(SweepError, match=r"O0 and O1, .* model, optimizer = ampatch\.initialize\("):
        planned(tmp_path, PLAIN, levels=["O0", "O2"]).run()
    kind = Kind(NO_AMP, framework="ignite")
    for asked in ({"levels": ["O0", "O2"]}, {"levels": ["O0"], "overrides": ["O1 loss_scale=2"]}):
        with pytest.raises(ValueError, match=r"trainer = Engine\(ampatch.integrations.ignite"):
            cases(dtypes=["float16"], kind=kind, **asked)


def test_initialize_after_steps_in_fp32_is_an_error_that_says_so(tmp_path):
    late = textwrap.dedent(PLAIN) + "import ampatch\nampatch.initialize(model, optimizer)\n"
    plan = planned(tmp_path, late)
    with pytest.raises(SweepError, match="initialize before the first step"):
        plan.run()
    assert len(plan.runs) == 1


LOOPS = {
    "accelerate": """
        import accelerate, torch
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2
        )
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = model(torch.randn(16, 8)).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    """,
    "fabric": """
        import torch
        from lightning.fabric import Fabric
        from lightning.fabric.plugins import MixedPrecision
        torch.manual_seed(0)
        plugin = MixedPrecision("bf16-mixed", "cpu")
        fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
        fabric.launch()
        model = torch.nn.Linear(8, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(6):
            loss = model(torch.randn(16, 8)).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
    """,
    "lightning": """
        import lightning, torch

        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 1)

            def training_step(self, batch, number):
                return self.layer(batch).pow(2).mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        lightning.seed_everything(0)
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", precision="bf16-true", enable_model_summary=False,
            **off
        )
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(96, 8), 16))
    """,
    "transformers": """
        import os, torch
        from transformers import Trainer, TrainingArguments

        class Model(torch.nn.Linear):
            def forward(self, x, labels):
                return {"loss": (super().forward(x) - labels).pow(2).mean()}

        torch.manual_seed(0)
        rows = [{"x": torch.randn(8), "labels": torch.zeros(1)} for _ in range(96)]
        arguments = TrainingArguments(
            os.environ["AMPATCH_TRIAL_DIR"], num_train_epochs=1, per_device_train_batch_size=16,
            bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        )
        Trainer(Model(8, 1), arguments, train_dataset=rows).train()
    """,
}


def needs(framework):
    package = "lightning" if framework == "fabric" else framework
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


SLOW = ("fabric", "lightning", "transformers")


@pytest.mark.parametrize("framework", [slow(name) if name in SLOW else name for name in LOOPS])
def test_a_framework_trains_through_its_integration(framework, tmp_path):
    """Its own mixed precision is off at O0 and beside ampatch."""
    needs(framework)
    plan = planned(tmp_path, LOOPS[framework], levels=["O0", "O2"], autocast=False).run()
    in_fp32, managed = plan.runs
    kind = in_fp32.measured.kind
    assert (kind.name, kind.framework, kind.dtypes) == (FRAMEWORK, framework, ("bfloat16",))
    steps = 3 if framework == "accelerate" else 6  # it accumulates
    rows = [(row.label, row.status, row.steps) for row in plan.rows]
    assert rows == [("O0", "ok", steps), ("O2-bfloat16", "ok", steps)]
    assert not in_fp32.measured.kind.half_weights
    assert managed.measured.opt_level == "O2"
    losses = [run.measured.losses["0"].values for run in plan.runs]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


IN_THE_SCRIPT = {
    "accelerate": (
        'accelerate.Accelerator(\n            cpu=True, mixed_precision="bf16",',
        "AmpatchAccelerator(\n            cpu=True,",
    ),
    "lightning": ('precision="bf16-true"', "plugins=[AmpatchPrecision()]"),
}
"""What of `LOOPS` is replaced where a script has the integration already."""


@pytest.mark.parametrize("framework", ["accelerate", slow("lightning")])
def test_a_call_of_initialize_by_an_integration_is_told_from_one_by_the_script(framework, tmp_path):
    """It says where in the script a setting goes."""
    needs(framework)
    *imports, _ = Kind(FRAMEWORK, framework).setup_lines(()).splitlines()
    script = textwrap.dedent(LOOPS[framework].replace(*IN_THE_SCRIPT[framework]))
    plan = planned(tmp_path, "\n".join([*imports, script]), levels=["O0"], autocast=False)
    kind = plan.run().runs[0].measured.kind
    assert (kind.name, kind.framework) == (AMPATCH, framework)
    assert (
        Kind(AMPATCH).setup_lines(()) == "model, optimizer = ampatch.initialize(model, optimizer)"
    )


@pytest.mark.parametrize("name", [NO_AMP, TORCH_AMP])
def test_rows_by_kind(name):
    kind = Kind(name, places=("a.py:1",) * (name == TORCH_AMP), dtypes=("float16", "bfloat16"))
    labels = [case.label for case in cases(None, ["bfloat16"], autocast=True, kind=kind)]
    own = ["autocast-float16+bfloat16"] if name == TORCH_AMP else []
    assert labels == ["O0", "O1-bfloat16", *own]


def test_losses_of_a_plain_backward_beside_initialize_are_recorded(tmp_path):
    """A script in which only the line with `initialize` was added, in each row."""
    line = "    model, optimizer = ampatch.initialize(model, optimizer)\n"
    script = PLAIN.replace("    for _", f"    import ampatch\n{line}    for _", 1)
    swept = planned(tmp_path, script, levels=["O0", "O1", "O2"]).run()
    for run in swept.runs:
        recorded = run.measured.losses["0"].values
        assert recorded == pytest.approx(printed(swept, run.case.label), rel=0.01)
    assert [run.case.opt_level for run in swept.runs] == ["O0", "O1", "O2", "autocast"]
    assert not any("no loss was recorded" in note for note in swept.results.notes)


# Rows beside the levels: autocast's against plain PyTorch, settings, seeds


STEPS, OVERFLOW = 12, 3
MODEL = """
    import torch
    from apex import amp
    torch.manual_seed(5)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(4, 32, 8)
"""
SCRIPT = f"""
    {MODEL}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    step, seen = 0, []
    for layer in (model[0], model[1]):
        layer.register_forward_pre_hook(lambda layer, args: seen.append(layer.weight.dtype))
    while True:  # until the sweep ends it
        for batch in x[:2]:  # gradients of two batches are added up
            loss = model(batch).pow(2).mean() * (1e30 if step == 3 else 1)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 6:
            print("accuracy: 0.25", *seen[-2:])
"""


@pytest.fixture(scope="module")
def ran(warm_trials, tmp_path_factory):
    """O0, O1, autocast and O2 with a setting of its own, one seed each, in float16."""
    rows = {"levels": ["O0", "O1"], "overrides": ["O2 growth_interval=500"], "dtypes": ["float16"]}
    options = {"steps": STEPS, "metrics": {"accuracy": r"accuracy: ([\d.]+)"}}
    return planned(tmp_path_factory.mktemp("engines"), SCRIPT, **rows, **options).run()


def plain_autocast():
    """The script as one would write it for torch.autocast, gradients added up by hand."""
    names = {}
    exec(textwrap.dedent(MODEL).replace("from apex import amp", ""), names)
    model, optimizer, x = names["model"], names["optimizer"], names["x"]
    scaler = torch.amp.GradScaler("cpu")
    losses, scales, skipped = [], [], []
    for step in range(STEPS):
        scale = scaler.get_scale()
        for batch in x[:2]:
            with torch.autocast("cpu", torch.float16):
                output = model(batch)
            loss = output.float().pow(2).mean() * (1e30 if step == OVERFLOW else 1)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            scales.append(scale)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < scale)
        optimizer.zero_grad()
    return losses, scales, skipped


def test_the_autocast_row_is_plain_pytorch(ran):
    [measured] = [run.measured for run in read_runs(ran.directory, "autocast-float16")]
    losses, scales, skipped = plain_autocast()
    seconds = measured.losses["0"].seconds
    assert len(seconds) == 2 * STEPS and 0 < seconds[0] and seconds == sorted(seconds)
    assert measured.losses["0"].values == pytest.approx(losses, rel=1e-3)
    assert measured.skipped == skipped and sum(skipped) == 1
    changes = [scales[0], *(b for a, b in itertools.pairwise(scales) if a != b)]
    assert measured.loss_scales["0"].values == changes == [2.0**16, 2.0**15]
    assert measured.loss_scales["0"].steps == [0, OVERFLOW + 1]
    assert measured.opt_level == "autocast" and measured.properties["grad_scaler"] == "True"


def test_the_rows_ran_to_their_end_at_what_was_asked(ran):
    rows = {row.label: (row.status, row.steps, row.skipped) for row in ran.rows}
    own = "O2-float16-growth_interval=500"
    assert list(rows) == ["O0", "O1-float16", "autocast-float16", own]
    assert rows["O1-float16"] == rows[own] == rows["autocast-float16"] == ("ok", STEPS, 1)
    assert "torch.float16 torch.float32" in log_of(ran, own)  # weights in the forward, BatchNorm's
    assert "torch.float32 torch.float32" in log_of(ran, "O1-float16")
    assert "ended after 12 steps" in ran.results.notes[0]
    assert all(row.metrics == {"accuracy": 0.25} for row in ran.rows)  # it prints that


SEEDED = """
    import json, os, random, sys
    import torch
    import ampatch as amp
    model = torch.nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(int(sys.argv[2])):
        with amp.scale_loss(model(torch.ones(8, 4)).pow(2).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    print(json.dumps([sys.argv[1], os.environ["AMPATCH_SEED"], random.random()]))
"""


def test_the_seed_reaches_the_script(tmp_path):
    options = {"levels": ["O0"], "seeds": 2, "steps": 9}
    plan = planned(tmp_path, SEEDED, "--seed={seed}", "{steps}", **options).run()
    logs = [json.loads(path.read_text()) for path in sorted(plan.directory.glob("runs/*.log"))]
    assert [log[:2] for log in logs] == [["--seed=0", "0"], ["--seed=1", "1"]]
    first, second = plan.runs
    assert first.measured.losses["0"].values != second.measured.losses["0"].values
    assert first.measured.stopped_at is None and plan.rows[0].steps == 9  # it ended by itself
    assert plan.results.notes == []


def test_a_missing_metric_ends_the_sweep_after_one_run(tmp_path):
    plan = planned(tmp_path, SEEDED, "", "9", levels=["O0"], seeds=2, metrics={"acc": r"acc (\d)"})
    with pytest.raises(SweepError, match="--metric acc=acc .*: nothing in the output of O0 seed 0"):
        plan.run()
    assert len(list(read_runs(plan.directory))) == 1  # what was measured is kept
