"""README, CONTRIBUTING, docs/ and the guides of rooms: links work, files that they name exist."""

import ast
import re
from pathlib import Path

import pytest
from pages import FENCE, PAGES
from repository import ROOT

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
