"""Training speed and memory on a GPU beside torch.autocast + GradScaler.

For each model, half dtype and system, each in a process of its own: milliseconds per step and items
per second (median of the rounds; one system after the other, the reference twice), peak memory of
the steps, kernels, operators and casts per step, how often a step makes the host wait, and the
milliseconds of a whole step that a CUDA graph replays.  O0 is FP32 as torch has it (no TF32).
There is a table at the end, also of what was measured until it is terminated; a system that fails
is in the table, and the exit status is 1.  `--rounds 0` only counts, in one process.  `--small
--device cpu` tries it on tiny shapes without a GPU: operators and casts are counted, kernels are
not, and torch.compile makes no code (aot_eager).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from counts import count_step
from detection import DETECTORS
from measuring import alone, table
from realistic import ON_A_DEVICE_TOO
from systems import (
    AGAIN,
    AUTOCAST,
    COMPILED,
    How,
    environment,
    make_evaluation,
    make_step,
    with_native,
)
from tasks import FULL, ON_A_DEVICE, TINY
from torch.profiler import ProfilerActivity, profile

import ampatch as amp

SYSTEMS = [AUTOCAST, AUTOCAST + AGAIN, "O0", "O1", "O2", "O3"]
TO_COMPILE = [AUTOCAST, "O1", "O2"]
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and those with another ending
Step = Callable[[], None]


@contextlib.contextmanager
def one_stream(device: str) -> Iterator[Any]:
    """All work on one stream that is not the default one, which cannot be captured."""
    if device != "cuda":
        yield None
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    side.synchronize()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(step: Step, steps: int, device: str) -> float:
    """Wall time per step."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - begin) / steps


def kernels(step: Step) -> int | None:
    """Kernels launched by one step; None where the profiler sees none."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    launches = (event.count for event in trace.key_averages() if event.key.startswith(LAUNCHES))
    return sum(launches) or None


def waits(step: Step) -> int:
    """How often one step makes the host wait for the GPU, as CUDA's own look for it says."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        return sum("synchroniz" in str(entry.message) for entry in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(step: Step, steps: int, stream: Any) -> float | str:
    """Seconds of a step that a CUDA graph replays, or why it cannot."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return seconds(graph.replay, max(steps, 1), "cuda")


def run(name: str, system: str, dtype: str, options: Namespace) -> dict[str, Any]:
    """One system on one model.  What is timed wants a process of its own."""
    torch.manual_seed(0)
    device, is_compiled = options.device, system.endswith(COMPILED)
    # Without `capturable` torch's optimizers refuse to be captured, fused ones too.
    more = {"capturable": True} if options.fused and device == "cuda" else {}
    adamw = functools.partial(torch.optim.AdamW, lr=1e-5, fused=options.fused, **more)
    compiler = "aot_eager" if options.small else "inductor"
    how = How(getattr(torch, dtype), adamw, device=device, always_scaled=False, compiler=compiler)
    with torch.device(device):
        sizes = {**ON_A_DEVICE, **ON_A_DEVICE_TOO, **DETECTORS}[name]
        task = sizes[TINY if options.small else FULL]()
    with one_stream(device) as stream:
        step = (make_evaluation if options.evaluate else make_step)(task, system, how)
        seconds(step, options.warm_up, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [seconds(step, options.steps, device) for _ in range(options.rounds)]
        result = {"fused": options.fused, "seconds": times, "unit": task.unit, "items": task.items}
        if not is_compiled:
            counted = count_step(step)
            result |= {"operators": counted.operators, "casts": counted.casts}
        if device == "cuda":
            if options.rounds:  # what came before in this process counts otherwise
                result["peak_bytes"] = torch.cuda.max_memory_allocated()
            result |= {"kernels": kernels(step), "waits": waits(step)}
            if options.fused and not is_compiled:
                result["replayed"] = replayed(step, options.steps, stream)
        return result


def counted_here(name: str, system: str, dtype: str, options: Namespace) -> dict[str, Any]:
    """As `run` in this process, which is left as it was."""
    try:
        return run(name, system, dtype, options)
    finally:
        amp.deactivate()


def timed_alone(name: str, system: str, dtype: str, options: Namespace) -> dict[str, Any]:
    """As `run`, in a process of its own."""
    return alone(run, name, system, dtype, options, environment=environment(system))


HEAD = (
    "", "dtype", "system", "ms per step", "per second", "speed", "peak MiB", "memory",
    "kernels", "operators", "casts", "waits", "ms replayed",
)  # fmt: skip


def rows_of(results: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Speed and memory relative to autocast + GradScaler."""
    bases = {(r["model"], r["dtype"]): r for r in results if r["system"] == AUTOCAST}
    for result in results:
        head = [result["model"], result["dtype"], result["system"]]
        if "failed" in result:
            yield [*head, f"failed: {result['failed']}", *[""] * (len(HEAD) - 4)]
            continue
        base = bases.get((result["model"], result["dtype"]), {})
        peak, of_base = result.get("peak_bytes"), base.get("peak_bytes")
        cells = [
            *_speeds(result, base),
            peak and f"{peak / 2**20:.0f}",
            peak and of_base and f"{peak / of_base:.3f}",
            *(result.get(name) for name in ("kernels", "operators", "casts", "waits")),
            _milliseconds(result.get("replayed")),
        ]
        yield head + ["" if cell is None else cell for cell in cells]


def _speeds(result: dict[str, Any], base: dict[str, Any]) -> list[str | None]:
    """Milliseconds, items per second, and the speed relative to the reference."""
    if not result["seconds"]:
        return [None, None, None]
    time_of = statistics.median(result["seconds"])
    of_base = statistics.median(base["seconds"]) if base.get("seconds") else None
    rate = f"{result['items'] / time_of:.0f} {result['unit']}"
    return [_milliseconds(time_of), rate, of_base and f"{of_base / time_of:.3f}"]


def _milliseconds(value: float | str | None) -> str | None:
    return f"{value * 1e3:.2f}" if isinstance(value, float) else value


def planned(options: Namespace) -> Iterator[tuple[str, str, str]]:
    """Model, system and dtype: what is compiled, which takes long, comes last."""
    models, systems = options.models or ON_A_DEVICE, options.systems or with_native(SYSTEMS)
    for name, dtype, system in itertools.product(models, options.dtypes, systems):
        yield name, system, dtype
    for name, system in itertools.product(models, options.compile):
        yield name, system + COMPILED, options.dtypes[-1]


def measure(options: Namespace, results: list[dict[str, Any]]) -> None:
    """Add what is planned to `results`, one by one; what is said to be done is there."""
    call = timed_alone if options.rounds else counted_here
    for name, system, dtype in planned(options):
        begun = time.perf_counter()
        try:
            result = call(name, system, dtype, options)
        except Exception as error:  # of torch, the driver or a compiler: the others go on
            result = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        results.append({"model": name, "system": system, "dtype": dtype, **result})
        duration = f"{time.perf_counter() - begun:.0f} s"
        print(f"{name}, {dtype}, {system}: {result.get('failed', duration)}", file=sys.stderr)


def report(options: Namespace) -> Iterator[str]:
    """A row per model, half dtype and system."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated before the end"))
    results: list[dict[str, Any]] = []
    try:
        measure(options, results)
    finally:
        yield table(list(HEAD), rows_of(results))
    if any("failed" in result for result in results):
        sys.exit(1)
