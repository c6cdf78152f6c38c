"""What a session casts: its policies, outside and inside its models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..casting.policy import Policy
from ..casting.rules import dtype_of, tensors_in
from ..casting.weight_cache import CacheInfo
from ..config.opt_levels import HALF_TYPES, Properties
from .index import Whereabouts
from .members import Members


class CastingMembers(Members):
    """The models and optimizers of one session, and the policy that calls are under.

    `function_rules` maps torch's functions to the precision the user's overrides ask for.
    """

    def __init__(
        self,
        properties: Properties,
        function_rules: dict[Any, str],
        apex_flavour: bool,
        cared_for: Whereabouts,
        modelled: Whereabouts,
    ) -> None:
        super().__init__(cared_for, modelled)
        self.properties = properties
        self.function_rules = function_rules
        self.may_cast = True  # until `stop_casting`
        self._policy = Policy(
            half_to=properties.dtype,
            allow_banned=properties.allow_banned,
            apex_flavour=apex_flavour,
            devices=_device_limit(),
        )
        self._overrides_only = dataclasses.replace(self._policy, follows_tables=False)
        self.mixed_policy = dataclasses.replace(self._policy, gate=mixes)

    @property
    def policy(self) -> Policy | None:
        """The rules this session has in force for the process; None: it casts no calls."""
        if not (self.properties.enabled and self.may_cast):
            return None
        if self._models:
            policies = [managed.policy for managed in self.models() if managed.policy is not None]
            policy = self._policy if self._policy in policies else next(iter(policies), None)
        else:
            policy = self._policy_under(self.properties)
        outside = self.properties.patch_scope == "process" or policy is self.mixed_policy
        if policy is None or outside:
            return policy
        return self._outside_models(policy)

    def _has_masters(self, properties: Properties) -> bool:
        """As apex, its package makes none at O1: weights that came in half keep their gradients."""
        as_apex = self._policy.apex_flavour and properties.patch_torch_functions
        return super()._has_masters(properties) and not as_apex

    def _policy_under(self, properties: Properties) -> Policy | None:
        """What casts at an opt level: the tables, the overrides of functions alone, or nothing."""
        if properties.patch_torch_functions:
            return self._policy
        return self._overrides_only if self.function_rules else None

    def _outside_models(self, policy: Policy) -> Policy:
        """`patch_scope="model"`, outside a forward: only calls that touch a model's own things."""
        parameters = {
            id(parameter) for managed in self.models() for parameter in managed.model.parameters()
        }

        def touches(args: tuple, kwargs: dict) -> bool:
            for value in (*args, *kwargs.values()) if kwargs else args:
                if type(value) is Tensor:  # asked by every call: no generator for the usual kinds
                    if value.dtype in HALF_TYPES:
                        return True
                elif value is not None and type(value) not in (int, float, bool):
                    for tensor in tensors_in((value,)):
                        if dtype_of(tensor) in HALF_TYPES or id(tensor) in parameters:
                            return True
            return False

        return dataclasses.replace(policy, gate=touches)

    def override_function(self, original: Any, dtype: torch.dtype) -> None:
        """Have one function cast to `dtype` whatever the tables say."""
        self._policy.override(original, dtype)

    def cache_info(self) -> CacheInfo:
        """Counts of the weight cache."""
        return self._policy.cache.info()

    def forget_copy(self, weight: Tensor) -> None:
        """A weight may be written into in a way that raises no version."""
        self._policy.cache.forget(weight)

    def forget_copies(self) -> None:
        """Weights may have changed within this thread's forward: cast them anew."""
        self._policy.cache.forget_all()

    def note_hook(self) -> None:
        """Somebody hooks into the graph that this thread is building."""
        self._policy.cache.note_hook()

    def cast_on(self, devices: set[str]) -> None:
        """Cast on these device types too, where it is limited at all."""
        if self._policy.devices is not None:
            self._policy.devices |= devices

    def cast_on_accelerators(self) -> None:
        """Without models: cast on accelerators, if there are any, and where `cast_on` says."""
        self._policy.devices = _device_limit()
        if self._policy.devices is not None:
            self.cast_on({_accelerator()})

    def _cast_to(self, dtype: torch.dtype) -> None:
        for policy in (self._policy, self._overrides_only, self.mixed_policy):
            policy.half_to = policy.half_type = dtype

    def _drop_cache(self) -> None:
        self._policy.cache.close()


def mixes(args: tuple, kwargs: dict) -> bool:
    """The gate of half models with FP32 buffers or inputs: calls that mix FP32 and half tensors.

    PyTorch refuses them where the tables have a row.
    """
    half = single = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            found = (value,)
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


def _device_limit() -> set[str] | None:
    """Where there is only one kind of device nothing needs asking; else start from "meta"."""
    accelerator = getattr(torch, "accelerator", torch.cuda)
    return {"meta"} if accelerator.is_available() else None


def _accelerator() -> str:
    accelerator = getattr(torch, "accelerator", None)
    return "cuda" if accelerator is None else accelerator.current_accelerator().type
