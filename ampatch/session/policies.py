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
from ..casting.special_ops import record_attention
from ..config.opt_levels import HALF_TYPES, Properties
from ..models.managed_model import Places
from ..models.module_overrides import ModuleOverride
from ..torch_private.devices import device_types, devices_to_start_from
from ..torch_private.probes import current_backward_pass


class Policies:
    """The policies of one session; which of them is in force depends on opt level and models.

    `tables` is that of O1, and `mixed` is for half models whose forward mixes FP32 and half
    tensors.  Both share one weight cache.  `functions`: see `Policy`.
    """

    def __init__(
        self, properties: Properties, functions: dict[Any, Choose], state: CastState
    ) -> None:
        self._properties = properties
        self._state = state
        half = properties.cast_model_type  # elsewhere than in half models None or FP32
        self.half = half if half in HALF_TYPES else properties.dtype
        self.tables = Policy(
            half_to=self.half,
            functions=functions,
            allow_banned=properties.allow_banned,
            devices=devices_to_start_from(),
        )
        self.mixed = dataclasses.replace(self.tables, gate=mixes)
        for policy in (self.tables, self.mixed):
            record_attention(policy, state)
        self.cache = self.tables.cache

    def in_models(self) -> Policy | None:
        """What casts in the models: the tables, or nothing."""
        return self.tables if self._properties.patch_torch_functions else None

    def module_override(self, module: nn.Module, precision: str) -> ModuleOverride:
        """What has a part of a model run in a precision of its own: "float" or "half"."""
        properties, policy = self._properties, None
        dtype = torch.float32 if precision == "float" else self.half
        if properties.patch_torch_functions:
            policy = self.tables.forced(dtype)
            record_attention(policy, self._state)
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
        self.tables.devices = devices_to_start_from()
        self.cast_on(set(device_types()) - {"cpu"})


def outside_passes(policy: Policy) -> Policy:
    """This policy, except that nothing is cast in a backward pass: hooks compute there."""
    gate = policy.gate

    def is_outside(args: tuple, kwargs: dict) -> bool:
        if gate is not None and not gate(args, kwargs):
            return False
        return is_dynamo_compiling() or current_backward_pass() == -1

    return dataclasses.replace(policy, gate=is_outside, in_forwards=policy)


def limited(policy: Policy, places: Sequence[Places]) -> Policy:
    """`policy` for calls on half tensors, or on parameters that stand in these `places`."""
    return dataclasses.replace(policy, gate=_touches(places))


def _touches(places: Sequence[Places]) -> Callable[[tuple, dict], bool]:
    def is_parameter(tensor: Tensor) -> bool:
        for known in places:
            place = known.get(id(tensor))
            if place is not None and getattr(place[0](), place[1], None) is tensor:
                return True
        return False

    def touches(args: tuple, kwargs: dict) -> bool:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is Tensor:  # run by every call: no generator for the usual kinds
                if value.dtype in HALF_TYPES:
                    return True
            elif value is not None and type(value) not in (int, float, bool):
                for tensor in tensors_in((value,)):
                    if dtype_of(tensor) in HALF_TYPES or is_parameter(tensor):
                        return True
        return False

    return touches


def mixes(args: tuple, kwargs: dict) -> bool:
    """The gate of half models with FP32 buffers or inputs: calls that mix FP32 and half tensors.

    PyTorch refuses them where the tables have a row.
    """
    half = single = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            found = [value]
        elif value is None or kind in (int, float, bool):
            continue
        else:
            found = tensors_in((value,))
        for tensor in found:
            dtype = tensor.dtype
            if dtype is torch.float32:
                single = True
            elif dtype in HALF_TYPES:
                half = True
    return half and single
