"""Sweeps in real processes: side by side, on Ray, under torchrun.

Whatever runs the trials, the figures of accuracy are the same to the bit.
"""

import contextlib
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
from ranks import slow
from sweep_runs import is_alive, started, wait_until, written

from ampatch.sweep import Sweep, read_results, read_runs

with contextlib.suppress(ImportError):
    import ray  # noqa: F401  (it derives from subprocess.Popen, which `warm_trials` replaces)

TRAINING = """
    import os, signal, sys, time
    import torch
    import ampatch as amp
    seed = int(os.environ["AMPATCH_SEED"])
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(12):
        loss = model(torch.randn(16, 32)).pow(2).mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if step == 6:
            MIDDLE
    print("loss", loss.item())
"""
ONCE = """
    import pathlib

    def once(name):
        try:
            pathlib.Path(sys.argv[1], name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
"""
KILL_THE_WORKER = """if seed == 0 and once("killed"):
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(600)"""


def write_script(directory, middle="pass", *more):
    text = TRAINING.replace("    import torch\n", "    import torch\n" + ONCE, 1)
    return written(directory, text.replace("MIDDLE", middle), *more)


def make(script, out, **options):
    wanted = {"levels": ["O0"], "seeds": 1, "metrics": {"loss": r"loss (\S+)"}, **options}
    return Sweep(script, [str(Path(script).parent)], dtypes=["bfloat16"], out=out, **wanted)


def figures(directory):
    """What accuracy is judged by, of each whole run."""
    return {
        run.trial.label: (run.measured.losses["0"].values, run.measured.metrics["loss"].values)
        for run in read_runs(directory)
        if not run.trial.short
    }


@pytest.fixture(scope="module")
def one_by_one(warm_trials, tmp_path_factory):
    """The figures of the plain sweep: one machine, one trial at a time."""
    directory = tmp_path_factory.mktemp("plain")
    script = write_script(directory, 'once("killed")')
    make(script, directory / "out", levels=["O0", "O1"], autocast=False, rounds=1).run()
    return figures(directory / "out")


def test_side_by_side_gives_the_same_and_says_what_was_timed_alone(tmp_path, one_by_one):
    options = {"levels": ["O0", "O1"], "autocast": False, "rounds": 2, "jobs": 2}
    sweep = make(write_script(tmp_path), tmp_path / "out", **options).run()
    assert figures(sweep.directory) == one_by_one and len(one_by_one) == 2
    assert [run.alone for run in sweep.runs] == [run.trial.short for run in sweep.runs]
    assert sweep.rows[1].speeds.n == 2
    assert "of the 6 of 8 runs that ran alone" in sweep.results.notes[0]
    sweep.runs[:] = [run for run in sweep.runs if not run.alone]
    assert sweep.results.notes[0] == (
        "No run had its device to itself, so there is no step time and no speed."
    )


RAY = {"engine": "ray", "cpus_per_trial": 1}


@pytest.mark.slow
def test_ray_gives_the_same_and_replaces_a_killed_worker(tmp_path, one_by_one):
    pytest.importorskip("ray")
    script = write_script(tmp_path, KILL_THE_WORKER)
    sweep = make(script, tmp_path / "out", **RAY).run()
    assert (tmp_path / "killed").exists()
    assert figures(sweep.directory) == {"O0 seed 0": one_by_one["O0 seed 0"]}
    log = (sweep.directory / "runs/O0.seed0.repeat0.log").read_text()
    assert log.startswith("loss ")  # the second attempt's alone


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_loses_one_and_no_run(tmp_path, one_by_one):
    """Timed runs are alone on one node; the node whose trial kills it takes nothing with it."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        pids = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
        script = write_script(
            tmp_path,
            f"""if int(os.environ["RAY_RAYLET_PID"]) != {pids[0]} and once("killed"):
                os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(600)""",
        )
        options = {"levels": ["O0", "O1"], "autocast": False, "rounds": 2}
        out = tmp_path / "out"
        sweep = make(script, out, engine="ray", address=cluster.address, **options).run()
    finally:
        cluster.shutdown()
    assert (tmp_path / "killed").exists()
    assert figures(out) == one_by_one
    assert {run.alone for run in sweep.runs if run.trial.short} == {True}
    assert len(sweep.runs) == 8 and sweep.results.complete


RANKS = """
    import json, signal
    import torch.distributed as dist

    def terminated(call):  # as by torchrun, which has seen that another rank failed
        def wrapped(*args, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return call(*args, **options)
        return wrapped

    dist.init_process_group("gloo")
    amp.log_metrics(rank=dist.get_rank())
    print("rank", dist.get_rank())
    if dist.get_rank() == 1 and os.environ["AMPATCH_OPT_LEVEL"] == "O1":
        print("the last words")
        raise RuntimeError("no more")
    sys.excepthook = terminated(sys.excepthook)
    json.dumps = terminated(json.dumps)  # the record's
    dist.barrier()
    dist.destroy_process_group()
"""


def with_ranks(directory, **options):
    script, out = write_script(directory, "pass", RANKS), directory / "out"
    wanted = {"rounds": 1, "metrics": {}, "autocast": False, "nproc_per_node": 2}
    sweep = make(script, out, **wanted, **options).run()
    assert not list((out / "runs").glob("*.ranks"))
    [run] = sweep.runs
    return sweep.rows[0], (out / f"runs/{run.trial.file_stem}.log").read_text()


def test_a_rank_that_dies_ends_the_trial_with_its_output(tmp_path):
    row, log = with_ranks(tmp_path, levels=["O1"])
    assert row.status == "crashed: rank 1: RuntimeError: no more"
    assert (row.metrics, row.steps) == ({"rank": 0.0}, 12)  # rank 0 reports, SIGTERM or not
    assert "the last words" in log and "RuntimeError: no more" in log


PROBE = """
import os, pathlib

def start(text, autocast_off, writes):
    pathlib.Path(text, f"rank {os.environ['RANK']} {writes}").touch()
"""


@pytest.mark.slow
def test_ranks_that_end_well_and_whose_probe_knows_that_the_first_writes(tmp_path, monkeypatch):
    (tmp_path / "probe_of_ranks.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    row, log = with_ranks(tmp_path, levels=["O0"], probe=("probe_of_ranks", str(tmp_path)))
    assert {path.name for path in tmp_path.glob("rank *")} == {"rank 0 True", "rank 1 False"}
    assert (row.status, row.metrics, row.steps) == ("ok", {"rank": 0.0}, 12)
    assert "rank 0\n" in log and "rank 1\n" not in log


# The end of a sweep: tests/cli/test_endings.py has what is said for each signal

STUBBORN = """
    import ctypes, os, signal, subprocess, sys, time
    workers = [subprocess.Popen(["sleep", "600"]) for _ in sys.argv[2:]]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path = os.path.join(sys.argv[1], os.environ.get("RANK", "0") + ".pid")
    with open(path + ".part", "w") as file:
        print(os.getpid(), *[worker.pid for worker in workers], file=file)
    os.rename(path + ".part", path)
    while True:
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock, so no thread of it runs
"""


@pytest.mark.parametrize("interrupts", [True, False], ids=["interrupts", "kill"])
@pytest.mark.parametrize("engine", [[], slow(["--engine", "ray"]), slow(["--nproc-per-node", "2"])])
def test_a_second_interrupt_or_a_kill_leaves_nothing_running(engine, interrupts, tmp_path):
    """Of a script that ignores SIGTERM; here, of its worker too."""
    if "ray" in engine:
        pytest.importorskip("ray")
    options = [*engine, "--dtypes", "bfloat16", "--rounds", "1"]
    arguments = [str(tmp_path), *([] if engine else ["with a worker"])]
    sweep = started(tmp_path, STUBBORN, *options, "--", *arguments)
    count = 2 if "--nproc-per-node" in engine else 1
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == count)
    children = [int(pid) for path in tmp_path.glob("*.pid") for pid in path.read_text().split()]
    assert all(map(is_alive, children)) and len(children) == (count if engine else 2)
    if interrupts:
        sweep.send_signal(signal.SIGINT)
        time.sleep(1)
        sweep.send_signal(signal.SIGINT)
    else:
        sweep.kill()
    _out, err = sweep.communicate(timeout=60)
    wait_until(lambda: not any(map(is_alive, children)))
    assert not interrupts or (sweep.returncode in (130, -signal.SIGINT) and "Interrupted" in err)
    if engine:
        return
    if interrupts:
        assert sweep.returncode == 130 and "Traceback" not in err
        assert "Runs that have ended: 0." in err
        dashes = sweep.args.index("--")
        goes_on = [*sweep.args[1:dashes], "--resume", *sweep.args[dashes:]]
        assert shlex.split(err.partition("To go on: ")[2].partition("\n")[0])[1:] == goes_on
    assert read_results(tmp_path / "out").complete is False
    plan = Sweep(tmp_path / "train.py", out=tmp_path / "out", resume=True)
    plan.close()  # the lock has died with its holder
    assert plan.runs == []
