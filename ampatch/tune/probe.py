"""The probe: in a run at O0 it also computes modules in half, a few of them in each step.

The sweep's child calls `start` before the script begins.  Each module has `SAMPLES` turns, spread
over the steps, so that few copies are in memory at once.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ampatch
from ampatch.launch.script import describe
from ampatch.session.facade import open_sessions
from ampatch.sweep.execution.early_stops import lacks_memory
from ampatch.torch_private.modules import has_forward
from ampatch.tune.sensitivity import Findings, Sensitivity
from ampatch.tune.shadow import HalfMode, ModuleCall, RefusedInHalf, Sample

SAMPLES = 4  # calls compared for each module
HEADROOM = 16  # by which gradients of weights may exceed those of outputs
LARGEST_SCALE = 2.0**16


@dataclass(frozen=True)
class ProbeOptions:
    """Options that the parent passes; `scale` None: the loss scale is dynamic."""

    file: str
    steps: int
    opt_level: str
    dtype: str
    scale: float | None


def start(text: str, off: Any, writes: bool) -> None:
    """Begin in this process; `off` switches the script's own torch.autocast off.

    All ranks compute, because a module may wait for the others; one rank `writes`.
    """
    options = ProbeOptions(**json.loads(text))
    torch.compiler.set_stance("force_eager")  # compiled modules do not call hooks of submodules
    ampatch.observe(Probe(options, off, writes))


@dataclass
class _Watched:
    """A module with its samples, or why there are none."""

    path: str
    modules: list[nn.Module]
    samples: list[Sample] = field(default_factory=list)
    trouble: str = ""
    is_refused: bool = False
    had_turn: bool = False
    is_called: bool = False
    only_calls_others: bool = False

    def sensitivity(self, steps: int) -> Sensitivity:
        kind = ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules))
        if len(self.modules) > 1:
            kind += f" ({len(self.modules)} models)"
        if self.samples:
            return Sensitivity(self.path, kind, tuple(self.samples))
        trouble = self.trouble or "it is called without gradients alone"
        if not self.had_turn:
            trouble = f"its turn did not come in {steps} steps. Give fewer --probe-steps"
        return Sensitivity(self.path, kind, (), trouble, self.is_refused)


def candidates(models: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """The modules to measure by path; several if models share a path.

    Without the models themselves, `Sequential`, and lists and dicts of modules, which compute
    nothing.  Other modules that only call submodules are found by the probe.  A module with two
    paths has its first.
    """
    by_path: dict[str, list[nn.Module]] = {}
    for model in models:
        for path, module in model.named_modules():
            is_sequence = getattr(type(module), "forward", None) is nn.Sequential.forward
            if path and has_forward(module) and not is_sequence:
                by_path.setdefault(path, []).append(module)
    return by_path


class Probe:
    """An observer of the training that measures some modules in each step."""

    def __init__(self, options: ProbeOptions, off: Any, writes: bool = True) -> None:
        self._options, self._off, self._writes = options, off, writes
        self._findings = Findings()
        self._watched: list[_Watched] = []
        self._turns: Iterator[_Watched] = iter(())
        self._modules_per_step = 0
        self._calls: list[tuple[_Watched, ModuleCall]] = []
        self._hooks: list[Any] = []
        self._largest = 0.0  # gradient so far; the loss scale must keep it in range

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """A step has ended: compare its calls, and choose the modules of the next step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._compare()
        eps = (group.get("eps") for group in getattr(optimizer, "param_groups", []))
        values = {float(value) for value in eps if isinstance(value, float)}
        self._findings.eps = sorted({*self._findings.eps, *values})
        self._findings.steps += 1
        if not self._watched:
            self._choose()
        if self._writes:
            self._write()
        if self._findings.steps <= self._options.steps:
            self._watch(itertools.islice(self._turns, self._modules_per_step))

    def _choose(self) -> None:
        """Find the modules to measure, and how many of them a step takes."""
        models = [managed.model for session in open_sessions() for managed in session.models]
        by_path = candidates(models)
        self._findings.paths = [
            name for model in models for name, _ in model.named_modules() if name
        ]
        self._watched = [_Watched(path, modules) for path, modules in by_path.items()]
        self._modules_per_step = math.ceil(len(self._watched) * SAMPLES / self._options.steps)
        self._turns = itertools.cycle(list(self._watched))

    def _watch(self, chosen: Iterator[_Watched]) -> None:
        for watched in chosen:
            watched.had_turn = True
            for module in watched.modules:
                self._hooks += self._hook(watched, module)

    def _hook(self, watched: _Watched, module: nn.Module) -> list[Any]:
        """Record the first call of a module in a training step."""
        running: deque[ModuleCall] = deque()
        done = False

        @torch.compiler.disable
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            nonlocal done
            watched.is_called = True
            if done or not torch.is_grad_enabled():
                return
            done = True
            is_leaf = not any(True for _ in module.children())
            try:
                running.append(ModuleCall(module, args, kwargs, is_leaf))
            except Exception as error:  # of any class that cannot be copied
                watched.trouble = f"it cannot be copied: {error}"

        @torch.compiler.disable
        def after(module: nn.Module, args: tuple, output: Any) -> None:
            if running:
                call = running.popleft()
                call.watch(output)
                self._calls.append((watched, call))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _compare(self) -> None:
        calls, self._calls = self._calls, []
        self._largest = max([self._largest, *(call.largest_gradient for _, call in calls)])
        for watched, call in calls:
            try:
                with self._off.lifted():
                    sample = call.compare(self._half())
            except RefusedInHalf as error:
                watched.is_refused, watched.trouble = True, f"it does not run in half: {error}"
                continue
            except Exception as error:  # modules may raise anything
                watched.trouble = f"it does not run a second time: {error}"
                if lacks_memory(describe(error)):
                    watched.trouble += ". More --probe-steps keep fewer copies at once"
                continue
            if sample is None:
                watched.only_calls_others = True
            else:
                watched.samples.append(sample)

    def _half(self) -> HalfMode:
        """How the level computes, at the loss scale that its training would have."""
        options = self._options
        dtype = getattr(torch, options.dtype)
        region = functools.partial(torch.autocast, _device(self._watched), dtype)
        return HalfMode(
            dtype,
            region if options.opt_level == "O1" else None,
            self._scale() if options.scale is None else options.scale,
        )

    def _scale(self) -> float:
        """The power of two that a dynamic scale would reach, with float16's maximum of 65504."""
        if not self._largest or self._options.dtype == "bfloat16":
            return 1.0
        fits = math.floor(math.log2(65504 / HEADROOM / self._largest))
        return min(LARGEST_SCALE, 2.0**fits)

    def _write(self) -> None:
        self._findings.modules = [
            watched.sensitivity(self._findings.steps)
            for watched in self._watched
            if not (watched.only_calls_others or (watched.had_turn and not watched.is_called))
        ]
        self._findings.write(Path(self._options.file))


def _device(watched: list[_Watched]) -> str:
    weights = (
        weight for entry in watched for module in entry.modules for weight in module.parameters()
    )
    return next((weight.device.type for weight in weights), "cpu")
