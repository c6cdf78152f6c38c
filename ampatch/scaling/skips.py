"""What to say when step after step is skipped."""

from __future__ import annotations

import torch

from .optimizer import ManagedOptimizer

_SHOWN = 5  # parameters named


def skip_report(managed: ManagedOptimizer, names: dict[int, str], scales: list[float]) -> str:
    """Name the first parameters with non-finite gradients, the scale, and what to try.

    `names` maps ids of the model's parameters to their module paths.
    """
    of_masters = {id(pair.master): names.get(id(pair.half)) for pair in managed.masters}
    bad = [
        names.get(id(param)) or of_masters.get(id(param)) or "(unnamed)"
        for param in managed.parameters()
        if param.grad is not None and not bool(torch.isfinite(param.grad).all())
    ]
    shown = ", ".join(bad[:_SHOWN]) or "(zeroed since)"
    return (
        f"{managed.consecutive_skips} steps in a row were skipped because gradients held inf or "
        f"NaN; the loss scale is now {', '.join(f'{scale:g}' for scale in scales)}. First such "
        f"gradients: {shown}. At a small scale this is no overflow of float16 any more: look for "
        'a NaN in the data or the loss, or try dtype=torch.bfloat16, opt_level="O0" or a lower '
        "learning rate."
    )
