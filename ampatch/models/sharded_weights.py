"""The weights of a model that FSDP2 (`fully_shard`) has sharded, under the model's opt level.

A model whose parameters are FP32 shards *is* at O2: the optimizer steps on the shards.  FSDP2
gathers the parameters and computes in half, as the user's `MixedPrecisionPolicy` says.
ampatch changes neither policies nor shards; it refuses policies and shards that contradict the opt
level.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config.opt_levels import HALF_DTYPES, Properties
from ..errors import AmpatchError
from ..torch_private.sharding import Sharded, Sharding, shardings
from .half_copy_slots import Fp32Predicate


def sharded_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP2 has sharded."""
    return {
        id(shard.parameter) for sharding in shardings(model) for shard in sharding.sharded_params
    }


def checked_sharded_parameters(
    model: nn.Module, properties: Properties, stays_fp32: Fp32Predicate
) -> set[int]:
    """Like `sharded_parameters`, but raises `AmpatchError` if FSDP2 contradicts the opt level.

    Shards must be FP32 at O0 and half at O3; at O2 both are allowed.  FSDP2 must compute in FP32 at
    O0, and in half at O2 and O3, except in modules that stay FP32 (batch norms, overrides) and in
    submodules whose policy says FP32.
    """
    ids: set[int] = set()
    if properties.cast_model_type is None:
        return ids
    for sharding in shardings(model):
        for shard in sharding.sharded_params:
            ids.add(id(shard.parameter))
            if shard.parameter.dtype in (torch.float32, *HALF_DTYPES):
                _refuse_storage(shard, properties, stays_fp32(shard.module))
                is_root = model in sharding.modules
                _refuse_computation(shard, sharding, properties, stays_fp32, is_root)
    return ids


def _refuse_storage(shard: Sharded, properties: Properties, is_fp32: bool) -> None:
    half, dtype = properties.cast_model_type, shard.parameter.dtype
    if properties.uses_half_copies or dtype is (torch.float32 if is_fp32 else half):
        return
    remedy = "model.float()" if half is torch.float32 or is_fp32 else f"model.to({half})"
    raise AmpatchError(
        f"ampatch: {_path(shard)} is sharded by fully_shard in {dtype}, and opt_level="
        f"{properties.opt_level!r} trains it in {torch.float32 if is_fp32 else half}, without "
        f"FP32 master weights. Call {remedy} before fully_shard"
        + (', or use opt_level="O2".' if half in HALF_DTYPES and not is_fp32 else ".")
    )


def _refuse_computation(
    shard: Sharded,
    sharding: Sharding,
    properties: Properties,
    stays_fp32: Fp32Predicate,
    is_root: bool,
) -> None:
    half, policy = properties.cast_model_type, sharding.mixed_precision
    dtype = policy.param_dtype or shard.parameter.dtype
    if stays_fp32(shard.module):
        if dtype is torch.float32:
            return
        class_name = type(shard.module).__name__
        raise AmpatchError(
            f"ampatch: {_path(shard)} stays FP32 at opt_level={properties.opt_level!r}, and "
            f"fully_shard computes with it in {dtype}, the precision of the module that was "
            f"sharded with it. Shard the {class_name} first, by itself and without a policy: "
            "fully_shard(submodule), then the modules around it."
        )
    if dtype is half or (policy.param_dtype is torch.float32 and not is_root):
        return
    remedy = f"mp_policy=MixedPrecisionPolicy(param_dtype={half}, reduce_dtype=torch.float32)"
    if half not in HALF_DTYPES:
        remedy = "no mp_policy"
    raise AmpatchError(
        f"ampatch: fully_shard computes with {_path(shard)} in {dtype}, and opt_level="
        f"{properties.opt_level!r} computes in {half}. Give fully_shard {remedy}."
    )


def _path(shard: Sharded) -> str:
    return f"{type(shard.module).__name__}.{shard.name}"
