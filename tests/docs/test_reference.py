"""docs/reference/ has what docstrings and parsers say: `python docs/site/reference.py`."""

import re
import runpy
from types import SimpleNamespace

import pytest
from repository import ROOT

import ampatch

FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def reference():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/site/reference.py")))


@pytest.mark.parametrize("name", ["api", "commands", "frameworks", "sweeps"])
def test_a_page_is_as_the_source_says(name, reference):
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert reference.PART.search(text)
    assert reference.completed(text) == text, "run: python docs/site/reference.py"


def test_a_page_that_is_not_current_is_seen(reference):
    text = (FOLDER / "api.md").read_text(encoding="utf-8")
    old = text.replace("growth_interval: int = 2000", "growth_interval: int = 1999")
    assert old != text and reference.completed(old) == text


def test_each_public_name_has_its_section():
    headings = re.findall(r"^### (\w+)$", (FOLDER / "api.md").read_text(encoding="utf-8"), re.M)
    assert set(ampatch.__all__) - {"__version__"} <= set(headings)


def test_each_option_is_in_the_page_of_commands(here):
    text = (FOLDER / "commands.md").read_text(encoding="utf-8")
    for command in ("sweep", "run", "gradients", "doctor"):
        said = here(command, "--help").stdout
        section = text.split(f"\n## ampatch {command}\n")[1].split("\n## ")[0]
        options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+|-m)", said, re.M)) - {"--help"}
        assert options and all(f"`{option}" in section for option in options)
