"""Tests of integrations search the modules of the frameworks for names bound early, as users do."""

from __future__ import annotations

import pytest

from ampatch.casting import rebind

FRAMEWORKS = {"accelerate", "ignite", "lightning", "pytorch_lightning", "timm", "transformers"}


@pytest.fixture(autouse=True)
def frameworks_are_searched():
    """Other tests pass over these modules: `tests/conftest.py`."""
    left_out = rebind.NOT_SEARCHED & FRAMEWORKS
    rebind.NOT_SEARCHED.difference_update(left_out)
    yield
    rebind.NOT_SEARCHED.update(left_out)
