"""README, CONTRIBUTING, docs/, guides of rooms: links work, and they say what the source says."""

import ast
import configparser
import inspect
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pages
import pytest
from pages import FENCE, PAGES
from repository import ROOT

import ampatch

REPOSITORY = "https://github.com/ampatch/ampatch"
IN_REPOSITORY = re.compile(rf"{REPOSITORY}/(?:blob|raw|tree)/main/(.+)")
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")  # to a file, and to a place in it
NAMED = re.compile(r"`([\w./-]*\w/[\w./-]*)`")  # a code span with a path in it
ENGINE = ("api", "config", "session", "interop", "models", "casting", "scaling", "native")
OF_THE_REPOSITORY = ("ampatch/", "tests/", "docs/", "benchmarks/", "clients/", "examples/", ".ci/")
ROOMS = tuple(f"{path.name}/" for path in (ROOT / "ampatch").iterdir() if path.is_dir())


def named(text: str) -> set[str]:
    """Files and folders of the repository that code spans of a page name."""
    paths = set(NAMED.findall(FENCE.sub("", text)))
    rooms = {f"ampatch/{path}" for path in paths if path.startswith(ROOMS)}
    return rooms | {path for path in paths if path.startswith(OF_THE_REPOSITORY)}


def places(page: Path) -> set[str]:
    """What links may name behind `#`: headings as GitHub has them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def in_repository(page: Path) -> list[tuple[Path, str]]:
    """The file and the place of each link, relative or absolute, that stays in the repository."""
    links = []
    for link, place in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if absolute := IN_REPOSITORY.fullmatch(link):
            links.append((ROOT / absolute[1], place))
        elif "://" not in link:
            links.append((page.parent / link if link else page, place))
    return links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    links = in_repository(page)
    assert [path for path, _ in links if not path.exists()] == []
    assert [(path, place) for path, place in links if place and place not in places(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    paths = named(page.read_text(encoding="utf-8"))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_checks_know_headings_and_can_see_a_file_that_is_gone():
    assert "initialize" in places(ROOT / "docs" / "reference" / "api.md")
    assert named("`casting/tables.py`, `torch/nn`, `a`") == {"ampatch/casting/tables.py"}
    assert named("```\n`casting/tables.py`\n```") == set()


FILE = r"`(?:ampatch/)?((?:\w+/)*\w+\.py)`"
SPANS = r"((?:`[\w.]+(?<!\.py)`(?:, | and )?)+)"
BESIDE_FILE = re.compile(rf"{FILE}[:,] {SPANS}(?! in `)|{SPANS} (?:in|of) {FILE}")


def defined(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return names | {getattr(node, "id", getattr(node, "attr", "")) for node in stored}


def undefined(text: str) -> list[str]:
    """Names that stand beside a file of ampatch, which does not define them."""
    found = BESIDE_FILE.findall(" ".join(FENCE.sub("", text).split()))
    pairs = [(ROOT / "ampatch" / (by or of), spans + more) for by, spans, more, of in found]
    names = [(file, name) for file, spans in pairs for name in re.findall(r"\w+(?=[`.])", spans)]
    return [f"{file.name}: {name}" for file, name in names if name not in defined(file)]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_names_beside_a_file_are_defined_in_it(page):
    text = (ROOT / page).read_text(encoding="utf-8") + " `gone` in `scaling/steps.py`"
    assert undefined(text) == ["steps.py: gone"]


def files_in_tree(room: str) -> list[str]:
    """The files that the tree in docs/design.md names in a room."""
    tree = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("```")[3]
    part = re.search(rf"^  {room}/.*\n((?:    .*\n)+)", tree, re.MULTILINE)
    return sorted(re.findall(r"\b\w+\.py\b", part.group(1)))


@pytest.mark.parametrize("room", ENGINE)
def test_the_tree_in_the_design_names_every_file_of_a_room_once(room):
    files = {path.name for path in (ROOT / "ampatch" / room).glob("*.py")}
    assert files_in_tree(room) == sorted(files - {"__init__.py"})


GUIDED = [
    path.parent
    for path in sorted((ROOT / "ampatch").rglob("__init__.py"))
    if "Where to look first" in path.read_text(encoding="utf-8")
]
ASIDE = re.compile(r"\([^()]*\)")
BULLET = re.compile(r"^\* (.*(?:\n .*)*)", re.MULTILINE)


def where_to_look(room: Path) -> set[str]:
    """The files and folders that a room's docstring names: in each clause, after its colon."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    bullets = BULLET.findall(ASIDE.sub("", docstring or ""))
    clauses = [clause for bullet in bullets for clause in bullet.split(";")]
    return {name for part in clauses for name in re.findall(r"`(\w+)`", part.rpartition(":")[2])}


@pytest.mark.parametrize("room", GUIDED, ids=lambda room: room.name)
def test_where_to_look_names_every_file_of_a_room_and_no_other(room):
    folders = {path.parent.name for path in room.glob("*/__init__.py")}
    assert where_to_look(room) == folders | {path.stem for path in room.glob("*.py")} - {"__init__"}


# The README, as the package page shows it too: its links, its commands, its extras

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
README = pages.snippets(ROOT / "README.md")
SNIPPETS = [snippet for snippet in README if snippet.language == "bash"]
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
    lines = SETUP["metadata"]["project_urls"].strip().splitlines()
    urls = dict(line.split(" = ") for line in lines)
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
    first = next(snippet for snippet in README if snippet.language == "python")
    assert first.text.strip() in inspect.getdoc(ampatch).replace("\n    ", "\n")


# docs/reference/ has what docstrings and parsers say: `python docs/site/reference.py`

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
