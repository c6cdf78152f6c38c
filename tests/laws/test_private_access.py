"""No test reads a private name of ours, but in `tests/native` and `tests/torch_private`."""

import ast
from collections.abc import Iterator

import pytest
from private_names import attributes_of_torch, is_private, own_names
from repository import TESTS

INSIDE = ("native", "torch_private")
"""Folders whose tests look inside, at the native part and at what torch may lack."""

OF_APEX = {"_clear_cache", "_deactivate", "_amp_state"}
"""Names that apex has, for scripts that use them: `tests/api/test_handle.py` has the handle's."""

FILES = [
    path for path in sorted(TESTS.rglob("*.py")) if path.relative_to(TESTS).parts[0] not in INSIDE
]


def ours(tree: ast.Module) -> set[str]:
    """The names of a file that are imported from ampatch: modules, and what they hold."""
    known = {"ampatch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname for alias in node.names if alias.asname and _is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            known |= {name.asname or name.name for name in node.names}
    return known


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "ampatch"


def made_by_ours(tree: ast.Module, known: set[str]) -> set[str]:
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _root(node.value) in known
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def private_reads(tree: ast.Module) -> Iterator[str]:
    """Private names of ours that a file imports, reads or patches, as far as its text shows."""
    known = ours(tree)
    assigned = made_by_ours(tree, known)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [
                part
                for alias in node.names
                if _is_ours(alias.name)
                for part in alias.name.split(".")
            ]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if _root(node) in known else []
            if _root(node) in assigned and node.attr in own_names() - attributes_of_torch():
                names = [node.attr]
        elif isinstance(node, ast.Call):
            names = list(_patched(node, known))
        else:
            continue
        yield from filter(is_private, set(names) - OF_APEX)


def _root(node: ast.AST) -> str:
    """The name that a chain of attributes and calls begins with; empty if it is none."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _patched(call: ast.Call, known: set[str]) -> Iterator[str]:
    """The names in `setattr(ours, "_name")`, and in `setattr("ampatch.module._name", ...)`."""
    words = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    texts = [word for word in words if isinstance(word, str)]
    if call.args and _root(call.args[0]) in known:
        yield from texts
    yield from (part for text in texts if text.startswith("ampatch.") for part in text.split("."))


def test_private_names_of_ours_are_not_read():
    results = {
        str(path.relative_to(TESTS)): names
        for path in FILES
        if (names := set(private_reads(ast.parse(path.read_text()))))
    }
    assert results == {}


@pytest.mark.parametrize(
    "line",
    [
        "from ampatch.casting.rules import _cast",
        "import ampatch._version",
        "ampatch.session.session._registry",
        "from ampatch import api\napi.thing()._name",
        "from ampatch.sweep import run as sweep\nsweep(1)[0]._rows",
        'from ampatch.log import logger\nmonkeypatch.setattr(logger, "_level", 3)',
        'monkeypatch.setattr("ampatch.launch.run._start", None)',
    ],
)
def test_the_check_can_see_a_private_name(line):
    assert list(private_reads(ast.parse(line)))


@pytest.mark.parametrize("line", ["module._parameters", "from torch import _C", "self._mine"])
def test_names_of_others_are_not_ours(line):
    assert not list(private_reads(ast.parse(line)))
