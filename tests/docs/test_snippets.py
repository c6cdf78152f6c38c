"""Every snippet of the documentation runs, in the order of its page.

The Python of a page is one program: its blocks share their names, and what a reader has already
(a model, an optimizer, a loader).  A block with a title is a file.  Commands run in the folder of
these files.  The pages in `distributed/` have programs for two ranks.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from page_readers import of_any_page, of_docstrings, run_on_rank
from pages import FENCE, PAGES, SHELL, Snippet, commands, examples_in_docstrings, snippets
from repository import DOCS, EXAMPLES, ROOT, TESTS
from sweep_made import made_sweep
from warm_python import environment, python

import ampatch
from ampatch.cli.main import main
from ampatch.sweep import read_results

RUN_ELSEWHERE = {
    "diagnose.md": "docs/test_docs_diagnose.py",
    "frameworks": "integrations/test_law_of_frameworks.py",
    "from_apex.md": "docs/test_docs_from_apex.py",
}
"""Pages and folders whose snippets have tests of their own."""

ON_RANKS = "distributed"
"""A folder of pages."""

NOT_RUN = {
    "ampatch build": "tests/native/test_building.py builds",
    "ampatch doctor": "it times products for seconds; tests/cli/ runs it with quicker ones",
    "ampatch tune": "minutes; tests/tune/ runs it, short",
    "benchmarks/on_gpu.sh": "tests/benchmarks/test_one_runner.py runs it, small",
    "export": "it sets a variable of the reader's shell",
    "mkdocs serve": "it runs until it is stopped; .ci/run builds the site",
    "mypy": ".ci/run runs it",
    "pip install": "it needs the package index; .ci/run installs",
    "python -m pytest": "it is what runs these tests",
    "python train.py": "the reader's script; tests/launch/test_run.py runs one in that way",
    "python benchmarks/run.py --list": "tests/benchmarks/test_one_runner.py runs it",
    "python benchmarks/run.py accuracy": "minutes; tests/benchmarks/ runs it, short",
    "python benchmarks/run.py training": "minutes; tests/benchmarks/ runs what it measures",
    "python clients/run.py": "it needs the package index; tests/docs/test_clients.py",
    "python3 -m venv": ".ci/run makes an environment",
    "python3.11 -m venv": ".ci/run makes an environment",
    "pyright": ".ci/run runs it",
    "ruff": ".ci/run runs it",
    "srun": "it needs an allocation of SLURM; what it starts are other tests' sweeps",
}
"""Beginnings of commands that no test runs as they are, and why."""

SHORTER = {"ampatch sweep": ("--levels", "O0,O2", "--seeds", "1", "--steps", "4")}
"""More arguments for commands in the default tests; the slow ones run them as they are."""


def is_slow(command: str) -> bool:
    """Whether a command trains for long, or starts processes that import torch."""
    return "examples/" in command or command.startswith("torchrun")


def is_run(command: str) -> bool:
    """Whether a command runs at all."""
    return not command.startswith(tuple(NOT_RUN))


def commands_of(page: Path) -> list[str]:
    """Those that run, each once."""
    parts = [part for part in snippets(page) if part.language in SHELL]
    every = [command for part in parts for command in commands(part)]
    return [command for command in dict.fromkeys(every) if is_run(command)]


def python_of(page: Path) -> list[Snippet]:
    """The program of a page."""
    on_ranks = page.parent.name == ON_RANKS  # there torchrun starts files
    parts = [part for part in snippets(page) if part.language == "python"]
    return [part for part in parts if not (on_ranks and part.title)]


OWN = [page for page in PAGES if not {page.name, page.parent.name} & RUN_ELSEWHERE.keys()]
PROGRAMS = [pytest.param(page, parts, id=page.stem) for page in OWN if (parts := python_of(page))]
QUICK = [(page, line) for page in OWN for line in commands_of(page) if not is_slow(line)]
LINES = [line for page in OWN for line in commands_of(page)]
SLOW = dict.fromkeys(line for line in LINES if is_slow(line) or line.startswith(tuple(SHORTER)))


EVERY = [part for page in PAGES for part in snippets(page)]
INTEGRATIONS = ("accelerate", "ignite", "lightning/__init__", "timm", "transformers")
OF_FUNCTIONS = [
    pytest.param(text, id=name)
    for module in ("initialize", "training")
    for name, text in examples_in_docstrings(ROOT / "ampatch" / "api" / f"{module}.py")
    if name != "observe"  # its list of methods looks like one
]
OPTION = re.compile(r"--[\w-]+")


@pytest.fixture
def folder(tmp_path, monkeypatch, warm_trials):
    """The current one, with the files that the pages show and what else their commands name."""
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for file in snippets(page):
            if file.title:
                (tmp_path / file.title).parent.mkdir(exist_ok=True)
                (tmp_path / file.title).write_text(file.text)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


def run_python(parts: list[Snippet], names: dict[str, Any]) -> None:
    """A file runs by itself; the other snippets go on with the names."""
    for part in parts:
        scope = {"__name__": "__main__"} if part.title else names
        exec(compile(part.text, str(part), "exec"), scope)


# Dynamo's own, where it cannot trace; what other tests have compiled before decides where that is.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("page, parts", PROGRAMS)
def test_the_python_of_a_page_runs(page, parts, folder, request):
    if page.parent.name == ON_RANKS:
        texts = [part.text for part in parts]
        ranks = request.getfixturevalue("ranks")
        first, second = ranks(run_on_rank, texts, str(folder))
        assert first == second
        assert all(losses[-1] < losses[0] for losses, _ in first)
    else:
        torch.compiler.reset()
        for name in ("train", "train-2"):
            made_sweep(folder / "ampatch-sweep" / name)
        run_python(parts, of_any_page())
    ampatch.deactivate()


def run_command(command: str, folder: Path, more: tuple[str, ...] = ()) -> str:
    """What it prints."""
    program, *arguments = command.split()
    arguments += more
    if arguments[0] == "sweep":  # here, so that its trials are forked
        assert main(arguments) == 0
        return ""
    if program != "python":
        arguments = ["-m", {"torchrun": "torch.distributed.run"}.get(program, program), *arguments]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = python(*arguments, cwd=folder, env=environment(**variables), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


[TUTORIAL] = [row for row in QUICK if "train_half.py --seeds" in row[1]]
"""Its results are looked at, in a test of its own."""


@pytest.mark.parametrize(
    "page, command", [pytest.param(*row, id=row[1]) for row in QUICK if row != TUTORIAL]
)
def test_a_command_runs(page, command, folder, capsys):
    [more] = [more for name, more in SHORTER.items() if command.startswith(name)] or [()]
    printed = run_command(command, folder, more)
    for part in snippets(page):
        if part.language == "console" and command in commands(part):
            assert printed.split() == part.text.partition("\n")[2].split()


def test_the_sweep_of_the_tutorial_gives_what_it_promises(folder):
    """A recommendation, and for each row whether its loss differs from O0's."""
    run_command(TUTORIAL[1], folder)
    results = read_results(folder / "sweep")
    assert results.recommendation and not results.recommendation.startswith("Not known")
    assert [row.opt_level for row in results.rows] == ["O0", "O1", "O2", "O3", "autocast"]
    assert not any(row.outcome == "untested" for row in results.rows)


@pytest.mark.slow
@pytest.mark.parametrize("command", SLOW)
def test_a_command_runs_as_it_is(command, folder):
    run_command(command, folder)


@pytest.mark.parametrize("text", OF_FUNCTIONS)
def test_the_example_in_a_docstring_runs(text):
    names = of_docstrings()
    if "initialize(" not in text:
        ampatch.initialize(names["model"], names["optimizer"])
        names["loss"] = names["model"](torch.ones(2, 8)).sum()
    exec(compile(text, "docstring", "exec"), names)


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_the_example_of_an_integration_is_that_of_its_page(module):
    name = module.partition("/")[0]
    page = (DOCS / "frameworks" / f"{name}.md").read_text(encoding="utf-8").splitlines()
    path = ROOT / "ampatch" / "integrations" / f"{module}.py"
    examples = [text for name, text in examples_in_docstrings(path) if not name]
    assert examples
    for text in examples:
        assert [line for line in text.splitlines() if line not in page] == []


def test_each_snippet_of_python_is_in_a_program():
    """But for a file that a command starts."""
    for page in OWN:
        run = python_of(page)
        for part in snippets(page):
            if part.language == "python" and part not in run:
                assert any(part.title in command.split() for command in commands_of(page)), part


def test_each_command_of_a_snippet_is_run_or_listed():
    for part in EVERY:
        if part.language in SHELL:
            assert commands(part), part
        for command in commands(part) if part.language in SHELL else ():
            starts_known = command.startswith(("ampatch ", "python examples/", "torchrun "))
            assert starts_known or not is_run(command), f"{part}: list {command} in NOT_RUN"


def test_other_snippets_are_no_code():
    for part in EVERY:
        if part.language == "py":
            assert part.page.parent.name == "reference"  # a signature
        elif part.language not in ("python", *SHELL):
            assert part.language in ("", "text", "mermaid"), part
            assert not re.search(r"^(\$|ampatch|python|pip|import|from) ", part.text, re.M), part


def test_the_lists_of_exceptions_are_short():
    """What they name is there."""
    every = [command for part in EVERY if part.language in SHELL for command in commands(part)]
    for first in NOT_RUN:
        assert any(command.startswith(first) for command in every), first
    for page, test in RUN_ELSEWHERE.items():
        assert page in (TESTS / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_options_that_there_are(page, capsys):
    """Those that no test runs, too, and `ampatch sweep train.py --seeds 3` in a line of text.

    Options after the script are its own.
    """
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    parts = [part for part in snippets(page) if part.language in SHELL]
    text += "".join(f"`{command}`" for part in parts for command in commands(part))
    for name, rest in re.findall(r"`ampatch (\w+)([^`]*)`", text):
        if name != "COMMAND":
            own = re.split(r" -- |\w\.py " if name == "run" else " -- ", rest)[0]
            with pytest.raises(SystemExit):
                main([name, "--help"])
            assert set(OPTION.findall(own)) <= set(OPTION.findall(capsys.readouterr().out))
