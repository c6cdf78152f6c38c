"""The places of weights, and the half copies that are put there while a forward runs.

Places are entries of the modules' tables of parameters.  Those of all modules are compared and
exchanged together, in the native part by one call.

Copies are made in buckets, each by one node of the graph (`casting/batched_casts`).  The nodes are
made before the forward, and autograd runs ready nodes in the order in which they were made: these
would run at the very end of the pass, and all half gradients would wait for them.  So they get a
high sequence number, with which each runs as soon as its gradients are there.  A weight that cannot
share a node has a cast of its own.  So has each weight where Dynamo traces the call, and in
replicas of DataParallel.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import native
from ..casting.batched_casts import (
    alike,
    are_alike,
    below_hooks,
    cast_apart,
    cast_in_graph,
    cast_in_one_block,
    cast_together,
    divide,
    hook_tables,
    may_use_all,
)
from ..casting.special_ops import EMBEDDINGS, MANY
from ..torch_private.modules import flat_weights, list_weights, part_table
from ..torch_private.probes import is_recording, run_when_ready
from .lookups import Lookup

StaysFloat = Callable[[nn.Module], bool]
"""Whether a module computes with FP32 weights in a half model."""


class Place(NamedTuple):
    """An entry of a module's table of parameters, and what is there outside of forwards."""

    table: dict[str, Any]
    name: str
    parameter: Tensor


def parameter_tables(root: nn.Module, stays_float: StaysFloat) -> list[dict[str, Any]]:
    """The tables of parameters of a module and its parts, except those of FP32 parts.

    TorchScript keeps its weights where nothing can be put in their place.
    """
    return [
        module._parameters
        for module in root.modules()
        if not (isinstance(module, torch.jit.ScriptModule) or stays_float(module))
    ]


def entries_of(tables: list[dict[str, Any]]) -> list[Place]:
    """All entries of these tables, as they are now."""
    return [Place(table, *entry) for table in tables for entry in table.items()]


def lent_of(places: list[Place], leave: Collection[int]) -> list[Place]:
    """The places of FP32 weights, except of those in `leave` (ids)."""
    return [
        place
        for place in places
        if place.parameter is not None
        and place.parameter.dtype is torch.float32
        and not (leave and id(place.parameter) in leave)
    ]


def divide_lookups(
    modules: list[nn.Module], places: list[Place]
) -> tuple[list[Lookup], list[Place]]:
    """The weights of embeddings that stand nowhere else, and the places of all others."""
    owners = {id(one._parameters): one for one in modules if isinstance(one, EMBEDDINGS)}
    in_table = Counter(id(place.table) for place in places)
    times = Counter(id(place.parameter) for place in places)
    lookups, others = [], []
    for place in places:
        owner = owners.get(id(place.table))
        stands_alone = in_table[id(place.table)] == times[id(place.parameter)] == 1
        if owner is not None and stands_alone and place.parameter.numel() >= MANY:
            lookups.append(Lookup(owner, place.name))
        else:
            others.append(place)
    return lookups, others


class Tree:
    """A module and its parts: the places that are lent to, with their parameters in buckets.

    Those in `leave` (ids) are left out.
    """

    def __init__(self, root: nn.Module, stays_float: StaysFloat, leave: Collection[int]) -> None:
        self.root = root
        modules = list(root.modules())
        self.modules = set(map(id, modules))
        tables = parameter_tables(root, stays_float)
        # What `is_valid` compares: the entries of parameters and parts, and how many there are.
        self._all_tables = [*tables, *filter(None, map(part_table, modules))]
        self._sizes = list(map(len, self._all_tables))
        self._seen = _columns(entries_of(self._all_tables))
        self.lookups, places = divide_lookups(modules, lent_of(entries_of(tables), leave))
        self._tables, self._names, weights = _columns(places)
        found = {id(weight): weight for weight in weights}
        self.ids = set(found).union(id(one.parameter) for one in self.lookups)
        self._rnns = [
            one for one in modules if isinstance(one, nn.RNNBase) and not stays_float(one)
        ]
        # Together the groups are `parameters`, in this order; of each: whether it is in one block.
        self.groups = [(one, True) for one in self._blocks(found)]
        self.groups += [(one, False) for one in divide(list(found.values()))]
        self.parameters = [one for weights, _ in self.groups for one in weights]
        order = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._sources = [order[id(weight)] for weight in weights]
        self.attributes: list[dict] = list(map(vars, self.parameters))
        self.hook_tables = hook_tables(modules)

    def _blocks(self, found: dict[int, Tensor]) -> list[list[Tensor]]:
        """Takes out of `found` the weights of RNNs that share one block of memory.

        cuDNN wants them so, else it copies them, and warns, at every forward.
        """
        blocks: list[list[Tensor]] = []
        for rnn in self._rnns:
            weights = flat_weights(rnn)
            if weights and all(id(weight) in found for weight in weights):
                blocks.append([found.pop(id(weight)) for weight in weights])
        return blocks

    def below_hooks(self) -> set[int]:
        """Ids of the parameters of modules with backward hooks, and of their parts."""
        return below_hooks(list(self.root.modules()))

    def is_valid(self) -> bool:
        """Whether the tables hold what was found there, and nothing else."""
        return list(map(len, self._all_tables)) == self._sizes and entries_are(*self._seen)

    def put(self, tensors: list[Tensor], instead_of: list[Tensor] | None = None) -> None:
        """Put `tensors`, one for each of `parameters`, in the places.

        With `instead_of`: only where one of these tensors is.  What the user's code has put there
        stays.
        """
        place = self._tables, self._names, self._sources
        if not exchange(*place, tensors, instead_of):
            assert instead_of is not None
            mixed = zip(self.found(), self._sources, strict=True)
            self.put_found([tensors[i] if one is instead_of[i] else one for one, i in mixed])
        elif self._rnns:
            self._list_rnns()

    def _list_rnns(self) -> None:
        for rnn in self._rnns:
            list_weights(rnn)

    def put_found(self, tensors: list[Any]) -> None:
        """Put tensors, one for each place, in those places that are still in their tables."""
        for table, name, tensor in zip(self._tables, self._names, tensors, strict=True):
            if name in table:
                table[name] = tensor
        self._list_rnns()

    def found(self) -> list[Any]:
        """What is in the places now."""
        return list(map(dict.get, self._tables, self._names))


def _columns(places: list[Place]) -> tuple[list[dict], list[str], list[Tensor]]:
    """Tables, names and parameters."""
    return tuple(map(list, zip(*places, strict=True))) or ([], [], [])  # type: ignore[return-value]


def entries_are(tables: list[dict], names: list[str], values: list[Any]) -> bool:
    """Whether each entry, a table and a name in it, is this very value."""
    return all(map(operator.is_, map(dict.get, tables, names), values))


def exchange(
    tables: list[dict], names: list[str], sources: list[int], new: list[Any], old: list[Any] | None
) -> bool:
    """Entry number i becomes `new[sources[i]]`.

    With `old`: only if every entry is `old[sources[i]]` now.  Returns whether they were exchanged.

    In C++: `exchange_entries` of `weights.h`.
    """
    if old is not None:
        found, known = map(dict.get, tables, names), map(old.__getitem__, sources)
        if not all(map(operator.is_, found, known)):
            return False
    deque(map(dict.__setitem__, tables, names, map(new.__getitem__, sources)), maxlen=0)
    return True


def share_attributes(tensors: list[Tensor], attributes: list[dict[str, Any]]) -> None:
    """Give copies the attributes of their parameters; subclasses of Tensor get none.

    What the user notes on a parameter (`p.lr_mult`) is then read and written on its copy too.
    """
    for tensor, one in zip(tensors, attributes, strict=True):
        if type(tensor) is Tensor:
            tensor.__dict__ = one


if native.part is not None:
    exchange = native.part.exchange_entries


def copies_of(tree: Tree, dtype: torch.dtype, model: nn.Module, is_apart: bool) -> list[Tensor]:
    """Half copies of the parameters of a tree, which is `model` or a part of it, in their order.

    `is_apart`: each has a node of its own.
    """
    if torch.is_inference_mode_enabled():  # tensors of that mode have no versions
        with torch.inference_mode(False), torch.no_grad():
            return copies_of(tree, dtype, model, is_apart)
    if is_recording():
        return [parameter.to(dtype) for parameter in tree.parameters]
    in_graph = torch.is_grad_enabled()
    alone: Collection[int] = ()
    if in_graph and not (model.training and may_use_all(model)):
        alone = tree.ids
    elif in_graph and any(tree.hook_tables):
        alone = tree.below_hooks()
    made: list[Tensor] = []
    for weights, in_block in tree.groups:
        if in_block:
            copies = cast_in_one_block(weights, dtype)
            run_when_ready(copies[0])
            made += copies
        elif not in_graph or (not alone and are_alike(weights[0], weights)):
            made += _cast(weights, dtype, is_apart)
        else:
            made += _cast_in_parts(weights, dtype, alone, is_apart)
    return made


def _cast(weights: list[Tensor], dtype: torch.dtype, is_apart: bool) -> Sequence[Tensor]:
    """The copies of weights that all require a gradient, or of which none does."""
    if weights[0].requires_grad and torch.is_grad_enabled():
        if is_apart:
            return cast_apart(weights, dtype)
        made = cast_in_graph(weights, dtype)
        run_when_ready(made[0])
        return made
    return cast_together(weights, dtype, in_graph=False)


def _cast_in_parts(
    weights: list[Tensor], dtype: torch.dtype, alone: Collection[int], is_apart: bool
) -> list[Tensor]:
    """The copies of a bucket in which weights in `alone` (ids) and with hooks have a node each."""
    copies: dict[int, Tensor] = {}
    for part in alike(weights, alone):
        copies.update(zip(map(id, part), _cast(part, dtype, is_apart), strict=True))
    for one in weights:
        if id(one) not in copies:
            copies[id(one)] = made = one.to(dtype)
            run_when_ready(made)
    return [copies[id(one)] for one in weights]


def put_in_traced(places: list[Place], dtype: torch.dtype) -> None:
    """Put half copies in places while Dynamo traces, so that it records the casts."""
    copies: dict[int, Tensor] = {}
    for table, name, weight in places:
        if id(weight) not in copies:
            copies[id(weight)] = weight.to(dtype)
        table[name] = copies[id(weight)]


def put_in_replica(
    model: nn.Module, replica: nn.Module, dtype: torch.dtype, stays_float: StaysFloat
) -> None:
    """A replica of `nn.DataParallel` has its weights as plain attributes of its own."""
    for own, part in zip(model.modules(), replica.modules(), strict=True):
        if stays_float(own):
            continue
        for name, weight in list(vars(part).items()):
            if name in own._parameters and getattr(weight, "dtype", None) is torch.float32:
                vars(part)[name] = weight.to(dtype)
        if isinstance(part, nn.RNNBase):
            list_weights(part)
