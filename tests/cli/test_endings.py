"""How the commands end: closed pipes, Ctrl-C, what cannot be written."""

import os

import pytest
from warm_python import environment, python, start

from ampatch.cli.ending import end_quietly

TRAINING = """
import torch
model = torch.nn.Linear(2, 2)
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


@pytest.mark.parametrize(
    "arguments", [["tables"], ["run", "chatty.py"], ["explain", "training.py"]]
)
def test_a_reader_that_has_enough_ends_a_command_quietly(arguments, tmp_path):
    (tmp_path / "chatty.py").write_text("while True:\n    print('line')\n")
    (tmp_path / "training.py").write_text(TRAINING)
    reader, writer = os.pipe()
    os.close(reader)
    with open(tmp_path / "err", "w+") as err, open(os.devnull) as nothing:
        streams = {"stdin": nothing.fileno(), "stdout": writer, "stderr": err.fileno()}
        process = start("-m", "ampatch", *arguments, cwd=tmp_path, env=environment(), **streams)
        os.close(writer)
        status = process.wait(120)
        err.seek(0)
        said = err.read()
    assert (status, "Traceback" in said or "BrokenPipe" in said) == (141, False)


def test_two_interrupts_end_a_command_with_one_line():
    code = """
import atexit, os, signal, sys, time
from ampatch.cli.ending import end_quietly

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

atexit.register(interrupt)
sys.exit(end_quietly(interrupt, "ampatch tables"))
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, "ampatch tables: interrupted.\n")


def test_what_cannot_be_written_is_one_line_and_other_errors_stay(capsys):
    def fail(*error):
        raise OSError(*error)

    missing = 13, "Permission denied", "there/report.html"
    assert end_quietly(lambda: fail(*missing), "ampatch report") == 1
    assert capsys.readouterr().err == "ampatch report: there/report.html: Permission denied.\n"
    with pytest.raises(OSError, match="a fault of ours"):
        end_quietly(lambda: fail("a fault of ours"), "ampatch doctor")


@pytest.mark.parametrize(
    ("own", "signal", "code", "said"),
    [
        ("sweep train.py --levels O0", "INT", 130, "Interrupted"),
        ("tune train.py --opt-level O1", "TERM", 143, "Ended by SIGTERM"),
    ],
)
def test_a_command_that_is_ended_says_how_it_goes_on(own, signal, code, said, tmp_path):
    (tmp_path / "train.py").write_text("")
    own = own.split()
    words = [*own, "--overwrite", "--", "--lr", "1", "--overwrite"]
    program = f"""
import os, signal, sys, time
from ampatch.cli import main, native_first
from ampatch.sweep import Sweep

def run(*rest):
    os.kill(os.getpid(), signal.SIG{signal})
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
Sweep.run, native_first.build = run, lambda: None
sys.orig_argv = ["python", "/v/bin/ampatch", *{words}]
sys.exit(main.main({words}))
"""
    done = python("-c", program, cwd=tmp_path)
    goes_on = (
        f"python /v/bin/ampatch {' '.join(own)} --resume --out ampatch-{own[0]}/train -- --lr 1"
    )
    assert done.returncode == code
    assert f"{said}. To go on: {goes_on} --overwrite\n" in done.stderr
