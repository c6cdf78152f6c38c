"""Tests of integrations search the modules of the frameworks for names bound early, as users do."""

import pytest

from ampatch.casting import places

FRAMEWORKS = {"accelerate", "ignite", "lightning", "pytorch_lightning", "timm", "transformers"}


@pytest.fixture(autouse=True)
def frameworks_are_searched():
    """Other tests pass over these modules: `tests/conftest.py`."""
    left_out = places.SKIPPED_PACKAGES & FRAMEWORKS
    places.SKIPPED_PACKAGES.difference_update(left_out)
    yield
    places.SKIPPED_PACKAGES.update(left_out)
