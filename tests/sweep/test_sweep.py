"""The sweep, with real scripts in real processes."""

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import ampatch
from ampatch.sweep import Sweep, read_results, read_runs, sweep
from ampatch.sweep.json_files import read_json
from ampatch.sweep.measure.record import Run
from ampatch.sweep.report.provenance import called

pytestmark = pytest.mark.usefixtures("warm_trials")

TRAINING = """
    import json, os, sys, time
    import torch
    import ampatch as amp

    level = os.environ["AMPATCH_OPT_LEVEL"]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(factor=1.0):
        loss = model(torch.ones(8, 4)).pow(2).mean() * factor
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss.item()
"""
INITIALIZE = """
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", loss_scale=1.0)
"""


@pytest.fixture(scope="module")
def directory(warm_trials, tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


def write_script(directory, name, *parts):
    path = directory / f"{name}.py"
    path.write_text("".join(textwrap.dedent(part) for part in parts))
    return str(path)


def environment():
    """Ours, with ampatch found from any directory."""
    root = str(Path(ampatch.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# A sweep in which all goes well


@pytest.fixture(scope="module")
def good(directory):
    """O0, O1 and O2 of a script that writes down for itself what a sweep should find."""
    script = write_script(
        directory,
        "good",
        TRAINING,
        INITIALIZE,
        """
        losses = [step() for _ in range(40)]
        amp.log_metrics(answer=len(losses) + 0.5)
        print("the script says", sys.argv[1:], file=sys.stderr)
        with open(f"{sys.argv[1]}/{level}.oracle", "w") as file:
            json.dump(losses, file)
    """,
    )
    plan = Sweep(
        script,
        [str(directory), "--x"],
        levels=["O0", "O1", "O2"],
        dtypes=["bfloat16"],
        autocast=False,
        rounds=1,
        out=directory / "out",
    )
    return plan.run()


def test_every_level_is_a_row(good):
    found = [(row.opt_level, row.dtype, row.status) for row in good.rows]
    assert found == [
        ("O0", "float32", "ok"),
        ("O1", "bfloat16", "ok"),
        ("O2", "bfloat16", "ok"),
    ]


def test_losses_are_those_the_script_saw(good, directory):
    for run, row in zip(good.runs, good.rows):
        oracle = json.loads((directory / f"{row.opt_level}.oracle").read_text())
        assert run.measured.losses["0"].values == oracle
        assert run.measured.losses["0"].steps == list(range(40))
        assert (row.first_loss, row.last_loss) == (
            pytest.approx(sum(oracle[:2]) / 2),
            pytest.approx(sum(oracle[-2:]) / 2),
        )
        assert row.last_loss < row.first_loss


def test_the_other_figures_are_there(good):
    for run, row in zip(good.runs, good.rows):
        assert (row.steps, row.skipped, row.loss_scale) == (40, 0, 1.0)
        assert row.metrics == {"answer": 40.5}
        assert 0 < row.step_ms < 1000 and row.cpu_ms > 0
        assert run.measured.machine["threads"] >= 1
        assert 50 * 2**20 < row.memory_bytes < 5000 * 2**20
        assert (run.measured.device, row.memory_kind) == ("cpu", "resident")
    base, *others = good.rows
    assert [row.speed for row in others] == [base.step_ms / row.step_ms for row in others]
    assert (base.speed, [row.pace for row in others]) == (None, ["one round"] * 2)


def test_the_script_ran_at_the_level_asked_for_and_not_its_own(good):
    assert [run.measured.opt_level for run in good.runs] == ["O0", "O1", "O2"]
    assert [run.measured.properties["dtype"] for run in good.runs[1:]] == ["torch.bfloat16"] * 2


def test_the_json_says_what_the_rows_say(good):
    data = json.loads(good.table_file.read_text())
    assert data["complete"] is True
    assert data["arguments"][1] == "--x"
    assert [row["status"] for row in data["rows"]] == ["ok"] * 3
    assert data["rows"][1]["last_loss"] == good.rows[1].last_loss
    assert (
        Run.from_json(read_json(good.directory / "runs/O1-bfloat16.seed0.repeat0.json"))
        == (good.runs[1])
    )
    assert list(read_runs(good.directory, "O1-bfloat16")) == [good.runs[1]]
    assert read_results(good.directory) == good.results


def test_the_log_holds_what_the_script_printed(good):
    log = (good.directory / "runs/O2-bfloat16.seed0.repeat0.log").read_text()
    assert "the script says" in log and "--x" in log


# Runs that end otherwise


def test_each_way_to_fail_is_a_row(directory):
    """Four kinds of trouble, one per level, and none of them ends the sweep."""
    script = write_script(
        directory,
        "troubles",
        TRAINING,
        INITIALIZE,
        """
        step(); step()
        if level == "O0":
            raise RuntimeError("the tensor is\\nnot what it was")
        if level == "O1":
            sys.exit(3)
        if level == "O2":
            step(float("nan"))
        if level == "O3":
            os.kill(os.getpid(), 9)
    """,
    )
    out = directory / "troubles"
    rows = sweep(script, dtypes=["bfloat16"], autocast=False, seeds=1, out=out)
    assert "ampatch tune" not in str(read_results(out).notes)  # nothing to come back to

    assert [row.status for row in rows] == [
        "crashed: RuntimeError: the tensor is",
        "exited: code 3",
        "diverged at step 3: loss nan",
        "killed: by SIGKILL (out of memory?)",
    ]
    assert [row.steps for row in rows] == [2, 2, 3, 0]
    assert math.isnan(rows[2].last_loss)
    log = (out / "runs/O0.seed0.repeat0.log").read_text()
    assert log.startswith('Traceback (most recent call last):\n  File "' + script)
    text = (out / "summary.json").read_text()
    assert "NaN" not in text and json.loads(text)["rows"][2]["last_loss"] == "nan"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("print('nothing to see')", "no training: never steps an optimizer of torch.optim"),
        (
            TRAINING + INITIALIZE,
            "no training: never steps an optimizer (given to ampatch.initialize)",
        ),
        (
            TRAINING + INITIALIZE.replace("loss_scale=1.0", "enabled=False") + "\n    step()\n",
            "no training: calls ampatch.initialize with enabled=False",
        ),
        ("def broken(:", "crashed: SyntaxError: "),
        (  # the forked process ends as Python does
            "import os\nif os.fork():\n    os.wait()\n    os._exit(0)",
            "no record: ended with code 0, as by os._exit; sys.exit leaves one",
        ),
        ("import sys; sys.exit('no data')", "crashed: no data"),
    ],
)
def test_a_script_that_does_not_train(directory, body, expected):
    script = write_script(directory, "idle", body)
    [row] = sweep(script, levels=["O0"], out=directory / "idle", overwrite=True)
    assert row.status.startswith(expected)
    assert (row.step_ms, row.speed, row.first_loss, row.steps) == (None, None, None, 0)


def test_what_runs_after_the_scripts_last_line_counts(directory):
    script = write_script(
        directory,
        "later",
        TRAINING,
        INITIALIZE,
        """
        import atexit, threading
        def train():
            threading.main_thread().join()  # Python waits for this thread at its end
            step(); step()
        threading.Thread(target=train).start()
        atexit.register(lambda: amp.log_metrics(answer=2.5))
    """,
    )
    [row] = sweep(script, levels=["O0"], out=directory / "later")
    assert (row.status, row.steps, row.metrics) == ("ok", 2, {"answer": 2.5})


def test_a_run_that_is_killed_after_its_last_step_is_told_from_one_that_exits(directory):
    script = write_script(
        directory,
        "late",
        TRAINING,
        INITIALIZE,
        """
        import atexit
        atexit.register(os.abort)
        step(); step()
    """,
    )
    out = directory / "late"
    [row] = sweep(script, levels=["O0"], out=out)
    assert (row.status, row.steps) == ("killed: by SIGABRT after its record was written", 2)
    log = (out / "runs/O0.seed0.repeat0.log").read_text()
    assert "Fatal Python error: Aborted" in log  # where it was, for what ends without a traceback


def test_a_skipped_overflow_is_counted_and_is_no_trouble(directory):
    script = write_script(
        directory,
        "overflow",
        TRAINING,
        """
        model, optimizer = amp.initialize(model, optimizer, loss_scale="dynamic")
        for factor in (1, 1, 1e8, 1):
            step(factor)
        amp.deactivate()
    """,
    )
    [row] = sweep(
        script, levels=["O2"], dtypes=["float16"], autocast=False, out=directory / "overflow"
    )
    assert (row.status, row.skipped, row.steps) == ("ok", 1, 4)
    assert row.loss_scale == 2.0**15


def test_a_run_that_hangs_is_ended_and_keeps_what_it_measured(directory, monkeypatch):
    """The sweep's clock jumps when the script hangs: no other moment is soon and late enough."""
    hangs = directory / "hangs"
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 300 * hangs.exists(), sleep=time.sleep
    )
    monkeypatch.setattr("ampatch.sweep.execution.runner.time", clock)
    script = write_script(
        directory,
        "hang",
        TRAINING,
        INITIALIZE,
        f"""
        for _ in range(5):
            step()
        open({str(hangs)!r}, "w").close()
        time.sleep(600)
    """,
    )
    [row] = sweep(script, levels=["O0"], timeout=300, out=directory / "hang")
    assert (row.status, row.steps) == ("timed out: after 300 s", 5)
    assert row.seconds < 300 + 120


def test_step_time_leaves_evaluation_out(directory):
    """Every second step is followed by an evaluation five times as long as a step."""
    script = write_script(
        directory,
        "slow",
        TRAINING,
        INITIALIZE,
        """
        for _ in range(10):
            for _ in range(2):
                time.sleep(0.02)
                step()
            time.sleep(0.1)
            amp.log_metrics(epochs=1)
    """,
    )
    [row] = sweep(script, levels=["O0"], out=directory / "slow")
    assert 20 <= row.step_ms < 60  # 70, with evaluations


def test_the_script_finds_itself_as_python_would_run_it(directory):
    """Modules beside it, `__main__` for pickling, workers that import it again."""
    (directory / "beside.py").write_text("word = 'found'")
    script = write_script(
        directory,
        "itself",
        """
        import multiprocessing, os, pickle, sys
        import beside

        class Thing:
            pass

        def work(x):
            return x + 1

        if __name__ == "__main__":
            assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(beside.word, sys.argv[1:], pool.map(work, [1]))
    """,
    )
    sweep(script, ["--", "-x"], levels=["O0"], out=directory / "itself")
    assert (
        directory / "itself/runs/O0.seed0.repeat0.log"
    ).read_text() == "found ['--', '-x'] [2]\n"


def test_a_module_as_by_python_m(directory, monkeypatch):
    package = directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    training = textwrap.dedent(TRAINING) + textwrap.dedent(INITIALIZE)
    (package / "train.py").write_text(
        f"from . import __name__ as package\n{training}"
        "losses = [step() for _ in range(3)]\nprint(package, __name__, sys.argv[1:])\n"
    )
    monkeypatch.chdir(directory)
    swept = Sweep("package.train", ["--lr", "1"], module=True, levels=["O0"])
    assert "package" not in sys.modules
    [row] = swept.run().rows
    assert (row.status, row.steps) == ("ok", 3)
    assert swept.directory == Path("ampatch-sweep/package.train")
    log = swept.directory / "runs/O0.seed0.repeat0.log"
    assert log.read_text() == "package __main__ ['--lr', '1']\n"
    results = read_results(swept.directory)
    assert results.script == "-m package.train" and called(results) == "-m package.train --lr 1"


# The sweep's own end


@contextlib.contextmanager
def interruptible():
    """Processes started in this block take Ctrl-C, also where a shell has us ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def hanging(request, tmp_path):
    """A sweep in its own process; yields it, and the pids of its child and the child's child."""
    pid_file = tmp_path / "pid"
    script = write_script(
        tmp_path,
        "wait",
        f"""
        import ctypes, os, subprocess, time
        worker = subprocess.Popen(["sleep", "600"])
        open({str(pid_file)!r} + ".part", "w").write(f"{{os.getpid()}} {{worker.pid}}")
        os.rename({str(pid_file)!r} + ".part", {str(pid_file)!r})
        while True:
            {request.param}
    """,
    )
    command = [sys.executable, "-m", "ampatch", "sweep", script, "--out", str(tmp_path / "out")]
    command += ["--dtypes", "bfloat16", "--rounds", "1"]
    with interruptible():
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    wait_until(pid_file.exists)
    yield process, list(map(int, pid_file.read_text().split()))
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "Interrupted. To go on: "),
        (signal.SIGTERM, 143, "Ended by SIGTERM. To go"),
    ],
)
@pytest.mark.parametrize("hanging", ["time.sleep(600)"], indirect=True)
def test_interrupting_a_sweep_ends_the_child_and_keeps_the_file(
    hanging, number, code, said, tmp_path
):
    process, children = hanging
    process.send_signal(number)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert said in err and "5 of 5 runs are missing." in err
    resumed = err.partition("To go on: ")[2].partition("\n")[0]
    assert shlex.split(resumed)[1:] == [*process.args[1:], "--resume"]
    assert "Traceback" not in err
    assert not any(map(is_alive, children))
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["complete"] is False


@pytest.mark.parametrize("hanging", ["ctypes.PyDLL(None).sleep(600)"], indirect=True)
def test_killing_a_sweep_ends_the_child(hanging):
    """Even one in C code that holds the interpreter's lock, where no thread of it runs."""
    process, children = hanging
    assert all(map(is_alive, children))
    process.kill()
    wait_until(lambda: not any(map(is_alive, children)))
    process.wait()
    script, out = process.args[4], process.args[6]
    plan = Sweep(
        script, dtypes=["bfloat16"], out=out, resume=True
    )  # the lock has died with its holder
    plan.close()
    assert plan.runs == []


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def is_alive(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
