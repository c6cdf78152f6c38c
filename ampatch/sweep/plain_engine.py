"""Scripts without AMP code: watched at O0, and at O1 as `ampatch run --auto` has it.

Losses are what `backward()` is called on.  At O0 nothing is changed, and steps
are those of any optimizer; at O1 the engine tells of those it has in its care.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampatch
from ampatch.config.environment import Asked
from ampatch.config.opt_levels import properties_for
from ampatch.sweep.recorder import Recorder


class _Steps:
    """The engine's notices but for losses: it has none where nothing is scaled."""

    def __init__(self, recorder: Recorder) -> None:
        self.on_step, self.on_scale = recorder.on_step, recorder.on_scale
        self.on_metrics = recorder.on_metrics


def watch(recorder: Recorder, asked: Asked) -> None:
    """Tell `recorder` of each backward pass and step.  For a process of its own: it stays.

    At O1 `ampatch.auto` has begun already, and its scaled losses are not seen here.
    """
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.on_loss(tensors if isinstance(tensors, Tensor) else next(iter(tensors)))
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    if asked.opt_level == "O0":
        register_optimizer_step_post_hook(lambda optimizer, *_: recorder.on_step(optimizer, False))
        recorder.on_engine("O0", {"dtype": "torch.float32"})
    else:
        ampatch.observe(_Steps(recorder))
        recorder.on_initialize(properties_for(asked.opt_level, asked.dtype))
