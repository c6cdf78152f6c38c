"""Put in, take out: every owner ends as it was found."""

from __future__ import annotations

import types

import pytest
import torch

from ampatch.casting.patches import PatchSet
from ampatch.log import set_verbosity


@pytest.fixture
def patches():
    set_verbosity(1)
    patches = PatchSet()
    yield patches
    patches.undo()


@pytest.fixture
def owner():
    owner = types.ModuleType("somewhere")
    owner.function = lambda: "original"
    return owner


def test_replace_gives_the_original_to_make_and_back(patches, owner):
    first = owner.function
    assert patches.replace(owner, "function", lambda old: lambda: f"new {old()}") is first
    assert owner.function() == "new original"
    assert len(patches) == 1


def test_a_name_replaced_twice_ends_at_its_first_original(patches, owner):
    first = owner.function
    for word in ("inner", "outer"):
        patches.replace(owner, "function", lambda old, word=word: lambda: f"{word} {old()}")
    assert owner.function() == "outer inner original"
    patches.undo()
    assert owner.function is first


def test_undo_leaves_no_copy_of_an_inherited_method(patches):
    """`Tensor.mul` lives on the C base class; undo must not move it."""
    assert "mul" not in vars(torch.Tensor)
    patches.replace(torch.Tensor, "mul", lambda original: lambda *args: "patched")
    assert torch.ones(1).mul(1) == "patched"
    patches.undo()
    assert "mul" not in vars(torch.Tensor)
    assert torch.ones(1).mul(2) == 2


def test_static_and_class_methods_are_put_back_raw(patches):
    class Owner:
        @staticmethod
        def static():
            return 1

        @classmethod
        def of_class(cls):
            return cls

    before = dict(vars(Owner))
    for name in ("static", "of_class"):
        patches.replace(Owner, name, lambda original: lambda *args: None)
    patches.undo()
    assert all(vars(Owner)[name] is before[name] for name in ("static", "of_class"))
    assert Owner.static() == 1 and Owner.of_class() is Owner


def test_a_replacement_by_other_code_is_left_alone(patches, owner, caplog):
    patches.replace(owner, "function", lambda old: lambda: "ours")

    def theirs():
        return "theirs"

    owner.function = theirs
    with caplog.at_level("WARNING", logger="ampatch"):
        patches.undo()
    assert owner.function is theirs
    assert "somewhere.function was replaced by other code" in caplog.text


def test_a_deleted_name_is_not_brought_back(patches, owner, caplog):
    patches.replace(owner, "function", lambda old: lambda: "ours")
    del owner.function
    patches.undo()
    assert not hasattr(owner, "function")


def test_a_missing_name_raises_and_changes_nothing(patches, owner):
    with pytest.raises(AttributeError):
        patches.replace(owner, "absent", lambda old: old)
    assert len(patches) == 0 and not hasattr(owner, "absent")


def test_an_exception_in_make_changes_nothing(patches, owner):
    first = owner.function

    def make(old):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        patches.replace(owner, "function", make)
    assert len(patches) == 0 and owner.function is first


def test_actions_run_in_their_turn_newest_first(patches, owner):
    first, seen = owner.function, []
    patches.on_undo(lambda: seen.append(("first", owner.function is first)))
    patches.replace(owner, "function", lambda old: lambda: "ours")
    patches.on_undo(lambda: seen.append(("last", owner.function is first)))
    patches.undo()
    assert seen == [("last", False), ("first", True)]


def test_a_second_undo_does_nothing(patches, owner):
    seen = []
    patches.on_undo(lambda: seen.append(1))
    patches.undo()
    owner.function = replaced_since = lambda: "since"
    patches.undo()
    assert seen == [1] and owner.function is replaced_since and len(patches) == 0
