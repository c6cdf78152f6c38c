"""Training speed and memory on a GPU beside torch.autocast + GradScaler.

    python benchmarks/gpu.py [--dtypes float16,bfloat16] [--models ...] [--json FILE]

For each model, half type and system, each in a process of its own: milliseconds per step and items
per second (median of the rounds; one system after the other, the reference twice), peak memory of
the steps, kernels, operators and casts per step, how often a step makes the host wait, and the
milliseconds of a whole step that a CUDA graph replays.  O0 is FP32 as torch has it (no TF32).
Prints a table at the end, also of what was measured until it is terminated, and writes JSON; a
system that fails is in the table, and the exit status is 1.  `--rounds 0` only counts, in one
process.  `--small --device cpu` tries it on tiny shapes without a GPU: operators and casts are
counted, kernels are not, and torch.compile makes no code (aot_eager).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from counts import count_step
from gpu_models import WORKLOADS, Workload
from systems import AGAIN, AUTOCAST, environment, with_native
from torch.profiler import ProfilerActivity, profile
from workers import alone, machine

import ampatch as amp

COMPILED = " compiled"
SYSTEMS = [AUTOCAST, AGAIN, "O0", "O1", "O2", "O3"]
TO_COMPILE = [AUTOCAST, "O1", "O2"]
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and those with another ending


def make_step(work: Workload, system: str, dtype: torch.dtype, options: Any) -> Any:
    """The function that does one training step."""
    # Without `capturable` torch's optimizers refuse to be captured, fused ones too.
    more = {"capturable": True} if options.fused and options.device == "cuda" else {}
    parameters = work.model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=options.fused, **more)
    level = system.partition(" ")[0]
    if level != AUTOCAST:
        amp.initialize(work.model, optimizer, opt_level=level, dtype=dtype, verbosity=0)
    model = work.model
    if system.endswith(COMPILED):
        model = torch.compile(model, backend="aot_eager" if options.small else "inductor")
    if level == AUTOCAST:
        return _autocast_step(work, model, optimizer, dtype, options.device)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(work.loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def _autocast_step(work: Workload, model: Any, optimizer: Any, dtype: Any, device: str) -> Any:
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            loss = work.loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


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


def seconds(step: Callable[[], None], steps: int, device: str) -> float:
    """Wall time per step."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - begin) / steps


def kernels(step: Callable[[], None], device: str) -> int | None:
    """Kernels launched by one step; None without a GPU, or where its profiler sees none."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        _wait(device)
    found = (event.count for event in trace.key_averages() if event.key.startswith(LAUNCHES))
    return sum(found) or None


def waits(step: Callable[[], None], device: str) -> int | None:
    """How often one step makes the host wait for the GPU, as CUDA's own look for it says."""
    if device != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        return sum("synchroniz" in str(entry.message) for entry in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(step: Callable[[], None], steps: int, device: str, stream: Any) -> float | str | None:
    """Seconds of a step that a CUDA graph replays, or why it cannot; None without a GPU."""
    if device != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return seconds(graph.replay, max(steps, 1), device)


def run(name: str, system: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """One system on one model.  What is timed wants a process of its own."""
    torch.manual_seed(0)
    work, device = WORKLOADS[name](options.device, options.small), options.device
    is_compiled = system.endswith(COMPILED)
    with one_stream(device) as stream:
        step = make_step(work, system, dtype, options)
        seconds(step, options.warm_up, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [seconds(step, options.steps, device) for _ in range(options.rounds)]
        counted = None if is_compiled else count_step(step)
        return {
            "model": name,
            "system": system,
            "dtype": str(dtype).removeprefix("torch."),
            "fused": options.fused,
            "seconds": times,
            "unit": work.unit,
            "items": work.items,
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "operators": counted and counted.operators,
            "casts": counted and counted.casts,
            "kernels": kernels(step, device),
            "waits": waits(step, device),
            "replayed": replayed(step, options.steps, device, stream)
            if options.fused and not is_compiled
            else None,
        }


def counted_here(name: str, system: str, dtype: Any, options: Any) -> dict[str, Any]:
    """As `run` in this process, which is left as it was."""
    try:
        return run(name, system, dtype, options)
    finally:
        amp.deactivate()


def timed_alone(name: str, system: str, dtype: Any, options: Any) -> dict[str, Any]:
    """As `run`, in a process of its own."""
    return alone(run, name, system, dtype, options, environment=environment(system))


def table(results: list[dict[str, Any]]) -> str:
    """Speed and memory relative to autocast + GradScaler, in Markdown."""
    lines = [
        "| | dtype | system | ms per step | per second | speed | peak MiB | memory | kernels "
        "| operators | casts | waits | ms replayed |",
        "|---" * 13 + "|",
    ]
    bases = {(r["model"], r["dtype"]): r for r in results if r["system"] == AUTOCAST}
    for found in results:
        head = f"| {found['model']} | {found['dtype']} | {found['system']} "
        if "failed" in found:
            lines.append(f"{head}| failed: {found['failed']} " + "| " * 9 + "|")
            continue
        base = bases.get((found["model"], found["dtype"]), {})
        peak, of_base = found["peak_bytes"], base.get("peak_bytes")
        cells = [
            *_speeds(found, base),
            peak and f"{peak / 2**20:.0f}",
            peak and of_base and f"{peak / of_base:.3f}",
            *(found[name] for name in ("kernels", "operators", "casts", "waits")),
            _milliseconds(found["replayed"]),
        ]
        lines.append(head + "".join(f"| {'' if cell is None else cell} " for cell in cells) + "|")
    return "\n".join(lines)


def _speeds(found: dict[str, Any], base: dict[str, Any]) -> list[str | None]:
    """Milliseconds, items per second, and the speed relative to the reference."""
    if not found["seconds"]:
        return [None, None, None]
    time_of = statistics.median(found["seconds"])
    of_base = statistics.median(base["seconds"]) if base.get("seconds") else None
    rate = f"{found['items'] / time_of:.0f} {found['unit']}"
    return [_milliseconds(time_of), rate, of_base and f"{of_base / time_of:.3f}"]


def _milliseconds(value: float | str | None) -> str | None:
    return f"{value * 1e3:.2f}" if isinstance(value, float) else value


def planned(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Model, system and dtype: what is compiled, which takes long, comes last."""
    models, dtypes = options.models.split(","), options.dtypes.split(",")
    systems = options.systems.split(",")
    for name, dtype, system in itertools.product(models, dtypes, systems):
        yield name, system, dtype
    compiled = [system + COMPILED for system in options.compile.split(",") if system]
    for name, system in itertools.product(models, compiled):
        yield name, system, dtypes[-1]


def measure(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Add what is planned to `results`, one by one; what is said to be done is there."""
    call = timed_alone if options.rounds else counted_here
    for name, system, dtype in planned(options):
        begun = time.perf_counter()
        try:
            found = call(name, system, getattr(torch, dtype), options)
        except Exception as error:  # of torch, the driver or a compiler: the others go on
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            found = {"model": name, "system": system, "dtype": dtype, "failed": reason}
        results.append(found)
        taken = f"{time.perf_counter() - begun:.0f} s"
        print(f"{name}, {dtype}, {system}: {found.get('failed', taken)}", file=sys.stderr)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--systems", default=",".join(with_native(SYSTEMS)))
    parser.add_argument("--compile", default=",".join(TO_COMPILE), help="in the last dtype")
    parser.add_argument("--rounds", type=int, default=5, help="0: count, time nothing")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--no-fused", dest="fused", action="store_false")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated before the end"))
    results: list[dict[str, Any]] = []
    try:
        measure(options, results)
    finally:
        fused = "fused" if options.fused else "not fused"
        print(f"{machine()}, AdamW, {fused}.\n\n{table(results)}", flush=True)
        if options.json is not None:
            content = {"machine": machine(), "results": results}
            options.json.write_text(json.dumps(content, indent=1))
    if any("failed" in found for found in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
