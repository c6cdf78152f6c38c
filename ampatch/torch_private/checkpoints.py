"""Activation checkpoints: what `torch.utils.checkpoint.checkpoint` does without reentry."""

from __future__ import annotations

import torch.utils.checkpoint

_NAMES = (
    "_checkpoint_without_reentrant_generator_impl",  # since torch 2.14
    "_checkpoint_without_reentrant_generator",
)


def no_reentry() -> str | None:
    """The name of what runs around a checkpoint's forward and keeps its function for the recompute.

    Its arguments begin with that function.  None: this torch has it under no name that is known.
    """
    return next((name for name in _NAMES if hasattr(torch.utils.checkpoint, name)), None)
