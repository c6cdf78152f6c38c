"""The README, as the package page shows it too: its links, its commands, its extras."""

import configparser
import inspect
import re

import pages
from pages import FENCE
from repository import ROOT
from test_pages import IN_REPOSITORY, LINK, REPOSITORY

import ampatch

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
SNIPPETS = [snippet for snippet in pages.snippets(ROOT / "README.md") if snippet.language == "bash"]
COMMANDS = [command.split() for part in SNIPPETS for command in pages.commands(part)]


def commands(program: str) -> list[list[str]]:
    """The arguments of each call of a program."""
    return [rest for name, *rest in COMMANDS if name == program]


def test_every_link_is_absolute_for_a_package_page_has_no_files():
    links = [link for link, _ in LINK.findall(FENCE.sub("", TEXT))]
    assert [link for link in links if "://" not in link] == []
    assert len(TEXT.partition("](")[0].split()) < 500, "a reader finds a link early"
    assert any(IN_REPOSITORY.fullmatch(link) for link in links)
    assert len(TEXT.splitlines()) <= 110, "it is short"


def test_the_addresses_are_those_of_the_repository():
    urls = dict(
        line.split(" = ") for line in SETUP["metadata"]["project_urls"].strip().splitlines()
    )
    for url in [SETUP["metadata"]["url"], *urls.values()]:
        assert url.startswith(REPOSITORY)
        page = IN_REPOSITORY.fullmatch(url)
        assert page is None or (ROOT / page[1]).exists()


def test_pip_installs_extras_that_exist_and_the_first_command_is_a_sweep():
    asked = [rest for rest in commands("pip") if rest[0] == "install"]
    assert ["install", "."] in asked  # from a clone: it is on no index
    named = {name for rest in asked for name in re.findall(r"\.\[(\w+)\]", " ".join(rest))}
    assert named == {"sweep", "test"}
    assert named < set(SETUP["options.extras_require"])
    assert set(re.findall(r"`\[(\w+)\]`", TEXT)) == set(SETUP["options.extras_require"])
    assert commands("ampatch")[0] == ["sweep", "examples/digits.py", "--budget", "4"]


def test_version_and_date_of_the_release_are_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    ((version, date), *_) = re.findall(r"^## \[([\d.]+)\] - (.+)$", changes, re.MULTILINE)
    assert version == ampatch.__version__
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    assert re.findall(r"^date-released: (.+)$", citation, re.MULTILINE) == [date]
    assert f"\nrepository-code: {REPOSITORY}\n" in citation
    assert f"\n[{version}]: {REPOSITORY}/releases/tag/v{version}\n" in changes
    assert f"\n[Unreleased]: {REPOSITORY}/compare/v{version}...HEAD\n" in changes


def test_help_of_the_package_has_the_first_example():
    first = next(
        snippet for snippet in pages.snippets(ROOT / "README.md") if snippet.language == "python"
    )
    assert first.text.strip() in inspect.getdoc(ampatch).replace("\n    ", "\n")
