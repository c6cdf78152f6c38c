"""What a session casts: its policies, inside and outside of its models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..casting.arguments import tensors_in
from ..casting.calls import CastState
from ..casting.policy import Policy
from ..casting.rules import ChooseDtype, dtype_of
from ..casting.special_ops import prepare_attention
from ..config.opt_levels import HALF_DTYPES, Properties
from ..models.managed_model import ParameterOwners
from ..models.module_overrides import ModuleOverride
from ..torch_private.devices import device_types, initial_cast_devices
from ..torch_private.probes import current_backward_pass


class Policies:
    """The policies of one session.  The opt level and the models decide which is active.

    `tables_policy`: the policy of O1.  `mixed_dtypes_policy`: for half models in whose forward a
    call gets FP32 and half tensors.  Both share one weight cache.  `functions`: see `Policy`.
    """

    def __init__(
        self, properties: Properties, functions: dict[Any, ChooseDtype], state: CastState
    ) -> None:
        self._properties = properties
        self._state = state
        model_dtype = properties.cast_model_type
        self.half_dtype = model_dtype if model_dtype in HALF_DTYPES else properties.dtype
        self.tables_policy = Policy(
            half_rows_to=self.half_dtype,
            functions=functions,
            allow_banned=properties.allow_banned,
            devices=initial_cast_devices(),
        )
        self.mixed_dtypes_policy = dataclasses.replace(
            self.tables_policy, condition=has_mixed_dtypes
        )
        for policy in (self.tables_policy, self.mixed_dtypes_policy):
            prepare_attention(policy, state)
        self.cache = self.tables_policy.cache

    def model_forward_policy(self) -> Policy | None:
        """The policy of the models' forwards: `tables_policy` at O1, else None."""
        return self.tables_policy if self._properties.patch_torch_functions else None

    def module_override(self, module: nn.Module, precision: str) -> ModuleOverride:
        """Return the override that runs a submodule in its own precision, "float" or "half"."""
        properties = self._properties
        policy = None
        dtype = torch.float32 if precision == "float" else self.half_dtype
        if properties.patch_torch_functions:
            policy = self.tables_policy.casting_all_to(dtype)
            prepare_attention(policy, self._state)
        return ModuleOverride(module, dtype, self._state, policy, properties.cast_model_type)

    def cast_everywhere(self) -> None:
        """Cast on every device.  For sessions without models, which would limit the devices."""
        self.tables_policy.devices = None

    def cast_on(self, devices: set[str]) -> None:
        """Cast on these device types too, if casts are limited to some device types."""
        if self.tables_policy.devices is not None:
            self.tables_policy.devices |= devices

    def cast_on_accelerators(self) -> None:
        """Cast on accelerators and on devices of later `cast_on`.  For sessions without models."""
        self.tables_policy.devices = initial_cast_devices()
        self.cast_on(set(device_types()) - {"cpu"})


def outside_backward(policy: Policy) -> Policy:
    """Return `policy` without casts in backward passes, in which hooks may compute."""
    condition = policy.condition

    def is_outside(args: tuple, kwargs: dict) -> bool:
        if condition is not None and not condition(args, kwargs):
            return False
        return is_dynamo_compiling() or current_backward_pass() == -1

    return dataclasses.replace(policy, condition=is_outside, in_forwards=policy)


def limited_to_parameters(policy: Policy, owner_maps: Sequence[ParameterOwners]) -> Policy:
    """Return `policy` limited to calls on half tensors or on parameters in `owner_maps`."""
    return dataclasses.replace(policy, condition=_has_half_or_parameter(owner_maps))


def _has_half_or_parameter(owner_maps: Sequence[ParameterOwners]) -> Callable[[tuple, dict], bool]:
    def is_parameter(tensor: Tensor) -> bool:
        for owners in owner_maps:
            owner = owners.get(id(tensor))
            if owner is not None and getattr(owner.module(), owner.name, None) is tensor:
                return True
        return False

    def has_half_or_parameter(args: tuple, kwargs: dict) -> bool:
        for tensor in _tensors(args, kwargs):
            cls = type(tensor)
            dtype = tensor.dtype if cls is Tensor or cls is Parameter else dtype_of(tensor)
            if dtype in HALF_DTYPES or (cls is not Tensor and is_parameter(tensor)):
                return True
        return False

    return has_half_or_parameter


def has_mixed_dtypes(args: tuple, kwargs: dict) -> bool:
    """Whether a call has both FP32 and half tensors, as in half models with FP32 buffers.

    PyTorch refuses most such calls of functions in the tables.
    """
    dtypes = {tensor.dtype for tensor in _tensors(args, kwargs)}
    return torch.float32 in dtypes and not dtypes.isdisjoint(HALF_DTYPES)


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors of a call.  Each call runs this, so the usual types take the fast path."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        cls = type(value)
        if cls is Tensor or cls is Parameter:
            tensors.append(value)
        elif value is not None and cls not in (int, float, bool):
            tensors += tensors_in((value,))
    return tensors
