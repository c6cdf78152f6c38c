"""Who belongs to a session."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .managed_model import ManagedModel
from .opt_levels import HALF_TYPES
from .scaling.optimizer import ManagedOptimizer


class Members:
    """The models and optimizers of one session, held weakly.

    Models and optimizers own their managed counterparts, so that a model nobody
    uses any more can go.
    """

    def __init__(self) -> None:
        self._was_given = False
        self._models: list[weakref.ref[ManagedModel]] = []
        self._optimizers: list[weakref.ref[ManagedOptimizer]] = []
        self._bystanders: list[weakref.ref] = []  # optimizers of a disabled session

    def models(self) -> Iterator[ManagedModel]:
        """The managed models that are still there."""
        return _alive(self._models)

    def optimizers(self) -> Iterator[ManagedOptimizer]:
        """The managed optimizers that are still there."""
        return _alive(self._optimizers)

    def master_of(self, half: Tensor) -> Tensor | None:
        """The FP32 master of a half parameter, or None."""
        for optimizer in self.optimizers():
            master = optimizer.masters.of(half)
            if master is not None:
                return master
        return None

    def current_master_of(self, half: Tensor) -> Tensor | None:
        """As `master_of`; what was written into the half parameter has been taken over."""
        for optimizer in self.optimizers():
            master = optimizer.masters.current(half)
            if master is not None:
                return master
        return None

    def load_master(self, half: Tensor, values: Tensor) -> None:
        """Give the master of a half parameter a checkpoint's values."""
        for optimizer in self.optimizers():
            if optimizer.masters.of(half) is not None:
                optimizer.masters.load(half, values)

    def managed(self, optimizer: Any) -> ManagedOptimizer | None:
        """Our side of an optimizer, or None if it is not in this session."""
        for managed in self.optimizers():
            if managed.optimizer is optimizer:
                return managed
        return None

    def knows(self, optimizer: Any) -> bool:
        """Whether `initialize` was given this optimizer, enabled or not."""
        return self.managed(optimizer) is not None or any(
            bystander() is optimizer for bystander in self._bystanders
        )

    def is_alive(self) -> bool:
        """Whether any of its models and optimizers is still in use."""
        references = (*self._models, *self._optimizers, *self._bystanders)
        return (
            not self._was_given
            or not references
            or any(reference() is not None for reference in references)
        )

    def is_empty(self) -> bool:
        """Whether nothing is left of what it was given."""
        return self._was_given and not (self._models or self._optimizers or self._bystanders)

    def plain_copy(self, model: nn.Module) -> nn.Module:
        """A plain FP32 copy of one of the models."""
        return next(managed for managed in self.models() if managed.model is model).plain_copy()

    def _originals(self) -> dict[int, Tensor]:
        return {key: value for model in self.models() for key, value in model.originals().items()}

    def _halves(self) -> set[int]:
        """Ids of the half parameters that get masters."""
        return {
            id(parameter)
            for managed in self.models()
            if managed.properties.master_weights is not False  # at O1 for weights that came in half
            for parameter in managed.model.parameters()
            if parameter.dtype in HALF_TYPES and parameter.requires_grad
        }


def _alive(references: Iterable[weakref.ref]) -> Iterator[Any]:
    for reference in references:
        target = reference()
        if target is not None:
            yield target
