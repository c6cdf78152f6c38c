"""O2: the half copy of an embedding's weight is made when something other than the lookup reads it.

A lookup reads some rows; a copy reads and writes all of them, in each forward.  So `nn.Embedding`
and `nn.EmbeddingBag` look up in their FP32 weight, and give the result in half.  Whatever else
reads the weight while the model's forward runs, such as a product with it, finds a half copy, as of
any other weight that is lent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.batched_casts import cast_together
from ..torch_private.modules import PARAMETERS
from ..torch_private.probes import is_recording
from .values import cast_tensors, caster, map_tensors

FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)

_to_float = caster(torch.float32)


class _Table(dict):
    """In the place of an embedding's table of parameters: makes the half copy when it is read.

    From then on the module has its own table again, with the copy in it.
    """

    dtype: torch.dtype
    grad_mode: bool

    def __init__(self, module: nn.Module, name: str) -> None:
        self.table: dict[str, Any] = vars(module)[PARAMETERS]
        super().__init__(self.table)
        self.module = module
        self.name = name
        self.parameter: Tensor = self.table[name]
        self.copy_made: Tensor | None = None
        self.note: Callable[[Tensor, Tensor], object] | None = None

    def opened(self) -> dict[str, Any]:
        """The module's own table, with the copy in it; as it is if this is in no place."""
        if is_dynamo_compiling() or is_recording():  # what is made now is a part of the graph
            return {**self.table, self.name: self.parameter.to(self.dtype)}
        own = vars(self.module)
        if own.get(PARAMETERS) is self:
            if self.copy_made is None:
                with torch.inference_mode(False), torch.set_grad_enabled(self.grad_mode):
                    [self.copy_made] = cast_together([self.parameter], self.dtype, in_graph=True)
                assert self.note is not None
                self.note(self.parameter, self.copy_made)
            self.table[self.name] = self.copy_made
            own[PARAMETERS] = self.table
        return self.table

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (dict(self.opened()),)


def _opening(name: str) -> Callable:
    def method(self: _Table, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.opened(), name)(*args, **kwargs)

    return method


for _name in (
    *("__delitem__", "__eq__", "__getitem__", "__ior__", "__or__", "__ror__", "__setitem__"),
    *("clear", "copy", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(_Table, _name, _opening(_name))


class Lookup:
    """An embedding whose weight, `name` in its table of parameters, stands nowhere else.

    While it is lent this object is the module's `forward`.  It is the same in all forwards, since
    Dynamo asks which it is.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._table = _Table(module, name)
        self.parameter = self._table.parameter

    def put(
        self, dtype: torch.dtype, copy: Tensor | None, note: Callable[[Tensor, Tensor], object]
    ) -> None:
        """Stand in the module; `note(parameter, copy)` is called when the copy is made.

        A `copy` from an earlier time that the forward's copies were in place is put in the table.
        What others have put in the module stays.
        """
        table = self._table
        own = vars(table.module)
        if (
            own.get(PARAMETERS) is not table.table
            or table.table.get(table.name) is not table.parameter
        ):
            return
        table.dtype, table.copy_made, table.note = dtype, copy, note
        table.grad_mode = torch.is_grad_enabled()
        if copy is not None:
            table.table[table.name] = copy
            return
        own[PARAMETERS] = table
        if "forward" in own:  # the script's own, which reads the weight
            table.opened()
        else:
            own["forward"] = self

    def take_back(self, note: Callable[[Tensor, Tensor], object]) -> None:
        """The module is as `put`, called with this `note`, has found it.  May be called again."""
        table = self._table
        if table.note != note:
            return
        own = vars(table.module)
        if table.copy_made is not None and table.table.get(table.name) is table.copy_made:
            table.table[table.name] = table.parameter
        if own.get(PARAMETERS) is table:
            own[PARAMETERS] = table.table
        if own.get("forward") is self:
            del own["forward"]
        table.copy_made = table.note = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        table = self._table
        module = table.module
        if module.__dict__[PARAMETERS] is not table:  # its copy has been made
            return type(module).forward(module, *args, **kwargs)
        module.__dict__[PARAMETERS] = table.table
        try:
            args, kwargs = map_tensors(args, _to_float), map_tensors(kwargs, _to_float)
            output = type(module).forward(module, *args, **kwargs)
        finally:
            module.__dict__[PARAMETERS] = table
        return cast_tensors(output, table.dtype)

    def __deepcopy__(self, memo: dict) -> Callable:
        """A copy of the module has the `forward` of its class."""
        module: nn.Module = memo[id(self._table.module)]
        return type(module).forward.__get__(module)
