"""Private names: of torch, where the law says and not needed to train; of ours, in no test."""

import ast
from collections.abc import Iterator
from pathlib import Path

import private_names
import pytest
from private_names import ALLOWED, ROOT, attributes_of_torch, is_home, losable, own_names, tree_of
from repository import TESTS
from warm_python import python


@pytest.fixture(scope="module")
def torchs():
    return attributes_of_torch()


@pytest.fixture(scope="module")
def met(torchs):
    own = own_names()
    return {
        path: set(private_names.private_names(tree_of(path), own, torchs))
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_private_names_of_torch_stand_in_one_place(met):
    elsewhere = {
        str(path): results
        for path, names in met.items()
        if (results := names - ALLOWED.keys()) and not is_home(path)
    }
    assert elsewhere == {}


def test_every_exception_is_used(met):
    assert ALLOWED.keys() <= set().union(*met.values())


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import functions",
        "from torch.jit import _builtins",
        "import torch._dynamo",
        "torch._C",
        'getattr(torch, "_foreach_add")',
        'register("torch._dynamo.eval_frame")',
        "optimizer._optimizer_step_pre_hooks",
        "module._apply(fn)",  # we have a function of that name
        "self._flat_weights",  # in a method that torch will call
    ],
)
def test_the_check_can_see_a_private_name(line, torchs):
    assert list(private_names.private_names(ast.parse(line), own_names(), torchs))


@pytest.mark.parametrize("line", ["self._policy", "other._policy", "__all__", '"_ampatch_holder"'])
def test_names_of_our_own_are_not_torchs(line, torchs):
    assert not list(private_names.private_names(ast.parse(line), own_names(), torchs))


def trained_without(*names: str) -> str:
    """What a training prints in a process whose torch lacks these names, or how it fails."""
    done = python("-W", "error", Path(private_names.__file__).with_name("train_without.py"), *names)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def unbroken():
    return trained_without()


@pytest.mark.parametrize("names", losable(), ids=lambda names: f"{names[0]} and {len(names) - 1}")
def test_the_loss_of_a_private_name_breaks_no_training(names, unbroken):
    """Names are lost together, and one by one where that breaks something."""
    assert unbroken.startswith("["), unbroken
    together = [name for name in names if name != "_VF"]
    if trained_without(*together) != unbroken:
        alone = {name: trained_without(name) for name in together}
        assert {name: results for name, results in alone.items() if results != unbroken} == {}


def test_recurrent_layers_have_another_way_without_their_kernels():
    """torch's recurrent layers call their kernels by this name: their numbers are not compared."""
    expected = trained_without("plain")
    assert expected.startswith("[") and trained_without("plain", "_VF") == expected


# No test reads a private name of ours, but in `tests/native` and `tests/torch_private`

INSIDE = ("native", "torch_private")
"""Folders whose tests look inside, at the native part and at what torch may lack."""

OF_OTHERS = {
    **dict.fromkeys(("_amp_state", "_clear_cache", "_deactivate", "_initialize"), "of apex"),
    **dict.fromkeys(("_is_active", "_loss_scale"), "of apex"),
    **{"_loss": "an end of names", "_scaler": "of timm"},
}
"""Private names of ours that others have too; those of `ampatch/compat` are apex's."""


def private_reads(tree: ast.Module) -> Iterator[str]:
    """Private names of ours that a file imports, reads or patches."""
    ours = own_names("compat") - attributes_of_torch() - private_names.names_given(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not private_names.is_self(node.value):
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


NAME = min(
    filter(private_names.is_private, own_names("compat") - attributes_of_torch() - OF_OTHERS.keys())
)


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
def test_the_check_can_see_a_private_name_of_ours(line):
    assert list(private_reads(ast.parse(line.format(NAME)))) == [NAME]


@pytest.mark.parametrize("line", ["module._parameters", "from torch import _C", "self.{}"])
def test_names_of_others_are_not_ours(line):
    assert not list(private_reads(ast.parse(line.format(NAME))))
