"""FSDP2 (`fully_shard`): the precision of modules that it has sharded, and how that changes later.

torch takes a `MixedPrecisionPolicy` when a module is sharded, and has no public way to change it
afterwards.  A torch that keeps it elsewhere gives `AmpatchError`, which says what to do instead.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import AmpatchError

MODULE = "torch.distributed.fsdp"
"""Where `fully_shard` is.  A process that has not imported it has no sharded modules."""


def fsdp_module_class() -> type | None:
    """The class that `fully_shard` adds to a module's bases; None where there is none yet."""
    return getattr(sys.modules.get(MODULE), "FSDPModule", None)


class Sharded(NamedTuple):
    """A parameter that FSDP2 holds, and the first module that has it, under which name."""

    parameter: Tensor
    module: nn.Module
    name: str


class Sharding:
    """What one call of `fully_shard` made: its modules, its policy and groups of parameters."""

    def __init__(self, state: Any) -> None:
        self.state = state
        with _explained():
            self.modules: tuple[nn.Module, ...] = tuple(state._modules)

    @property
    def policy(self) -> Any:
        """The `MixedPrecisionPolicy` in force."""
        with _explained():
            return self.state._mp_policy

    def held(self) -> list[Sharded]:
        """The parameters; the sharded ones, also while FSDP2 has gathered them."""
        with _explained():
            return [
                Sharded(one.sharded_param, one._module_info.module, one._module_info.param_name)
                for group in _groups(self.state)
                for one in group.fsdp_params
            ]

    def reshard(self) -> None:
        """The sharded parameters are the modules' parameters again."""
        module: Any = self.modules[0]
        module.reshard()

    def put(self, policy: Any, is_float: Callable[[nn.Module], bool]) -> Callable[[], None]:
        """Put a policy in force; parameters of modules for which `is_float` compute in FP32.

        A group is gathered in one dtype and its gradients are reduced in one, so a group with
        parameters of both kinds becomes two for that time.  Returns a function that undoes it.
        """
        with _explained():
            return self._put(policy, is_float)

    def _put(self, policy: Any, is_float: Callable[[nn.Module], bool]) -> Callable[[], None]:
        self.reshard()
        state, groups = self.state, _groups(self.state)
        known = state._mp_policy, [(one, one.fsdp_params, _policies(one)) for one in groups]
        in_float = dataclasses.replace(policy, param_dtype=torch.float32)
        parts: list[Any] = []
        for group in groups:
            floats = [one for one in group.fsdp_params if is_float(one._module_info.module)]
            halves = [one for one in group.fsdp_params if one not in floats]
            if floats and halves:
                parts.append(_part(group, halves, [policy] * len(halves)))
                parts.append(_part(_split_off(state, group), floats, [in_float] * len(floats)))
            else:
                alike = [in_float if floats else policy] * len(group.fsdp_params)
                parts.append(_part(group, floats or halves, alike))
        state._mp_policy = policy
        _regroup(state, parts)

        def undo() -> None:
            with _explained():
                self.reshard()
                state._mp_policy, found = known
                _regroup(state, [_part(*one) for one in found])

        return undo


def shardings(model: nn.Module) -> list[Sharding]:
    """What `fully_shard` has made of a model and its parts, outer ones first."""
    kind: Any = fsdp_module_class()
    if kind is None:
        return []
    with _explained():
        states = {
            id(state): state
            for module in model.modules()
            if isinstance(module, kind)
            for state in [module._get_fsdp_state()]
        }
    return [Sharding(state) for state in states.values()]


def convert_shards(sharding: Sharding, dtype_of: Callable[[Sharded], torch.dtype]) -> None:
    """Give sharded parameters another dtype; they stay the same objects."""
    with _explained():
        sharding.reshard()
        for group in _groups(sharding.state):
            for one in group.fsdp_params:
                info = one._module_info
                _convert(one, dtype_of(Sharded(one.sharded_param, info.module, info.param_name)))
            _note_dtypes(group)


def _convert(one: Any, dtype: torch.dtype) -> None:
    parameter = one.sharded_param
    if parameter.dtype is dtype:
        return
    grad, parameter.grad = parameter.grad, None
    with torch.no_grad():
        other = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)
    if grad is not None:
        parameter.grad = grad.to(dtype)
    one.reset_sharded_param()


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = state._fsdp_param_group  # torch before 2.12 has one for each module
    return [] if group is None else [group]


def _split_off(state: Any, group: Any) -> Any:
    """Another group beside this one, for some of its parameters."""
    if not hasattr(state, "_fsdp_param_groups"):
        raise AmpatchError(
            f"ampatch: torch {torch.__version__} keeps one precision for all parameters of a "
            "module that fully_shard was called on, and some of these are to compute in FP32 "
            "(batch norms, overrides). Call fully_shard for such modules first, each by itself, "
            "with mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)."
        )
    other = copy.copy(group)
    other._module_to_pre_save_state_dict_hook_handle = {}
    other._module_to_pre_load_state_dict_hook_handle = {}
    other._post_forward_indices = []
    return other


def _policies(group: Any) -> list[Any]:
    """The policy of each parameter; before torch 2.15 it is the group's."""
    common = getattr(group, "mp_policy", None)
    return [one.mp_policy if common is None else common for one in group.fsdp_params]


def _part(group: Any, params: list[Any], policies: list[Any]) -> Any:
    group.fsdp_params = params
    for one, policy in zip(params, policies, strict=True):
        one.mp_policy = policy
    if hasattr(group, "mp_policy") and policies:  # torch before 2.15
        group.mp_policy = policies[0]
    return group


def _regroup(state: Any, groups: list[Any]) -> None:
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups = groups
    for index, group in enumerate(groups):
        group._param_group_index, group._num_param_groups = index, len(groups)
        _note_dtypes(group)


def _note_dtypes(group: Any) -> None:
    """Let a group that has run look at dtypes anew; another does so in its first forward."""
    if not any(hasattr(one, "orig_dtype") for one in group.fsdp_params):
        return
    for one in group.fsdp_params:
        one.all_gather_outputs = []
        if hasattr(one, "_unsharded_param"):
            del one._unsharded_param
    group._init_mp_dtypes()
    if hasattr(group, "_init_reduce_scatter_param_order"):  # since torch 2.15
        group._init_reduce_scatter_param_order()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        raise AmpatchError(
            f"ampatch: fully_shard of torch {torch.__version__} keeps the precision of sharded "
            f'modules in another way than ampatch knows ({error}). Use opt_level="O1", or give '
            "fully_shard itself a MixedPrecisionPolicy and the model the level O0."
        ) from error
