"""Mixed precision for a script that has no line about it: `ampatch run --auto`.

Functions cast as at O1.  Every `torch.optim.Optimizer` is noticed as it is
built, every `backward()` is a `scale_loss` block around itself, so that
gradients are always the true ones, and every `step()` is that of the engine:
it does nothing after an overflow.
"""

from .control import start, why_not

__all__ = ["start", "why_not"]
