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


def test_a_name_replaced_twice_ends_at_its_first_original(patches, owner):
    first = owner.function
    for word in ("inner", "outer"):
        found = owner.function
        made = patches.replace(owner, "function", lambda old, word=word: lambda: f"{word} {old()}")
        assert made is found
    assert owner.function() == "outer inner original" and len(patches) == 2
    patches.undo()
    assert owner.function is first
    patches.undo()  # finds nothing left to do
    assert len(patches) == 0 and owner.function is first


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


def test_what_other_code_has_replaced_or_deleted_is_left_alone(patches, owner, caplog):
    owner.another = theirs = [].append
    for name in ("function", "another"):
        patches.replace(owner, name, lambda old: lambda: "ours")
    owner.function = theirs
    del owner.another
    with caplog.at_level("WARNING", logger="ampatch"):
        patches.undo()
    assert owner.function is theirs and not hasattr(owner, "another")
    assert "somewhere.function was replaced by other code" in caplog.text


def test_what_fails_changes_nothing(patches, owner):
    def make(old):
        raise ValueError("no")

    first = owner.function
    with pytest.raises(AttributeError):
        patches.replace(owner, "absent", lambda old: old)
    with pytest.raises(ValueError, match="no"):
        patches.replace(owner, "function", make)
    assert len(patches) == 0 and owner.function is first and not hasattr(owner, "absent")


def test_actions_run_in_their_turn_newest_first(patches, owner):
    first, seen = owner.function, []
    patches.on_undo(lambda: seen.append(("first", owner.function is first)))
    patches.replace(owner, "function", lambda old: lambda: "ours")
    patches.on_undo(lambda: seen.append(("last", owner.function is first)))
    patches.undo()
    assert seen == [("last", False), ("first", True)]
