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
        """The copies of the parameters of a tree, in their order."""
        if torch.is_inference_mode_enabled():  # tensors of that mode have no versions
            with torch.inference_mode(False), torch.no_grad():
                return self.of(tree)
        if is_recording():
            return [parameter.to(self._dtype) for parameter in tree.parameters]
        in_graph = torch.is_grad_enabled()
        if self._kept.is_open and not in_graph:
            return self._kept.of_all(tree.groups, self._dtype)
        alone = tree.below_hooks() if in_graph and any(tree.hook_tables) else ()
        are_together = in_graph and self._model.training and may_use_all(self._model)
        made: list[Tensor] = []
        for weights, in_block in tree.groups:
            if in_block:
                copies = cast_in_one_block(weights, self._dtype)
                run_when_ready(copies[0])
                made += copies
            elif not in_graph:
                made += cast_together(weights, self._dtype, in_graph=False)
            elif are_together and not alone and are_alike(weights[0], weights):
                made += self._cast(weights)
            else:
                made += self._apart(weights, alone if are_together else None)
        return made

    def _cast(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Weights that all want a gradient, or none of which does."""
        if weights[0].requires_grad:
            made = cast_in_graph(weights, self._dtype)
            run_when_ready(made[0])
            return made
        if self._kept.is_open:
            return self._kept.of(weights, self._dtype)
        return cast_together(weights, self._dtype, in_graph=False)

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
