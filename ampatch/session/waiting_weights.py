"""FP32 values of half models that were given to `initialize` before their optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from ..log import logger
from ..models.float_values import FloatValues
from ..scaling.optimizer import ManagedOptimizer
from .masters import Masters, ModelWeights


class WaitingWeights:
    """Keeps the values that half weights were rounded from, for master weights that are to come.

    Those of a model wait until its first forward: from then on they would cost memory that a model
    without an optimizer does not need.  If `outlast_forwards`, they wait until optimizers come.
    """

    def __init__(self, weights: ModelWeights, masters: Masters, values: FloatValues) -> None:
        self._weights = weights
        self._masters = masters
        self._values = values
        self.outlast_forwards = False
        self.halves: list[Tensor] = []
        self._equal_on_ranks: set[int] = set()  # ids of those whose values `broadcast` has sent

    def wait(self) -> None:
        """Models were converted, and not all of their weights are in an optimizer yet."""
        known = set(map(id, self.halves))
        for half in self._weights.keep_originals():
            if id(half) not in known and self._masters.of(half) is None:
                self.halves.append(half)

    def originals(self) -> dict[int, Tensor]:
        """The values, by ids of the half parameters; what was written into these counts."""
        return {id(half): self._values.of(half) for half in self.halves}

    def broadcast(self, parameters: Sequence[Tensor], send: Callable[[Tensor], None]) -> None:
        """Ranks have made these half weights equal; `send` makes the values that wait equal too."""
        keys = set(map(id, self.halves)) if self.halves else set()
        for half in parameters:
            if id(half) in keys:
                values = self._values.of(half)
                send(values)
                self._values.widened.forget_original(half)
                self._values.widened.keep_original(half, values)
                self._equal_on_ranks.add(id(half))

    def leave(self, gone: Collection[int]) -> None:
        """These half weights (ids) are parameters of a model no longer."""
        self.halves = [half for half in self.halves if id(half) not in gone]

    def before_forward(self, model: nn.Module) -> None:
        """A model runs, perhaps without an optimizer."""
        if self.outlast_forwards:
            return
        own = set(map(id, model.parameters()))
        for half in self.halves:
            if id(half) in own:
                self._values.widened.forget_original(half)
        self.halves = [half for half in self.halves if id(half) not in own]
        self._equal_on_ranks -= own

    def give_to(self, optimizers: list[ManagedOptimizer]) -> None:
        """Optimizers have come: their masters hold these values now.

        The log says of which optimizer the masters start from rounded values.
        """
        rounded = self._weights.converted() - set(map(id, self.halves))
        for managed in optimizers:
            if not rounded.isdisjoint(managed.masters.by_half):
                logger.info(
                    "ampatch.add_optimizers(%s): master weights start from the half weights. Their "
                    "FP32 values are kept only until the model's first forward.",
                    type(managed.optimizer).__name__,
                )
            managed.masters.are_equal_on_ranks(self._equal_on_ranks)
        for half in self.halves:
            if self._masters.of(half) is not None:
                self._values.widened.forget_original(half)
        self.halves = [half for half in self.halves if self._masters.of(half) is None]
