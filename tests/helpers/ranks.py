"""Processes with a gloo group between them, started once, that do what tests send them."""

import importlib
import io
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing  # tensors go through a pipe as shared memory
from few_modules import search_no_other_packages
from torch_snapshot import changes, snapshot
from warm_python import Process, environment, start

import ampatch

PATIENCE = 100  # seconds; a rank that waits for another in vain must not stop the tests


def slow(*values: Any) -> Any:
    """A case that the default run leaves out: its danger is in another one, too."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Ranks:
    """`ranks(work, *args)` is what `work(rank, *args)` returned on each rank.

    `work` is a function of an importable module.  A failure on one rank fails
    the call; the processes, which may wait for each other, are then replaced.
    """

    def __init__(self, folder: str, count: int = 2) -> None:
        self._folder = folder
        self._count = count
        self._started = 0
        self._ranks: list[tuple[Process, Connection]] = []

    def __call__(self, work: Callable, *args: Any) -> list[Any]:
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((work, args))
        return [self._answer(rank, work, args) for rank in range(self._count)]

    def load(self, module: str) -> None:
        """Import it on each rank: some packages wrap functions of torch, once and for all."""
        self(importlib.import_module, module)

    def _answer(self, rank: int, work: Callable, args: tuple) -> Any:
        pipe, error, value = self._ranks[rank][1], "no answer", None
        if pipe.poll(PATIENCE):
            error, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        if error is not None:
            self.stop()
            raise RuntimeError(f"{work.__name__}{args}, rank {rank}:\n{error}")
        return value

    def _start(self) -> None:
        self._started += 1
        place = f"file://{self._folder}/{self._started}"
        for rank in range(self._count):
            here, there = socket.socketpair()
            code = f"import ranks; ranks.serve({there.fileno()})"
            with there, open(os.devnull) as nothing:
                process = start(
                    *("-c", f"import sys; sys.path[:] = {sys.path}; {code}"),
                    env=environment(),
                    **{"stdin": nothing.fileno(), "stdout": 1, "stderr": 2},
                    pass_fds=(there.fileno(),),
                )
            pipe = Connection(here.detach())
            key = bytes(multiprocessing.current_process().authkey)
            pipe.send((key, place, rank, self._count))
            self._ranks.append((process, pipe))

    def stop(self) -> None:
        for process, pipe in self._ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
            pipe.close()
        self._ranks = []


def serve(descriptor: int) -> None:
    """Be a rank: do what comes through this end of the pipe."""
    pipe = Connection(descriptor)
    key, place, rank, count = pipe.recv()
    multiprocessing.current_process().authkey = key
    torch.set_num_threads(1)
    search_no_other_packages()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count)
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:  # the tests have ended
            return
        file = io.BytesIO()
        if work is importlib.import_module:
            done = (None, work(*args) and None)
        else:
            done = _done(work, rank, args)
        torch.save(done, file)
        pipe.send_bytes(file.getvalue())


def _done(work: Callable, rank: int, args: tuple) -> tuple[str | None, Any]:
    """What went wrong, and the result; as after each test torch must be as it was."""
    before = snapshot()
    try:
        value = work(rank, *args)
    except Exception:
        return traceback.format_exc(), None
    finally:
        ampatch.deactivate()
    left = changes(before, snapshot())
    return (f"left in torch: {left}" if left else None), value
