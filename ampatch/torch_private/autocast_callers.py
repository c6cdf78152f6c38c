"""torch's own modules that enter autocast regions, or ask about them, for the user's code."""

from __future__ import annotations

AUTOCAST = "torch.amp.autocast_mode"

ENTER_FOR_USER = frozenset((AUTOCAST, "torch._higher_order_ops.wrap"))
"""They enter regions on the user's behalf."""

ASK_TO_CAST = frozenset(("torch.nested._internal.sdpa",))
"""They ask about autocast in order to cast to the answer."""
