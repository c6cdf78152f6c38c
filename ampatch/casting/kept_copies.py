"""Half copies of one model's weights that serve all its forwards, inside `ampatch.cached_weights`.

Only copies without a graph: one in a graph belongs to one backward pass.  Weights may not change
meanwhile.  What raises no version (`.data`, numpy) is found in the end, by comparing values.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import AmpatchError
from ..torch_private.devices import has_values
from ..torch_private.probes import computes_with_fakes
from .batched_casts import Copies, cast_in_one_block, cast_together

_BITS = {2: torch.int16, 4: torch.int32}
_CURE = (
    "End the block before weights change (an optimizer's step, load_state_dict, an average that is "
    "swapped in), and begin another one after that."
)

_version_of = operator.attrgetter("_version")


class Store(NamedTuple):
    """Copies, and the weights that they are of, held so that an id stays a weight's own."""

    copies: Copies
    weights: list[Any]


class KeptCopies:
    """The copies of one model, while `blocks` are there.  `at_end` is closed when they end."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: list[object] = []
        self.at_end = contextlib.ExitStack()
        self._model = model
        self._stores = Store({}, []), Store({}, [])  # the second is of inference mode
        self._watch([])

    def begin(self, block: object) -> None:
        """From now on forwards use these copies, and weights may not change."""
        if not self.blocks:
            self._watch([one for one in self._model.parameters() if _is_watched(one)])
        self.blocks.append(block)

    def _watch(self, weights: list[Tensor]) -> None:
        self._weights = weights
        self._ids = set(map(id, weights))
        self._seen = self._look()
        self._latest: tuple[object, list[Tensor]] = (None, [])  # buckets, and all their copies

    def store(self) -> Store:
        """Where copies are kept that are made in the mode of now."""
        return self._stores[torch.is_inference_mode_enabled()]

    def of_all(self, groups: list[tuple[list[Tensor], bool]], dtype: torch.dtype) -> list[Tensor]:
        """As `of`, for all groups of weights of a model or a part; known by their identity."""
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
        """Whether copies are of values, and of weights whose changes are seen."""
        return self._ids.issuperset(map(id, weights)) and not computes_with_fakes()

    # Changes of weights

    def check(self) -> None:
        """A forward begins.  Raise `AmpatchError` if a weight was written to since the last one."""
        written = self._take_note()
        if written:
            raise self._error(written, "Nothing was computed with the old values.")

    def settle(self) -> None:
        """A forward has ended: what it has itself written into weights is allowed."""
        self._take_note()

    def refuse_step(self, optimizer: Any) -> None:
        """An optimizer is about to step.  Raise `AmpatchError` if it has weights of the model."""
        own = (id(one) for group in optimizer.param_groups for one in group["params"])
        if self.blocks and not self._ids.isdisjoint(own):
            raise AmpatchError(
                f"{type(optimizer).__name__}.step() inside ampatch.cached_weights"
                f"({type(self._model).__name__}): forwards inside use the half copies that were "
                f"made of the weights as they are. Nothing was changed. {_CURE}"
            )

    def _look(self) -> tuple[list[int], list[int]]:
        """Versions, and where the values are: `.data = ...` changes that alone."""
        return list(map(_version_of, self._weights)), list(map(Tensor.data_ptr, self._weights))

    def _take_note(self) -> list[Tensor]:
        """The weights that have changed since the last look; their copies are dropped."""
        found = self._look()
        if found == self._seen:
            return []
        before, self._seen = self._seen, found
        self._latest = None, []
        pairs = zip(self._weights, zip(*before, strict=True), zip(*found, strict=True), strict=True)
        changed: list[Tensor] = [weight for weight, old, new in pairs if old != new]
        for weight in changed:
            for copies, _ in self._stores:
                copies.pop(id(weight), None)
        return changed

    def _error(self, weights: Collection[Tensor], what_it_did: str) -> AmpatchError:
        ids = set(map(id, weights))
        names = [name for name, one in self._model.named_parameters() if id(one) in ids]
        if len(names) > 3:
            names = [*names[:2], f"{len(names) - 2} more"]
        return AmpatchError(
            f"ampatch.cached_weights({type(self._model).__name__}): inside the block these weights "
            f"were written to: {', '.join(names)}. {what_it_did} Their half copies were dropped. "
            f"{_CURE}"
        )

    # The end

    def end(self, is_checked: bool = False) -> None:
        """Let go of the copies.  Harmless when there are none.

        With `is_checked` raise `AmpatchError` if they are no longer those of the weights.
        """
        self.blocks.clear()
        self.at_end.close()
        try:
            if is_checked:
                self.check()
                self._compare()
        finally:
            for copies, held in self._stores:  # a forward that was interrupted may have them too
                copies.clear()
                held.clear()
            self._watch([])

    def _compare(self) -> None:
        stale = [
            weight
            for weight in self._weights
            for copies, _ in self._stores
            if id(weight) in copies and _differs(weight, copies[id(weight)][0])
        ]
        if stale:
            raise self._error(
                stale,
                "It raised no version (.data, numpy), so forwards after it used the old values.",
            )


def _cast(weights: list[Tensor], dtype: torch.dtype, in_one_block: bool) -> Sequence[Tensor]:
    if in_one_block:
        return cast_in_one_block(weights, dtype)
    return cast_together(weights, dtype, in_graph=False)


def _is_watched(weight: Tensor) -> bool:
    """Whether one can see here that it changes."""
    return type(weight) is nn.Parameter and has_values(weight.device) and not weight.is_inference()


def _differs(weight: Tensor, copy: Tensor) -> bool:
    """Bit by bit: a NaN equals itself."""
    now, bits = weight.detach().to(copy.dtype), _BITS[copy.element_size()]
    return not torch.equal(now.view(bits), copy.view(bits))
