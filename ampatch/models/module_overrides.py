"""`overrides={"decoder.*": "float", nn.Softmax: "float", torch.bmm: "half"}`.

Modules are named by a glob over their path or by their class, functions by
themselves.  The most specific wins: of several rules for a module, the last
one given.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.handlers import is_mode_on, unseen
from ..casting.install import Installation
from ..casting.policy import CastState, Policy
from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import did_you_mean, type_name
from .conversion import caster, has_statistics, is_instance_norm, map_tensors
from .hooks import Hook

PRECISIONS = ("float", "half")


class ModuleOverride:
    """One submodule that runs in another precision than the rest of its model."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        state: CastState,
        policy: Policy | None,
        out_dtype: torch.dtype | None,
    ) -> None:
        self.module = module
        self._state = state
        self._policy = policy
        self._cast_in = caster(dtype)
        self._cast_out = None if out_dtype is None else caster(out_dtype)

    def install(self) -> list[Any]:
        """Hang the hooks on the submodule; returns their handles."""
        return [
            self.module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True),
            self.module.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if self._state.modes and not is_dynamo_compiling() and is_mode_on():
            with unseen():
                return self._enter(module, args, kwargs)
        if self._policy is not None:
            self._state.push(self._policy, self)
        return map_tensors(args, self._cast_in), map_tensors(kwargs, self._cast_in)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._state.modes and not is_dynamo_compiling() and is_mode_on():
            with unseen():
                return self._leave(module, args, output)
        if self._policy is not None:
            self._state.pop(self)
        return None if self._cast_out is None else map_tensors(output, self._cast_out)


def split(overrides: Any) -> tuple[list[tuple[Any, str]], dict[Callable, str]]:
    """`(rules for modules, rules for functions)`, checked.

    Raises `TypeError` or `ValueError` for a key or a precision that means nothing.
    """
    if overrides is None:
        return [], {}
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"ampatch.initialize(overrides={overrides!r}): expected a dict such as "
            f'{{"decoder.*": "float"}}, got {type_name(overrides)}.'
        )
    modules: list[tuple[Any, str]] = []
    functions: dict[Callable, str] = {}
    for key, precision in overrides.items():
        if precision not in PRECISIONS:
            raise ValueError(
                f"ampatch.initialize(overrides={{{key!r}: {precision!r}}}): expected "
                f'"float" or "half".' + did_you_mean(str(precision), PRECISIONS)
            )
        if isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module)):
            modules.append((key, precision))
        elif callable(key) and not isinstance(key, (type, nn.Module)):
            functions[key] = precision
        else:
            raise TypeError(
                f"ampatch.initialize(overrides={{{key!r}: ...}}): expected a module "
                f"path (globs allowed), a Module class or a function, got "
                f"{type_name(key)}."
            )
    return modules, functions


def matching(model: nn.Module, rules: list[tuple[Any, str]]) -> dict[nn.Module, str]:
    """The precision of each submodule that a rule names."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for key, precision in rules:
            hit = (
                fnmatch.fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)
            )
            if hit and name:
                found[module] = precision
    return found


def check_all_used(rules: list[tuple[Any, str]], models: list[nn.Module]) -> None:
    """Raise `ValueError` for a rule that names no submodule of any model."""
    names = [name for model in models for name, _ in model.named_modules() if name]
    for key, precision in rules:
        if not any(matching(model, [(key, precision)]) for model in models):
            shown = key if isinstance(key, str) else key.__name__
            raise ValueError(
                f"ampatch.initialize(overrides={{{shown!r}: {precision!r}}}): no "
                f"submodule matches {shown!r}. Expected a path such as those of "
                f"model.named_modules()." + did_you_mean(str(shown), names)
            )


def precisions(
    model: nn.Module, rules: list[tuple[Any, str]], properties: Properties
) -> dict[nn.Module, str]:
    """The precision of each submodule that runs in another than its model.

    Those that rules name, and in half models InstanceNorm with running statistics: fed half
    input its kernel loses updates of the statistics.
    """
    found = matching(model, rules)
    if properties.cast_model_type in HALF_TYPES and properties.keep_batchnorm_fp32:
        for module in model.modules():
            if module is not model and is_instance_norm(module) and has_statistics(module):
                found.setdefault(module, "float")
    return found


def stays_float(properties: Properties, found: dict[nn.Module, str]) -> Callable[[nn.Module], bool]:
    """Says of a module whether its weights stay in FP32 when the model goes to half."""
    keep = properties.cast_model_type in HALF_TYPES and bool(properties.keep_batchnorm_fp32)
    floats = {
        child
        for module, precision in found.items()
        if precision == "float"
        for child in module.modules()
    }
    halves = {module for module, precision in found.items() if precision == "half"}
    return lambda module: (
        module in floats or (keep and has_statistics(module) and module not in halves)
    )


def check_functions(functions: dict[Callable, str], installation: Installation) -> None:
    """Raise `ValueError` for functions in `overrides` that could not be patched."""
    for function, precision in functions.items():
        if not installation.can_patch(installation.original(function)):
            raise ValueError(
                f"ampatch.initialize(overrides={{{function!r}: {precision!r}}}): this function is "
                "not found in torch, torch.nn.functional, torch.linalg, torch.special or on "
                "torch.Tensor. For functions of your own use "
                "ampatch.register_float_function or register_half_function."
            )
