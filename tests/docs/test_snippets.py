"""Every snippet of the site's pages runs, in the order of its page.

The Python of a page is one program: its blocks share their names, and what a reader has already
(a model, an optimizer, a loader).  A block with `title="train.py"` is a file.  In blocks of the
shell each `ampatch` command runs, in the folder with these files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import DOCS
from torch import nn
from warm_python import environment, python

import ampatch
from ampatch.cli.main import main

FOLDERS = ("tutorials", "how_to", "explanation")
PAGES = [DOCS / "index.md", *(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))]
BLOCK = re.compile(r"^```(python|bash)(?: title=\"(.+?)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_RUN = ("pip",)  # programs of shell blocks


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of each block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def files() -> Iterator[tuple[str, str]]:
    """The files that pages show, for the commands of other pages too."""
    for page in PAGES:
        yield from ((title, text) for _, title, text in blocks(page) if title)


@pytest.fixture
def folder(tmp_path, monkeypatch, warm_trials):
    monkeypatch.chdir(tmp_path)
    for title, text in files():
        (tmp_path / title).write_text(text)
    return tmp_path


def beginning() -> dict[str, Any]:
    """What a reader of a how-to page has already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return {
        "torch": torch,
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.functional.cross_entropy,
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(4)],
    }


# Dynamo's own, where it cannot trace; what other tests have compiled before decides where that is.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(page, folder):
    torch.compiler.reset()
    names = beginning()
    for number, (language, title, text) in enumerate(blocks(page)):
        if language == "bash":
            run_commands(text, folder)
        elif title:
            run_command(title, folder=folder)
        else:
            exec(compile(text, f"{page.name}, block {number}", "exec"), names)
    ampatch.deactivate()


def run_commands(text: str, folder: Path) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        if program not in NOT_RUN:
            assert program == "ampatch", line
            if arguments[0] == "sweep":  # here, so that its trials are forked
                assert main(arguments) == 0
            else:
                run_command("-m", "ampatch", *arguments, folder=folder)


def run_command(*arguments: str, folder: Path) -> None:
    done = python(*arguments, cwd=folder, env=environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
