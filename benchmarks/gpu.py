"""Training speed and memory on a GPU beside torch.autocast + GradScaler.

    python benchmarks/gpu.py [--dtypes float16,bfloat16] [--models ...] [--json FILE]

For each model, half type and system, each in a process of its own: milliseconds per step and items
per second (median of the rounds; one system after the other, the reference twice), peak memory,
kernels, operators and casts per step, how often a step makes the host wait, and whether a whole
step can be captured in a CUDA graph.  Prints a short table last and writes JSON.
`--small --device cpu` tries it on tiny shapes without a GPU, where operators and casts are counted
and kernels are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from counts import count_step
from gpu_models import WORKLOADS, Workload
from systems import AGAIN, AUTOCAST, environment, with_native
from torch.profiler import ProfilerActivity, profile
from workers import alone, machine

import ampatch as amp

SYSTEMS = [AUTOCAST, AGAIN, "O1", "O2"]
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and those with another ending


def make_step(work: Workload, system: str, dtype: torch.dtype, device: str, fused: bool) -> Any:
    """The function that does one training step."""
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-5, fused=fused)
    level = system.partition(" ")[0]
    if level == AUTOCAST:
        scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype):
                loss = work.loss_of(work.model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step
    amp.initialize(work.model, optimizer, opt_level=level, dtype=dtype, verbosity=0)

    def ours() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(work.loss_of(work.model), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return ours


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
    """Kernels launched by one step; None without a GPU."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        _wait(device)
    return sum(event.count for event in trace.key_averages() if event.key.startswith(LAUNCHES))


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


def captures(step: Callable[[], None], device: str) -> bool | None:
    """Whether one step can be captured in a CUDA graph and replayed."""
    if device != "cuda":
        return None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        _wait(device)
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0]}")
        return False
    return True


def run(name: str, system: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """One system on one model; this wants a process of its own."""
    torch.manual_seed(0)
    work = WORKLOADS[name](options.device, options.small)
    step = make_step(work, system, dtype, options.device, options.fused)
    seconds(step, options.warm_up, options.device)
    times = [seconds(step, options.steps, options.device) for _ in range(options.rounds)]
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    counted = count_step(step)
    return {
        "model": name,
        "system": system,
        "dtype": str(dtype).removeprefix("torch."),
        "fused": options.fused,
        "seconds": times,
        "per_second": work.items / statistics.median(times),
        "unit": work.unit,
        "peak_bytes": peak,
        "kernels": kernels(step, options.device),
        "operators": counted.operators,
        "casts": counted.casts,
        "waits": waits(step, options.device),
        "graph": captures(step, options.device) if options.fused else None,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Speed and memory relative to autocast + GradScaler, in Markdown."""
    lines = [
        "| | dtype | system | ms per step | per second | speed | memory | kernels | operators "
        "| casts | waits | graph |",
        "|---" * 12 + "|",
    ]
    bases = {(r["model"], r["dtype"]): r for r in results if r["system"] == AUTOCAST}
    for found in results:
        base = bases[found["model"], found["dtype"]]
        memory = (
            "" if found["peak_bytes"] is None
            else f"{found['peak_bytes'] / base['peak_bytes']:.3f}"
        )  # fmt: skip
        lines.append(
            f"| {found['model']} | {found['dtype']} | {found['system']} "
            f"| {statistics.median(found['seconds']) * 1e3:.2f} "
            f"| {found['per_second']:.0f} {found['unit']} "
            f"| {found['per_second'] / base['per_second']:.3f} | {memory} "
            f"| {found['kernels']} | {found['operators']} | {found['casts']} "
            f"| {found['waits']} | {found['graph']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--models", default=",".join(WORKLOADS))
    parser.add_argument("--systems", default=",".join(with_native(SYSTEMS)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--no-fused", dest="fused", action="store_false")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.models.split(","):
        for dtype in options.dtypes.split(","):
            for system in options.systems.split(","):
                arguments = (name, system, getattr(torch, dtype), options)
                results.append(alone(run, *arguments, environment=environment(system)))
                print(json.dumps({**results[-1], "seconds": None}), flush=True)
    print(machine())
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
