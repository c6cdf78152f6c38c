"""The half weights of a session's models, and their FP32 masters in its optimizers."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch.nn import Parameter

from ..config.opt_levels import HALF_TYPES, Properties
from ..log import logger
from ..models.managed_model import ManagedModel
from ..scaling.optimizer import ManagedOptimizer
from .members import Members


class Masters:
    """Finds the master weight of a half parameter in the optimizers of one session.

    This is what a managed model asks for the FP32 values of its weights (`float_values.Masters`).
    """

    def __init__(self, optimizers: Members[ManagedOptimizer]) -> None:
        self._optimizers = optimizers

    def of(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, or None."""
        for optimizer in self._optimizers.alive():
            master = optimizer.masters.of(half)
            if master is not None:
                return master
        return None

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master, or None."""
        for optimizer in self._optimizers.alive():
            half = optimizer.masters.half_of(master)
            if half is not None:
                return half
        return None

    def share(self, half: Tensor) -> Parameter | None:
        """As `of`, for another optimizer that is about to use the same master."""
        for optimizer in self._optimizers.alive():
            master = optimizer.masters.of(half)
            if master is not None:
                optimizer.masters.is_shared = True
                return master
        return None

    def current(self, half: Tensor) -> Parameter | None:
        """As `of`; the master has taken over what was written into the half parameter."""
        for optimizer in self._optimizers.alive():
            master = optimizer.masters.current(half)
            if master is not None:
                return master
        return None

    def show(self, half: Tensor, keep_vars: bool) -> Tensor | None:
        """As `current`, for a caller that hands the tensor out, so that it can be written into.

        An alias of the master's memory; with `keep_vars` the master itself.
        """
        for optimizer in self._optimizers.alive():
            master = optimizer.masters.hand_out(half, keep_vars)
            if master is not None:
                return master
        return None

    def load(self, half: Tensor, values: Tensor) -> None:
        """Give the master of a half parameter the values of a checkpoint."""
        for optimizer in self._optimizers.alive():
            if optimizer.masters.of(half) is not None:
                optimizer.masters.load(half, values)


class ModelWeights:
    """What a session asks of the weights of its models.

    As apex, its package makes no masters at O1: weights that came in half keep half gradients
    there if `has_apex_tables`.
    """

    def __init__(self, models: Members[ManagedModel], has_apex_tables: bool) -> None:
        self._models = models
        self._has_apex_tables = has_apex_tables

    def contain(self, tensor: Tensor) -> bool:
        """Whether a model has this parameter."""
        return any(
            parameter is tensor
            for managed in self._models.alive()
            for parameter in managed.model.parameters()
        )

    def names(self) -> dict[int, str]:
        """Names of the models' parameters, by ids of the parameters."""
        return {
            id(parameter): name
            for managed in self._models.alive()
            for name, parameter in managed.model.named_parameters()
        }

    def originals(self) -> dict[int, Tensor]:
        """The FP32 values that half parameters were rounded from, by ids of the parameters."""
        return {
            key: value
            for managed in self._models.alive()
            for key, value in managed.originals().items()
        }

    def keep_originals(self) -> list[Tensor]:
        """Have models keep their FP32 values for masters; returns their half parameters."""
        halves = self.halves()
        return [half for managed in self._models.alive() for half in managed.keep_originals(halves)]

    def converted(self) -> set[int]:
        """Ids of the parameters and buffers that models at O2 and O3 have in another dtype."""
        return {key for managed in self._models.alive() for key in managed.converted()}

    def forget_originals(self) -> None:
        """Free these values: the masters hold those that are still needed."""
        for managed in self._models.alive():
            managed.forget_originals()

    def halves(self, trained: Collection[int] = ()) -> set[int]:
        """Ids of the half parameters that get masters, at O1 those that came in half.

        They are trainable, or in `trained` (ids): they were in an optimizer before, and keep
        their FP32 values.
        """
        return {
            id(parameter)
            for managed in self._models.alive()
            if self._allow_masters(managed.properties)
            for parameter in managed.model.parameters()
            if parameter.dtype in HALF_TYPES
            and (parameter.requires_grad or id(parameter) in trained)
        }

    def _allow_masters(self, properties: Properties) -> bool:
        as_apex = self._has_apex_tables and properties.patch_torch_functions
        return properties.master_weights is not False and not as_apex

    def halves_that_need_masters(self) -> set[int]:
        """Ids of the half parameters of models at a level with master weights."""
        return {
            id(parameter)
            for managed in self._models.alive()
            if managed.properties.master_weights
            for parameter in managed.model.parameters()
            if parameter.dtype in HALF_TYPES and parameter.requires_grad
        }

    def warn_of_missing_masters(self, masters: Masters) -> None:
        """Warn of models at O2 that no optimizer trains: as a rule, targets of averages."""
        halves = self.halves_that_need_masters()
        without = [
            type(managed.model).__name__
            for managed in self._models.alive()
            if (own := [p for p in managed.model.parameters() if id(p) in halves])
            and all(masters.of(half) is None for half in own)
        ]
        if without:
            logger.warning(
                "No optimizer given to initialize has weights of: %s. They are kept in half "
                "without master weights; averages and updates by hand lose what half cannot hold. "
                "Keep such a model at O1 or O0, or average FP32 values: into copy.deepcopy(model) "
                "or torch.optim.swa_utils.AveragedModel(model), or load_state_dict of FP32 "
                "averages of the trained model's state_dict().",
                ", ".join(without),
            )
