"""The command line, as a user runs it: in processes, piped and on a pseudo-terminal."""

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from quick_speed import measure_quickly
from warm_python import environment, python

from ampatch._version import __version__
from ampatch.casting import tables
from ampatch.cli import main

TRAINING = """
    import sys
    import torch
    import ampatch as amp

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
    for _ in range(10):
        loss = model(torch.ones(8, 4)).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    amp.log_metrics(accuracy=0.75)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAINING))
    return str(path)


def ampatch_command(*arguments, cwd):
    return python("-m", "ampatch", *arguments, cwd=cwd)


# sweep


def test_the_help_of_a_sweep_fits_two_screens(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.main(["sweep", "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 50
    assert shown.index("--budget") < shown.index("more options") < shown.index("--engine")


@pytest.mark.usefixtures("warm_trials")
def test_a_piped_sweep_writes_plain_lines(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(script).write_text(Path(script).read_text() + "print(sys.argv[1:])\n")
    own = ["--levels", "O0,O1", "--dtypes", "bfloat16", "--no-autocast", "--rounds", "1"]
    code = main.main(["sweep", "train.py", *own, "--", "--levels", "x", "--", "y"])
    out, err = capsys.readouterr()

    assert code == 0
    assert "\x1b" not in out + err
    table, parts, verdicts = out.split("\n\n")
    head, _line, first, second, *notes = table.splitlines()
    assert head.split()[:8] == ["level", "dtype", "step", "ms", "CPU", "ms", "speed", "memory"]
    assert head.split()[-4:] == ["accuracy", "skips", "scale", "status"]
    assert "resident set" in notes[-1]
    assert first.split()[:2] == ["O0", "float32"] and second.split()[:2] == ["O1", "bfloat16"]
    assert second.split()[6].endswith("x\N{DAGGER}")
    assert first.split()[-4:] == ["0.7500", "0/10", "1", "ok"]
    assert parts.split()[2:6] == ["data", "forward", "backward", "optimizer"]
    of_o0, of_o1, kind, checked, native_part, threads, load, scaling, recommended, written = (
        verdicts.splitlines()
    )
    assert kind == "Script: calls initialize of ampatch or apex."
    assert checked.startswith("Checked: O0 had no torch.autocast and no GradScaler, and FP32 prod")
    assert native_part == "Native part: not in force."
    assert threads.startswith("Threads: ") and "over a minute" in load and scaling.endswith(".")
    assert of_o0 == "O0 float32: the baseline"
    assert of_o1.endswith("accuracy 0.75 against 0.75, not tested (one seed)")
    assert recommended.startswith("Recommendation: No speed is recommended: that takes two rounds")
    assert written.startswith("Written to ampatch-sweep/train: report.html, plots/, summary.json")
    progress = err.splitlines()
    assert progress[0] == "[1/2] O0 seed 0: started"
    assert progress[1].startswith("[1/2] O0 seed 0: ok, 10 steps of ")
    assert progress[-1].startswith("[2/2] O1-bfloat16 seed 0: ok, 10 steps of ")
    folder = tmp_path / "ampatch-sweep/train"
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert [row["metrics"] for row in rows] == [{"accuracy": 0.75}] * 2
    log = (folder / "runs/O0.seed0.repeat0.log").read_text()
    assert log == "['--levels', 'x', '--', 'y']\n"  # behind -- all is the script's


@pytest.mark.usefixtures("warm_trials")
def test_on_a_terminal_a_sweep_has_a_line_that_moves_colours_and_each_note_once(
    script, tmp_path, monkeypatch
):
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    text = Path(script).read_text().replace("model =", "torch.manual_seed(5)\nmodel =", 1)
    Path(script).write_text(text)
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    assert main.main(["sweep", "train.py", "--levels", "O0", "--seeds", "2"]) == 0
    text = terminal.getvalue()
    moving = text.index("\r\x1b[K[1/2] O0 seed 0: started")
    assert moving < text.index("\r\x1b[K[1/2] O0 seed 0: ok, 10 steps of ")
    assert "\x1b[32mok" in text
    told = " ".join(text.split())
    assert told.count("train.py seeds itself: torch.manual_seed(5)") == 1
    assert told.count("The seed does not reach the script") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("sweep",), "the following arguments are required: SCRIPT"),
        (("sweep", "gone.py"), "gone.py: there is no such script"),
        (("sweep", "."), ".: not a file"),
        *(
            ((command, "notebook.ipynb"), "jupyter nbconvert --to script notebook.ipynb")
            for command in ("run", "sweep", "explain", "gradients")
        ),
        (("run", "MY BOOK.IPYNB"), "jupyter nbconvert --to script 'MY BOOK.IPYNB'"),
        *(
            (("sweep", "-m", name), f"-m {name}: there is no such module")
            for name in ("gone", "train.py", "train.gone", ".train", "email")
        ),
        (("explain", "-m", "gone"), "-m gone: there is no such module"),
        (("sweep", "train.py", "-m", "train"), "SCRIPT (train.py) and -m train: expected one"),
        (("sweep", "-m", "train", "--lr", "1"), "behind --: ampatch sweep -m train -- --lr 1"),
        *(
            (("sweep", "-m", "train", *words.split()), f"sweep -m train -- {words}")
            for words in ("x y", "--lr 1 x", "x --lr 1")
        ),
        (("sweep", "--seeds", "2", "train.py", "--tag", "a b"), "train.py -- --tag 'a b'"),
        (("sweep", "train.py", "--levels", "O0,O5x"), "unknown level 'O5x'"),
        (("sweep", "train.py", "--epochs", "2"), "behind --: ampatch sweep train.py -- --epochs 2"),
        (("sweep", "train.py", "--timeout", "-1"), "--timeout -1.0: must be above 0"),
        (("sweep", "train.py", "--timeout", "soon"), "argument --timeout: "),
        (
            ("sweep", "train.py", "--out", "train.py/x"),
            "train.py/x: cannot be written: Not a directory",
        ),
        (("sweep", "train.py", "--dtypes", "half"), "unknown dtype 'half'"),
        (("sweep", "train.py", "--seeds", "0"), "--seeds 0: expected at least 1"),
        (("sweep", "train.py", "--with", "O2"), "--with 'O2': expected an opt level and settings"),
        (("sweep", "train.py", "--with", "O2 loss_scale=-1"), "must be above 0"),
        (("sweep", "train.py", "--with", "O2 lr=1"), "initialize has no setting 'lr'"),
        (("sweep", "train.py", "--with", "O1 master_weights=True"), "are their own masters"),
        (("sweep", "train.py", "--metric", "acc"), "'acc': expected NAME=VALUE"),
        (("sweep", "train.py", "--metric", "acc=[("), "no regular expression"),
        (("sweep", "train.py", "--metric", r"acc=\d+"), "expected one group in parentheses"),
        (("sweep", "train.py", "--better", "acc=up"), "expected lower or higher"),
        (("sweep", "train.py", "--resume"), "there is no sweep to resume"),
        (("sweep", "train.py", "--", "--steps", "{steps}"), "give --steps N as well"),
        (("run",), "the following arguments are required: SCRIPT"),
        (("run", "gone.py"), "gone.py: there is no such script"),
        (("tables", "--rule", "quarter"), "unknown rule 'quarter'; expected one of half"),
        (("doctor", "--fast"), "unrecognized arguments: --fast"),
        (("polish",), "there is no command 'polish'"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message, script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("notebook.ipynb", "MY BOOK.IPYNB"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ampatch {__version__}\n"


# run


def test_run_is_python_with_the_variables_set(script, tmp_path):
    Path(script).write_text(
        textwrap.dedent("""
        import os, sys
        print(__name__, sys.argv, os.environ["AMPATCH_OPT_LEVEL"], os.environ["AMPATCH_DTYPE"])
        print(sys.path[0] == os.path.dirname(os.path.realpath(__file__)))
        sys.exit(5)
    """)
    )
    done = ampatch_command(
        "run",
        "--opt-level",
        "O2",
        "--dtype",
        "bfloat16",
        "train.py",
        "--opt-level",
        "mine",
        "--",
        "x",
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        "__main__ ['train.py', '--opt-level', 'mine', '--', 'x'] O2 bfloat16",
        "True",
    ]
    assert (done.returncode, done.stderr) == (5, "")


def test_run_overrides_what_the_script_gives(script, tmp_path):
    with open(script, "a") as file:
        file.write("print(next(model.parameters()).dtype)\n")
    done = ampatch_command("run", "--opt-level", "O3", "--dtype", "bfloat16", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "torch.bfloat16\n")


def test_run_takes_scripts_written_for_apex(script, tmp_path):
    pytest.importorskip("ampatch.compat.apex")
    text = Path(script).read_text().replace("import ampatch as amp", "from apex import amp")
    Path(script).write_text(text.partition("amp.log_metrics")[0] + "print(amp.__name__)\n")
    done = ampatch_command("run", "--opt-level", "O1", "--dtype", "bfloat16", script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "apex.amp\n")


def test_a_crash_in_run_reads_as_pythons_own(script, tmp_path):
    Path(script).write_text("def f():\n    raise ValueError('too late')\n\nf()\n")
    ours = ampatch_command("run", "train.py", cwd=tmp_path)
    theirs = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ours.returncode == theirs.returncode == 1
    assert ours.stderr.replace(str(tmp_path), "") == theirs.stderr.replace(str(tmp_path), "")


# tables and doctor


def test_tables_say_where_what_and_why(capsys):
    assert main.main(["tables"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name in ("WHITELIST", "BLACKLIST", "PROMOTE", "BANNED"):
        for row in getattr(tables, name):
            assert f"{row.rule.value}: {row.where}" in out
            assert " ".join(row.why.split()) in out
            assert " ".join(row.names) in out
    assert "lacks" in out


def test_tables_of_one_rule(capsys):
    assert main.main(["tables", "--rule", "banned"]) == 0
    out = capsys.readouterr().out
    assert "binary_cross_entropy" in out
    assert "half: " not in out and "WHITELIST" not in out


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ("-m ampatch --version", 0, ["ampatch 0."]),
        ("-m ampatch doctor", 1, [" cannot be imported: no GPU", "To install it: pip install"]),
        ("-m ampatch doctor --json", 1, ['"torch_error": "no GPU"']),
        ("uses.py", 1, ["ampatch.initialize needs torch, which cannot be imported: no GPU. "]),
    ],
)
def test_what_is_said_where_torch_cannot_be_imported(arguments, code, said, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no GPU')")
    (tmp_path / "uses.py").write_text("from ampatch import initialize")
    done = subprocess.run(
        [sys.executable, *arguments.split()],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code
    assert all(words in done.stdout + done.stderr for words in said)
    assert ("Traceback" in done.stderr) == (arguments == "uses.py")


def test_doctor_measures_and_reports(monkeypatch, capsys):
    measure_quickly(monkeypatch)
    monkeypatch.setenv("AMPATCH_DTYPE", "bfloat16")
    assert main.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(
        line.split(maxsplit=1) for line in lines if line.startswith(("torch  ", "AMPATCH"))
    )
    assert facts["torch"].startswith(torch.__version__.partition("+")[0])
    assert facts["AMPATCH_DTYPE"] == "bfloat16"
    assert facts["AMPATCH_OPT_LEVEL"] == "not set"
    speeds = [line.split() for line in lines if "matmul" in line]
    assert [line[:2] for line in speeds[:2]] == [["cpu", "float16"], ["cpu", "bfloat16"]]
    assert all(line[-1] in ("faster", "slower", "tie") for line in speeds[:2])
