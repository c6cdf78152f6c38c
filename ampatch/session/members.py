"""Who belongs to a session."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from ..config.opt_levels import HALF_TYPES, Properties
from ..log import logger
from ..models.float_copies import WidenedCopies
from ..models.managed_model import ManagedModel
from ..models.plain_parameters import PlainParameters
from ..scaling.optimizer import ManagedOptimizer
from .index import Whereabouts


class Members:
    """The models and optimizers of one session, held weakly.

    Models and optimizers own their managed counterparts, so that a model nobody
    uses any more can go.  `cared_for` and `modelled` tell which session has which.
    """

    def __init__(self, cared_for: Whereabouts, modelled: Whereabouts) -> None:
        self._cared_for = cared_for
        self._modelled = modelled
        self._was_given = False
        self._models: list[weakref.ref[ManagedModel]] = []
        self._optimizers: list[weakref.ref[ManagedOptimizer]] = []
        self.bystanders: list[weakref.ref] = []  # optimizers of a disabled session
        self.stand_ins = PlainParameters()
        self.widened = WidenedCopies()

    def add_model(self, managed: ManagedModel) -> None:
        """A model joins."""
        self._models.append(weakref.ref(managed))
        self._modelled.put(managed.model, self, managed)

    def add_optimizer(self, managed: ManagedOptimizer) -> None:
        """An optimizer joins."""
        self._optimizers = [known for known in self._optimizers if known() is not None]
        self._optimizers.append(weakref.ref(managed))
        self._cared_for.put(managed.optimizer, self, managed)

    def add_bystanders(self, optimizers: Iterable[Any]) -> None:
        """Optimizers join that nothing is to be done for, the session being disabled."""
        for optimizer in optimizers:
            self.bystanders.append(weakref.ref(optimizer))
            self._cared_for.put(optimizer, self, optimizer)

    def forget_members(self) -> None:
        """All have left."""
        for managed in self.models():
            self._modelled.remove(managed.model, self)
        for optimizer in self.optimizers():
            self._cared_for.remove(optimizer.optimizer, self)
        for bystander in _alive(self.bystanders):
            self._cared_for.remove(bystander, self)
        self._models, self._optimizers, self.bystanders = [], [], []

    def models(self) -> list[ManagedModel]:
        """The managed models that are still there."""
        return _alive(self._models)

    def optimizers(self) -> list[ManagedOptimizer]:
        """The managed optimizers that are still there."""
        return _alive(self._optimizers)

    def master_of(self, half: Tensor) -> Tensor | None:
        """The FP32 master of a half parameter, or None."""
        for optimizer in self.optimizers():
            master = optimizer.masters.of(half)
            if master is not None:
                return master
        return None

    def share_master_of(self, half: Tensor) -> Tensor | None:
        """As `master_of`, for another optimizer that takes it too."""
        for optimizer in self.optimizers():
            master = optimizer.masters.of(half)
            if master is not None:
                optimizer.masters.is_shared = True
                return master
        return None

    def current_master_of(self, half: Tensor) -> Tensor | None:
        """As `master_of`; what was written into the half parameter has been taken over."""
        for optimizer in self.optimizers():
            master = optimizer.masters.current(half)
            if master is not None:
                return master
        return None

    def has_parameter(self, tensor: Tensor) -> bool:
        """Whether one of the models has this parameter."""
        return any(
            parameter is tensor
            for managed in self.models()
            for parameter in managed.model.parameters()
        )

    def show_master_of(self, half: Tensor, keep_vars: bool) -> Tensor | None:
        """As `current_master_of`, for who hands it out to be written into.

        An alias of its memory; with `keep_vars` the master itself.
        """
        for optimizer in self.optimizers():
            master = optimizer.masters.show(half, keep_vars)
            if master is not None:
                return master
        return None

    def load_master(self, half: Tensor, values: Tensor) -> None:
        """Give the master of a half parameter a checkpoint's values."""
        for optimizer in self.optimizers():
            if optimizer.masters.of(half) is not None:
                optimizer.masters.load(half, values)

    def parameter_names(self) -> dict[int, str]:
        """Names of the models' parameters, by their ids."""
        return {
            id(parameter): name
            for model in self.models()
            for name, parameter in model.model.named_parameters()
        }

    def managed(self, optimizer: Any) -> ManagedOptimizer | None:
        """Our side of an optimizer, or None if it is not in this session."""
        session, managed = self._cared_for.find(optimizer) or (None, None)
        return managed if session is self else None

    def managed_model(self, model: nn.Module) -> ManagedModel | None:
        """Our side of a model, or None if it is not in this session."""
        session, managed = self._modelled.find(model) or (None, None)
        return managed if session is self else None

    def is_alive(self) -> bool:
        """Whether any of its models and optimizers is still in use."""
        references = (*self._models, *self._optimizers, *self.bystanders)
        for reference in references:
            if reference() is not None:
                return True
        return not self._was_given or not references

    def is_empty(self) -> bool:
        """Whether nothing is left of what it was given."""
        return self._was_given and not (self._models or self._optimizers or self.bystanders)

    def plain_copy(self, model: nn.Module) -> nn.Module:
        """A plain FP32 copy of one of the models."""
        return self.managed_model(model).plain_copy()

    def release_model(self, model: nn.Module) -> None:
        """Take one model out of care; its parameters go back into the optimizers."""
        managed = self.managed_model(model)
        if managed is None:
            return
        for optimizer in self.optimizers():
            optimizer.settle()
        managed.uninstall()
        ids = {id(parameter) for parameter in model.parameters()}
        for optimizer in self.optimizers():
            optimizer.release_parameters(ids)
            optimizer.fit_state(managed.converted())
        self._models = [ref for ref in self._models if ref() is not managed]
        self._modelled.remove(model, self)

    def release_optimizer(self, optimizer: Any) -> None:
        """Take one optimizer out of care."""
        self.bystanders = [ref for ref in self.bystanders if ref() is not optimizer]
        managed = self.managed(optimizer)
        self._cared_for.remove(optimizer, self)
        if managed is not None:
            managed.settle()
            managed.uninstall()
            self._optimizers = [ref for ref in self._optimizers if ref() is not managed]

    def wants_masters(self) -> bool:
        """Whether a model is at a level with master weights."""
        for reference in self._models:
            managed = reference()
            if managed is not None and managed.properties.master_weights:
                return True
        return False

    def has_half_models(self) -> bool:
        """Whether a model is at a level with half weights."""
        for reference in self._models:
            managed = reference()
            if managed is not None and managed.properties.cast_model_type in HALF_TYPES:
                return True
        return False

    def wanting_masters(self) -> set[int]:
        """Ids of half weights of such models."""
        return {
            id(parameter)
            for managed in self.models()
            if managed.properties.master_weights
            for parameter in managed.model.parameters()
            if parameter.dtype in HALF_TYPES and parameter.requires_grad
        }

    def _tell_of_lone_halves(self) -> None:
        """Warn of models at O2 that train in no optimizer: targets of averages, as a rule."""
        wanting = self.wanting_masters()
        lone = [
            type(managed.model).__name__
            for managed in self.models()
            if (halves := [p for p in managed.model.parameters() if id(p) in wanting])
            and all(self.master_of(half) is None for half in halves)
        ]
        if lone:
            logger.warning(
                "No optimizer given to initialize has weights of: %s. They are kept in half without "
                "master weights; averages and updates by hand lose what half cannot hold. Keep such "
                "a model at O1 or O0, or average FP32 values: into copy.deepcopy(model) or "
                "torch.optim.swa_utils.AveragedModel(model), or load_state_dict of FP32 averages "
                "of the trained model's state_dict().",
                ", ".join(lone),
            )

    def _adopt_parameters(self, masters: dict[int, Parameter]) -> None:
        originals, halves = self._weights()
        for managed in self.optimizers():
            managed.adopt_parameters(originals, halves, masters)

    def _weights(self) -> tuple[dict[int, Tensor], set[int]]:
        """Of all models: FP32 values of half parameters, and who is to have masters, by ids."""
        return self._originals(), self._halves()

    def _forget_originals(self) -> None:
        for managed in self.models():
            managed.forget_originals()

    def _originals(self) -> dict[int, Tensor]:
        return {key: value for model in self.models() for key, value in model.originals().items()}

    def _has_masters(self, properties: Properties) -> bool:
        return properties.master_weights is not False

    def halves_to_step_on(self) -> set[int]:
        """As `_halves`, for an optimizer that holds half weights itself: they are up to date."""
        if self.widened.copies:
            self.widened.take_over()
        return self._halves()

    def _halves(self) -> set[int]:
        """Ids of the half parameters that get masters."""
        return {
            id(parameter)
            for managed in self.models()
            if self._has_masters(managed.properties)  # at O1 for weights that came in half
            for parameter in managed.model.parameters()
            if parameter.dtype in HALF_TYPES and parameter.requires_grad
        }


def _alive(references: Iterable[weakref.ref]) -> list[Any]:
    return [target for reference in references if (target := reference()) is not None]
