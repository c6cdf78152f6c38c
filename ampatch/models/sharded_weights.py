"""The weights of a model that FSDP2 (`fully_shard`) has sharded, under the model's opt level.

A model whose parameters are FP32 shards *is* at O2: the optimizer steps on the shards, and FSDP2
gathers them, computes and sends them in half, by its own `MixedPrecisionPolicy`.  So the level
becomes that policy.  Without master weights (O3) the shards themselves are half.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config.opt_levels import HALF_TYPES, Properties
from ..errors import AmpatchError, UndoAll
from ..torch_private.sharding import Sharded, Sharding, convert_shards, shardings
from .conversion import ConvertedWeights, set_data
from .lent_places import StaysFloat


def float_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that were sharded with a policy of FP32: they run in FP32 in a half model."""
    return [
        module
        for sharding in shardings(model)
        if sharding.policy.param_dtype is torch.float32
        for module in sharding.modules
        if module is not model
    ]


def sharded_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP2 holds."""
    return {id(held.parameter) for sharding in shardings(model) for held in sharding.held()}


def fits(call: str, policy: Any, properties: Properties, is_whole: bool) -> None:
    """Raise `AmpatchError` for a policy that contradicts a level.

    A part of a half model may have a policy of FP32, the model as a whole (`is_whole`) not.
    """
    half = properties.cast_model_type
    expected = {None, half} if is_whole else {None, half, torch.float32}
    if half in HALF_TYPES and policy is not None and policy.param_dtype not in expected:
        raise AmpatchError(
            f"{call}: fully_shard was given MixedPrecisionPolicy(param_dtype={policy.param_dtype}),"
            f" and the model is at {properties.opt_level} in {half}. Expected a policy without "
            f"param_dtype, which ampatch fills in, or with param_dtype={half}"
            + (
                "; other dtypes: ampatch.initialize(dtype=...)."
                if is_whole
                else "; or torch.float32 for a part of the model that shall run in FP32."
            )
        )


class _Place(NamedTuple):
    """Where a module has a parameter that is about to be sharded, and its dtype by the user."""

    module: nn.Module
    name: str
    parameter: Tensor
    dtype: torch.dtype


class ShardedWeights:
    """What a managed model changes of FSDP2's policies and shards, and how that is undone."""

    def __init__(self, model: nn.Module, properties: Properties) -> None:
        self._model = model
        self._properties = properties
        self._undo: list[Callable[[], None]] = []
        self._taken: set[int] = set()  # ids of states, which `_undo` keeps alive
        self._dtypes: dict[int, torch.dtype] = {}  # before a change, by ids of parameters

    def _storage_dtype(self, module: nn.Module, stays_float: StaysFloat) -> torch.dtype:
        """In which dtype the shards of a module's own parameters are kept."""
        half = self._properties.cast_model_type
        in_float = self._properties.master_weights is not False or stays_float(module)
        return torch.float32 if half is None or in_float else half

    def _policy(self, given: Any, is_whole: bool) -> Any:
        """What a policy of the user becomes under the level."""
        half = self._properties.cast_model_type
        if half not in HALF_TYPES:
            return given
        changes: dict[str, Any] = {}
        if given.param_dtype is not half:
            changes = {
                "param_dtype": half,
                "reduce_dtype": given.reduce_dtype or torch.float32,
                "cast_forward_inputs": False,
            }
        if is_whole:  # ampatch casts what goes into the model, and comes out of it
            changes |= {"cast_forward_inputs": False}
        return dataclasses.replace(given, **changes)

    def take(self, stays_float: StaysFloat) -> None:
        """Put everything that is sharded by now under the level."""
        if self._properties.cast_model_type is None:
            return
        new = [one for one in shardings(self._model) if id(one.state) not in self._taken]
        call = f"ampatch.initialize(opt_level={self._properties.opt_level!r})"
        for sharding in new:
            is_whole = self._model in sharding.modules
            fits(call, sharding.policy, self._properties, is_whole)
        for sharding in new:
            self._taken.add(id(sharding.state))
            self._take(sharding, stays_float)

    def _take(self, sharding: Sharding, stays_float: StaysFloat) -> None:
        def dtype_of(held: Sharded) -> torch.dtype:
            known = held.parameter.dtype
            if known not in (torch.float32, *HALF_TYPES):
                return known
            return self._storage_dtype(held.module, stays_float)

        changed = [held for held in sharding.held() if dtype_of(held) is not held.parameter.dtype]
        self._dtypes |= {id(held.parameter): held.parameter.dtype for held in changed}
        policy = self._policy(sharding.policy, self._model in sharding.modules)
        self._undo.append(sharding.put(policy, stays_float))
        convert_shards(sharding, dtype_of)
        self._undo.append(lambda: convert_shards(sharding, self._dtype_before))

    def refuse_unseen(self, call: str) -> None:
        """Raise `AmpatchError` where `fully_shard` was called without ampatch's knowledge."""
        if self._properties.cast_model_type not in HALF_TYPES:
            return
        for sharding in shardings(self._model):
            if id(sharding.state) not in self._taken:
                raise AmpatchError(
                    f"{call}: {type(sharding.modules[0]).__name__} was sharded after "
                    f"ampatch.initialize(opt_level={self._properties.opt_level!r}) by a "
                    "fully_shard that ampatch could not replace (a closure, a container or a "
                    "class has held it since before), so its shards are the rounded weights. Call "
                    "torch.distributed.fsdp.fully_shard by that name, or call fully_shard first "
                    "and initialize then."
                )

    @contextlib.contextmanager
    def being_made(
        self,
        modules: list[nn.Module],
        given: Any,
        ignored: set[int],
        stays_float: StaysFloat,
        converted: ConvertedWeights,
    ) -> Iterator[Any]:
        """`fully_shard` is called inside for parts of the model; gives the policy for it.

        `given` is the user's policy; parameters in `ignored` (ids) are not sharded.  The others are
        replaced: they leave `converted`, and half ones whose shards are to be FP32 are so before.
        """
        left = ignored | sharded_parameters(self._model)
        places = {
            id(parameter): _Place(module, name, parameter, converted.dtype_before(parameter))
            for outer in modules
            for module in outer.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) not in left
        }
        forgotten, before = converted.forget(places), []
        for module, _, parameter, _ in places.values():
            wanted = self._storage_dtype(module, stays_float)
            if parameter.dtype in HALF_TYPES and parameter.dtype is not wanted:
                before.append((parameter, parameter.detach()))
                set_data(parameter, parameter.detach().to(wanted))
        try:
            yield self._policy(given, self._model in modules)
        except BaseException:
            converted.remember(forgotten)
            for parameter, data in before:
                set_data(parameter, data)
            raise
        for module, name, _, dtype in places.values():
            parameter = module.get_parameter(name)
            if parameter.dtype is not dtype:
                self._dtypes[id(parameter)] = dtype
        for sharding in shardings(self._model):
            if id(sharding.state) not in self._taken:
                self._undo.append(_with_policy(sharding, given))
        self.take(stays_float)

    def _dtype_before(self, held: Sharded) -> torch.dtype:
        return self._dtypes.get(id(held.parameter), held.parameter.dtype)

    def converted(self) -> set[int]:
        """Ids of the sharded parameters whose dtype is, or was, changed."""
        return set(self._dtypes)

    def release(self) -> None:
        """Policies and dtypes are as they were before, the newest change first."""
        undo = UndoAll("ampatch: sharded weights are given back")
        while self._undo:
            undo.do(self._undo.pop())
        self._taken.clear()
        undo.end()


def _with_policy(sharding: Sharding, policy: Any) -> Callable[[], None]:
    def put() -> None:
        sharding.put(policy, lambda module: False)

    return put
