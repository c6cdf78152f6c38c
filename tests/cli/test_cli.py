"""The command line: its help, what it refuses, and whose arguments are whose."""

import argparse
import shlex
import subprocess
import sys
import types

import pytest
from run_command import write
from warm_python import environment

import ampatch
from ampatch.cli import main
from ampatch.cli.script_options import add_program


def test_the_help_of_a_sweep_fits_two_screens(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.main(["sweep", "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 50
    assert shown.index("--budget") < shown.index("more options") < shown.index("--engine")


def test_arguments_after_two_dashes_are_the_scripts(tmp_path, here, warm_trials):
    write(tmp_path / "train.py", "import sys\nprint(sys.argv[1:])\n")
    done = here(*"sweep --levels=O0 train.py --out here -- --levels x -- y".split())
    log = tmp_path / "here/runs/O0.seed0.repeat0.log"
    assert log.read_text() == "['--levels', 'x', '--', 'y']\n"
    assert done.returncode == 1  # no run went well
    assert "never steps an optimizer of torch.optim, nor calls initialize" in done.stderr


# What is refused

NO_SCRIPT = "the following arguments are required: SCRIPT"
WATCHES = "does not see.\nExpected the script that it starts; ampatch sweep has --nproc-per-node."
WRONG = [
    ("polish", "there is no command 'polish'.\nExpected one of sweep, "),
    ("swep train.py", "there is no command 'swep'. Did you mean \"sweep\"?"),
    ("train.py", "To run a script: ampatch run train.py"),
    ("--verison", 'unrecognized arguments: --verison. Did you mean "--version"?'),
    ("--verison run train.py", 'Did you mean "--version"?'),
    ("--opt-level O1 run train.py", "--opt-level. Options of a command come after it."),
    ("doctor --jsn", 'unrecognized arguments: --jsn. Did you mean "--json"?'),
    ("tables --rule quarter", "unknown rule 'quarter'; expected one of half"),
    # what is to run
    *((command, NO_SCRIPT) for command in ("run", "sweep", "explain", "gradients")),
    *(
        (f"{command} ''", "the name of the script is empty: an unset variable?")
        for command in ("run", "sweep", "explain", "gradients", "run -m", "sweep -m")
    ),
    *((f"{command} gone.py", "there is no such script") for command in ("sweep", "gradients")),
    ("explain .", ".: not a file"),
    ("sweep notebook.ipynb", "jupyter nbconvert --to script notebook.ipynb"),
    ("run 'MY BOOK.IPYNB'", "jupyter nbconvert --to script 'MY BOOK.IPYNB'"),
    *(
        (f"{command} -m {name}", f"-m {name}: there is no such module")
        for command in ("run", "sweep", "explain")
        for name in ("gone", "train.py", "train.gone", ".train", "package")
    ),
    ("run -m", "argument -m: expected one argument"),
    ("sweep train.py -m train", "SCRIPT (train.py) and -m train: expected one"),
    # a launcher
    ("run --auto torchrun --standalone train.py",
     "Expected the launcher first: torchrun [OPTIONS] -m ampatch run SCRIPT"),
    ("run accelerate launch train.py", "accelerate launch [OPTIONS] -m ampatch run SCRIPT"),
    ("run deepspeed train.py", "deepspeed [OPTIONS] --module ampatch run SCRIPT"),
    ("run bin/torchrun.exe train.py", "torchrun [OPTIONS] -m ampatch run SCRIPT"),
    ("run -m accelerate.commands.launch x.py", "accelerate launch [OPTIONS] -m ampatch run SCRIPT"),
    ("run fabric.py", "fabric.py: there is no such script"),  # only named like a launcher
    ("gradients -m torch.distributed.run train.py", WATCHES),
    ("sweep torchrun -- train.py", WATCHES),
    # options
    ("run --fast train.py", "unrecognized arguments: --fast"),
    ("run -opt-level O1 train.py", ': -opt-level. Did you mean "--opt-level"?'),
    ("run --opt O1 train.py", "unrecognized arguments: --opt"),
    ("explain --opt-level O9 train.py", "argument --opt-level: O9: not understood. Expected O0"),
    ("run --dtype=float32 train.py", "for FP32 use opt level O0"),
    ("run --loss-scale abc train.py", 'Expected "dynamic" or a positive number, such as 128'),
    ("run --opt-level o1 train.py", '(the letter O, not the digit zero). Did you mean "O1"?'),
    ("run --loss-scale=1e60 train.py", "argument --loss-scale: 1e60: not understood"),
    ("run --loss-scale", "argument --loss-scale: expected one argument"),
    ("run --stop-at any train.py", "--stop-at goes with --debug"),
    *(
        (f"run --auto --opt-level {level} train.py", f"--auto with opt level {level}: this level")
        for level in ("O2", "O3", "O5")
    ),
    ("explain --auto --opt-level O2 train.py", "--auto with opt level O2: this level"),
    ("gradients --steps 0 train.py", "0 is not above 0"),
    ("gradients --steps few train.py", "--steps: 'few': expected a whole number"),
    ("gradients --lost 100 train.py", "100 is not at least 0 and below 100"),
    ("gradients --lost much train.py", "--lost: 'much': expected percent, a number"),
    ("sweep -m train --lr 1", "Put -- before the script's own arguments: ampatch sweep -m train"),
    ("sweep train.py --rounds 1 --lr=1", "arguments: ampatch sweep train.py --rounds 1 -- --lr=1"),
    ("sweep --lr 1 train.py", "arguments: ampatch sweep SCRIPT -- ARGUMENTS"),
    ("sweep train.py --epochs 3 --out x",
     "--epochs 3.\nPut -- before the script's own arguments: ampatch sweep train.py --out x -- --"),
    ("sweep train.py --seed 3", '--seed 3. Did you mean "--seeds"?\nPut -- before'),
    ("sweep train.py --metric val_logloss",
     r"'val_logloss': expected NAME=REGEX, such as 'val_logloss=val_logloss: (\S+)'"),
    ("sweep train.py --better loss", "'loss': expected NAME=WAY"),
    ("sweep train.py --levels o1", 'O0, O1, O2, O3. Did you mean "O1"?'),
    ("tune train.py --opt-level O1 --dtypes float16 --out x",
     '"--dtype"?\nPut -- before the script\'s own arguments: ampatch tune train.py --opt-level '
     "O1 --out x -- --dtypes float16"),
    ("tune train.py --resume",
     "--opt-level: expected O1, O2 or O3, the level to repair. ampatch-tune/train holds no"),
    ("sweep train.py --timeout soon", "argument --timeout: invalid float value: 'soon'"),
    ("sweep train.py --timeout -1", "--timeout -1.0: must be above 0"),
    ("sweep train.py --levels O0,O7", "unknown level 'O7'.\nExpected some of O0, O1, O2, O3."),
    ("sweep train.py --levels O0 --out train.py/x", "cannot be written: Not a directory"),
    ("sweep train.py --levels O0 --out train.py", "train.py: cannot be written: File exists"),
    ("sweep train.py --out ''", "--out '': expected the name of a folder"),
    ("tune train.py --opt-level O1 --out=", "--out '': expected the name of a folder"),
    ("tune train.py --opt-level O1 --seeds 3", "--seeds 3: expected at least 4"),
    ("sweep train.py --resume --overwrite", "--resume and --overwrite: give one of them"),
    ("sweep train.py --dtypes bfloat", 'Did you mean "bfloat16"?'),
    ("sweep train.py --seeds 0", "--seeds 0: expected at least 1"),
    ("sweep train.py --with O2", "--with 'O2': expected an opt level and settings"),
    ("sweep train.py --with 'O2 lr=1'", "initialize has no setting 'lr'"),
    ("sweep train.py --with 'O1 master_weights=True'", "all weights stay FP32"),
    ("sweep train.py --metric 'acc=[('", "not a regular expression"),
    (r"sweep train.py --metric 'acc=\d+'", "expected one group in parentheses"),
    ("sweep train.py --resume", "there is no sweep to resume"),
    ("sweep train.py -- --steps {steps}", "give --steps N as well"),
]  # fmt: skip


def test_the_command_alone_prints_its_help(here):
    alone = here()
    assert alone.returncode == 0 and alone.stdout == here("--help").stdout != ""


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command_line_is_refused(line, message, tmp_path, here):
    """In one message, that names nothing internal, and before anything starts."""
    for name in ("train.py", "notebook.ipynb", "MY BOOK.IPYNB", "package/__init__.py"):
        write(tmp_path / name, "")
    done = here(*shlex.split(line))
    assert (done.returncode, done.stdout) == (2, "")
    usage, _, said = done.stderr.partition("error: ")
    assert usage.startswith("usage: ampatch ")
    assert message in said
    assert "invalid _" not in said and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", main.NAMES)
def test_each_help_documents_the_exit_codes(command, here):
    done = here(command, "--help")
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "Exit status: " in shown and "2 for a wrong command line" in shown
    assert "130 after Ctrl-C" in shown


@pytest.mark.parametrize(
    "line, of_script",
    [
        ("run train.py --dtype x", "--dtype x"),
        ("run --dtype float16 train.py -m y", "-m y"),
        ("run --dtype=float16 -m train -m y", "-m y"),
        ("run --auto -m train -- x", "-- x"),
        ("gradients --lost 1 --json train.py --lost 2", "--lost 2"),
        # the rank, which torch's old launcher hands over
        ("--local-rank=1 run --opt-level O1 train.py --lr 1", "--local-rank=1 --lr 1"),
        ("run --local_rank=1 --opt-level=O1 train.py --lr 1", "--local_rank=1 --lr 1"),
        ("run --opt-level O1 --local-rank=1 -m train --lr 1", "--local-rank=1 --lr 1"),
        ("--local_rank=1 explain train.py --lr 1", "--local_rank=1 --lr 1"),
    ],
)
def test_the_scripts_arguments(line, of_script, tmp_path, here):
    write(tmp_path / "train.py", "import sys\nprint(sys.argv[1:])\n")
    done = here(*line.split())
    assert f"{of_script.split()}\n" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ("-m ampatch --version", 0, [f"ampatch {ampatch.__version__}\n"]),
        ("-m ampatch doctor", 1, [" cannot be imported: no GPU", "To install it: pip install"]),
        ("-m ampatch doctor --json", 1, ["torch cannot be imported: no GPU"]),
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


def test_shtab_is_told_where_a_shell_completes_files(monkeypatch):
    """It makes the completion from the parsers, and gives this to the arguments that are files."""
    added = []

    class Parser(argparse.ArgumentParser):
        def add_argument(self, *names, **options):
            added.append(super().add_argument(*names, **options))
            return added[-1]

    monkeypatch.setitem(sys.modules, "shtab", types.SimpleNamespace(FILE="files"))
    add_program(Parser())
    assert [action.dest for action in added if getattr(action, "complete", "") == "files"] == [
        "script"
    ]
