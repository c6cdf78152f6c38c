"""O2: the half copy of an embedding's weight is made when something other than the lookup reads it.

A lookup reads some rows; a copy reads and writes all of them, in each forward.  So `nn.Embedding`
and `nn.EmbeddingBag` look up in the FP32 weight, and the row of that function gives the result in
half (`casting/special_ops`).  Whatever else reads the weight, such as a product with it, finds a
half copy, as of any other weight that is lent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..torch_private.modules import PARAMETERS
from ..torch_private.probes import is_recording
from .lent_places import LOOKUPS, Lookup

_CODES = tuple(forward.__code__ for forward in LOOKUPS)


class LentTable(dict):
    """In the place of an embedding's table of parameters while a forward runs.

    `note(parameter, copy)` is called as the copy is made.  From then on the module has its own
    table again, with the copy in it.
    """

    def __init__(
        self,
        lookup: Lookup,
        dtype: torch.dtype,
        note: Callable[[Tensor, Tensor], object],
        copy: Tensor | None,
    ) -> None:
        (self._table, self._name, self._parameter) = lookup.place
        super().__init__(self._table)
        self._module = lookup.module
        self._dtype = dtype
        self._note = note
        self._copy = copy  # from an earlier time that the forward's copies were in place
        self._before = self._parameter
        self._grad_mode = torch.is_grad_enabled()

    def put(self) -> None:
        """Stand in the module, or put the copy that is known in its table.

        What another model, which shares the module, has lent stays there.
        """
        if vars(self._module).get(PARAMETERS) is not self._table:
            return
        self._before = self._table[self._name]
        if self._copy is not None:
            self._table[self._name] = self._copy
        elif self._before is self._parameter:
            vars(self._module)[PARAMETERS] = self

    def take_back(self) -> None:
        """The module has what `put` found.  May be called again."""
        if self._copy is not None and self._table.get(self._name) is self._copy:
            self._table[self._name] = self._before
        if vars(self._module).get(PARAMETERS) is self:
            vars(self._module)[PARAMETERS] = self._table

    def _opened(self) -> dict[str, Any]:
        """The module's own table, with the copy in it; as it is if this is in no place."""
        if is_dynamo_compiling() or is_recording():  # what is made now is a part of the graph
            return {**self._table, self._name: self._parameter.to(self._dtype)}
        if vars(self._module).get(PARAMETERS) is self:
            if self._copy is None:
                with torch.inference_mode(False), torch.set_grad_enabled(self._grad_mode):
                    self._copy = self._parameter.to(self._dtype)
                self._note(self._parameter, self._copy)
            self._table[self._name] = self._copy
            vars(self._module)[PARAMETERS] = self._table
        return self._table

    def __getitem__(self, name: str) -> Any:
        if not is_dynamo_compiling() and sys._getframe(2).f_code in _CODES and name == self._name:
            return self._parameter  # its module looks up
        return self._opened()[name]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (dict(self._opened()),)


def _opening(name: str) -> Callable:
    def method(self: LentTable, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._opened(), name)(*args, **kwargs)

    return method


for _name in (
    *("__delitem__", "__eq__", "__ior__", "__or__", "__ror__", "__setitem__", "clear", "copy"),
    *("get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(LentTable, _name, _opening(_name))
