"""Put in, take out: every owner ends as it was found."""

import types

import pytest

from ampatch.casting.patches import PatchSet


@pytest.fixture
def patches():
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
        previous = owner.function
        returned = patches.replace(owner, "function", lambda f, word=word: lambda: f"{word} {f()}")
        assert returned is previous
    assert owner.function() == "outer inner original" and len(patches) == 2
    patches.undo()
    assert owner.function is first
    patches.undo()  # finds nothing left to do
    assert len(patches) == 0 and owner.function is first


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
