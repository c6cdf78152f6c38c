"""Watches a script without AMP code, at O0 and at O1 as `ampatch run --auto` runs it.

The losses are the tensors on which `backward()` is called.  At O0 nothing is changed,
but AMP code of the script is refused as at O1, and the steps of every optimizer count; at O1
ampatch reports those of managed optimizers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ampatch
from ampatch import auto
from ampatch.config.environment import Asked
from ampatch.config.opt_levels import properties_for
from ampatch.sweep.measure.recorder import Recorder


class _Steps:
    """Passes ampatch's notices on, but not those of losses, which `backward` reports."""

    def __init__(self, recorder: Recorder) -> None:
        self.on_step, self.on_scale = recorder.on_step, recorder.on_scale
        self.on_metrics, self.on_step_begin = recorder.on_metrics, recorder.on_step_begin


def watch(recorder: Recorder, asked: Asked) -> None:
    """Report each backward pass and step to `recorder`, for the rest of the process.

    At O1 `ampatch.auto` has started already, so losses are reported before they are scaled.
    """
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.on_loss(tensors if isinstance(tensors, Tensor) else next(iter(tensors)))
        result = original(tensors, *args, **kwargs)
        recorder.on_backward()
        recorder.on_unscaled()  # at O1 within the pass
        return result

    torch.autograd.backward = backward
    if asked.opt_level == "O0":
        auto.refuse_amp_code()  # it would run in half, and be called FP32
        register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.on_step_begin(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: recorder.on_step(optimizer, False))
        recorder.on_engine("O0", {"dtype": "torch.float32"})
    else:
        ampatch.observe(_Steps(recorder))
        recorder.on_initialize(properties_for(asked.opt_level, asked.dtype))
