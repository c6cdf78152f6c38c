"""gloo's process group at the end of a process, whose script does not destroy it."""

import sys
from typing import Any

import pytest
import torch.distributed as dist

from ampatch.integrations import process_end


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """What is to run at the end of the process, in which there is a group."""
    registered: list[Any] = []
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr("atexit.unregister", lambda end: end in registered and registered.clear())
    monkeypatch.delattr(sys, "last_type", raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/place", rank=0, world_size=1)
    yield registered
    if dist.is_initialized():
        dist.destroy_process_group()


def test_gloos_threads_end_before_the_interpreter(ends, monkeypatch):
    """Not after an error: other ranks may be in the middle of a collective."""
    process_end.end_gloo_at_exit()
    process_end.end_gloo_at_exit()
    (end,) = ends
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    end()
    assert dist.is_initialized()
    monkeypatch.delattr(sys, "last_type")
    end()
    assert not dist.is_initialized()
    end()
