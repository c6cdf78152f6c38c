"""The `apex` package is there for each test of this folder, and gone after it."""

import importlib

import pytest

import ampatch
from ampatch.compat import apex


@pytest.fixture(autouse=True)
def apex_package():
    apex.install()
    yield
    apex.uninstall()
    ampatch.deactivate()


@pytest.fixture
def amp(apex_package):
    """What `from apex import amp` gives."""
    return importlib.import_module("apex.amp")
