"""Activation checkpoints: what `torch.utils.checkpoint.checkpoint` does without reentry."""

from __future__ import annotations

import torch.utils.checkpoint

NO_REENTRY = "_checkpoint_without_reentrant_generator"
"""Runs around a checkpoint's forward, and keeps its function for the recompute.

Its arguments begin with that function.
"""


def has_no_reentry() -> bool:
    """Whether this torch has it."""
    return hasattr(torch.utils.checkpoint, NO_REENTRY)
