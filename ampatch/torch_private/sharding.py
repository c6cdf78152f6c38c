"""FSDP2 (`fully_shard`): its sharded parameters, and their precision.

torch has no public function for a sharded module's `MixedPrecisionPolicy` or for the modules of its
parameters.  If a torch keeps them elsewhere, `AmpatchError` is raised and says what to do.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import AmpatchError

_FSDP_MODULE = "torch.distributed.fsdp"


class Sharded(NamedTuple):
    """A parameter that FSDP2 manages, the first module that has it, and its name in that module."""

    parameter: Tensor
    module: nn.Module
    name: str


class Sharding(NamedTuple):
    """One call of `fully_shard`: its modules, `MixedPrecisionPolicy` and parameters."""

    modules: tuple[nn.Module, ...]
    mixed_precision: Any
    sharded_params: list[Sharded]  # also while FSDP2 has gathered them


def shardings(model: nn.Module) -> list[Sharding]:
    """The calls of `fully_shard` on a model and its submodules, outer ones first."""
    # A process that has not imported the module has sharded nothing.
    fsdp_class: Any = getattr(sys.modules.get(_FSDP_MODULE), "FSDPModule", None)
    if fsdp_class is None:
        return []
    with _explain_errors():
        states = {
            id(state): state
            for module in model.modules()
            if isinstance(module, fsdp_class)
            for state in [module._get_fsdp_state()]
        }
        return [
            Sharding(tuple(state._modules), state._mp_policy, _sharded_params(state))
            for state in states.values()
        ]


def _sharded_params(state: Any) -> list[Sharded]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one for each module
        groups = filter(None, [state._fsdp_param_group])
    return [
        Sharded(param.sharded_param, param._module_info.module, param._module_info.param_name)
        for group in groups
        for param in group.fsdp_params
    ]


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        raise AmpatchError(
            f"ampatch: fully_shard of torch {torch.__version__} keeps the precision of sharded "
            f'modules in another way than ampatch knows ({error}). Use opt_level="O1", or give '
            "fully_shard itself a MixedPrecisionPolicy and the model the level O0."
        ) from error
