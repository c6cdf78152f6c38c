"""Mixed precision for a script without AMP code: `ampatch run --auto`.

Functions cast as at O1.  Every `torch.optim.Optimizer` is managed from its
construction.  Every `backward()` runs in a `scale_loss` block of its own, so the
gradients that the script sees are always unscaled.  A `step()` after an overflow
is skipped.
"""

from .control import check, start

__all__ = ["check", "start"]
