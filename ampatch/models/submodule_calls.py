"""Parts of a half model called from outside its forward: `model.encoder(x)`, `model.encode(x)`.

The outermost part that is called gets its inputs as the model's own forward would.  Where weights
are lent it returns FP32, as the weights are that a method reads.  Of a model with half weights what
it returns stays in half, as these are; but in the steps of a framework (`steps.py`) it has the
dtype of the model's results, since a loss follows.  While the model's own forward runs these hooks
are taken out, so that they cost it nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..config.opt_levels import HALF_TYPES
from ..torch_private.modules import forward_tables
from ..torch_private.probes import current_backward_pass
from . import entries
from .conversion import cast_tensors
from .hooks import Hook
from .io_casting import ModelInputs
from .lent_weights import lenders


class _Here(threading.local):
    def __init__(self) -> None:
        self.outermost: nn.Module | None = None  # the part that a call from outside has entered
        self.again = 0  # how often it is inside itself
        self.result: torch.dtype | None = None  # of what a part returns; None: as it is


def is_traced_by_fx(args: tuple, kwargs: dict) -> bool:
    """Whether torch.fx calls a module on proxies, to see what it does."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.fx.Proxy):
            return True
    return False


class SubmoduleCalls:
    """Hooks on the submodules of one half model.

    `is_inside(part)` says whether a forward runs in this thread that the part belongs to: the
    model's own, or that of a model which shares the part.  `make_inputs(name)` makes what casts a
    part's inputs.  `push(part)` puts the model's policy in force, `pop(part)` takes it out
    again.  `traced()` has the calls, `(module, ...)`, that are lent weights where Dynamo
    traces; None where weights are not lent.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_inside: Callable[[nn.Module], bool],
        make_inputs: Callable[[str], ModelInputs],
        push: Callable[[nn.Module], None],
        pop: Callable[[nn.Module], None],
        traced: Callable[[], list[Any] | None],
    ) -> None:
        self._model = model
        self._is_inside = is_inside
        self._make_inputs = make_inputs
        self._push = push
        self._pop = pop
        self._traced = traced
        self._threads = {threading.get_ident()}  # that have called the model, or made this
        self._here = _Here()
        self._inputs: dict[int, ModelInputs] = {}
        self._tables: list[Any] = []
        self._ids: list[int] = []
        self._hooks: list[Any] = []

    def install(self, lent: Collection[int] | None = None) -> list[Any]:
        """Hang the hooks on the parts with half weights, or with those in `lent` (ids).

        Returns their handles.
        """
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            if not name or isinstance(module, torch.jit.ScriptModule):
                continue
            if not any(
                parameter.dtype in HALF_TYPES if lent is None else id(parameter) in lent
                for parameter in module.parameters()
            ):
                continue
            self._inputs[id(module)] = self._make_inputs(f"{type(self._model).__name__}.{name}")
            before, after = Hook(self._enter), Hook(self._leave)
            pre = module.register_forward_pre_hook(before, with_kwargs=True)
            post = module.register_forward_hook(after, always_call=True)
            handles += (pre, post)
            tables = forward_tables(module)
            if tables is not None:  # else they stay in, which only takes time
                self._tables += tables
                self._ids += (pre.id, post.id)
                self._hooks += (before, after)
        return handles

    def forget(self) -> None:
        """The handles have been removed."""
        self._tables, self._ids, self._hooks = [], [], []

    def results_are(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Have parts return results of this dtype in this thread; returns what they did before."""
        before, self._here.result = self._here.result, dtype
        return before

    def step_aside(self) -> None:
        """The model's own forward begins: out with the hooks.

        Not where weights are lent and several threads call the model or its parts: these are to
        wait for each other.
        """
        self._here.outermost, self._here.again = None, 0
        self._threads.add(threading.get_ident())
        if len(self._threads) > 1 and self._traced() is not None:
            return
        entries.take_out(self._tables, self._ids)

    def come_back(self) -> None:
        """The model's own forward has ended."""
        entries.put_in(self._tables, self._ids, self._hooks)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if is_dynamo_compiling():
            return self._enter_traced(module, args, kwargs)
        here = self._here
        if self._is_inside(module) or id(module) in lenders:
            return None
        if here.outermost is not None:
            here.again += here.outermost is module
            return None
        if current_backward_pass() != -1 and self._traced() is None:
            return None  # a recomputation of converted weights: its inputs are the forward's
        if is_traced_by_fx(args, kwargs):
            return None
        self._threads.add(threading.get_ident())
        taken = self._inputs[id(module)].take(args, kwargs)
        here.outermost = module
        self._push(module)
        return taken

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        here = self._here
        if is_dynamo_compiling():
            return self._leave_traced(module, output)
        if here.outermost is not module:
            return None
        if here.again:
            here.again -= 1
            return None
        here.outermost = None
        self._pop(module)
        self._inputs[id(module)].write_back()
        return self._for_the_code_around(output)

    def _for_the_code_around(self, output: Any) -> Any:
        """Where weights are lent these are FP32 there, beside what a part returns."""
        result = self._here.result if self._traced() is None else torch.float32
        return None if result is None else cast_tensors(output, result)

    # Where Dynamo traces a function that calls a part

    def _enter_traced(
        self, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        traced = self._traced()
        if traced is None or traced:
            return None
        taken = self._inputs[id(module)].take(args, kwargs)
        self._push(module)
        return taken

    def _leave_traced(self, module: nn.Module, output: Any) -> Any:
        traced = self._traced()
        if not traced or traced[-1][0] is not module:
            return None
        self._pop(module)
        return self._for_the_code_around(output)
