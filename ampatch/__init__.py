"""Apex-style automatic mixed precision for today's PyTorch, by monkey-patching."""

from ._version import __version__
from .control import (
    disable_casts,
    float_function,
    half_function,
    precision,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .errors import AmpatchError, BannedFunctionError
from .frontend import (
    cache_info,
    deactivate,
    initialize,
    load_state_dict,
    log_metrics,
    loss_scale,
    master_params,
    observe,
    scale_loss,
    set_loss_scale,
    set_opt_level,
    state_dict,
    step_was_skipped,
    unwrap,
)
