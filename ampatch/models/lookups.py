"""O2: the half copy of an embedding's weight is made when something other than the lookup reads it.

A lookup reads some rows; a copy reads and writes all of them, in each forward.  So `nn.Embedding`
and `nn.EmbeddingBag` look up in their FP32 weight, and give the result in half
(`casting/special_ops`).  Whatever else reads the weight while the model's forward runs, such as a
product with it, finds a half copy, as of any other weight that is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.half_copies import half_copies
from ..torch_private.modules import PARAMETERS
from ..torch_private.probes import is_recording
from .values import cast_tensors, caster, map_tensors

_to_float = caster(torch.float32)


class Lookup(dict):
    """In the place of an embedding's table of parameters while its weight is lent.

    The half copy is made when it is read.  From then on the module has its own table again, with
    the copy in it.  The object is the same in all forwards, since Dynamo asks which it is.
    """

    dtype: torch.dtype
    grad_mode: bool

    def __init__(self, module: nn.Module, name: str) -> None:
        self.table: dict[str, Any] = vars(module)[PARAMETERS]
        super().__init__(self.table)
        self.module = module
        self.name = name
        self.parameter: Tensor = self.table[name]
        self.made: Tensor | None = None
        self.note: Callable[[Tensor, Tensor], object] | None = None

    def put(
        self, dtype: torch.dtype, copy: Tensor | None, note: Callable[[Tensor, Tensor], object]
    ) -> None:
        """Stand in the module; `note(parameter, copy)` is called when the copy is made.

        A `copy` from an earlier time that the forward's copies were in place is put in the table.
        What others have put in the module stays.
        """
        own = vars(self.module)
        if own.get(PARAMETERS) is not self.table or self.table.get(self.name) is not self.parameter:
            return
        self.dtype, self.made, self.note = dtype, copy, note
        self.grad_mode = torch.is_grad_enabled()
        if copy is None:
            own[PARAMETERS] = self
        else:
            self.table[self.name] = copy

    def take_back(self, note: Callable[[Tensor, Tensor], object]) -> None:
        """The module is as `put`, called with this `note`, has found it.  May be called again."""
        if self.note != note:
            return
        if self.made is not None and self.table.get(self.name) is self.made:
            self.table[self.name] = self.parameter
        own = vars(self.module)
        if own.get(PARAMETERS) is self:
            own[PARAMETERS] = self.table
        self.made = self.note = None

    def look_up(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """What the `forward` of the module's class gives with the FP32 weight, in half."""
        if kwargs or len(args) > 1:  # weights of samples
            args, kwargs = map_tensors(args, _to_float), map_tensors(kwargs, _to_float)
        output = forward(_WithWeight(self.module, self.name, self.parameter), *args, **kwargs)
        return output.to(self.dtype) if type(output) is Tensor else cast_tensors(output, self.dtype)

    def _opened(self) -> dict[str, Any]:
        """The module's own table, with the copy in it; as it is if this is in no place."""
        if is_dynamo_compiling() or is_recording():  # what is made now is a part of the graph
            return {**self.table, self.name: self.parameter.to(self.dtype)}
        own = vars(self.module)
        if own.get(PARAMETERS) is self:
            if self.made is None:
                with torch.inference_mode(False), torch.set_grad_enabled(self.grad_mode):
                    [made] = half_copies([self.parameter], self.dtype, own_nodes=True)
                assert self.note is not None
                self.note(self.parameter, made)  # first: Ctrl-C may strike at any moment
                self.made = made
            self.table[self.name] = self.made
            own[PARAMETERS] = self.table
        return self.table

    def __iter__(self) -> Iterator[str]:  # without it `dict(table)` does not ask for values
        return iter(self._opened())

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (dict(self._opened()),)


def _opening(name: str) -> Callable:
    def method(self: Lookup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._opened(), name)(*args, **kwargs)

    return method


for _name in (
    *("__delitem__", "__eq__", "__getitem__", "__ior__", "__or__", "__ror__", "__setitem__"),
    *("clear", "copy", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(Lookup, _name, _opening(_name))


class _WithWeight:
    """A module for the `forward` of its class, except that one parameter is another tensor."""

    def __init__(self, module: nn.Module, name: str, weight: Tensor) -> None:
        if not is_dynamo_compiling():  # else each attribute is asked for by `__getattr__`
            self.__dict__.update(vars(module))
        self.__dict__[name] = weight
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
