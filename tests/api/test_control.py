"""Casting under the user's control: `disable_casts`, `precision`, `patch_scope`."""

import pytest
import torch

import ampatch

X = torch.randn(4, 4)
H = torch.bfloat16


@pytest.fixture
def o1():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)


def now() -> tuple:
    return torch.mm(X, X).dtype, torch.exp(X.to(H)).dtype


CASTING = (H, torch.float32)
PLAIN = (torch.float32, H)


def test_blocks_nest_and_restore_what_they_found(o1):
    assert now() == CASTING
    with ampatch.disable_casts():
        assert now() == PLAIN
        with ampatch.disable_casts():
            assert now() == PLAIN
        assert now() == PLAIN  # not switched on by the inner one
    assert now() == CASTING
    with ampatch.precision("float"):
        assert now() == (torch.float32, torch.float32)
        with ampatch.precision("half"):
            pass
        with ampatch.disable_casts():
            assert now() == PLAIN
        assert now() == (torch.float32, torch.float32)
    with ampatch.precision("half"):
        assert now() == (H, H)
    assert now() == CASTING


def test_blocks_are_decorators_and_reenter(o1):
    @ampatch.disable_casts()
    def plain(depth: int) -> list:
        """Its docstring."""
        return [now()] + (plain(depth - 1) if depth else [])

    assert plain(2) == [PLAIN] * 3 and now() == CASTING
    assert plain.__name__ == "plain" and plain.__doc__ == "Its docstring."


# Scope
