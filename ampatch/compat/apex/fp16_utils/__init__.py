"""apex.fp16_utils: half models, master weights and loss scaling by hand, on plain torch.

What scripts used before `amp.initialize`.  These work without any patch.
"""

from . import conversion, fp16_optimizer, loss_scaler
from .conversion import *  # noqa: F403
from .fp16_optimizer import *  # noqa: F403
from .loss_scaler import *  # noqa: F403

__all__ = sorted({*conversion.__all__, *fp16_optimizer.__all__, *loss_scaler.__all__})
