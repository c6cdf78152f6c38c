"""Policies, which say to which dtypes and on which devices calls are cast, and their `with` blocks.

A policy belongs to a thread, as torch's grad mode does.  While a generator or a task is suspended
inside a `with` block, other code of the thread runs under that block too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..types import Called
from .calls import USER_BLOCK, CastState
from .weight_cache import WeightCache

Condition = Callable[[tuple, dict], bool]


@dataclasses.dataclass(eq=False)
class Policy:
    """What the rules mean while this policy is active.

    * `half_rows_to`, `float_rows_to`: the dtypes that HALF and FLOAT rows cast to.
      `precision("float")` sets both to FP32.
    * `devices`: the device types whose tensors are cast; None means all.
    * `condition(args, kwargs)` returns whether the rules apply to a call; if None, they always do.
    * `functions`: by function of torch, the `ChooseDtype` (`rules`) that replaces its row's rule.
    * `half_dtype`: the half dtype of the session, also where `precision("float")` sets
      `half_rows_to` to FP32.
    * `in_forwards`: None for most policies.  Otherwise this policy casts nothing in backward
      passes, and `in_forwards` is the policy of forwards and of their recomputations.
    * `attention_in_graphs`: see `special_ops.opaque_attention`.
    """

    half_rows_to: torch.dtype
    float_rows_to: torch.dtype = torch.float32
    devices: set[str] | None = None
    condition: Condition | None = None
    functions: Mapping[Any, Callable] = dataclasses.field(default_factory=dict)
    allow_banned: bool = True
    half_dtype: torch.dtype = None  # type: ignore[assignment]  # None becomes `half_rows_to`
    in_forwards: Policy | None = None
    attention_in_graphs: Callable[..., Any] | None = None
    cache: WeightCache = dataclasses.field(default_factory=WeightCache)

    def __post_init__(self) -> None:
        if self.half_dtype is None:
            self.half_dtype = self.half_rows_to

    def with_half_dtype(self, dtype: torch.dtype) -> Policy:
        """This policy with another half dtype, and with a cache of its own."""
        if dtype is self.half_rows_to:
            return self
        return dataclasses.replace(
            self,
            half_rows_to=dtype,
            float_rows_to=torch.float32,
            half_dtype=dtype,
            attention_in_graphs=None,
            cache=WeightCache(),
        )

    def casts_on_device(self, device: str) -> bool:
        """Whether tensors on this type of device are cast."""
        return self.devices is None or device in self.devices

    def casting_all_to(self, dtype: torch.dtype) -> Policy:
        """This policy with every rule casting to `dtype`, and with a cache of its own."""
        return dataclasses.replace(
            self,
            half_rows_to=dtype,
            float_rows_to=dtype,
            condition=None,
            functions={},
            in_forwards=None,
            attention_in_graphs=None,
            cache=WeightCache(),
        )


class PolicyContext:
    """`with` block or decorator under the policy that `choose()` returns at each entry.  Nests.

    `user_call` is the text of the call that made this block, for errors.  The block's policy is
    active in managed models too, and torch's own autocast is off in the block.
    """

    __slots__ = ("_choose", "_state", "_user_call")

    def __init__(
        self, state: CastState, choose: Callable[[], Policy | None], user_call: str
    ) -> None:
        self._state = state
        self._choose = choose
        self._user_call = user_call

    def __enter__(self) -> None:
        policy = self._choose()
        state = self._state
        autocast_off = state.autocast_devices() if state.may_cast_in_thread() else ()
        try:
            state.enter_block(policy, USER_BLOCK, self, autocast_off)
        except BaseException:
            state.exit_block(self)
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._state.exit_block(self)
        except BaseException:  # KeyboardInterrupt in `exit_block`: no other code exits the block
            self._state.exit_block(self)
            raise

    def __call__(self, function: Called) -> Called:
        if _runs_later(function):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"{self._user_call} cannot decorate {name}: a generator or coroutine function "
                f"returns before it runs. Write `with {self._user_call}:` inside the function, "
                "around the calls; no `yield` or `await` belongs inside the block."
            )

        @functools.wraps(function)
        def in_context(*args: Any, **kwargs: Any) -> Any:
            with PolicyContext(self._state, self._choose, self._user_call):
                return function(*args, **kwargs)

        decorated: Any = in_context
        return decorated


def _runs_later(function: Any) -> bool:
    return (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    )
