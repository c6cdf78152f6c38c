"""DDP averages only gradients, so its ranks must have the same settings and loss scales."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.opt_levels import level_defaults
from ..errors import AmpatchError

_UNCOMPARED_SETTINGS = ("verbosity", "max_consecutive_skips", "allow_banned")  # may differ


def compare(sessions: Sequence[Any], model: nn.Module, group: Any) -> None:
    """Raise `AmpatchError` on each rank that is about to wrap `model`, unless all ranks agree.

    Calls all_gather with one number.  DDP itself begins with such an all_gather, so a rank on which
    ampatch does not manage the model takes part too, and raises torch's error.
    """
    sent = [param for param in model.parameters() if param.requires_grad]
    if not (sessions and sent) or dist.get_rank(group) < 0:
        return
    text = "; ".join(map(_describe_settings, sessions))
    digest = torch.tensor([zlib.crc32(text.encode()) >> 1], device=sent[0].device)
    digests = [digest.clone() for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, digest, group=group)
    if len(set(torch.cat(digests).tolist())) > 1:
        raise AmpatchError(
            f"DistributedDataParallel({type(model).__name__}): ranks differ in settings or loss "
            f"scales. Rank {dist.get_rank()} has {text}. Give all ranks the same arguments of "
            "ampatch.initialize, AMPATCH_... variables and ampatch.load_state_dict(...)."
        )


def _describe_settings(session: Any) -> str:
    """The settings that differ from the opt level's defaults, and the present loss scales."""
    properties = session.properties
    usual = vars(level_defaults(properties.opt_level, properties.dtype))
    usual |= {"opt_level": None, "dtype": None}
    shown = {name: value for name, value in vars(properties).items() if value != usual[name]}
    overrides = [*session.overrides.modules, *session.overrides.functions.items()]
    shown["overrides"] = {getattr(key, "__name__", key): precision for key, precision in overrides}
    shown["loss scales"] = [scaler.state_dict() for scaler in session.scalers]
    return ", ".join(
        f"{name}={value}" for name, value in shown.items() if name not in _UNCOMPARED_SETTINGS
    )


def refuse_uneven_inputs(sessions: Sequence[Any], model: nn.Module) -> None:
    """Raise `AmpatchError` for a model whose ranks would get different loss scales in `join`."""
    scaling = [session for session in sessions if session.scales_losses()]
    if any(s.checks_for_overflow() or s.process_group is not None for s in scaling):
        raise AmpatchError(
            f"{type(model).__name__}.join(): a rank without data does not see an overflow of the "
            "others, and its loss scale would stay behind. Expected a static scale and no "
            "process_group: dtype=torch.bfloat16, or ampatch.initialize(loss_scale=128.0)."
        )
