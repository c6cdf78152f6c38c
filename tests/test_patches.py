"""Replacements go in and come out exactly."""

from __future__ import annotations

import types

import pytest
import torch

from ampatch.casting.patches import PatchSet


@pytest.fixture
def patches():
    """A patch set that is undone whatever the test did."""
    patches = PatchSet()
    yield patches
    patches.undo()


def wrapped(original):
    """A replacement that can be told from what it replaces."""
    return lambda *args: original(*args)


def test_an_inherited_name_is_deleted_on_undo(patches):
    assert "add" not in vars(torch.Tensor)
    patches.replace(torch.Tensor, "add", lambda original: lambda *args: "patched")
    assert torch.ones(1).add(1) == "patched"
    patches.undo()
    assert "add" not in vars(torch.Tensor)
    assert torch.ones(1).add(1) == 2


def test_an_own_name_is_the_same_object_again(patches):
    own = vars(torch.Tensor)["norm"]
    patches.replace(torch.Tensor, "norm", wrapped)
    assert vars(torch.Tensor)["norm"] is not own
    patches.undo()
    assert vars(torch.Tensor)["norm"] is own


def test_a_name_replaced_twice_ends_at_its_first_original(patches):
    first = torch.mm
    for _ in ("inner", "outer"):
        patches.replace(torch, "mm", wrapped)
    patches.undo()
    assert torch.mm is first


def test_the_original_is_raw_and_not_bound(patches):
    class Owner:
        @staticmethod
        def static(value):
            return value

        @classmethod
        def of_class(cls, value):
            return cls, value

    static, of_class = vars(Owner)["static"], vars(Owner)["of_class"]
    assert patches.replace(Owner, "static", lambda original: original) is static
    assert patches.replace(Owner, "of_class", lambda original: original) is of_class
    assert Owner.static(3) == 3 and Owner.of_class(3) == (Owner, 3)


def test_a_module_with_getattr_gets_its_name_deleted(patches):
    """`torch._VF` finds its functions by `__getattr__`; a copy left on it would hide them."""
    assert "lstm" not in vars(torch._VF)
    patches.replace(torch._VF, "lstm", wrapped)
    assert "lstm" in vars(torch._VF)
    patches.undo()
    assert "lstm" not in vars(torch._VF)


def test_a_missing_name_is_an_error_and_changes_nothing(patches):
    with pytest.raises(AttributeError):
        patches.replace(torch, "no_such_function", wrapped)
    assert not hasattr(torch, "no_such_function") and len(patches) == 0


def test_a_replacement_that_cannot_be_made_changes_nothing(patches):
    original = torch.mm
    with pytest.raises(ZeroDivisionError):
        patches.replace(torch, "mm", lambda original: 1 / 0)
    assert torch.mm is original and len(patches) == 0


def test_what_others_put_over_ours_stays(patches, caplog):
    module = types.ModuleType("somewhere")
    module.function = lambda: "original"
    patches.replace(module, "function", lambda original: lambda: original() + ", ours")
    ours = module.function
    module.function = theirs = lambda: ours() + ", theirs"
    patches.undo()
    assert module.function is theirs
    assert "somewhere.function was replaced by somebody else" in caplog.text


def test_other_things_are_undone_in_their_turn(patches):
    order = []
    module = types.ModuleType("somewhere")
    module.name = original = object()
    patches.on_undo(lambda: order.append(module.name is original))
    patches.replace(module, "name", lambda original: object())
    patches.on_undo(lambda: order.append(module.name is original))
    patches.undo()
    assert order == [False, True]


def test_undo_twice_is_harmless(patches):
    original = torch.mm
    patches.replace(torch, "mm", wrapped)
    patches.undo()
    torch_now = torch.mm
    patches.undo()
    assert torch.mm is torch_now is original
