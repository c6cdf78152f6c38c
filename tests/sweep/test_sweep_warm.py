"""Trials that are forked see of themselves what those see that start cold."""

import json
import re

import pytest
from sweep_runs import INITIALIZE, TRAINING, is_alive, written
from warm_python import environment, python

from ampatch.sweep.execution import warm_starts

pytestmark = pytest.mark.skipif(
    not warm_starts.IS_POSSIBLE, reason="trials are forked on Linux alone"
)

SCRIPT = """
    import sys
    IS_FULL = "rich.style" in sys.modules  # before any import of the script
    import json, logging, multiprocessing, os, pickle, random, signal, threading, warnings
    import numpy, rich.style, torch
    import ampatch
    from torch.utils.data import DataLoader

    class Own:
        def __init__(self, value=0):
            self.value = value
        def __eq__(self, other):
            return self.value == other.value

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return torch.tensor([index, torch.utils.data.get_worker_info().seed % 1000])

    def square(own):
        return own.value ** 2, __name__, os.getcwd(), sys.argv

    def seen():
        main = sys.modules["__main__"]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("AMPATCH_")}
        threads = [threading.active_count(), torch.get_num_threads()]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            worker = pool.map(square, [Own(3)])
        draws = random.random(), random.randint(0, 9), torch.rand(3).tolist()
        return {
            "environment": environment,
            "folder": [os.getcwd(), os.listdir(os.environ["AMPATCH_TRIAL_DIR"])],
            "arguments": sys.argv[1:],
            "path": sys.path,
            "flags": [repr(sys.flags), sys.warnoptions, repr(warnings.filters)],
            "hash": hash("a text"),
            "streams": [
                (s.name, s.encoding, s.errors, s.isatty(), s.fileno(), s.line_buffering)
                for s in (sys.stdin, sys.stdout, sys.stderr)
            ],
            "stdin": sys.stdin.read(),
            "files": sorted(os.listdir("/proc/self/fd")),
            "signals": [repr(signal.getsignal(n)) for n in (2, 13, 17)],
            "blocked": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
            "main": {n: repr(v) for n, v in vars(main).items() if n.startswith("__")},
            "pickled": pickle.loads(pickle.dumps(Own(2))) == Own(2) and __name__,
            "worker": worker,
            "loader": [b.tolist() for b in DataLoader(Data(), num_workers=2)],
            "draws": [*draws, numpy.random.random(2).tolist()],
            "threads": threads,
            "parent": repr(multiprocessing.parent_process()),
        }

    if __name__ == "__main__":
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        settings = {"opt_level": "O1", "dtype": "bfloat16"}
        model, optimizer = ampatch.initialize(model, optimizer, **settings)
        with ampatch.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        print("full", IS_FULL)
        print(json.dumps(seen()))
        print("to the other stream", file=sys.stderr)
        if os.environ["AMPATCH_OPT_LEVEL"] == "O1":
            sys.exit(7)
"""


def test_a_script_sees_of_itself_what_a_cold_start_shows(tmp_path):
    """The first trial of a sweep starts cold, the second is forked."""
    options = ["--no-autocast", "--seeds", "1", "--rounds", "1", "--dtypes", "bfloat16"]
    words = ["--out", "out", "--levels", "O0,O1", *options, "--", "--seed", "{seed}"]
    command = ["-m", "ampatch", "sweep", written(tmp_path, SCRIPT), *words]
    ended = python(*command, cwd=tmp_path, env=environment(MY_OWN="yes"), timeout=900)
    seen, runs = [], []
    for stem, is_forked, code in (("O0", False, 0), ("O1-bfloat16", True, 7)):
        path = tmp_path / f"out/runs/{stem}.seed0.repeat0"
        assert path.with_name(path.name + ".json").exists(), ended.stderr
        runs.append(json.loads(path.with_name(path.name + ".json").read_text()))
        full, shown, *rest = path.with_name(path.name + ".log").read_text().splitlines()
        assert (full, rest) == (f"full {is_forked}", ["to the other stream"])
        assert runs[-1]["exit_code"] == code
        seen.append(json.loads(shown))
    cold, forked = seen
    assert {n: (cold[n], forked[n]) for n in cold if cold[n] != forked[n]} == {}
    cold, forked = (run["measured"] for run in runs)
    losses = (measured["losses"]["0"]["values"] for measured in (cold, forked))
    assert next(losses) == pytest.approx(next(losses), rel=0.02)  # from the same weights
    assert forked["memory_bytes"] == pytest.approx(cold["memory_bytes"], rel=0.2)


ENDS = f"""
    {TRAINING}
    {INITIALIZE}
    print(os.getpid(), os.getppid(), flush=True)
    step(), step()
    if level == "O1":
        os.kill(os.getpid(), 9)
    if level == "O2":
        time.sleep(1000)
"""


def test_what_is_forked_ends_as_it_should_and_so_does_the_server(tmp_path):
    """By a signal, by the sweep at its time limit; and with the sweep the server."""
    options = ["--levels", "O0,O1,O2,O3", "--dtypes", "bfloat16", "--no-autocast", "--rounds", "1"]
    command = ["-m", "ampatch", "sweep", written(tmp_path, ENDS), "--out", "out", *options]
    ended = python(*command, "--timeout", "30", cwd=tmp_path, timeout=900)
    runs, pids = {}, {}
    for level in ("O0", "O1-bfloat16", "O2-bfloat16", "O3-bfloat16"):
        path = tmp_path / f"out/runs/{level}.seed0.repeat0"
        runs[level] = json.loads(path.with_name(path.name + ".json").read_text())
        printed = path.with_name(path.name + ".log").read_text()
        pids[level] = [*map(int, re.search(r"^(\d+) (\d+)$", printed, re.M).groups())]
    assert [run["exit_code"] for run in runs.values()] == [0, -9, 143, 0], ended.stderr
    assert runs["O2-bfloat16"]["ended_by"] == "timed out: after 30 s"
    assert runs["O2-bfloat16"]["measured"]["losses"]["0"]["values"]
    forked = [pids[level] for level in ("O1-bfloat16", "O2-bfloat16", "O3-bfloat16")]
    [server] = {parent for _, parent in forked}
    assert server != pids["O0"][1]
    assert not any(is_alive(pid) for pid in (server, *(pid for pid, _ in forked)))


OBSTACLES = {
    "'' 4": "import random\nrandom.getrandbits(24), random.getrandbits(64), random.getrandbits(1)",
    "'' None": "import torch\ntorch.rand(1)",
    "'' None ": "import numpy\nnumpy.random.rand()",
    "touched a device, or started a thread' 0": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "imports ampatch or apex, which": "try:\n    import apex\nexcept ImportError:\n    pass",
    "a library imports ampatch": "from ampatch import initialize",
    "VARIABLE is set in the script": "",
}


@pytest.mark.parametrize("said", OBSTACLES)
def test_trials_start_cold_where_a_fork_would_differ(said, tmp_path):
    """What raises is left out, with all that it has imported."""
    (tmp_path / "library.py").write_text(OBSTACLES[said])
    (tmp_path / "broken.py").write_text("import beside\nraise RuntimeError")
    (tmp_path / "beside.py").write_text("import os\nos.environ['OF_LIBRARY'] = 'yes'")
    variables = {"OF_LIBRARY": "yes", **({"VARIABLE": "of script"} if "VARIABLE" in said else {})}
    code = f"""if True:
        import sys
        from ampatch.sweep.execution import fork_server, seeding
        seeding.seed_everything(0)
        obstacle = fork_server.import_modules(["broken", "library", "of_the_script"], {variables})
        print(repr(obstacle), seeding.count_random_draws(), "")
        print("library" in sys.modules, "broken" in sys.modules, "beside" in sys.modules)
    """
    path = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    ended = python("-c", code, cwd=tmp_path, env=environment() | path)
    shown, imported = ended.stdout.splitlines()
    assert said in shown, ended.stderr
    assert imported == "True False False"
