"""The examples in docs/diagnose.md, and the outputs shown for them."""

import re
from pathlib import Path

from pages import commands, snippets
from repository import DOCS
from warm_python import environment, python

import ampatch
from ampatch.cli.main import main

PAGE = snippets(DOCS / "diagnose.md")
FILES = {part.title: part.text for part in PAGE if part.title}
[SHOWN] = [part.text for part in PAGE if not part.language]
CONSOLE = {commands(part)[0]: part for part in PAGE if part.language == "console"}


def run(name: str, folder: Path) -> None:
    path = folder / name
    path.write_text(FILES[name])
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})


def answer(command: str, folder: Path) -> tuple[str, str]:
    """What a command of the page says, without the directory, and what the page says it does."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    done = python("-m", *command.split(), cwd=folder, env=environment(COLUMNS="100"))
    told = (done.stdout + done.stderr).replace(f"{folder}/", "")
    return told, CONSOLE[command].text.partition("\n")[2]


def test_each_file_and_command_has_a_test_here():
    """`ampatch doctor` times products for seconds; tests/cli/ runs it with quicker ones."""
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in here for name in FILES.keys() | CONSOLE.keys() - {"ampatch doctor"})
    assert all(part.title for part in PAGE if part.language == "python")


def test_the_overflow(tmp_path, capsys):
    run("overflow.py", tmp_path)
    told = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    end = "Largest finite input"  # the number after it depends on torch's generator
    assert told.split(end)[0].split() == SHOWN.split(end)[0].split()


def test_the_overflows_that_are_absorbed(tmp_path):
    """ "sqrt.py": the first steps overflow, and the last one is wrong at every scale."""
    told, shown = answer("ampatch run --debug sqrt.py", tmp_path)
    told = told[told.index("ampatch: passed over") :]
    value = re.compile(r"Largest finite input: \d+")  # depends on torch's generator
    words = [value.sub("", " ".join(text.split())).split() for text in (told, shown)]
    assert words[0] == words[1]


def test_the_casts(tmp_path, monkeypatch, capsys):
    """ "attention.py", of which the command takes ten steps."""
    command = "ampatch explain --steps 10 attention.py"
    monkeypatch.chdir(tmp_path)
    Path("attention.py").write_text(FILES["attention.py"])
    assert main(command.split()[1:]) == 0
    counts = re.compile(r"^(torch\.\S+) +(\d+) +(\d+) +(\d+) ", re.MULTILINE)
    assert counts.findall(capsys.readouterr().out) == counts.findall(CONSOLE[command].text) != []


def test_the_tiny_gradients(tmp_path):
    told, shown = answer("ampatch gradients --opt-level O0 --steps 50 small.py", tmp_path)
    assert told.splitlines()[:2] == shown.splitlines()[:2]
    advice = "A static loss scale of 16384 loses 0.0"
    assert advice in told and advice in shown


def test_the_tiny_gradients_in_half(tmp_path, monkeypatch):
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", "O1")
    with ampatch.gradient_range() as gradients:
        run("small.py", tmp_path)
    report = gradients.report()
    assert report.steps == 50 and report.scale == 128
    assert report.total.share("flushed") > 0.999
    assert report.floor == 2.0**-31 and min(report.total.bins) >= -31
