"""Exact counts per training step, free of noise: operators, casts, host syncs, calls, bytes.

Operators are the calls that reach a dispatch mode, below autograd.  A cast is a
`_to_copy` to another dtype; a batched cast (`_foreach_copy_`) is one operator and
no cast.  A host sync is a `_local_scalar_dense`: the host reads a number.  Python calls are
the functions written in Python that are entered, of torch, of ampatch and of the script.
With AMPATCH_NATIVE=0 it counts the Python way where the native part is built.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from measuring import table
from systems import AUTOCAST, FP32, FUSED, HALF, SGD, How, make_step
from tasks import SMALL, TASKS, TO_REMEMBER, Task
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ampatch as amp

SYSTEMS = [FP32, HALF, AUTOCAST, "O1", "O2", "O3"]
OPTIMIZERS = {"ordinary": SGD, "fused": FUSED}
WARM_UP = 12  # steps: a model at O2 looks once more at its weights in its tenth forward


class Counts(NamedTuple):
    """Per training step."""

    operators: int
    casts: int
    syncs: int
    calls: int


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = self.casts = self.syncs = 0

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operators += 1
        if function is torch.ops.aten._to_copy.default:
            self.casts += out.dtype is not args[0].dtype
        self.syncs += function is torch.ops.aten._local_scalar_dense.default
        return out


def count(
    name: str, system: str, optimizer: str = "ordinary", dtype: torch.dtype = torch.bfloat16
) -> Counts:
    """What one step of a task under a system does, after some steps to warm up."""
    torch.manual_seed(0)
    try:
        return count_step(make_step(TASKS[name](), system, How(dtype, OPTIMIZERS[optimizer])))
    finally:
        amp.deactivate()


def count_step(step: Callable[[], None]) -> Counts:
    """The counts of one call, after some calls to warm up."""
    for _ in range(WARM_UP):
        step()
    with _Counter() as counter:
        step()
    return Counts(counter.operators, counter.casts, counter.syncs, calls(step))


def calls(step: Callable[[], Any]) -> int:
    """Python functions entered in one step."""
    events: list[str] = []
    gc.disable()  # what it calls belongs to no step
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return events.count("call")


def report(options: Namespace) -> Iterator[str]:
    """A row per model and optimizer."""
    dtype, rows = getattr(torch, options.dtype), []
    for name in options.models or SMALL:
        for optimizer in OPTIMIZERS:
            # fused SGD leaves half weights as they are on the CPU
            skipped = ("O3", HALF) if optimizer == "fused" else ()
            cells = [
                "none"
                if system in skipped
                else " / ".join(map(str, count(name, system, optimizer, dtype)))
                for system in SYSTEMS
            ]
            rows.append([name, optimizer, *cells])
    yield table(["", "optimizer", *SYSTEMS], rows)


# Memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensor storages made while it is on; a run repeats to the byte.

    A storage counts from its making by an operator to its death, and with the size that it has
    then: FSDP2 frees what it has gathered by making a storage empty.  `peak` is the most that was
    alive after an operator since it was last set.  Scratch space inside a kernel is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                local = value.to_local() if hasattr(value, "to_local") else value
                self._note(local.untyped_storage())
        self.peak = max(self.peak, self.now)
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key))

    @property
    def now(self) -> int:
        """What is alive."""
        alive = [storage for ref in list(self._alive.values()) if (storage := ref()) is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())


MEMORY_SYSTEMS = [AUTOCAST, FP32, "O1", "O2", "O3", HALF]
TO_COUNT = (*TO_REMEMBER, "MLP 1024", "ResNet-like", "small GPT", "LSTM 256")
BEFORE_THE_PEAK = 2  # steps until all optimizer state is there


def adam(parameters: Any, **more: Any) -> torch.optim.Optimizer:
    """Of which a step makes state of twice the size of the weights."""
    return torch.optim.Adam(parameters, lr=1e-3, **more)


def peak_bytes(
    build: Callable[[], Task], system: str, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> int:
    """The most bytes of tensors alive at once during a training step with Adam.

    Weights, optimizer state, gradients, activations and the batch all count; `more` are further
    arguments of Adam.
    """
    how = How(dtype, functools.partial(adam, **more))
    gc.collect()
    gc.disable()  # what only the collector frees counts, and at the same place each time
    try:
        with LiveBytes() as live:
            torch.manual_seed(0)
            step = make_step(build(), system, how)
            for _ in range(BEFORE_THE_PEAK):
                step()
            live.peak = live.now
            step()
            return live.peak
    finally:
        amp.deactivate()
        gc.enable()


def memory(options: Namespace) -> Iterator[str]:
    """A row per model: megabytes of the reference, and the ratio of each system's to it."""
    rows = []
    for name in options.models or TO_COUNT:
        peaks = [
            peak_bytes(TASKS[name], system, getattr(torch, options.dtype))
            for system in MEMORY_SYSTEMS
        ]
        ratios = [f"{peak / peaks[0]:.3f}" for peak in peaks]
        rows.append([name, f"{peaks[0] / 2**20:.2f}", *ratios])
    yield table(["", "MB", *MEMORY_SYSTEMS], rows)
