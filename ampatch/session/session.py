"""A session: one `initialize`, with all it changed and how to take it out.

The only module that knows both the operator side and the optimizer side, and
the only one with a module-level variable that changes: `registry`, which holds
the open sessions and what they share.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..casting.policy import CastState
from ..config.opt_levels import NULLABLE, Properties, properties_for
from ..errors import TakingOut
from ..interop import dynamo_skip, fx_jit
from ..models import float_copies, module_overrides
from ..models.managed_model import ManagedModel
from ..scaling import gradient_state, master_weights
from ..scaling.loss_scaler import make_scaler
from ..scaling.masters import comparison, pairs, writes
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.scaled_backward import ScaledBackward
from ..scaling.shared_parameters import with_sharers
from ..scaling.skip_report import SkipReports
from ..torch_private import half_grads
from . import members
from .optimizer_copies import OptimizerCopies
from .policies import CastingMembers
from .registry import Registry
from .transfer import Handover


class Session(CastingMembers):
    """Models and optimizers under one set of `Properties`.

    Complete when constructed, in force after `open`.
    """

    def __init__(
        self,
        properties: Properties,
        *,
        rules: tuple[list, dict] = ([], {}),
        process_group: Any = None,
        apex_flavour: bool = False,
    ) -> None:
        self._module_rules, function_rules = rules
        super().__init__(
            properties, function_rules, apex_flavour, registry.cared_for, registry.modelled
        )
        self._process_group = process_group
        self.scalers = [_scaler(properties) for _ in range(properties.num_losses)]
        self.is_open = False
        self.scales_by_itself = False  # each pass, for all it reaches: nobody writes `scale_loss`
        self.skips = SkipReports(properties.growth_interval)
        self.handle: Any = None  # of `ampatch.init`, if that opened this session

    # Put in, take out

    def open(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Change models, optimizers and torch; all of it or, on an exception, nothing."""
        self._was_given = bool(models or optimizers)
        if not models:
            self._policy.devices = None  # no model says where it is at home: cast everywhere
        if not self.properties.enabled:
            self.add_bystanders(optimizers)
            self.is_open = True
            registry.add(self)
            return
        try:
            for model in models:
                self._manage_model(model, self.properties)
            weights = self._weights()
            for optimizer in optimizers:
                self.manage_optimizer(optimizer, weights)
            self._forget_originals()
            for managed in self.optimizers():
                managed.forget_found_state()
            if optimizers:
                self._tell_of_lone_halves()
            self.is_open = True
            registry.add(self)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take everything out again.  Harmless when closed."""
        taking_out = TakingOut("ampatch: a session closes")
        taking_out.do(registry.tell, "on_close", self)
        taking_out.do(registry.state.drop_interrupted)
        taking_out.do(self.skips.close)
        for optimizer in self.optimizers():
            taking_out.do(optimizer.settle)
        changed: set[int] = set()
        for managed in self.models():
            taking_out.do(managed.uninstall)
            changed |= managed.converted()
        for optimizer in self.optimizers():
            taking_out.do(optimizer.uninstall)
            taking_out.do(optimizer.fit_state, changed)
            taking_out.do(optimizer.restore_found_state)
        self.forget_members()
        self.is_open = False
        taking_out.do(registry.remove, self)
        taking_out.end()

    def _manage_model(self, model: nn.Module, properties: Properties) -> None:
        found = module_overrides.precisions(model, self._module_rules, properties)
        managed = ManagedModel(
            model,
            properties,
            state=registry.state,
            policy=self._policy_under(properties),
            master_of=self.current_master_of,
            show_master_of=self.show_master_of,
            load_master=self.load_master,
            stand_ins=self.stand_ins,
            widened=self.widened,
            mix=self._mix,
            before_forward=self._before_forward,
            overrides=[
                self._module_override(module, precision, properties)
                for module, precision in found.items()
            ],
        )
        self.add_model(managed)
        if properties.casts_model:
            managed.convert(module_overrides.stays_float(properties, found))
            if managed.mixes:
                self._mix(managed)
        managed.install()
        fx_jit.note_scripted_parts(model, managed.policy)

    def _mix(self, managed: ManagedModel) -> None:
        """FP32 meets half in a model's forward: what PyTorch refuses then follows the tables."""
        if managed.policy is None:
            managed.policy = self.mixed_policy
            if self.is_open:
                registry.refresh()

    def _module_override(
        self, module: nn.Module, precision: str, properties: Properties
    ) -> module_overrides.ModuleOverride:
        dtype = torch.float32 if precision == "float" else properties.dtype
        policy = self._policy.forced(dtype) if properties.patch_torch_functions else None
        return module_overrides.ModuleOverride(
            module, dtype, registry.state, policy, properties.cast_model_type
        )

    def manage_optimizer(
        self, optimizer: Any, weights: tuple[dict, set] | None = None
    ) -> ManagedOptimizer:
        """Take an optimizer into care: masters for its half parameters, its step and zero_grad.

        `weights` is what `_weights` gives, for who has many optimizers.
        """
        managed = ManagedOptimizer(
            optimizer,
            suspend_casts=registry.state.suspend,
            resume_casts=registry.state.resume,
            casts_off=lambda: registry.state.under(lambda: None),
            casts_on=lambda: registry.state.under(
                registry.outside_step, registry.state.covered_by_user()
            ),
            after_step=self._after_step,
            halves=self.halves_to_step_on,
            master_of=self.share_master_of,
            process_group=self._process_group,
            name_of=lambda half: self.parameter_names().get(id(half), "a weight"),
        )
        managed.add_methods(OptimizerCopies(managed, self.has_parameter, self.stand_ins).methods())
        self.add_optimizer(managed)
        self.skips.follow(managed)
        managed.install(*(weights or self._weights()))
        return managed

    def add_scalers(self, count: int) -> range:
        """Make `count` more loss scalers; returns their numbers, for `loss_id`."""
        first = len(self.scalers)
        self.scalers.extend(_scaler(self.properties) for _ in range(count))
        return range(first, first + count)

    def stop_casting(self) -> None:
        """Leave torch's functions alone from now on; models, masters and loss scales stay."""
        self.may_cast = False
        for managed in self.models():
            managed.policy = None
        registry.refresh()

    # Training

    def scaled_backward(
        self,
        loss: Tensor,
        managed: list[ManagedOptimizer],
        loss_id: int,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> ScaledBackward:
        """The context manager behind `scale_loss`."""
        registry.state.drop_interrupted()
        for optimizer in managed:
            optimizer.adopt_new()
        outsiders = []
        if not (len(managed) == len(self._optimizers) == 1 and self._optimizers[0]() is managed[0]):
            everyone = self.optimizers()
            managed = with_sharers(managed, everyone)
            if not self.scales_by_itself:
                outsiders = [other for other in everyone if other not in managed]
        if registry.is_observed:
            registry.tell("on_loss", loss, loss_id)
            registry.tell("on_scale", self.scalers[loss_id].peek(), loss_id)
        return ScaledBackward(
            loss,
            managed,
            self.scalers[loss_id],
            delay_unscale,
            delay_overflow_check,
            outsiders,
            self._policy.cache.close,
            together=self._policy.apex_flavour,
        )

    def _before_forward(self, model: nn.Module) -> None:
        if self._optimizers:
            unscaled = all(scaler.is_one for scaler in self.scalers)
            reduces = registry.reduces(model)
            for managed in self.optimizers():
                managed.before_forward(reduces, unscaled)

    def _after_step(self, managed: ManagedOptimizer) -> None:
        self._policy.cache.close()
        registry.state.drop_interrupted()
        if managed.masters.is_shared:
            for other in self.optimizers():
                if other is not managed and other.masters.is_shared:
                    other.masters.note_shared(managed.masters)
        if self.widened.copies:
            self.widened.take_over()
        news = managed.counter.news(self.properties.max_consecutive_skips)
        if news is not None:
            self.skips.report(managed, news, self.parameter_names(), self.scalers)
        unfed = not (managed.was_fed or self.scales_by_itself)
        if unfed and any(scaler.is_dynamic for scaler in self.scalers):
            managed.report_unfed()
        if registry.is_observed:
            registry.tell("on_step", managed.optimizer, managed.skipped)

    # Changes at run time

    def relevel(self, model: nn.Module, opt_level: Any) -> None:
        """Put one of the models under another opt level; FP32 values carry over exactly.

        What the level decides is decided anew, a loss scale among it; the rest
        (dtype, limits, scope, ...) stays.  Other models of the session keep
        their level, and the loss scalers that serve them; raises `ValueError`
        for a level in another half type than theirs.
        """
        kept = {
            field.name: getattr(self.properties, field.name)
            for field in dataclasses.fields(self.properties)
            if field.name not in ("opt_level", *NULLABLE) or field.name == "min_loss_scale"
        }
        properties = properties_for(opt_level, **kept)
        others = [managed for managed in self.models() if managed.model is not model]
        if others and properties.dtype is not self.properties.dtype:
            raise ValueError(
                f"ampatch.set_opt_level(..., {opt_level!r}): this is in {properties.dtype}, and the "
                f"models given to initialize together share {self.properties.dtype}. Choose a "
                "level in that type, or call initialize for this model and its optimizer alone."
            )
        with Handover(registry, [model], []):
            self._cast_to(properties.dtype)
            self._manage_model(model, properties)
            self._adopt_parameters({})
        self._fit_scalers(properties, others)
        self._forget_originals()
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

    def take_back(
        self,
        models: list[ManagedModel],
        optimizers: list[ManagedOptimizer],
        bystanders: list[Any],
        masters: dict[int, Parameter],
    ) -> None:
        """Manage again what was released; `masters` by ids of half parameters are used again."""
        self._cast_to(self.properties.dtype)
        for managed in models:
            if self.managed_model(managed.model) is None:
                self._manage_model(managed.model, managed.properties)
        self._optimizers, self.bystanders = [], []
        self.add_bystanders(bystanders)
        for managed in optimizers:
            self.add_optimizer(managed)
            managed.reinstall()
        self._adopt_parameters(masters)
        self._forget_originals()
        registry.refresh()


def _scaler(properties: Properties) -> Any:
    return make_scaler(properties.loss_scale, **dataclasses.asdict(properties.scale_settings))


def cast_state() -> CastState:
    """The process's `CastState`, read from this module's globals."""
    return registry.state


registry = Registry(cast_state)
atexit.register(registry.report_closing)
dynamo_skip.run_eagerly(
    *(sys.modules[__name__], members, float_copies, half_grads),
    *(gradient_state, master_weights, pairs, writes, comparison),
)
