"""Where a model has the weights that are lent, and what is put there and taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..casting.batched_casts import below_hooks, divide
from ..torch_private.modules import (
    GLOBAL_BACKWARD_TABLES,
    backward_tables,
    flat_weights,
    list_weights,
)
from . import entries

StaysFloat = Callable[[nn.Module], bool]


class Place(NamedTuple):
    """An entry of a module's table of parameters, and what is there outside of forwards."""

    table: dict[str, Any]
    name: str
    parameter: Tensor


def is_lent(parameter: Tensor | None) -> TypeGuard[Tensor]:
    """Whether it is a weight that a half copy can stand in for."""
    return parameter is not None and parameter.dtype is torch.float32


def may_be_lent(root: nn.Module, stays_float: StaysFloat) -> Iterator[nn.Module]:
    """The parts of a module whose weights are lent.

    TorchScript has its weights where nothing can be put in their place.
    """
    for module in root.modules():
        if not (isinstance(module, torch.jit.ScriptModule) or stays_float(module)):
            yield module


def places_in(root: nn.Module, stays_float: StaysFloat, leave: Collection[int]) -> list[Place]:
    """The places of a module and its parts, as they are now, but for weights in `leave` (ids)."""
    places: list[Place] = []
    for module in may_be_lent(root, stays_float):
        for name, parameter in module._parameters.items():
            if is_lent(parameter) and not (leave and id(parameter) in leave):
                places.append(Place(module._parameters, name, parameter))
    return places


class Tree:
    """A module and its parts: the places that are lent to, with their parameters in buckets.

    Those in `leave` (ids) are left out.
    """

    def __init__(self, root: nn.Module, stays_float: StaysFloat, leave: Collection[int]) -> None:
        self.root = root
        self.modules = set(map(id, root.modules()))
        self.rnns: list[nn.RNNBase] = []
        self.is_old = False  # a module in it has got a parameter or a submodule
        seen: list[tuple[dict, str, Tensor | None]] = []
        for module in may_be_lent(root, stays_float):
            seen += [(module._parameters, name, one) for name, one in module._parameters.items()]
            if isinstance(module, nn.RNNBase):
                self.rnns.append(module)
        self.places = places_in(root, stays_float, leave)
        self._seen = tuple(map(list, zip(*seen, strict=True))) or ([], [], [])
        found = {id(place.parameter): place.parameter for place in self.places}
        # Together the buckets are `parameters`, in this order.
        self.blocks = self._blocks(found)
        self.buckets = divide(list(found.values()))
        self.groups = [
            *((one, True) for one in self.blocks),
            *((one, False) for one in self.buckets),
        ]
        self.parameters = [one for weights, _ in self.groups for one in weights]
        order = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._sources = [order[id(place.parameter)] for place in self.places]
        self._tables = [place.table for place in self.places]
        self._names = [place.name for place in self.places]
        self.attributes: list[dict] = list(map(vars, self.parameters))
        self.hook_tables = [*GLOBAL_BACKWARD_TABLES]
        for module in root.modules():
            self.hook_tables += backward_tables(module)

    def _blocks(self, found: dict[int, Tensor]) -> list[list[Tensor]]:
        """Takes out of `found` the weights of RNNs that share one block of memory.

        cuDNN wants them so, else it copies them, and warns, at every forward.
        """
        blocks: list[list[Tensor]] = []
        for rnn in self.rnns:
            weights = flat_weights(rnn)
            if weights and all(id(weight) in found for weight in weights):
                blocks.append([found.pop(id(weight)) for weight in weights])
        return blocks

    def below_hooks(self) -> set[int]:
        """Ids of the parameters of modules with backward hooks, and of their parts."""
        return below_hooks(list(self.root.modules()))

    def is_valid(self) -> bool:
        """Whether the tables hold what was found there."""
        tables, names, found = self._seen
        return not self.is_old and entries.are(tables, names, found)

    def put(self, tensors: list[Tensor], instead_of: list[Tensor] | None = None) -> None:
        """Put `tensors`, one for each of `parameters`, in the places.

        With `instead_of` only where one of those is: what the user's code has put there stays.
        """
        place = self._tables, self._names, self._sources
        if not entries.exchange(*place, tensors, instead_of):
            assert instead_of is not None
            mixed = zip(self.found(), self._sources, strict=True)
            self.put_found([tensors[i] if one is instead_of[i] else one for one, i in mixed])
        elif self.rnns:
            self._list_rnns()

    def _list_rnns(self) -> None:
        for rnn in self.rnns:
            list_weights(rnn)

    def put_found(self, tensors: list[Any]) -> None:
        """Put them in the places that are still in their tables."""
        for table, name, tensor in zip(self._tables, self._names, tensors, strict=True):
            if name in table:
                table[name] = tensor
        self._list_rnns()

    def found(self) -> list[Any]:
        """What is in the places now."""
        return list(map(dict.get, self._tables, self._names))
