"""Parts of a half model called from outside its forward: `model.encoder(x)`, `model.encode(x)`.

The outermost part that is called gets its inputs as the model's own forward would.  Where weights
are lent it returns FP32, as the weights are that a method reads.  A model with half weights returns
half there; but in a framework's step the dtype of the model's results, because a loss follows.
While the model's own forward runs these hooks are taken out, so that they cost it nothing.

`model.forward(x)` is such a call too: `forward_of` makes it one of the model, for apex's scripts.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from itertools import repeat
from types import FrameType
from typing import Any, Protocol

import torch
import torch.fx
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call, calling_frame, computes_in, here, innermost
from ..casting.cast_state import CastState
from ..config.opt_levels import HALF_TYPES, Properties
from ..log import logger
from ..torch_private.modules import forward_tables
from .hooks import Hook
from .io_casting import ModelInputs
from .lent_places import StaysFloat
from .lent_weights import LentWeights, lenders, lending_around
from .values import cast_tensors

_FRAMES = 12  # from a part up to the forward that calls it; torch's own take three


class Whole(Protocol):
    """What parts ask of their model."""

    model: nn.Module
    properties: Properties
    lent: LentWeights | None

    def inputs_of(self, part: str = "") -> ModelInputs: ...

    def begin(
        self, root: nn.Module, args: tuple, kwargs: dict, inputs: ModelInputs | None
    ) -> tuple[tuple, dict] | None: ...

    def begin_traced(
        self, root: nn.Module, args: tuple, kwargs: dict, inputs: ModelInputs | None
    ) -> tuple[tuple, dict] | None: ...

    def join(self, root: nn.Module) -> None: ...

    def end(self, root: nn.Module) -> Call | None: ...

    def results_in_step(self) -> torch.dtype | None: ...


def is_traced_by_fx(args: tuple, kwargs: dict) -> bool:
    """Whether torch.fx calls a module on proxies, to see what it does."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.fx.Proxy):
            return True
    return False


class SubmoduleCalls:
    """Hooks on the submodules of one half model."""

    def __init__(self, whole: Whole, state: CastState) -> None:
        self._whole = whole
        self._state = state
        self.lends = whole.properties.lends_weights
        self._inputs: dict[int, ModelInputs] = {}
        self._tables: list[Any] = []
        self._ids: list[int] = []
        self._hooks: list[Any] = []
        self._has_warned = False

    def install(self, lent: Collection[int] | None, stays_float: StaysFloat) -> Iterator[Any]:
        """Hang the hooks on the parts with half weights, or with those in `lent` (ids).

        Inputs of parts that stay FP32 are cast by their overrides alone.
        Gives each handle at once: what follows may raise.
        """
        for name, module in self._whole.model.named_modules():
            if not name or isinstance(module, torch.jit.ScriptModule) or stays_float(module):
                continue
            if not any(
                parameter.dtype in HALF_TYPES if lent is None else id(parameter) in lent
                for parameter in module.parameters()
            ):
                continue
            self._inputs[id(module)] = self._whole.inputs_of(name)
            before, after = Hook(self._enter), Hook(self._leave)
            yield (pre := module.register_forward_pre_hook(before, with_kwargs=True))
            yield (post := module.register_forward_hook(after, always_call=True))
            tables = forward_tables(module)
            if tables is not None:  # else they stay in, which only takes time
                self._tables += tables
                self._ids += (pre.id, post.id)
                self._hooks += (before, after)

    def forget(self) -> None:
        """The handles have been removed."""
        self._tables, self._ids, self._hooks = [], [], []

    def step_aside(self) -> None:
        """The model's own forward begins: out with the hooks."""
        take_out(self._tables, self._ids)

    def end(self) -> None:
        """The model's own forward has ended."""
        put_in(self._tables, self._ids, self._hooks)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        whole, is_traced = self._whole, is_dynamo_compiling()
        inputs = self._inputs.get(id(module))
        if whole.lent is None or inputs is None:  # a shallow copy of a part has the same hooks
            return None
        if is_traced:
            if not self.lends or any(one.is_traced and one.begun_by is whole for one in here.stack):
                return None
            return whole.begin_traced(module, args, kwargs, inputs)
        if here.stack:
            self._state.end_abandoned()
            if lending_around(module) is not None:
                if innermost(whole, module) is not None:  # it calls itself
                    whole.join(module)
                return None
        if id(module) in lenders or is_traced_by_fx(args, kwargs):
            return None
        if not self._has_warned:
            self._warn_of_forward()
        return whole.begin(module, args, kwargs, inputs)

    def _warn_of_forward(self) -> None:
        """Say once that the model's `forward` is called by itself, if it is what calls a part."""
        model = self._whole.model
        code = getattr(model.forward, "__code__", None)
        frame = calling_frame()
        for _ in range(_FRAMES):
            if frame is None or frame.f_code is code:
                break
            frame = frame.f_back
        if frame is None or frame.f_code is not code or _first_argument(frame) is not model:
            return
        self._has_warned = True
        logger.warning(
            "%s.forward(...) was called by itself. At %s inputs and outputs are cast where the "
            "model is called: here each part casts by itself, and what is computed between parts "
            "is not cast at all. Call the model: model(...) instead of model.forward(...).",
            *(type(model).__name__, self._whole.properties.opt_level),
        )

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if not here.stack:
            return None
        whole, is_traced = self._whole, is_dynamo_compiling()
        call = whole.end(module)
        if call is None or call.is_passive:
            return None
        # Outside of forwards lent weights are FP32, beside what a part returns.
        result = torch.float32 if self.lends else whole.results_in_step()
        if not is_traced:
            result = computes_in() or result
        return None if result is None else cast_tensors(output, result)


def forward_of(model: nn.Module, enter: Callable, leave: Callable) -> Callable:
    """`model.forward` that, called by itself, does what `model(...)` does, as in apex.

    `enter` and `leave` are the model's hooks, for a forward of the script's own that calls this.
    """
    forward = model.forward
    threads: set[int] = set()  # in which such a call is on its way into the model's own

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or id(model) not in lenders:
            return forward(*args, **kwargs)
        around = lending_around(model)
        if around is not None and not around.is_abandoned():
            return forward(*args, **kwargs)
        thread = threading.get_ident()
        if thread in threads:
            return forward(*args, **kwargs)
        if vars(model).get("forward") is not call:  # in one of the script's own
            return within(args, kwargs)
        threads.add(thread)
        try:
            return model(*args, **kwargs)
        finally:
            threads.discard(thread)

    def within(args: tuple, kwargs: dict) -> Any:
        taken = enter(model, args, kwargs, sys._getframe())
        args, kwargs = taken or (args, kwargs)
        output = result = None
        try:
            output = forward(*args, **kwargs)
        finally:
            result = leave(model, args, output)
        return output if result is None else result

    return call


def _first_argument(frame: FrameType) -> Any:
    return frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None


def put_in(tables: list[OrderedDict], ids: list[int], hooks: list[Any]) -> None:
    """Add hooks, behind all others of their tables."""
    deque(map(OrderedDict.__setitem__, tables, ids, hooks), maxlen=0)


def take_out(tables: list[OrderedDict], ids: list[int]) -> None:
    """Remove hooks, where they are there."""
    deque(map(OrderedDict.pop, tables, ids, repeat(None)), maxlen=0)
