"""The parameters in an optimizer's `param_groups`: masters in the place of half parameters.

The optimizer's state moves along with its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..master_weights import MasterWeights
from . import parameter_lists, zero
from .state import move_state


class ParamGroups:
    """The places of one optimizer's parameters.

    `master_of` gives the master that another optimizer has made for a half parameter, or None;
    `half_of` the half parameter of a master that another optimizer has made, or None.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: MasterWeights,
        master_of: Callable[[Tensor], Parameter | None],
        half_of: Callable[[Tensor], Tensor | None],
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._master_of = master_of
        self._half_of = half_of

    def own_parameters(self) -> Iterator[Tensor]:
        """The parameters that the optimizer was given: half ones where it has masters now."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                half = self._masters.half_of(param)
                yield param if half is None else half

    def put_masters(
        self, originals: dict[int, Tensor], halves: set[int], masters: dict[int, Parameter]
    ) -> bool:
        """Put masters in the place of half parameters in `halves` (ids); whether there were any.

        `originals` has the FP32 values that half parameters (ids) were rounded from.  Those in
        `masters` (by ids of half parameters) exist already.  An optimizer that was made of another
        one's masters shares them.
        """
        parameter_lists.check(self._optimizer, halves)
        new_of: dict[int, Tensor] = {}
        for group in self._optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if id(param) in halves:
                    master = self._master_for(param, originals, masters)
                    group["params"][index] = new_of[id(param)] = master
                    move_state(self._optimizer, param, master)
                elif id(param) in originals:
                    move_state(self._optimizer, param, param)
                elif self._masters.half_of(param) is None:
                    half = self._half_of(param)
                    if half is not None:
                        new_of[id(half)] = self._master_for(half, originals, masters)
        parameter_lists.exchange(self._optimizer, new_of)
        zero.settle(self._optimizer)
        return bool(new_of)

    def _master_for(
        self, param: Tensor, originals: dict[int, Tensor], masters: dict[int, Parameter]
    ) -> Parameter:
        master = self._masters.of(param)
        if master is None:
            known = masters.get(id(param), self._master_of(param))
            self._masters.is_shared = self._masters.is_shared or known is not None
            master = self._masters.add(param, originals.get(id(param)), known)
        return master

    def put_halves(self, halves: set[int]) -> bool:
        """Put half parameters (ids) back in the place of their masters; whether there were any."""
        old_of: dict[int, Tensor] = {}
        for group in self._optimizer.param_groups:
            for index, master in enumerate(group["params"]):
                param = self._masters.half_of(master)
                if param is not None and id(param) in halves:
                    group["params"][index] = old_of[id(master)] = param
                    move_state(self._optimizer, master, param)
                    self._masters.remove(param)
        if old_of:
            zero.forget_keys(self._optimizer)
            parameter_lists.exchange(self._optimizer, old_of)
        return bool(old_of)

    def fit_state(self, changed: set[int]) -> None:
        """Give the state of parameters (ids) whose dtype has changed their new dtype."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if id(param) in changed:
                    move_state(self._optimizer, param, param)
        zero.settle(self._optimizer)

    def refuse_twice(self, group: Any) -> None:
        """Raise `ValueError` if a new group has half weights whose masters are in others."""
        params = group.get("params") if isinstance(group, dict) else None
        if params is None:
            return
        given = group["params"] = [params] if isinstance(params, Tensor) else list(params)
        held = {id(param) for one in self._optimizer.param_groups for param in one["params"]}
        for param in given:
            param = param[1] if isinstance(param, tuple) else param
            if id(self._masters.of(param)) in held:
                raise ValueError(
                    "some parameters appear in more than one parameter group: "
                    f"{type(self._optimizer).__name__}.add_param_group was given a half weight "
                    f"of shape {tuple(param.shape)} whose FP32 master it has already."
                )
