"""A session: one `initialize`, what it changed, and how that is undone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..casting.policy import Policy
from ..config.opt_levels import NULLABLE, Properties, properties_for
from ..errors import UndoAll
from ..interop import dynamo_skip, fx_jit, rank_agreement
from ..models import module_overrides
from ..models.managed_model import ManagedModel
from ..scaling.loss_scaler import make_scaler
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers import zero
from ..scaling.optimizers.state import fit_state
from ..scaling.scaled_backward import ScaledBackward
from ..scaling.shared_parameters import with_sharers
from ..scaling.skip_report import SkipReports
from . import members, policies, rank_settings
from .members import Members
from .observers import ObservedBlock
from .policies import Policies
from .registry import registry
from .transfer import Transfer


class Session:
    """Models and optimizers under one set of `Properties`.

    Complete when constructed, in force after `open`.  `models` and `optimizers` are its members,
    `policies` what it casts.  Its optimizers ask it what they need for a step (`StepOwner`).
    """

    def __init__(
        self,
        properties: Properties,
        *,
        rules: tuple[list, dict] = ([], {}),
        process_group: Any = None,
        has_apex_tables: bool = False,
    ) -> None:
        self.rules = rules  # overrides of modules and of functions
        self.properties = properties
        self.models: Members[ManagedModel] = Members(self, registry.models, registry.end_sessions)
        self.optimizers: Members[ManagedOptimizer] = Members(
            self, registry.optimizers, registry.end_sessions
        )
        self.policies = Policies(properties, rules[1], has_apex_tables)
        self.casts_off = registry.state.casts_off
        self.scalers = [_scaler(properties) for _ in range(properties.num_losses)]
        self.skips = SkipReports(properties.growth_interval)
        self.is_open = False
        self.may_cast = True  # until `stop_casting`
        self.scales_by_itself = False  # each pass, for all it reaches: no `scale_loss` is written
        self.handle: Any = None  # of `ampatch.init`, if that opened this session
        self.process_group = process_group
        self.at_close: list[Callable[[], None]] = []
        self._was_given = False

    # Put in, take out

    def open(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Change models, optimizers and torch; all of it or, on an exception, nothing."""
        self._was_given = bool(models or optimizers)
        if not models:
            self.policies.cast_everywhere()
        if not self.properties.enabled:
            self._was_given = bool(optimizers)  # models alone wait for theirs
            self.optimizers.add_unmanaged(optimizers)
            self.is_open = True
            registry.add(self)
            return
        try:
            for model in models:
                self._manage_model(model, self.properties)
            for optimizer in optimizers:
                self.manage_optimizer(optimizer)
            self._fit_states()
            self._settle()
            self.is_open = True
            registry.add(self)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take everything out again.  Harmless when closed."""
        undo = UndoAll("ampatch: a session closes")
        undo.do(registry.observers.notify, "on_close", self)
        undo.do(registry.state.drop_interrupted)
        undo.do(self.skips.close)
        changed: set[int] = set()
        for managed in self.models.alive():
            changed |= managed.converted()
            undo.do(managed.uninstall)
        for optimizer in self.optimizers.alive():
            undo.do(optimizer.uninstall)
            undo.do(_fit, optimizer, changed)
            undo.do(optimizer.found_states.restore)
        self.models.clear()
        self.optimizers.clear()
        self.is_open = False
        undo.do(registry.remove, self)
        while self.at_close:
            undo.do(self.at_close.pop())
        undo.end()

    def is_alive(self) -> bool:
        """Whether a model or optimizer is still in use, or none was given."""
        if self.models.are_alive() or self.optimizers.are_alive():
            return True
        return not self._was_given or (self.models.is_empty() and self.optimizers.is_empty())

    def is_empty(self) -> bool:
        """Whether all models and optimizers that were given have left."""
        return self._was_given and self.models.is_empty() and self.optimizers.is_empty()

    def policy(self) -> Policy | None:
        """The rules by which this session casts calls; None: it casts none."""
        if not (self.properties.enabled and self.may_cast):
            return None
        return self.policies.of(self.properties, self.models)

    # Models

    def _manage_model(self, model: nn.Module, properties: Properties) -> None:
        found = module_overrides.precisions(model, self.rules[0], properties)
        managed = ManagedModel(
            model,
            properties,
            self,
            state=registry.state,
            policy=self.policies.at(properties),
            overrides=[
                self.policies.module_override(module, precision, properties, registry.state)
                for module, precision in found.items()
            ],
        )
        self.models.add(managed)
        if properties.lends_weights:
            registry.events.give_back_shared(model)
        if properties.casts_model:
            managed.convert(module_overrides.stays_float(model, properties, found))
        managed.warn_of_half_weights()
        managed.install()
        fx_jit.note_scripted_parts(managed)

    def add_models(self, models: list[nn.Module]) -> None:
        """Manage more models; all of them or, on an exception, none."""
        if not self.properties.enabled:
            return
        self._was_given = True
        try:
            for model in models:
                self._manage_model(model, self.properties)
            self._fit_states()
        except BaseException:
            _give_back_models(self, models)
            raise
        self._settle()
        registry.refresh()

    def _fit_states(self) -> None:
        """The state of optimizers has the dtypes that their parameters have got."""
        converted = {key for managed in self.models.alive() for key in managed.converted()}
        for managed in self.optimizers.alive():
            _fit(managed, converted)

    def _settle(self) -> None:
        """From here on nothing goes back to what it was before."""
        for model in self.models.alive():
            model.forget_originals()
        for optimizer in self.optimizers.alive():
            optimizer.found_states.forget()

    def names(self) -> dict[int, str]:
        """Names of the models' parameters, by ids of the parameters."""
        return {
            id(parameter): name
            for managed in self.models.alive()
            for name, parameter in managed.model.named_parameters()
        }

    def mix(self, managed: ManagedModel) -> None:
        """FP32 meets half in a model's forward: what PyTorch refuses then follows the tables."""
        if managed.policy is None:
            managed.policy = self.policies.mixed
            if self.is_open:
                registry.refresh()

    def release_model(self, model: nn.Module) -> None:
        """Manage a model no longer."""
        managed = self.models.find(model)
        if managed is None:
            return
        for optimizer in self.optimizers.alive():
            optimizer.gradients.state.finish_pending()
        changed = managed.converted()
        managed.uninstall()
        for optimizer in self.optimizers.alive():
            _fit(optimizer, changed)
        self.models.remove(model)

    def stop_casting(self) -> None:
        """Leave torch's functions alone from now on; models and loss scales stay."""
        self.may_cast = False
        for managed in self.models.alive():
            managed.policy = None
        registry.refresh()

    # Optimizers

    def manage_optimizer(self, optimizer: Any) -> ManagedOptimizer:
        """Manage an optimizer: its `step`, `zero_grad` and `load_state_dict`."""
        managed = ManagedOptimizer(optimizer, self)
        self.optimizers.add(managed)
        self.skips.follow(managed)
        managed.install()
        return managed

    def add_optimizers(self, optimizers: list[Any]) -> None:
        """Manage more optimizers; all of them or, on an exception, none."""
        if not self.properties.enabled:
            self._was_given = True
            self.optimizers.add_unmanaged(optimizers)
            return
        for model in self.models.alive():
            model.sharded.refuse_unseen("ampatch.add_optimizers(...)")
        try:
            added = [self.manage_optimizer(one) for one in optimizers]
            self._fit_states()
        except BaseException:
            _give_back(optimizers, self.optimizers)
            raise
        for managed in added:
            managed.found_states.forget()
        registry.refresh()

    def release_optimizer(self, optimizer: Any) -> None:
        """Manage an optimizer no longer."""
        managed = self.optimizers.find(optimizer)
        if managed is not None:
            managed.uninstall()
        self.optimizers.remove(optimizer)

    def add_scalers(self, count: int) -> range:
        """Make `count` more loss scalers; returns their numbers, for `loss_id`."""
        first = len(self.scalers)
        self.scalers.extend(_scaler(self.properties) for _ in range(count))
        return range(first, first + count)

    # Training

    def scaled_backward(
        self,
        loss: Tensor,
        managed: list[ManagedOptimizer],
        loss_id: int,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """The context manager behind `scale_loss`; at a static scale of 1 it gives the loss."""
        if registry.ranks.expected:
            registry.ranks.before_pass(loss)
        registry.state.drop_interrupted()
        self.policies.cache.close()
        if registry.observers.are_there:
            registry.observers.notify("on_loss", loss, loss_id)
            registry.observers.notify("on_scale", self.scalers[loss_id].peek(), loss_id)
            registry.observers.notify("on_block", self.scalers[loss_id])
        block: AbstractContextManager[Tensor]
        if self.scalers[loss_id].is_one:
            block = nullcontext(loss)
        else:
            block = self._block(loss, managed, loss_id, delay_unscale, delay_overflow_check)
        if registry.observers.are_there:
            return ObservedBlock(block, registry.observers, loss_id)
        return block

    def _block(
        self,
        loss: Tensor,
        managed: list[ManagedOptimizer],
        loss_id: int,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> ScaledBackward:
        others: list[ManagedOptimizer] = []
        members = self.optimizers.references
        if not (len(managed) == len(members) == 1 and members[0]() is managed[0]):
            everyone = self.optimizers.alive()
            managed = with_sharers(managed, everyone)
            if not self.scales_by_itself:
                others = [other for other in everyone if other not in managed]
        return ScaledBackward(
            loss,
            managed,
            self.scalers[loss_id],
            delay_unscale,
            delay_overflow_check,
            others,
            together=self.policies.tables.apex_tables,
        )

    def looks_for_overflow(self) -> bool:
        """Whether there is a dynamic loss scale."""
        return any(scaler.is_dynamic for scaler in self.scalers)

    def computes_in_half(self, parameter: Tensor) -> bool:
        """Whether a model computes with half copies of this weight."""
        return any(managed.lends(parameter) for managed in self.models.alive())

    def casts_on(self) -> AbstractContextManager[None]:
        """The policy in force around the step that is running, for the forward in a closure."""
        state = registry.state
        return state.under(state.covered, state.covered_by_user())

    def before_step(self, managed: ManagedOptimizer) -> None:
        """A step of one of the optimizers begins."""
        if registry.observers.are_there:
            registry.observers.notify("on_step_begin", managed.optimizer)

    def after_step(self, managed: ManagedOptimizer) -> None:
        """It has ended."""
        self.policies.cache.close()
        registry.state.drop_interrupted()
        news = managed.counter.news(self.properties.max_consecutive_skips)
        if news is not None:
            self.skips.report(managed, news, self.names(), self.scalers)
        without_block = not (managed.step_had_block or self.scales_by_itself)
        if without_block and self.looks_for_overflow():
            managed.warn_without_block()
        if registry.observers.are_there:
            registry.observers.notify("on_step", managed.optimizer, managed.skipped)

    # Changes at run time

    def at_level(self, model: nn.Module, opt_level: Any) -> Properties:
        """What another opt level of one of the models means.

        What the level decides is decided anew, a loss scale among it; the rest (dtype, limits,
        scope, ...) stays.  Raises `ValueError` for a level in another half type than that of the
        session's other models.
        """
        kept = {
            field.name: getattr(self.properties, field.name)
            for field in dataclasses.fields(self.properties)
            if field.name not in ("opt_level", *NULLABLE) or field.name == "min_loss_scale"
        }
        properties = properties_for(opt_level, **kept)
        others = self._models_but(model)
        if others and properties.dtype is not self.properties.dtype:
            raise ValueError(
                f"ampatch.set_opt_level(..., {opt_level!r}): this is in {properties.dtype}, and "
                f"the models given to initialize together share {self.properties.dtype}. Choose "
                "a level in that type, or call initialize for this model and its optimizer alone."
            )
        return properties

    def _models_but(self, model: nn.Module) -> list[ManagedModel]:
        return [managed for managed in self.models.alive() if managed.model is not model]

    def relevel(self, model: nn.Module, properties: Properties) -> None:
        """Put one of the models under another opt level, as `at_level` gives it.

        Other models of the session keep their level, and the loss scalers that serve them.
        """
        others = self._models_but(model)
        with Transfer(registry, [model], []):
            self.policies.cast_to(properties.dtype)
            self._manage_model(model, properties)
            self._fit_states()
        self._fit_scalers(properties, others)
        self._settle()
        registry.refresh()

    def _fit_scalers(self, properties: Properties, others: list[ManagedModel]) -> None:
        """Scale losses as a model's new level wants it, and as the other models need it."""
        if not others:
            anew = self.properties.loss_scale != properties.loss_scale
            self.properties = properties
            self.may_cast = True
        elif properties.loss_scale == "dynamic":
            anew = all(scaler.is_one for scaler in self.scalers)
        else:
            dynamic = any(other.properties.loss_scale == "dynamic" for other in others)
            anew = not dynamic and any(scaler.is_dynamic for scaler in self.scalers)
        if anew:
            self.scalers = [_scaler(properties) for _ in self.scalers]

    def restore(
        self,
        models: list[ManagedModel],
        optimizers: list[ManagedOptimizer],
        unmanaged: list[Any],
    ) -> None:
        """Manage again what was released."""
        self.policies.cast_to(self.properties.dtype)
        for managed in models:
            if self.models.find(managed.model) is None:
                self._manage_model(managed.model, managed.properties)
        self.optimizers.clear()
        self.optimizers.add_unmanaged(unmanaged)
        for optimizer in optimizers:
            self.optimizers.add(optimizer)
            optimizer.reinstall()
        self._fit_states()
        self._settle()
        registry.refresh()


def _fit(managed: ManagedOptimizer, converted: set[int]) -> None:
    """Parameters (ids) have got other dtypes: what the optimizer keeps of them fits again."""
    if converted:
        fit_state(managed.optimizer, converted)
        zero.settle(managed.optimizer)


def _give_back_models(session: Session, models: list[nn.Module]) -> None:
    """The models that have just come are as they were, since one of them cannot be managed."""
    undo = UndoAll("ampatch.add_models(...) fails")
    for model in models:
        undo.do(session.release_model, model)
    undo.end()


def _give_back(given: list[Any], optimizers: Members[ManagedOptimizer]) -> None:
    """The optimizers that have just come are as they were, since one of them cannot be managed."""
    undo = UndoAll("ampatch.add_optimizers(...) fails")
    for optimizer in given:
        managed = optimizers.find(optimizer)
        if managed is not None:
            undo.do(managed.uninstall)
            undo.do(managed.found_states.restore)
        optimizers.remove(optimizer)
    undo.end()


def _scaler(properties: Properties) -> Any:
    is_needed = properties.opt_level != "O0" and properties.dtype is torch.float16
    settings = dataclasses.asdict(properties.scale_settings)
    return make_scaler(properties.loss_scale, is_needed, **settings)


dynamo_skip.run_eagerly(sys.modules[__name__], members, policies, rank_agreement, rank_settings)
