"""Recognizes what kind of script runs at O0, and reports its training to the recorder.

The kind is known at `initialize`, or at the first optimizer step if the step comes first.  Until
the script calls `initialize`, it is watched as plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import ampatch
from ampatch.errors import AmpatchError
from ampatch.integrations import framework_patches
from ampatch.sweep.execution.autocast_off import AutocastOff
from ampatch.sweep.execution.plain_training import PlainTraining, record_losses_before_scale_loss
from ampatch.sweep.kinds import AMPATCH, FRAMEWORK, FRAMEWORKS, LATE, NO_AMP, TORCH_AMP, Kind
from ampatch.sweep.measure.recorder import Recorder


class Recognition:
    """The kind of the script in this process, from `start` on.

    `autocast_off` records the regions of torch.autocast that the script has entered.
    """

    def __init__(self, recorder: Recorder, autocast_off: AutocastOff) -> None:
        self._recorder, self._autocast_off = recorder, autocast_off
        self._training = PlainTraining(recorder, "O0", self._first_step)
        self._kind_name = self._framework = ""
        self._half_weights: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """The kind as known so far: the script may enter torch.autocast after many steps."""
        name, lines = self._kind_name, tuple(self._autocast_off.lines)
        if name == NO_AMP and lines:
            name = TORCH_AMP
        dtypes = tuple(self._autocast_off.dtypes)
        return Kind(name, self._framework, lines, dtypes, self._half_weights)

    def start(self) -> None:
        """Watch the script, and pass ampatch's notices to the recorder."""
        ampatch.observe(self)
        ampatch.observe(self._recorder)
        self._training.start()
        framework_patches.ignore_precision(self._autocast_off.record)
        framework_patches.wrap_backward(self._training.framework_backward)

    def on_initialize(self, properties: Any) -> None:
        if self._kind_name in ("", AMPATCH):
            self._kind_name = AMPATCH
            modules = {name: [framework.integration] for name, framework in FRAMEWORKS.items()}
            self._framework = _running_framework(sys._getframe(), modules)
            self._training.mute()
            record_losses_before_scale_loss(self._recorder)
            return
        raise AmpatchError(
            f"{LATE}: a sweep cannot tell which part of this training is to be compared. Expected "
            "initialize before the first step."
        )

    def _first_step(self, optimizer: Any) -> None:
        modules = {name: framework.modules for name, framework in FRAMEWORKS.items()}
        self._framework = _running_framework(sys._getframe(), modules)
        has_integration = self._framework and FRAMEWORKS[self._framework].integration
        self._kind_name = FRAMEWORK if has_integration else NO_AMP
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights}
        self._half_weights = tuple(sorted(dtypes & {"bfloat16", "float16"}))


def _running_framework(frame: FrameType | None, modules: Mapping[str, Sequence[str]]) -> str:
    """The first framework in `modules` that has a function on the stack, or ""."""
    on_stack = []
    while frame is not None:
        on_stack.append(f"{frame.f_globals.get('__name__', '')}.")
        frame = frame.f_back
    for framework, names in modules.items():
        prefixes = tuple(f"{name}." for name in names if name)
        if any(module.startswith(prefixes) for module in on_stack):
            return framework
    return ""
