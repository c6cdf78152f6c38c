"""Recognizes what kind of script runs at O0, and reports its training to the recorder.

The kind is known at `initialize`, or at the first optimizer step if that comes first.  The script
is watched as plain PyTorch until it calls `initialize`.
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
from ampatch.sweep.execution.plain_training import PlainTraining, watch_unscaled
from ampatch.sweep.kinds import AMPATCH, FRAMEWORK, FRAMEWORKS, LATE, NO_AMP, TORCH_AMP, Kind
from ampatch.sweep.measure.recorder import Recorder


class Recognition:
    """The kind of the script in this process, from `start` on.

    `off` records the regions of torch.autocast that the script has entered.
    """

    def __init__(self, recorder: Recorder, off: AutocastOff) -> None:
        self._recorder, self._off = recorder, off
        self._plain = PlainTraining(recorder, "O0", self._first_step)
        self._kind_name = self._framework = ""
        self._half_weights: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """As far as it has shown: the script may enter a region after many steps."""
        name, lines = self._kind_name, tuple(self._off.lines)
        if name == NO_AMP and lines:
            name = TORCH_AMP
        return Kind(name, self._framework, lines, tuple(self._off.dtypes), self._half_weights)

    def start(self) -> None:
        """Watch the script; ampatch's own notices reach the recorder, too."""
        ampatch.observe(self)
        ampatch.observe(self._recorder)
        self._plain.start()
        framework_patches.ignore_precision(self._off.record)
        framework_patches.wrap_backward(self._plain.framework_backward)

    def on_initialize(self, properties: Any) -> None:
        if self._kind_name in ("", AMPATCH):
            self._kind_name = AMPATCH
            modules = {name: [framework.integration] for name, framework in FRAMEWORKS.items()}
            self._framework = _running_framework(sys._getframe(), modules)
            self._plain.mute()
            watch_unscaled(self._recorder)
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
    """The first name in `modules` that has a function on the stack, or ""."""
    running = []
    while frame is not None:
        running.append(f"{frame.f_globals.get('__name__', '')}.")
        frame = frame.f_back
    for name, listed in modules.items():
        prefixes = tuple(f"{module}." for module in listed if module)
        if any(module.startswith(prefixes) for module in running):
            return name
    return ""
