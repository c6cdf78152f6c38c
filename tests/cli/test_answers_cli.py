"""`ampatch gradients`, `explain`, `doctor` and `run --debug`, as a user runs them."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from quick_speed import measure_quickly
from warm_python import environment, on_a_terminal, python

from ampatch.cli import main, script_options
from ampatch.cli import run as run_module
from ampatch.diagnose import doctor, running
from ampatch.launch import program

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
OVERFLOWING = """
    import torch
    import ampatch as amp

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.exp(self.fc(x)).sum()

    amp.deactivate()  # a leftover; it does not end the watch
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O1")
    with amp.scale_loss(net(torch.full((1, 4), 1e5)), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""

ABSORBED = """
    import torch
    import ampatch as amp

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


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAINING))
    return path


def run(*arguments, cwd):
    return python("-m", "ampatch", *arguments, cwd=cwd, env=environment(COLUMNS="120"))


def test_gradients_piped_as_json_with_a_plot(script, tmp_path):
    done = run("gradients", "--steps", 3, "--json", "--plot", "g.png", "--opt-level", "O2",
               "train.py", 10, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # nothing of the script's own output
    assert found["steps"] == 3
    names = {f"Sequential.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert set(found["parameters"]) == names
    assert found["counted"] + found["counts"]["zero"] == 3 * (64 + 8 + 16 + 2)
    assert "step 1" in done.stderr and "done" not in done.stderr
    assert "Ended train.py after 3 optimizer steps" in done.stderr
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_explain_in_a_terminal(script, tmp_path):
    """Both streams on a pseudo-terminal; the script runs to its end."""
    command = ("-m", "ampatch", "explain", "train.py", "2")
    shown, status = on_a_terminal(*command, cwd=tmp_path, env=environment(COLUMNS="120"))
    assert status == 0
    lines = shown.replace("\r\n", "\n").splitlines()
    linear = next(line for line in lines if line.startswith("torch.nn.functional.linear"))
    # two layers, two forwards: inputs 8*8*2 bytes and, of the second layer, cast already
    assert linear.split()[1:5] == ["4", "6", "4", str(2 * (2 * 64) + 2 * (64 + 8 + 16 + 2))]
    assert any(
        line.split() == ["Sequential.0", "Linear", "2", "float32", "bfloat16"] for line in lines
    )
    assert "done" in lines


@pytest.mark.parametrize("command", ["explain", "gradients"])
def test_a_module_as_by_python_m(command, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        f"from . import steps_of\n{textwrap.dedent(TRAINING)}assert __package__ == 'package'\n"
    )
    (tmp_path / "package" / "__init__.py").write_text("steps_of = int\n")
    done = run(command, "--json", "-m", "package.train", 4, "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) and "step 3" in done.stderr


@pytest.fixture
def in_this_process(monkeypatch):
    """Scripts run here, which is quicker than in a process of their own."""

    def execute(script, arguments):
        try:
            exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__"})
        except AssertionError as error:
            return running.Ending(1, f"AssertionError: {error}")
        return running.Ending(0)

    monkeypatch.setattr(program, "run_script", execute)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_a_script_that_fails_midway_still_gets_its_answer(script, in_this_process, capsys):
    script.write_text(
        script.read_text().replace('print("step", step)', "assert step < 2, 'broken'")
    )
    assert main.main(["gradients", str(script)]) == 1
    done = capsys.readouterr()
    assert "over 3 optimizer steps" in done.out and "A static loss scale of" in done.out
    assert "failed after 3 optimizer steps: AssertionError: broken." in done.err


@pytest.mark.parametrize("text, points", ((OVERFLOWING, True), (TRAINING, False)))
def test_explain_points_to_tune_where_most_steps_overflow(tmp_path, text, points):
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    arguments = ["--x", "1 2"] if points else []
    done = python("-m", "ampatch", "explain", "train.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("ampatch tune train.py --opt-level LEVEL -- --x '1 2'\n" in done.stderr) == points
    assert ("ampatch tune" in done.stderr) == points


def test_a_script_that_never_steps(tmp_path, in_this_process, capsys):
    (tmp_path / "hello.py").write_text("print('hello')")
    assert main.main(["gradients", str(tmp_path / "hello.py")]) == 1
    done = capsys.readouterr()
    assert done.out == "" and "hello.py never stepped an optimizer" in done.err


def test_a_script_without_ampatch(tmp_path, in_this_process, capsys):
    plain = """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    (tmp_path / "plain.py").write_text(textwrap.dedent(plain))
    assert main.main(["gradients", "--json", str(tmp_path / "plain.py")]) == 0
    assert json.loads(capsys.readouterr().out)["bins"] == {"0": 18}
    assert main.main(["explain", "--json", str(tmp_path / "plain.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["functions"] == {} and found["modules"]["Linear"]["calls"] == 3


def test_run_under_debug(tmp_path):
    (tmp_path / "net.py").write_text(textwrap.dedent(OVERFLOWING))
    done = run("run", "--debug", "net.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert done.stderr.count("First non-finite value") == 1
    assert "made by aten._to_copy in torch.float16, in Net.fc (Linear)" in last
    assert "return torch.exp(self.fc(x)).sum()" in last and "net.py:" in last
    assert "Largest finite input: 100000." in last


def test_debug_of_a_healthy_run(capsys):
    assert run_module.run_debugged(lambda: 3, "unabsorbed") == 3
    said = capsys.readouterr().err
    assert said.startswith("ampatch: no inf or NaN in 0 optimizer steps. ")
    assert "ampatch gradients SCRIPT" in said


@pytest.mark.parametrize(
    "stop_at, steps, found",
    [("unabsorbed", 9, "step 8, in forward: made by aten.log"), ("any", 1, "step 0, in backward")],
)
def test_debug_passes_over_what_the_scale_absorbs_and_ends_the_script(
    stop_at, steps, found, tmp_path
):
    (tmp_path / "net.py").write_text(textwrap.dedent(ABSORBED))
    done = run("run", "--debug", "--stop-at", stop_at, "net.py", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (1, [str(step) for step in range(steps)])
    *listed, last = done.stderr.splitlines()
    assert found in last and "net.py:" in last
    passed = [line.split(":")[0] for line in listed if line.startswith("  step")]
    scales = (f"  step {n}, loss scale {2.0 ** (16 - n):g}" for n in range(steps - 1))
    assert passed == list(scales)[:6]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("gradients", "missing.py"), "there is no such script"),
        (("explain", "."), "not a file"),
        (("gradients",), "the following arguments are required: SCRIPT"),
        (("explain", "--lr", "train.py"), "unrecognized arguments: --lr"),
        (("gradients", "--steps", "0", "train.py"), "0 is not above 0"),
        (("gradients", "--lost", "100", "train.py"), "100 is not at least 0 and below 100"),
        (("explain", "--opt-level", "O7", "train.py"), "--opt-level=O7: not understood"),
        (("explain", "--dtype", "float8", "train.py"), "--dtype=float8: not understood"),
        (("gradients", "--plot", "no/such/g.png", "train.py"), "no directory"),
        (("gradients", "--plot", "g.xyz", "train.py"), "unknown kind of picture"),
    ],
)
def test_wrong_command_lines(arguments, message, script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_run(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main.main(["gradients", "--plot", "g.png", "train.py"])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_doctor_as_json_says_what_the_text_says(monkeypatch, capsys):
    measure_quickly(monkeypatch)
    monkeypatch.setenv("AMPATCH_DTYPE", "bfloat16")
    monkeypatch.setenv("AMPATCH_OPTLEVEL", "O1")  # misspelt: shown, so that it is seen
    assert main.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert found["environment"]["AMPATCH_DTYPE"] == "bfloat16"
    assert found["environment"]["AMPATCH_OPT_LEVEL"] is None
    assert found["environment"]["AMPATCH_OPTLEVEL"] == "O1"
    speeds = found["speed"]["cpu"]
    assert set(speeds) == {"float32", "float16", "bfloat16"}
    assert set(speeds["bfloat16"]) == {"matmul", "conv2d"}
    assert set(speeds["bfloat16"]["matmul"]) == {"ratio", "low", "high", "verdict"}
    assert set(found["fast"]["cpu"]) <= {"float16", "bfloat16"}
    assert found["extras"]["matplotlib"] and found["apex"] == "not installed"
    assert found["missing_in_torch"] == doctor.content.missing()
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "Faster than FP32 on cpu: " in text
    for name in (*found["extras"], *found["environment"]):
        assert f"\n{name} " in text


def test_every_new_command_is_listed(capsys):
    with pytest.raises(SystemExit):
        main.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("gradients", "explain", "doctor"))
    assert script_options.DEFAULT_STEPS == 20
