"""`ampatch run`: scripts and modules started as Python would, options, exit codes, children."""

import contextlib
import io
import logging
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import warm_python
from ranks import slow
from run_command import ampatch_run, write
from warm_python import environment

import ampatch
from ampatch.cli import main
from ampatch.compat import apex as compat

LEGACY = """
    import torch
    from apex import amp

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(8, 4)).pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    print(model.weight.dtype, model(torch.ones(1, 4)).dtype, scale)
"""
NO_AMP = "print('started')\n"


def without_note(err):
    """What a script wrote: these scripts never call `initialize`, which `run` says at the end."""
    said = re.compile(r"^ampatch: .* never called ampatch.initialize: .*\n\Z", re.MULTILINE)
    return said.sub("", err)


# Messages, which apex printed

OVERFLOWING = """
    import logging, sys
    import torch
    from apex import amp
    SETUP
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=VERBOSITY)
    for scale in (float("inf"), float("inf"), 1.0):
        with amp.scale_loss(model(torch.ones(1, 4)).sum() * scale, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LINES = ["SGD skipped a step (1 of 1 since", "SGD skipped a step (2 of 2 since"]


@pytest.mark.parametrize(
    "setup, verbosity, shown",
    [
        ("", 1, "plain"),
        ("", 0, "none"),
        ("logging.getLogger('ampatch').setLevel(logging.WARNING)", 1, "none"),
        ("logging.basicConfig(format='own: %(message)s')", 1, "none"),  # warnings and above
        ("logging.basicConfig(level='INFO', format='own: %(message)s')", 1, "own"),
        ("logging.getLogger('ampatch').addHandler(logging.NullHandler())", 1, "none"),
        (
            "logging.getLogger('ampatch').setLevel(logging.INFO); "
            "logging.getLogger('ampatch').addHandler(logging.StreamHandler(sys.stderr))",
            *(1, "plain"),
        ),
    ],
)
def test_messages_are_shown_where_the_program_shows_none(setup, verbosity, shown, tmp_path):
    script = OVERFLOWING.replace("SETUP", setup).replace("VERBOSITY", str(verbosity))
    write(tmp_path / "train.py", script)
    done = ampatch_run(tmp_path, "train.py", AMPATCH_NATIVE="0")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    for line in LINES:
        [*lines] = [told for told in said if line in told]
        assert len(lines) == (shown != "none")
        assert all(told.startswith("own: ") == (shown == "own") for told in lines)
    assert "lacks" not in done.stderr and not done.stdout
    assert any("Initialized:" in told for told in said) == (shown != "none")


def test_the_package_shows_messages_and_ends_it(capsys, monkeypatch):
    logger = logging.getLogger("ampatch")
    monkeypatch.setattr(logging.root, "handlers", [])
    for _ in range(2):
        compat.install()
        logger.info("one")
        logger.debug("none")
        compat.uninstall()
        assert logger.level == logging.NOTSET and not logger.handlers
        logger.info("none")
    assert capsys.readouterr().err == "one\n" * 2


# Variables


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("AMPATCH_OPT_LEVEL", "O7", "Expected O0, O1, O2 or O3, or O4 and O5, which are"),
        ("AMPATCH_DTYPE", "float32", "Expected float16 or bfloat16"),
        ("AMPATCH_LOSS_SCALE", "much", 'Expected "dynamic" or a positive number'),
        ("AMPATCH_ENABLED", "perhaps", "expected 0 (off) or 1"),
    ],
)
def test_a_wrong_variable_is_named(name, value, expected, tmp_path, monkeypatch, here):
    write(tmp_path / "train.py", NO_AMP)
    monkeypatch.setenv(name, value)
    done = here("run", "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name}={value}" in done.stderr and expected in done.stderr

    model = torch.nn.Linear(2, 2)
    for start in (lambda: ampatch.initialize(model), ampatch.init):
        with pytest.raises(ValueError, match=f"^{name}={value}: ") as error:
            start()
        assert expected in str(error.value)


# Exit codes and tracebacks


@pytest.fixture
def both(tmp_path, here):
    """What `run` does in this process, and what Python itself does, with paths from `tmp_path`."""

    def compare(*arguments):
        theirs = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment(), capture_output=True,
            text=True,
        )  # fmt: skip
        ours = here("run", *arguments)
        ours.stderr = without_note(ours.stderr)
        # python -m shows its own frames, before Python 3.11 with their lines
        frames = r'  File "(<frozen runpy>|.*/runpy\.py)".*\n(    .*\n)*'
        theirs.stderr = re.sub(frames, "", theirs.stderr)
        return [
            (done.returncode, done.stdout, done.stderr.replace(f"{tmp_path}/", ""))
            for done in (ours, theirs)
        ]

    return compare


ENDINGS = (
    *("sys.exit()", "sys.exit(3)", "sys.exit('no data')", "sys.exit((1, 2))"),
    *("raise SystemExit(True)", "raise KeyError('gone')"),
)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        *((f"import sys\n\ndef f():\n    {ending}\n\nf()\n", "train.py --x 1")
          for ending in ENDINGS),
        ("import sys\n\n1 / 0\n", "-m train --x 1"),
        ("import sys\nsys.exit('no data')\n", "-m train"),
        ("def f(:\n", "train.py"),
        ("try:\n    {}['a']\nexcept KeyError as e:\n    raise OSError from e\n", "train.py"),
        ("import gone_for_good\n", "train.py"),
        ("import broken\n", "train.py"),
        ("", "-m carrying.train"),
    ],
    ids=[*ENDINGS, "module", "module message", "syntax", "chain", "import", "broken", "package"],
)  # fmt: skip
def test_it_ends_as_python_would(text, how, tmp_path, both):
    write(tmp_path / "train.py", text)
    write(tmp_path / "broken.py", "\nraise RuntimeError('at import')\n")
    write(tmp_path / "carrying/__init__.py", "import gone_for_good\n")
    write(tmp_path / "carrying/train.py", NO_AMP)
    ours, theirs = both(*how.split())
    assert ours == theirs


def test_an_ending_from_a_shell(tmp_path):
    bye = "import atexit, sys\natexit.register(lambda: print(__file__[-8:]))\nsys.exit('no data')"
    write(tmp_path / "train.py", bye)
    done = ampatch_run(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (1, "train.py\n")
    assert without_note(done.stderr) == "no data\n"


def test_interrupted(tmp_path):
    endless = "os.kill(os.getpid(), signal.SIGINT)\nwhile True:\n    pass\n"
    write(tmp_path / "train.py", f"import os, signal\n{endless}")
    done = ampatch_run(tmp_path, "train.py")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert set(re.findall('File "(.*)", line', done.stderr)) == {str(tmp_path / "train.py")}


# What the script sees


SEEN = """
    import sys, os  # it has a --dtype of its own
    print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]))
    print(__file__ == os.path.abspath(__file__), __spec__ and __spec__.name, __package__)
    print(sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""


@pytest.mark.parametrize("how", ["train.py", "sub/train.py", "-m train", "-m sub.train", "-m sub"])
def test_it_sees_what_python_would_show(how, tmp_path, both):
    for name in ("train", "sub/train", "sub/__main__"):
        write(tmp_path / f"{name}.py", SEEN)
    write(tmp_path / "sub/__init__.py", "")
    ours, theirs = both(*how.split(), "-m", "--dtype", "x", "--")
    assert ours == theirs
    assert ours[0] == 0


@pytest.mark.parametrize(
    ("options", "printed", "replaced"),
    [
        ("--opt-level O1 --dtype bfloat16", "torch.float32 torch.bfloat16 8.0",
         "opt_level O2 -> O1, dtype float16 -> bfloat16"),
        ("--opt-level=O3 --loss-scale 4", "torch.float16 torch.float32 4.0",
         "opt_level O2 -> O3, loss_scale 8.0 -> 4.0"),
        ("--opt-level O2 --dtype float16 --loss-scale 8", "torch.float32 torch.float32 8.0", None),
        ("--loss-scale dynamic", "torch.float32 torch.float32 65536.0",
         "loss_scale 8.0 -> dynamic"),
    ],
)  # fmt: skip
def test_options_override_the_scripts_and_one_line_says_so(options, printed, replaced, tmp_path):
    write(tmp_path / "train.py", LEGACY)
    done = ampatch_run(tmp_path, *options.split(), "train.py", AMPATCH_OPT_LEVEL="O2")
    said = f"ampatch: replaced settings of the script: {replaced}\n" if replaced else ""
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, printed, said)


FORK = """
import os
pid = os.fork()
if pid == 0:
    import ampatch, torch
    ampatch.initialize(torch.nn.Linear(2, 2), verbosity=0)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (NO_AMP, [], True),
        (NO_AMP + "import sys; sys.exit(3)\n", [], False),
        (NO_AMP, ["--auto", "--opt-level", "O0"], False),
        (NO_AMP + "import ampatch; ampatch.init(enabled=False)\n", [], False),
        (NO_AMP + "import ampatch; ampatch.init()._deactivate()\n", [], False),
        (NO_AMP + FORK, [], False),
    ],
    ids=["plain", "failed", "auto", "init", "ended", "fork"],
)
def test_a_script_that_never_calls_initialize_is_told(text, options, said, tmp_path, here):
    write(tmp_path / "train.py", text)
    *_, last = here("run", *options, "train.py").stderr.splitlines() or [""]
    assert ("train.py never called ampatch.initialize" in last) == said
    assert ("ampatch run --auto train.py" in last) == said


CATCHES_ALL = """
import torch
def main():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    INITIALIZE
    model(torch.ones(1, SIZE))
    optimizer.step()
try:
    main()
except Exception:
    pass
"""


@pytest.mark.parametrize(
    ("options", "initialize", "size", "said"),
    [
        (["--auto"], "", 3, True),
        (["--auto"], "", 2, False),
        ([], "model, optimizer", 3, True),
        ([], "model, optimizer", 2, False),
        ([], "model", 3, False),  # as for evaluation
    ],
)
def test_a_script_that_hides_its_errors_is_told(options, initialize, size, said, tmp_path, here):
    call = f"import ampatch; ampatch.initialize({initialize}, verbosity=0)" if initialize else ""
    text = CATCHES_ALL.replace("INITIALIZE", call).replace("SIZE", str(size))
    write(tmp_path / "train.py", text)
    done = ampatch_run(tmp_path, *options, "train.py") if options else here("run", "train.py")
    note = "ampatch: train.py: no optimizer step was seen. If it should train, look for errors "
    assert done.returncode == 0
    assert done.stderr.endswith(f"{note}that it catches.\n") is said


TORCH_AMP = """
import torch
with torch.autocast("cpu", enabled=False):
    pass
"""


@pytest.mark.parametrize("beside", [False, True])
def test_a_script_with_torchs_amp_is_told_what_is_right_for_it(beside, tmp_path, here):
    write(tmp_path / "train.py", "import helps\n" if beside else TORCH_AMP)
    write(tmp_path / "helps.py", TORCH_AMP)
    last = here("run", "--opt-level", "O1", "train.py").stderr.splitlines()[-1]
    assert "train.py never called ampatch.initialize: it ran as it is, and --opt-level" in last
    assert "ampatch sweep train.py" in last and "from_torch_amp.md" in last
    assert "--auto" not in last
    assert (Path(__file__).parents[2] / "docs/tutorials/from_torch_amp.md").is_file()


MISPLACED = [
    ("run train.py --opt-level O9", "--opt-level O9", "run --opt-level O9 train.py"),
    ("run --dtype bfloat16 train.py 1 --opt-level=O9 --lr 2 --debug", "--opt-level=O9 --debug",
     "run --opt-level=O9 --debug --dtype bfloat16 train.py 1 --lr 2"),
    ("run -m train --auto", "--auto", "run --auto -m train"),
    ("explain train.py --json --steps 3", "--json --steps 3", "explain --json --steps 3 train.py"),
    ("gradients train.py --lost", "--lost", "gradients --lost train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named", "right"), MISPLACED)
def test_options_behind_the_script_are_named(line, named, right, tmp_path, here):
    write(tmp_path / "train.py", NO_AMP)
    said = here(*line.split()).stderr
    assert (
        f": {named} went to the script. Options of ampatch come before it: ampatch {right}" in said
    )


def test_options_that_the_script_names_are_its_own(tmp_path, here):
    text = "import argparse\nparser = argparse.ArgumentParser()\n"
    text += "parser.add_argument('--opt-level')\nprint(parser.parse_args())\n"
    write(tmp_path / "train.py", text)
    done = here("run", "train.py", "--opt-level", "O1")
    assert "Namespace(opt_level='O1')" in done.stdout and "went to the script" not in done.stderr


# Processes


CHILDREN = """
    import torch
    from apex import amp

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.tensor([float(index)]), amp.__name__

    def work(rank, queue):
        queue.put((rank, amp.__name__, __name__))

    if __name__ == "__main__":
        loader = torch.utils.data.DataLoader(
            Numbers(), num_workers=1, multiprocessing_context="forkserver"
        )
        print([(batch.item(), name[0]) for batch, name in loader])
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(work, args=(queue,), nprocs=1)
        print(queue.get())
"""


def with_apex_path(folder, *arguments, behind=()):
    """`PYTHONPATH="$(ampatch apex-path)" python ARGUMENTS`; other folders follow in the path."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main.main(["apex-path"]) == 0
    variables = environment()
    path = [told.getvalue().strip(), *map(str, behind), variables["PYTHONPATH"]]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    return warm_python.python(*arguments, cwd=folder, env=variables)


TODAYS = {"__init__": "", "contrib/kernels": "found = 'behind'\n"}


@pytest.mark.parametrize(
    ("start", "how", "installed"),
    [
        (ampatch_run, "train.py", {}),
        slow(ampatch_run, "-m train", {}),
        slow(with_apex_path, "train.py", {}),
        slow(ampatch_run, "train.py", TODAYS),
    ],
)
def test_processes_of_the_script_find_apex_too(start, how, installed, tmp_path):
    """Today's apex has no amp; its other modules stay reachable."""
    for name, text in installed.items():
        write(tmp_path / "apex" / f"{name}.py", text)
    kernels = "from apex.contrib.kernels import found\n" if installed else ""
    write(tmp_path / "train.py", kernels + textwrap.dedent(CHILDREN))
    done = start(tmp_path, *how.split())
    assert done.returncode == 0, done.stderr
    batches = [(float(index), "apex.amp") for index in range(4)]
    assert done.stdout.splitlines() == [f"{batches}", "(0, 'apex.amp', '__mp_main__')"]
    assert done.stderr.count("takes the place of") == bool(installed)


@pytest.mark.parametrize(
    "first, others, printed",
    [
        ("import apex.amp", {}, "ampatch 0.1+ampatch nothing True"),
        ("from apex.optimizers import FusedAdam", {}, "ampatch 0.1+ampatch nothing True"),
        ("", TODAYS, "behind True"),
        ("", {"__init__": "", "amp": "initialize = None\n"}, "nothing False"),
    ],
    ids=["amp", "optimizers", "todays", "with amp"],
)
def test_the_folder_for_pythonpath_gives_what_run_gives(first, others, printed, tmp_path):
    for name, text in others.items():
        write(tmp_path / "installed" / "apex" / f"{name}.py", text)
    write(
        tmp_path / "train.py",
        f"""
        import importlib.metadata, importlib.util
        version = importlib.metadata.version("apex")  # transformers asks for it, and
        assert importlib.util.find_spec("apex")  # for this, before it imports apex
        {first}
        import apex
        from apex import amp
        from ampatch.compat.apex import amp as ours
        if {first!r}:
            print(apex.__spec__.origin, version, end=" ")
        try:
            from apex.contrib.kernels import found
        except ImportError:
            found = "nothing"
        print(found, amp.initialize is ours.initialize)
        """,
    )
    done = with_apex_path(tmp_path, "train.py", behind=[tmp_path / "installed"])
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
    assert done.stderr.count("takes the place of") == ("behind" in printed)


def test_what_the_folder_for_pythonpath_has_is_no_other_apex(monkeypatch):
    monkeypatch.syspath_prepend(Path(ampatch.__file__).parent / "compat" / "apex_path")
    assert [name for _, name, _ in pkgutil.iter_modules(sys.path[:1])] == ["apex"]
    compat.uninstall()
    compat.install()  # raises where another one would be hidden
    assert compat.is_installed() and compat.hidden_folders() == []
    compat.uninstall()


OWN = """
    import inspect, pickle, sys
    import apex
    from apex import Own

    def work(rank):
        from apex import Own
        print(rank, Own.__module__)

    if __name__ == "__main__":
        assert apex.__file__.startswith(sys.path[0]) and inspect.getsource(Own)
        assert pickle.loads(pickle.dumps(Own())).__class__ is Own
        import torch
        torch.multiprocessing.spawn(work, nprocs=1)
        if hasattr(apex, "__path__"):
            from apex.parallel import Worker
            import apex.optimizers
            assert apex.optimizers.OWN and Worker.__module__ == "apex.parallel"
"""


@pytest.mark.parametrize("is_package", [False, slow(True)])
def test_a_module_apex_of_the_users_own_stays(is_package, tmp_path):
    package = {
        "apex/__init__": "from .core import Own\n",
        "apex/core": "class Own: pass\n",
        "apex/parallel": "class Worker: pass\n",
        "apex/optimizers": "OWN = True\n",
    }
    for name, text in (package if is_package else {"apex": "class Own: pass\n"}).items():
        write(tmp_path / f"{name}.py", text)
    write(tmp_path / "train.py", OWN)
    done = ampatch_run(tmp_path, "--auto", "train.py")
    of_own = "apex.core" if is_package else "apex"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"0 {of_own}\n", "")


DDP = """
    import gc
    import torch
    from apex import amp
    from apex.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    seen = set()

    class Seen(torch.nn.Linear):
        def forward(self, x):
            seen.add(self.weight.dtype)
            return super().forward(x)

    model = Seen(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model = DistributedDataParallel(model)
    loss = model(torch.full((8, 4), float(rank + 1))).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    weights = [torch.empty(8) for _ in range(2)]
    torch.distributed.all_gather(weights, model.module.weight.float().flatten())
    if rank == 0:
        print(torch.equal(*weights), *seen, loss.dtype, flush=True)
    # What holds a gloo group at exit makes torch 2.13 abort now and then, without ampatch too.
    del model, loss, scaled_loss, optimizer
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def launched(folder, *arguments):
    """`python -m torch.distributed.ARGUMENTS -m ampatch run ...`."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_two_ranks_under_torchrun(tmp_path):
    write(tmp_path / "train.py", DDP)
    line = "torch.distributed.run --nproc-per-node 2 --master-port 0 --rdzv-backend c10d "
    line += "--rdzv-endpoint localhost:0 -m ampatch run --dtype bfloat16 train.py"
    done = launched(tmp_path, *line.split())
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]  # on torch 2.10 gloo writes on this stream too
    assert last == "True torch.bfloat16 torch.float32"  # half within the forward


@pytest.mark.slow
def test_under_torchs_old_launcher(tmp_path):
    """It hands the script its rank as an argument."""
    half = "torch.nn.Linear(2, 2)(torch.eye(2)).dtype"
    write(tmp_path / "train.py", f"import sys, torch\nprint({half}, *sys.argv[1:], flush=True)\n")
    line = "torch.distributed.launch --nproc-per-node 1 --standalone -m ampatch run --auto "
    done = launched(tmp_path, *line.split(), "--dtype", "bfloat16", "train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.bfloat16 --local-rank=0 --lr 1\n"
