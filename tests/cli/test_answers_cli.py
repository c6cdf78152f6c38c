"""`ampatch gradients`, `explain`, `doctor` and `run --debug`, as a user runs them."""

import json

import pytest
import torch
from quick_speed import measure_quickly
from run_command import write
from warm_python import python

from ampatch.diagnose.tables import content

TRAINING = """
    import sys
    import torch
    import ampatch as amp

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", dtype="bfloat16")
    for step in range(steps):
        loss = model(torch.ones(8, 8)).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
    amp.deactivate()
    print("done")
"""
ABSORBED = """
    import torch
    import ampatch as amp

    amp.deactivate()  # a leftover; it does not end the watch
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in range(12):
        print(step)
        x = torch.full((40, 4), 1.0)
        loss = model(x).float().sum()  # its gradient is 40: too large for float16 from 2048 on
        with amp.scale_loss((-loss.abs()).log() if step == 8 else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_gradients_piped_as_json(tmp_path):
    write(tmp_path / "train.py", TRAINING)
    words = "gradients --steps 3 --json --opt-level O2 train.py 10"
    done = python("-m", "ampatch", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # nothing of the script's own output
    assert answer["steps"] == 3
    names = {f"Sequential.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert set(answer["parameters"]) == names
    assert answer["counted"] + answer["counts"]["zero"] == 3 * (64 + 8 + 16 + 2)
    assert "step 1" in done.stderr and "done" not in done.stderr
    assert "Ended train.py after 3 optimizer steps" in done.stderr


@pytest.mark.parametrize("command", ["explain", "gradients"])
def test_a_module_as_by_python_m(command, tmp_path, here):
    write(tmp_path / "package/train.py", TRAINING + "    assert __package__ == 'package'\n")
    write(tmp_path / "package/__init__.py", "")
    done = here(command, "--json", "-m", "package.train", 4, "--steps", 1)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) and "step 3" in done.stderr


PLAIN = """
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_answer_where_a_script_fails_never_steps_or_has_no_ampatch(tmp_path, here):
    failing = TRAINING.replace('print("step", step)', "assert step < 2, 'broken'")
    write(tmp_path / "failing.py", failing)
    done = here("gradients", "failing.py")
    assert done.returncode == 1
    assert "over 3 optimizer steps" in done.stdout and "A static loss scale of" in done.stdout
    assert "failed after 3 optimizer steps: AssertionError: broken." in done.stderr

    write(tmp_path / "hello.py", "print('hello')")
    done = here("gradients", "hello.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert "hello.py never stepped an optimizer" in done.stderr

    write(tmp_path / "plain.py", PLAIN)
    assert json.loads(here("gradients", "--json", "plain.py").stdout)["bins"] == {"0": 18}
    answer = json.loads(here("explain", "--json", "plain.py").stdout)
    assert answer["functions"] == {} and answer["modules"]["Linear"]["calls"] == 3


@pytest.mark.parametrize("command", ["explain", "gradients"])
def test_options_that_changed_nothing_end_a_command_without_an_answer(command, tmp_path, here):
    """A script that never calls `initialize` is told of, as by `run`."""
    write(tmp_path / "plain.py", PLAIN)
    said = "ampatch: plain.py never called ampatch.initialize: it ran as it is"
    auto = f"ampatch {command} --auto plain.py"
    done = here(command, "plain.py")
    assert done.returncode == 0 and done.stdout and f"{said}. " in done.stderr
    assert auto in done.stderr
    done = here(command, "--opt-level", "O2", "--dtype=float16", "plain.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{said}, and --opt-level, --dtype changed nothing. " in done.stderr
    assert auto in done.stderr
    done = here(command, "--opt-level", "O0", "plain.py")  # as it is anyway
    assert done.returncode == 0 and done.stdout and f"{said}. " in done.stderr


@pytest.mark.parametrize("command", ["explain", "gradients"])
def test_with_auto_a_plain_script_is_in_half(command, tmp_path):
    write(tmp_path / "plain.py", PLAIN)
    words = ("-m", "ampatch", command, "--auto", "--dtype", "bfloat16", "--loss-scale", "64")
    done = python(*words, "--json", "plain.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if command == "explain":
        assert answer["functions"]["torch.nn.functional.linear"]["to"] == {"bfloat16": 9}
    else:
        assert answer["loss_scale"] == 64.0 and answer["steps"] == 3
    assert "never called" not in done.stderr


def test_debug_of_a_healthy_run(tmp_path, here):
    write(tmp_path / "fine.py", PLAIN + "    raise SystemExit(3)\n")
    done = here("run", "--debug", "fine.py")
    assert done.returncode == 3
    assert done.stderr.startswith("ampatch: no inf or NaN in 3 optimizer steps. ")
    assert "ampatch gradients SCRIPT" in done.stderr
    write(tmp_path / "none.py", "")
    last = here("run", "--debug", "none.py").stderr.splitlines()[-1]
    assert last == "ampatch: no inf or NaN: no optimizer stepped."
    nan = "import torch\ntorch.nn.Linear(2, 2)(torch.full((1, 2), float('nan')))\n"
    write(tmp_path / "last.py", nan)  # no step and no forward comes after it
    done = here("run", "--debug", "last.py")
    assert done.returncode == 1 and "First non-finite value (nan)" in done.stderr


@pytest.mark.parametrize(
    "stop_at, steps, told",
    [("unabsorbed", 9, "step 8, in forward: made by aten.log"), ("any", 1, "step 0, in backward")],
)
def test_debug_passes_over_what_the_scale_absorbs_and_ends_the_script(
    stop_at, steps, told, tmp_path, here
):
    write(tmp_path / "net.py", ABSORBED)
    done = here("run", "--debug", "--stop-at", stop_at, "net.py")
    assert (done.returncode, done.stdout.split()) == (1, [str(step) for step in range(steps)])
    *listed, last = done.stderr.splitlines()
    assert done.stderr.count("First non-finite value") == 1
    assert told in last and "net.py:" in last
    passed = [line.split(":")[0] for line in listed if line.startswith("  step")]
    scales = (f"  step {n}, loss scale {2.0 ** (16 - n):g}" for n in range(steps - 1))
    assert passed == list(scales)[:6]


def test_doctor_as_json_says_what_the_text_says(monkeypatch, here):
    measure_quickly(monkeypatch)
    monkeypatch.setenv("AMPATCH_DTYPE", "bfloat16")
    monkeypatch.setenv("AMPATCH_OPTLEVEL", "O1")  # misspelt: shown, so that it is seen
    facts = json.loads(here("doctor", "--json").stdout)
    assert facts["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert facts["environment"]["AMPATCH_DTYPE"] == "bfloat16"
    assert facts["environment"]["AMPATCH_OPTLEVEL"] == "O1"
    speeds = facts["speed"]["cpu"]
    assert set(speeds) == {"float32", "float16", "bfloat16"}
    assert set(speeds["bfloat16"]) == {"matmul", "conv2d"}
    assert set(speeds["bfloat16"]["matmul"]) == {"ratio", "low", "high", "verdict"}
    assert set(facts["fast"]["cpu"]) <= {"float16", "bfloat16"}
    assert facts["extras"]["matplotlib"] and facts["apex"] == "not installed"
    assert facts["missing_in_torch"] == content.missing()
    lines = here("doctor").stdout.splitlines()
    rows = {line[:22].strip(): line[22:] for line in lines}
    assert rows["torch"].startswith(torch.__version__.partition("+")[0])
    assert rows["AMPATCH_DTYPE"] == "bfloat16" and "  Faster than FP32 on cpu: " in "\n".join(lines)
    assert rows.keys() >= {*facts["extras"], *facts["environment"]}
    timed = [line.split() for line in lines if "matmul" in line]
    assert [line[1] for line in timed] == ["float16", "bfloat16", "float32"]
    assert all(line[-1] in ("faster", "slower", "tie") for line in timed[:2])
