"""Parameters that several optimizers update: one of them unscales the gradients, for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .loss_scaler import Scaler
from .scale_value import Flag, either

if TYPE_CHECKING:
    from .gradient_flow import GradientFlow
    from .optimizer import ManagedOptimizer


class Sharing:
    """Which of some optimizers hold the same tensors; the first of them owns such a tensor.

    Only the owner scales or unscales its gradient; an overflow in it concerns all holders.
    """

    def __init__(self, flows: Sequence[GradientFlow] = ()) -> None:
        holders: dict[int, list[GradientFlow]] = {}
        if len(flows) > 1:
            for flow in flows:
                for param in flow.parameters():
                    holders.setdefault(id(param), []).append(flow)
        self._holders = {key: known for key, known in holders.items() if len(known) > 1}

    @property
    def is_any(self) -> bool:
        """Whether there are tensors that several hold."""
        return bool(self._holders)

    def owned(self, flow: GradientFlow, params: Iterable[Tensor]) -> list[Tensor]:
        """Those of `params` that are this optimizer's to deal with."""
        if not self._holders:
            return list(params)
        return [p for p in params if self._holders.get(id(p), [flow])[0] is flow]

    def unscale(
        self,
        flow: GradientFlow,
        scaler: Scaler,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        scale: Any,
    ) -> Flag | None:
        """Unscale those of an optimizer's gradients, of `params`, that it owns.

        Those shared are checked for all that hold them.  Returns found_inf, or None: unchecked.
        """
        if not self._holders:
            return flow.check(scaler, list(grads), scale, [flow])
        owned = {id(param) for param in self.owned(flow, params)}
        pairs = [pair for pair in zip(params, grads, strict=True) if id(pair[0]) in owned]
        alone = [grad for param, grad in pairs if not self._is_shared(param)]
        found = flow.check(scaler, alone, scale, [flow])
        others = self._others(flow)
        if others:
            shared = [grad for param, grad in pairs if self._is_shared(param)]
            in_shared = flow.check(scaler, shared, scale, [flow, *others])
            if found is None or in_shared is None:
                return in_shared if found is None else found
            found = either(found, in_shared)
        return found

    def _others(self, flow: GradientFlow) -> list[GradientFlow]:
        """The others that hold tensors which this one owns."""
        known = [holders[1:] for holders in self._holders.values() if holders[0] is flow]
        return list({id(other): other for some in known for other in some}.values())

    def _is_shared(self, param: Tensor) -> bool:
        """Whether several optimizers hold this tensor."""
        return id(param) in self._holders


NOTHING_SHARED = Sharing()


def sharing_among(flows: Sequence[GradientFlow]) -> Sharing:
    """`Sharing(flows)`; the same object wherever nothing is shared."""
    sharing = Sharing(flows)
    return sharing if sharing.is_any else NOTHING_SHARED


def with_sharers(
    given: list[ManagedOptimizer], everyone: Sequence[ManagedOptimizer]
) -> list[ManagedOptimizer]:
    """`given` and all that share a tensor with them, directly or through others."""
    if all(map(given.__contains__, everyone)):
        return given
    found = list(given)
    others = [(other, set(map(id, other.parameters()))) for other in everyone if other not in given]
    reached = {id(param) for one in given for param in one.parameters()}
    more = True
    while more:
        more = False
        for other, held in others:
            if other not in found and not reached.isdisjoint(held):
                found.append(other)
                reached |= held
                more = True
    return found
