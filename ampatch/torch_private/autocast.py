"""Where torch's own modules ask about autocast for the user's code."""

from __future__ import annotations

AUTOCAST = "torch.amp.autocast_mode"
"""The module of `torch.autocast`, and of `custom_fwd`, which asks from there."""

ASK_TO_CAST = frozenset(("torch.nested._internal.sdpa",))
"""Modules that ask about autocast in order to cast to the answer."""


def has_custom_fwd(context: object) -> bool:
    """Whether `context` is of a custom Function whose forward has `custom_fwd`."""
    return hasattr(context, "_fwd_used_autocast")
