"""How the half copies of a call are made: in buckets, in the order of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..casting.batched_casts import (
    are_alike,
    cast_in_graph,
    cast_in_one_block,
    cast_together,
    may_be_planned,
    may_use_all,
)
from ..casting.kept_copies import KeptCopies
from ..torch_private.dtensors import is_dtensor
from ..torch_private.nodes import run_when_ready
from ..torch_private.probes import is_recording
from .lent_places import Tree


class LentCasts:
    """Casts weights of one model to `dtype`; while `kept` is open it has those without a graph."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, kept: KeptCopies) -> None:
        self._model = model
        self._dtype = dtype
        self._kept = kept

    def of(self, tree: Tree) -> list[Tensor]:
        if torch.is_inference_mode_enabled():  # tensors of that mode have no versions
            with torch.inference_mode(False), torch.no_grad():
                return self.of(tree)
        if is_recording():
            return [parameter.to(self._dtype) for parameter in tree.parameters]
        if torch.is_grad_enabled():
            return self._in_graph(tree)
        if self._kept.is_open:
            return self._kept.of_all(tree.groups, self._dtype)
        made = self._of_blocks(tree) if tree.blocks else []
        for bucket in tree.buckets:
            made += cast_together(bucket, self._dtype, in_graph=False)
        return made

    def _of_blocks(self, tree: Tree) -> list[Tensor]:
        made: list[Tensor] = []
        for block in tree.blocks:
            copies = cast_in_one_block(block, self._dtype)
            run_when_ready(copies[0])
            made += copies
        return made

    def _outside_graphs(self, weights: list[Tensor]) -> Sequence[Tensor]:
        if self._kept.is_open:
            return self._kept.of(weights, self._dtype)
        return cast_together(weights, self._dtype, in_graph=False)

    def _in_graph(self, tree: Tree) -> list[Tensor]:
        alone = tree.below_hooks() if any(tree.hook_tables) else ()
        are_together = self._model.training and may_use_all(self._model)
        made = self._of_blocks(tree) if tree.blocks else []
        for bucket in tree.buckets:
            if are_together and not alone and are_alike(bucket[0], bucket):
                made += self._cast(bucket)
            else:
                made += self._apart(bucket, alone if are_together else None)
        return made

    def _cast(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Weights that all want a gradient, or none of which does."""
        if not weights[0].requires_grad:
            return self._outside_graphs(weights)
        made = cast_in_graph(weights, self._dtype)
        run_when_ready(made[0])
        return made

    def _apart(self, bucket: list[Tensor], alone: Collection[int] | None) -> list[Tensor]:
        """Some of a bucket go by themselves: those with hooks, in `alone` (ids; None: all), ..."""
        copies: dict[int, Tensor] = {}
        frozen = [one for one in bucket if not one.requires_grad]
        group = [
            one
            for one in bucket
            if alone is not None
            and one.requires_grad
            and may_be_planned(one)
            and id(one) not in alone
        ]
        for weights in (frozen, group):
            if weights:
                copies.update(zip(map(id, weights), self._cast(weights), strict=True))
        return [copies[id(one)] if id(one) in copies else self._alone(one) for one in bucket]

    def _alone(self, weight: Tensor) -> Tensor:
        if type(weight) is nn.Parameter and weight.is_leaf and not is_dtensor(weight):
            return self._cast([weight])[0]
        made = weight.to(self._dtype)
        run_when_ready(made)
        return made
