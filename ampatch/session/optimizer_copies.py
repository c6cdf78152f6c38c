"""Plain copies of one managed optimizer, made together with plain copies of its model.

Copied or pickled with its model, in any order, an optimizer comes back with the
copied model's parameters in its groups, and its state by them.  By itself it is
copied as torch copies it, without ampatch's methods; parameters are in FP32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..config.opt_levels import HALF_TYPES
from ..models.copies import SharedState
from ..models.plain_parameters import PlainParameters
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers.state import entry_copy, move_state


class OptimizerCopies:
    """Copies one optimizer.  `is_managed(tensor)` says whether a managed model has a parameter."""

    def __init__(
        self,
        managed: ManagedOptimizer,
        is_managed: Callable[[Tensor], bool],
        plain_parameters: PlainParameters,
    ) -> None:
        self._managed = managed
        self._is_managed = is_managed
        self._plain_parameters = plain_parameters

    def methods(self) -> dict[str, Callable]:
        """What is to hang on the optimizer, by name."""
        return {"__deepcopy__": self._deepcopy, "__reduce_ex__": self._reduce}

    def _deepcopy(self, memo: dict) -> Any:
        optimizer = self._bring_up_to_date()
        for half in self._widened():
            if id(half) not in memo:
                value = half.detach().float()
                memo[id(half)] = nn.Parameter(value, requires_grad=half.requires_grad)
        with self._plain() as plain:
            copied = copy.deepcopy(plain, memo)
        if copied is not optimizer:
            _fit_state(copied)
        return copied

    def _reduce(self, protocol: int) -> Any:
        """Pickle takes a plain copy; `copy.copy`, which asks here too, shares what it can."""
        optimizer = self._bring_up_to_date()
        with self._plain():
            kind: Any = type(optimizer)
            reduced = kind.__reduce_ex__(optimizer, protocol)
            make, args, state, *rest = reduced
            if isinstance(state, dict):
                state = dict(state)
        widened = self._widened()
        if not widened or not isinstance(state, dict) or "param_groups" not in state:
            return make, args, state, *rest
        return (
            make,
            args,
            SharedState(state, lambda: self._with_plain_parameters(state, widened)),
            *rest,
        )

    def _bring_up_to_date(self) -> Any:
        self._managed.add_new_params()
        self._managed.masters.sync_from_half()
        return self._managed.optimizer

    def _widened(self) -> list[Tensor]:
        """Half parameters without masters, in FP32 in a copy of their model."""
        return [
            param
            for param in self._managed.parameters()
            if param.dtype in HALF_TYPES and self._is_managed(param)
        ]

    @contextlib.contextmanager
    def _plain(self) -> Iterator[Any]:
        """The optimizer, for as long as it has none of ampatch's methods."""
        with self._managed.without_methods():
            yield self._managed.optimizer

    def _with_plain_parameters(self, state: dict, widened: list[Tensor]) -> dict:
        """An optimizer's attributes with FP32 parameters in place of those `widened`."""
        plain = {id(half): self._plain_parameters.of(half) for half in widened}
        groups = [
            {**group, "params": [plain.get(id(param), param) for param in group["params"]]}
            for group in state["param_groups"]
        ]
        entries = copy.copy(state.get("state", {}))
        for half in widened:
            if half in entries:
                entries[plain[id(half)]] = entry_copy(entries.pop(half))
        shadow = _Holder(groups, entries)
        _fit_state(shadow)
        return {**state, "param_groups": groups, "state": entries}


class _Holder:
    """What `move_state` needs to see of an optimizer."""

    def __init__(self, param_groups: list[dict], state: Any) -> None:
        self.param_groups = param_groups
        self.state = state


def _fit_state(optimizer: Any) -> None:
    """Give state in half to FP32 parameters in their dtype."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            move_state(optimizer, param, param)
