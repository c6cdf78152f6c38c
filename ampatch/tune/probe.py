"""The probe: during a run at O0 it computes some modules in each step in half as well.

The sweep's child calls `start` before the script begins.  Each module is measured `SAMPLES` times,
spread over the steps, so that few copies are in memory at once.
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
from ampatch.tune.module_call import CallErrors, HalfMode, ModuleCall, RefusedInHalf
from ampatch.tune.sensitivity import Findings, Sensitivity

SAMPLES = 4  # calls compared for each module
HEADROOM = 16  # gradients of weights may be larger than gradients of outputs by this factor
LARGEST_SCALE = 2.0**16
MAX_FLOAT16 = 65504


@dataclass(frozen=True)
class ProbeOptions:
    """Options from the parent, as JSON.  The loss scale is dynamic if `scale` is None."""

    file: str
    steps: int
    opt_level: str
    dtype: str
    scale: float | None


def start(text: str, autocast_off: Any, writes: bool) -> None:
    """Observe the training of this process; `autocast_off` is the script's `AutocastOff`.

    All ranks compute, because a module may wait for the other ranks.  Only the first rank `writes`.
    """
    options = ProbeOptions(**json.loads(text))
    torch.compiler.set_stance("force_eager")  # compiled modules do not call hooks of submodules
    ampatch.observe(Probe(options, autocast_off, writes))


@dataclass
class _ProbedPath:
    """The modules at a path, and their samples or the reason why they have none."""

    path: str
    modules: list[nn.Module]
    samples: list[CallErrors] = field(default_factory=list)
    trouble: str = ""
    is_refused: bool = False
    had_turn: bool = False
    is_called: bool = False
    only_calls_submodules: bool = False

    def sensitivity(self, steps: int) -> Sensitivity:
        kind = ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules))
        if len(self.modules) > 1:
            kind += f" ({len(self.modules)} models)"
        if self.samples:
            return Sensitivity(self.path, kind, tuple(self.samples))
        trouble = self.trouble or "it is only called without gradients"
        if not self.had_turn:
            trouble = f"its turn did not come in {steps} steps. Give fewer --probe-steps"
        return Sensitivity(self.path, kind, (), trouble, self.is_refused)


def measurable_modules(models: Iterable[nn.Module]) -> dict[str, list[nn.Module]]:
    """The modules to measure, by path.  Modules of several models may have the same path.

    The models themselves are left out, and `Sequential`, `ModuleList` and `ModuleDict`, which
    compute nothing.  The probe finds other modules that only call submodules.  A module with two
    paths is listed under the first path.
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

    def __init__(self, options: ProbeOptions, autocast_off: Any, writes: bool = True) -> None:
        self._options, self._autocast_off, self._writes = options, autocast_off, writes
        self._findings = Findings()
        self._probed: list[_ProbedPath] = []
        self._turns: Iterator[_ProbedPath] = iter(())
        self._modules_per_step = 0
        self._calls: list[tuple[_ProbedPath, ModuleCall]] = []
        self._hooks: list[Any] = []
        self._largest_gradient = 0.0  # the largest one so far; the loss scale must keep it in range

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """Compare the calls recorded in a step that has ended, and hook the next modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._compare()
        eps = (group.get("eps") for group in getattr(optimizer, "param_groups", []))
        values = {float(value) for value in eps if isinstance(value, float)}
        self._findings.eps = sorted({*self._findings.eps, *values})
        self._findings.steps += 1
        if not self._probed:
            self._choose_modules()
        if self._writes:
            self._write()
        if self._findings.steps <= self._options.steps:
            self._hook_next(itertools.islice(self._turns, self._modules_per_step))

    def _choose_modules(self) -> None:
        """Find the modules to measure, and how many of them to measure in a step."""
        models = [managed.model for session in open_sessions() for managed in session.models]
        by_path = measurable_modules(models)
        self._findings.paths = [
            name for model in models for name, _ in model.named_modules() if name
        ]
        self._probed = [_ProbedPath(path, modules) for path, modules in by_path.items()]
        self._modules_per_step = math.ceil(len(self._probed) * SAMPLES / self._options.steps)
        self._turns = itertools.cycle(list(self._probed))

    def _hook_next(self, chosen: Iterator[_ProbedPath]) -> None:
        for probed in chosen:
            probed.had_turn = True
            for module in probed.modules:
                self._hooks += self._hook(probed, module)

    def _hook(self, probed: _ProbedPath, module: nn.Module) -> list[Any]:
        """Hooks that record the first call of the module in a training step."""
        running: deque[ModuleCall] = deque()
        is_recorded = False

        @torch.compiler.disable
        def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
            nonlocal is_recorded
            probed.is_called = True
            if is_recorded or not torch.is_grad_enabled():
                return
            is_recorded = True
            is_leaf = not any(True for _ in module.children())
            try:
                running.append(ModuleCall(module, args, kwargs, is_leaf))
            except Exception as error:  # the class decides what a failed copy raises
                probed.trouble = f"it cannot be copied: {error}"

        @torch.compiler.disable
        def after(module: nn.Module, args: tuple, output: Any) -> None:
            if running:
                call = running.popleft()
                call.record_gradients(output)
                self._calls.append((probed, call))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _compare(self) -> None:
        calls, self._calls = self._calls, []
        self._largest_gradient = max(
            [self._largest_gradient, *(call.largest_gradient for _, call in calls)]
        )
        for probed, call in calls:
            try:
                with self._autocast_off.allow_autocast():
                    sample = call.compare(self._half_mode())
            except RefusedInHalf as error:
                probed.is_refused, probed.trouble = True, f"it does not run in half: {error}"
                continue
            except Exception as error:  # modules may raise anything
                probed.trouble = f"it does not run a second time: {error}"
                if lacks_memory(describe(error)):
                    probed.trouble += ". More --probe-steps keep fewer copies at once"
                continue
            if sample is None:
                probed.only_calls_submodules = True
            else:
                probed.samples.append(sample)

    def _half_mode(self) -> HalfMode:
        """How the level computes in half, at the loss scale that its training would have."""
        options = self._options
        dtype = getattr(torch, options.dtype)
        autocast = functools.partial(torch.autocast, _device(self._probed), dtype)
        return HalfMode(
            dtype,
            autocast if options.opt_level == "O1" else None,
            self._expected_scale() if options.scale is None else options.scale,
        )

    def _expected_scale(self) -> float:
        """The power of two that a dynamic loss scale would reach, or 1 in bfloat16."""
        if not self._largest_gradient or self._options.dtype == "bfloat16":
            return 1.0
        exponent = math.floor(math.log2(MAX_FLOAT16 / HEADROOM / self._largest_gradient))
        return min(LARGEST_SCALE, 2.0**exponent)

    def _write(self) -> None:
        self._findings.modules = [
            probed.sensitivity(self._findings.steps)
            for probed in self._probed
            if not (probed.only_calls_submodules or (probed.had_turn and not probed.is_called))
        ]
        self._findings.write(Path(self._options.file))


def _device(probed: list[_ProbedPath]) -> str:
    modules = [module for entry in probed for module in entry.modules]
    params = (param for module in modules for param in module.parameters())
    return next((param.device.type for param in params), "cpu")
