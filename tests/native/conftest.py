"""What the tests of the native part share."""

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no choice of the caller's."""
    monkeypatch.setenv("AMPATCH_CACHE", str(tmp_path))
    monkeypatch.delenv("AMPATCH_NATIVE", raising=False)
    return tmp_path
