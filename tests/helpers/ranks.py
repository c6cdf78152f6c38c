"""Processes with a gloo group between them, started once, that do what tests send them."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import ampatch

PATIENCE = 100  # seconds; a rank that waits for another in vain must not stop the tests


class Ranks:
    """`ranks(work, *args)` is what `work(rank, *args)` returned on each rank.

    `work` is a function of an importable module.  A failure on one rank fails
    the call; the processes, which may wait for each other, are then replaced.
    """

    def __init__(self, folder: str, count: int = 2) -> None:
        self._folder = folder
        self._count = count
        self._started = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, work: Callable, *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE):
                self.stop()
                raise TimeoutError(f"{work.__name__}{args}: no answer from rank {rank}")
            error, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            if error is not None:
                self.stop()
                raise RuntimeError(f"{work.__name__}{args}, rank {rank}:\n{error}")
            answers.append(value)
        return answers

    def _start(self) -> None:
        self._started += 1
        place = f"file://{self._folder}/{self._started}"
        context = torch.multiprocessing.get_context("spawn")
        for rank in range(self._count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self._count, place), daemon=True
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def stop(self) -> None:
        """End the processes; the next call starts others."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection, rank: int, count: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count)
    while True:
        work, args = pipe.recv()
        try:
            answer = None, work(rank, *args)
        except Exception:
            answer = traceback.format_exc(), None
        finally:
            ampatch.deactivate()
        file = io.BytesIO()
        torch.save(answer, file)
        pipe.send_bytes(file.getvalue())
