"""No test reads a private name of ours, but in `tests/native` and `tests/torch_private`."""

import ast
from collections.abc import Iterator

import pytest
from private_names import attributes_of_torch, is_private, is_self, names_given, own_names
from repository import TESTS

INSIDE = ("native", "torch_private")
"""Folders whose tests look inside, at the native part and at what torch may lack."""

OF_OTHERS = {
    **dict.fromkeys(("_amp_state", "_clear_cache", "_deactivate", "_initialize"), "of apex"),
    **dict.fromkeys(("_is_active", "_loss_scale"), "of apex"),
    **{"_exit": "of os", "_loss": "an end of names", "_scaler": "of timm"},
}
"""Private names of ours that others have too; those of `ampatch/compat` are apex's."""


def private_reads(tree: ast.Module) -> Iterator[str]:
    """Private names of ours that a file imports, reads or patches."""
    ours = own_names("compat") - attributes_of_torch() - names_given(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            names = [node.attr]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            places = [getattr(node, "module", ""), *(alias.name for alias in node.names)]
            names = ".".join(filter(None, places)).split(".")
        elif isinstance(node, ast.Call):  # `setattr("ampatch.module._name", ...)` is one
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            names = [name for text in texts for name in str(text).split(".")]
        else:
            continue
        yield from (name for name in names if name in ours - OF_OTHERS.keys())


def test_private_names_of_ours_are_not_read():
    results = {
        path.relative_to(TESTS).as_posix(): names
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in INSIDE
        and (names := set(private_reads(ast.parse(path.read_text()))))
    }
    assert results == {}


NAME = min(filter(is_private, own_names("compat") - attributes_of_torch() - OF_OTHERS.keys()))


@pytest.mark.parametrize(
    "line",
    [
        "from ampatch.casting.rules import {}",
        "import ampatch.{}",
        "ampatch.session.session.{}",
        "from ampatch import api\napi.thing().{}",
        'monkeypatch.setattr(logger, "{}", 3)',
        'monkeypatch.setattr("ampatch.launch.run.{}", None)',
    ],
)
def test_the_check_can_see_a_private_name(line):
    assert list(private_reads(ast.parse(line.format(NAME)))) == [NAME]


@pytest.mark.parametrize("line", ["module._parameters", "from torch import _C", "self.{}"])
def test_names_of_others_are_not_ours(line):
    assert not list(private_reads(ast.parse(line.format(NAME))))
