"""What a session casts: its policies, outside and inside its models."""

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
from ..casting.rules import Choose, dtype_of
from ..casting.special_ops import prepare_attention
from ..config.opt_levels import HALF_DTYPES, Properties
from ..models.managed_model import SlotsById
from ..models.module_overrides import ModuleOverride
from ..torch_private.devices import device_types, initial_cast_devices
from ..torch_private.probes import current_backward_pass


class Policies:
    """The policies of one session; the active one depends on opt level and models.

    `tables` is that of O1.  `mixed_dtypes` is for half models in whose forward FP32 and half
    tensors meet.  Both share one weight cache.  `functions`: see `Policy`.
    """

    def __init__(
        self, properties: Properties, functions: dict[Any, Choose], state: CastState
    ) -> None:
        self._properties = properties
        self._state = state
        half = properties.cast_model_type  # elsewhere than in half models None or FP32
        self.half = half if half in HALF_DTYPES else properties.dtype
        self.tables = Policy(
            half_to=self.half,
            functions=functions,
            allow_banned=properties.allow_banned,
            devices=initial_cast_devices(),
        )
        self.mixed_dtypes = dataclasses.replace(self.tables, condition=has_mixed_dtypes)
        for policy in (self.tables, self.mixed_dtypes):
            prepare_attention(policy, state)
        self.cache = self.tables.cache

    def policy_of_models(self) -> Policy | None:
        """The policy of the models' forwards: that of the tables, or None."""
        return self.tables if self._properties.patch_torch_functions else None

    def module_override(self, module: nn.Module, precision: str) -> ModuleOverride:
        """The override that runs a submodule in a precision of its own: "float" or "half"."""
        properties, policy = self._properties, None
        dtype = torch.float32 if precision == "float" else self.half
        if properties.patch_torch_functions:
            policy = self.tables.casting_all_to(dtype)
            prepare_attention(policy, self._state)
        return ModuleOverride(module, dtype, self._state, policy, properties.cast_model_type)

    def cast_everywhere(self) -> None:
        """Cast on every device: there is no model whose device would decide."""
        self.tables.devices = None

    def cast_on(self, devices: set[str]) -> None:
        """Cast on these device types too, where casting is limited to some."""
        if self.tables.devices is not None:
            self.tables.devices |= devices

    def cast_on_accelerators(self) -> None:
        """Without models: cast on all accelerators, and on the devices of `cast_on`."""
        self.tables.devices = initial_cast_devices()
        self.cast_on(set(device_types()) - {"cpu"})


def outside_backward(policy: Policy) -> Policy:
    """This policy, except that nothing is cast in a backward pass: hooks compute there."""
    condition = policy.condition

    def is_outside(args: tuple, kwargs: dict) -> bool:
        if condition is not None and not condition(args, kwargs):
            return False
        return is_dynamo_compiling() or current_backward_pass() == -1

    return dataclasses.replace(policy, condition=is_outside, in_forwards=policy)


def limited_to_slots(policy: Policy, slot_maps: Sequence[SlotsById]) -> Policy:
    """`policy` for calls on half tensors, or on parameters that stand in these slots."""
    return dataclasses.replace(policy, condition=_has_half_or_parameter(slot_maps))


def _has_half_or_parameter(slot_maps: Sequence[SlotsById]) -> Callable[[tuple, dict], bool]:
    def is_parameter(tensor: Tensor) -> bool:
        for slots in slot_maps:
            slot = slots.get(id(tensor))
            if slot is not None and getattr(slot[0](), slot[1], None) is tensor:
                return True
        return False

    def has_half_or_parameter(args: tuple, kwargs: dict) -> bool:
        for tensor in _tensors(args, kwargs):
            kind = type(tensor)
            dtype = tensor.dtype if kind is Tensor or kind is Parameter else dtype_of(tensor)
            if dtype in HALF_DTYPES or (kind is not Tensor and is_parameter(tensor)):
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
    """The tensors of a call.  Every call runs this: no generator for the usual kinds."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            tensors.append(value)
        elif value is not None and kind not in (int, float, bool):
            tensors += tensors_in((value,))
    return tensors
