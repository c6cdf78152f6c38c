"""What torch's own modules say to autocast, and ask it, for the user's code."""

from __future__ import annotations

AUTOCAST = "torch.amp.autocast_mode"
"""Has `torch.autocast`; `custom_fwd` asks from here."""

ASK_TO_CAST = frozenset(("torch.nested._internal.sdpa",))
"""They ask about autocast in order to cast to the answer."""


def has_custom_fwd(context: object) -> bool:
    """Whether the forward of a custom Function, which this is the context of, has `custom_fwd`."""
    return hasattr(context, "_fwd_used_autocast")
