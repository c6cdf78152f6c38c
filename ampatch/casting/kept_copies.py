"""Half copies of one model's weights that serve all its forwards, inside `ampatch.cached_weights`.

Only copies without a graph: one in a graph belongs to one backward pass.  The copies serve until a
weight has another version or place in memory.  A step drops them too, since fused optimizers raise
no versions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_private.devices import has_values
from ..torch_private.probes import computes_with_fakes
from .batched_casts import Copies, cast_in_one_block, cast_together

_version_of = operator.attrgetter("_version")


class Store(NamedTuple):
    """Copies, and the weights that they are of, held so that an id stays a weight's own."""

    copies: Copies
    weights: list[Any]


class KeptCopies:
    """The copies of one model, while `blocks` are there."""

    unseen_changes = 0
    """Steps and reads of `.data` so far, in any thread: they may change weights unseen."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: list[object] = []
        self._model = model
        self._stores = Store({}, []), Store({}, [])  # the second is of inference mode
        self._weights: list[Tensor] = []
        self._ids: set[int] = set()
        self._seen: object = None
        self._latest: tuple[object, list[Tensor]] = (None, [])  # buckets, and all their copies

    def begin(self, block: object) -> None:
        """From now on forwards use these copies, until the last block has ended."""
        if not self.blocks:
            self._weights = [one for one in self._model.parameters() if _is_watched(one)]
            self._ids = set(map(id, self._weights))
        self.blocks.append(block)

    def end(self) -> None:
        """Let go of the copies.  Harmless when there are none."""
        self.blocks.clear()
        self._weights, self._ids = [], set()
        self.forget()

    def forget(self) -> None:
        """Drop all copies: the next forward makes new ones."""
        self._seen, self._latest = None, (None, [])
        for copies, held in self._stores:
            copies.clear()
            held.clear()

    def check(self) -> None:
        """A forward begins: drop all copies if a weight has changed since the last one began.

        Copies of weights that came since the block began, whose changes are not seen, are dropped.
        """
        for copies, _ in self._stores:
            for key in copies.keys() - self._ids:
                del copies[key]
        found = self._look()
        if found != self._seen:
            self.forget()
            self._seen = found

    def _look(self) -> tuple[list[int], list[int], int]:
        """Versions, addresses (`swap_tensors` may change these alone), and unseen changes."""
        places = list(map(Tensor.data_ptr, self._weights))
        return list(map(_version_of, self._weights)), places, KeptCopies.unseen_changes

    def store(self) -> Store:
        """Where copies are kept that are made in the mode of now."""
        return self._stores[torch.is_inference_mode_enabled()]

    def of_all(self, groups: list[tuple[list[Tensor], bool]], dtype: torch.dtype) -> list[Tensor]:
        """As `of`, for all groups of a model or a part; the list is recognized by its identity."""
        if self._latest[0] is not groups:
            made = [copy for group in groups for copy in self.of(group[0], dtype, group[1])]
            if not all(self._may_keep(weights) for weights, _ in groups):
                return made
            self._latest = groups, made
        return self._latest[1]

    def of(
        self, weights: list[Tensor], dtype: torch.dtype, in_one_block: bool = False
    ) -> Sequence[Tensor]:
        """Copies of these weights, outside of graphs and of inference mode."""
        if not self._may_keep(weights):
            return _cast(weights, dtype, in_one_block)
        copies, held = self._stores[False]
        missing = [one for one in weights if id(one) not in copies]
        if missing:
            versions = map(_version_of, missing)
            made = _cast(missing, dtype, in_one_block)
            copies.update(zip(map(id, missing), zip(made, versions)))
            held.append(missing)
        return [copies[id(one)][0] for one in weights]

    def _may_keep(self, weights: list[Tensor]) -> bool:
        """Whether copies of these weights have values, and changes of the weights are seen."""
        return self._ids.issuperset(map(id, weights)) and not computes_with_fakes()


def _cast(weights: list[Tensor], dtype: torch.dtype, in_one_block: bool) -> Sequence[Tensor]:
    if in_one_block:
        return cast_in_one_block(weights, dtype)
    return cast_together(weights, dtype, in_graph=False)


def _is_watched(weight: Tensor) -> bool:
    """Whether changes of a weight are seen, by its version or its address."""
    return type(weight) is nn.Parameter and has_values(weight.device) and not weight.is_inference()
