"""Registers the `apex` package before a test module imports its client, as `ampatch run` does."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors on shared cores
os.environ.setdefault("AMPATCH_NATIVE", "0")  # `ampatch run` compiles nothing first
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is to be downloaded

import pytest
import torch

import ampatch
from ampatch.compat import apex

apex.install()


@pytest.fixture(autouse=True)
def fresh():
    """Each test starts from one seed, and ends with torch as it was."""
    torch.manual_seed(0)
    yield
    ampatch.deactivate()


@pytest.fixture(params=["O1", "O2"])
def opt_level(request) -> str:
    """The opt levels that scripts use."""
    return request.param
