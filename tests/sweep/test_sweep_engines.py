"""Rows beside the levels, in real processes: autocast's against plain PyTorch, settings, seeds."""

import itertools
import json
import textwrap

import pytest
import torch
from sweep_runs import log_of, planned

from ampatch.sweep import SweepError, read_runs

pytestmark = pytest.mark.usefixtures("warm_trials")

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
    return planned(
        tmp_path_factory.mktemp("engines"),
        SCRIPT,
        levels=["O0", "O1"],
        overrides=["O2 growth_interval=500"],
        dtypes=["float16"],
        steps=STEPS,
        metrics={"accuracy": r"accuracy: ([\d.]+)"},
    ).run()


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


def run_named(ran, label):
    [run] = read_runs(ran.directory, label)
    return run


def test_the_autocast_row_is_plain_pytorch(ran):
    measured = run_named(ran, "autocast-float16").measured
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
