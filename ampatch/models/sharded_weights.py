"""The weights of a model that FSDP2 (`fully_shard`) has sharded, under the model's opt level.

A model whose parameters are FP32 shards *is* at O2: the optimizer steps on the shards, and FSDP2
gathers them, computes and sends them in half, by the `MixedPrecisionPolicy` that the user gives it.
ampatch changes neither policies nor shards; it refuses those that contradict the level.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import AmpatchError
from ..torch_private.sharding import Sharded, Sharding, shardings
from .lent_places import StaysFloat


def sharded_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP2 holds."""
    return {id(held.parameter) for sharding in shardings(model) for held in sharding.sharded_params}


def checked_shards(model: nn.Module, properties: Properties, stays_float: StaysFloat) -> set[int]:
    """As `sharded_parameters`.  Raises `AmpatchError` where FSDP2 contradicts the opt level.

    So it does where it stores or computes in another dtype.  Shards are FP32 at O0, half at O3 and
    either at O2.  O0 computes in FP32; half models compute in half, except modules that stay FP32
    (batch norms, overrides) and parts whose policy says FP32.
    """
    found: set[int] = set()
    if properties.cast_model_type is None:
        return found
    for sharding in shardings(model):
        for held in sharding.sharded_params:
            found.add(id(held.parameter))
            if held.parameter.dtype in (torch.float32, *HALF_TYPES):
                _refuse_storage(held, properties, stays_float(held.module))
                is_root = model in sharding.modules
                _refuse_computation(held, sharding, properties, stays_float, is_root)
    return found


def _refuse_storage(held: Sharded, properties: Properties, is_float: bool) -> None:
    half, found = properties.cast_model_type, held.parameter.dtype
    if properties.uses_half_copies or found is (torch.float32 if is_float else half):
        return
    remedy = "model.float()" if half is torch.float32 or is_float else f"model.to({half})"
    raise AmpatchError(
        f"ampatch: {_place(held)} is sharded by fully_shard in {found}, and opt_level="
        f"{properties.opt_level!r} trains it in {torch.float32 if is_float else half}, without "
        f"FP32 master weights. Call {remedy} before fully_shard"
        + (', or use opt_level="O2".' if half in HALF_TYPES and not is_float else ".")
    )


def _refuse_computation(
    held: Sharded,
    sharding: Sharding,
    properties: Properties,
    stays_float: StaysFloat,
    is_root: bool,
) -> None:
    half, policy = properties.cast_model_type, sharding.policy
    found = policy.param_dtype or held.parameter.dtype
    if stays_float(held.module):
        if found is torch.float32:
            return
        kind = type(held.module).__name__
        raise AmpatchError(
            f"ampatch: {_place(held)} stays FP32 at opt_level={properties.opt_level!r}, and "
            f"fully_shard computes with it in {found}, the precision of the module that was "
            f"sharded with it. Shard the {kind} first, by itself and without a policy: "
            "fully_shard(part), then the modules around it."
        )
    if found is half or (policy.param_dtype is torch.float32 and not is_root):
        return
    remedy = f"mp_policy=MixedPrecisionPolicy(param_dtype={half}, reduce_dtype=torch.float32)"
    if half not in HALF_TYPES:
        remedy = "no mp_policy"
    raise AmpatchError(
        f"ampatch: fully_shard computes with {_place(held)} in {found}, and opt_level="
        f"{properties.opt_level!r} computes in {half}. Give fully_shard {remedy}."
    )


def _place(held: Sharded) -> str:
    return f"{type(held.module).__name__}.{held.name}"
