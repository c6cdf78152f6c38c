"""Forwards of `nn.Linear` and `nn.Conv*` that read weights from the module's table of parameters.

`self.weight` is no attribute of the instance, so that it costs a failed look-up and a call of
`nn.Module.__getattr__`, in Python, and so does `self.bias`.  The replacements do what torch's
forwards do, and call the same function by the same name.  Where `self.weight` may mean anything
but the entry of the table they leave the call to torch's forward.

Where torch's forward is not the one that is written here, nothing is replaced.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

Forward = Callable[[Any, Tensor], Tensor]


def _linear(self: Any, input: Tensor) -> Tensor:
    return F.linear(input, self.weight, self.bias)


def _convolution(self: Any, input: Tensor) -> Tensor:
    return self._conv_forward(input, self.weight, self.bias)


def _of_table(kind: type[Any], original: Forward, is_linear: bool) -> Forward:
    of_kind, is_traced = vars(kind), is_dynamo_compiling
    module, look_up = nn.Module, nn.Module.__getattr__

    def forward(self: Any, input: Tensor) -> Tensor:
        if type(self) is kind and module.__getattr__ is look_up and not is_traced():
            own = self.__dict__
            table = own["_parameters"]
            if (
                "weight" in table
                and "bias" in table
                and "weight" not in own
                and "bias" not in own
                and "weight" not in of_kind
                and "bias" not in of_kind
            ):
                if is_linear:  # written out: explanations of errors quote the line
                    return F.linear(input, table["weight"], table["bias"])
                return self._conv_forward(input, table["weight"], table["bias"])
        return original(self, input)

    return forward


_KINDS: dict[type[Any], Forward] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}


def replacements() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What to replace: `(class, name, make)`."""
    return [
        (kind, "forward", functools.partial(_in_torchs_module, kind, known is _linear))
        for kind, known in _KINDS.items()
        if _does_what(vars(kind).get("forward"), known, sys.modules[kind.__module__])
    ]


def _does_what(found: Any, known: Any, home: Any) -> bool:
    """Whether `found` is torch's own, not one that other code has put there, and as `known`."""
    if not inspect.isfunction(found) or found.__globals__ is not vars(home):
        return False
    ours, theirs = known.__code__, found.__code__
    return (theirs.co_code, theirs.co_names, theirs.co_varnames) == (
        ours.co_code,
        ours.co_names,
        ours.co_varnames,
    )


def _in_torchs_module(kind: type[Any], is_linear: bool, original: Any) -> Any:
    """The replacement of `original` as a function of the module that the original is in.

    It finds `F` there, as the original does.  So do TorchScript, which compiles the original's
    source, and the explanation of errors, which looks for frames of torch.
    """
    made: Any = _of_table(kind, original, is_linear)
    forward = FunctionType(made.__code__, original.__globals__, None, None, made.__closure__)
    return functools.update_wrapper(forward, original)
