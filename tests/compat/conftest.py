"""The `apex` package is there for each test of this folder, and gone after it."""

import pytest

import ampatch
from ampatch.compat import apex


@pytest.fixture(autouse=True)
def apex_package():
    apex.install()
    yield
    apex.uninstall()
    ampatch.deactivate()
