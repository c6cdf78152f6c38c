"""A session: what one call of `initialize` manages and changes, and how the changes are undone."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import weight_cache
from ..casting.calls import CastState
from ..casting.outermost_forwards import OutermostForwards
from ..casting.policy import Policy
from ..casting.rules import OVERRIDES, ChooseDtype
from ..config.opt_levels import Properties
from ..config.overrides import Overrides
from ..errors import UndoAll
from ..interop import dynamo_skip, torchscript
from ..models import module_overrides
from ..models.managed_model import ManagedModel
from ..scaling.loss_scaler import make_scaler
from ..scaling.optimizer import ManagedOptimizer
from ..scaling.optimizers import zero_redundancy
from ..scaling.optimizers.state import ReplacedValues, match_state_dtypes
from ..scaling.scale_loss_block import PlainBlock, ScaleLossBlock, with_optimizers_sharing_params
from .object_registry import ManagedRefs, live_counterparts
from .policies import Policies
from .registry import Registry


def get_cast_state() -> CastState:
    """The process's `CastState`.

    The user's decorated functions call this instead of holding the object: Dynamo traces some of
    these functions without sources, and then their closures may hold only functions.
    """
    return registry.state


registry: Registry[Session] = Registry(get_cast_state)


class Session:
    """Models and optimizers under one set of `Properties`.

    Complete when constructed, active after `open`.  `models` and `optimizers` are the managed
    counterparts, `policies` decide what is cast.  The optimizers call the session at each step (see
    `SessionForOptimizer`).
    """

    def __init__(
        self,
        properties: Properties,
        *,
        overrides: Overrides | None = None,
        process_group: Any = None,
        has_apex_tables: bool = False,
    ) -> None:
        self.overrides = overrides or Overrides([], {})
        self.properties = properties
        self.model_entries: ManagedRefs[ManagedModel] = {}
        self.optimizer_entries: ManagedRefs[ManagedOptimizer] = {}
        self.unmanaged_entries: ManagedRefs[Any] = {}  # optimizers of a disabled session
        self._entries: tuple[ManagedRefs[Any], ...]
        self._entries = (self.model_entries, self.optimizer_entries, self.unmanaged_entries)
        self.has_apex_tables = has_apex_tables
        self.policies = Policies(properties, self._function_rules(), registry.state)
        self.call_without_casts, self.call_with_outer_casts = (
            registry.state.call_without_casts,
            registry.state.call_with_outer_casts,
        )
        self.observers = registry.observers
        self.max_consecutive_skips = properties.max_consecutive_skips
        self.scalers = _make_scalers(properties, properties.num_losses)
        self.is_open = False
        self.may_cast = True  # False after `stop_casting`
        # ampatch scales the backward passes of a script that has no `scale_loss`.
        self.scales_automatically = False
        self.outermost_forwards: OutermostForwards | None = None  # set by `open_automatic_session`
        self.init_handle: Any = None  # the result of `ampatch.init`, if it opened this session
        self.process_group = process_group
        self._had_entries = False
        self.last_loss: Callable[[], Tensor | None] = lambda: None  # a weak reference to the loss

    def _function_rules(self) -> dict[Any, ChooseDtype]:
        """The rules that replace rows of the op tables in this session, by function."""
        installation = registry.installation
        rules = {}
        if self.has_apex_tables and self.properties.patch_torch_functions:
            rules = installation.apex_functions(registry.table_edits)
        for function, precision in self.overrides.functions.items():
            rules[installation.replacements.original_of(function)] = OVERRIDES[precision]
        return rules

    # Models and optimizers

    @property
    def models(self) -> list[ManagedModel]:
        """The managed models that are not yet garbage-collected."""
        return live_counterparts(self.model_entries)

    @property
    def optimizers(self) -> list[ManagedOptimizer]:
        """The managed optimizers that are not yet garbage-collected."""
        return live_counterparts(self.optimizer_entries)

    def is_alive(self) -> bool:
        """Whether the session can still be used.

        False once all its models and optimizers were garbage-collected instead of released.
        """
        for entries in self._entries:
            for ref in list(entries.values()):
                if ref() is not None:
                    return True
        return not self._had_entries or self.has_released_all()

    def scales_losses(self) -> bool:
        """Whether it has optimizers whose losses it scales, or may get optimizers later."""
        if self.init_handle is not None or self.scales_automatically:
            return True
        return bool(self.optimizers or live_counterparts(self.unmanaged_entries))

    def has_released_all(self) -> bool:
        """Whether it had models or optimizers, and all of them were released.

        Garbage-collected ones do not count as released.
        """
        return self._had_entries and not any(self._entries)

    def _add_entry(self, entries: ManagedRefs[Any], obj: Any, managed: Any) -> None:
        for key in [key for key, ref in entries.items() if ref() is None]:
            del entries[key]
        entries[id(obj)] = registry.objects.put(obj, self, managed)

    def _remove_entries(self, entries: ManagedRefs[Any], *keys: int) -> None:
        for key in keys:
            if entries.pop(key, None) is not None:
                registry.objects.remove(key, self)

    # Open and close

    def open(
        self,
        models: list[nn.Module],
        optimizers: list[Any],
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Change models, optimizers and torch, and call `notify`.  An exception undoes it all."""
        if not models:
            self.policies.cast_everywhere()
        try:
            self._manage_all(models, optimizers)
            self.is_open = True
            registry.add(self)
            notify()
            self._match_all_state_dtypes()
        except BaseException:
            self.close()
            raise

    def add(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Manage more models and optimizers, or none of them if an exception is raised."""
        try:
            self._manage_all(models, optimizers)
            self._match_all_state_dtypes()
        except BaseException:
            undo = UndoAll("ampatch.add_models(...) or add_optimizers(...) fails")
            for obj in (*optimizers, *models):
                undo.do(self.release, obj)
            undo.end()
            raise
        registry.refresh()

    def _manage_all(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        self._had_entries |= bool(optimizers)
        if not self.properties.enabled:  # no entries for models; their optimizers may come later
            for optimizer in optimizers:
                self._add_entry(self.unmanaged_entries, optimizer, optimizer)
            return
        self._had_entries |= bool(models)
        for model in models:
            self._manage_model(model)
        for optimizer in optimizers:
            self.manage_optimizer(optimizer)

    def close(self) -> None:
        """Undo every change.  A second call does nothing."""
        undo = UndoAll("ampatch: a session closes")
        undo.do(registry.observers.notify, "on_close", self)
        changed: set[int] = set()
        for managed in self.models:
            changed |= managed.converted_ids()
            undo.do(managed.uninstall)
        for optimizer in self.optimizers:
            undo.do(optimizer.uninstall)
            undo.do(_match_state_dtypes, optimizer, changed)
        for entries in self._entries:
            self._remove_entries(entries, *entries)
        self.is_open = False
        undo.do(registry.remove, self)
        undo.end()

    def release(self, obj: Any) -> None:
        """Stop managing a model or an optimizer."""
        entries_with_obj = (entries for entries in self._entries if id(obj) in entries)
        entries: ManagedRefs[Any] = next(entries_with_obj, {})
        managed = entries[id(obj)]() if entries else None
        if isinstance(managed, ManagedModel):
            changed = managed.converted_ids()
            managed.uninstall()
            for optimizer in self.optimizers:
                _match_state_dtypes(optimizer, changed)
        elif isinstance(managed, ManagedOptimizer):
            managed.uninstall()
        self._remove_entries(entries, id(obj))

    def policy(self) -> Policy | None:
        """Return the policy under which this session casts calls, or None if it casts none."""
        if not (self.properties.enabled and self.may_cast):
            return None
        if not self.model_entries:
            return self.policies.model_forward_policy()
        policies = [managed.policy for managed in self.models if managed.policy is not None]
        if self.policies.tables_policy in policies:
            return self.policies.tables_policy
        return policies[0] if policies else None

    def _match_all_state_dtypes(self) -> None:
        """Cast the optimizers' states to their parameters' dtypes.

        Then drop what a failed `open` would need to undo the changes.
        """
        models, optimizers = self.models, self.optimizers
        converted = self.converted_ids()
        for optimizer in optimizers:
            _match_state_dtypes(optimizer, converted, optimizer.replaced_state)
        for model in models:
            model.forget_originals()
        for optimizer in optimizers:
            optimizer.replaced_state.clear()

    def converted_ids(self) -> set[int]:
        """Ids of the tensors whose dtype an opt level has changed."""
        return {key for managed in self.models for key in managed.converted_ids()}

    # Models

    def _manage_model(self, model: nn.Module) -> None:
        properties = self.properties
        overridden, stays_fp32 = module_overrides.resolve_overrides(
            model, self.overrides.modules, properties
        )
        managed = ManagedModel(
            model,
            properties,
            self,
            state=registry.state,
            policy=self.policies.model_forward_policy(),
            overrides=[
                self.policies.module_override(module, precision)
                for module, precision in overridden.items()
            ],
        )
        self._add_entry(self.model_entries, model, managed)
        if properties.uses_half_copies:
            registry.restore_fp32_weights(model)
        managed.convert(stays_fp32)
        managed.warn_of_half_weights()
        managed.install()
        torchscript.warn_of_scripted_submodules(managed)

    def drop_copies(self) -> None:
        """Drop this thread's cached half copies (O1)."""
        weight_cache.drop_copies()

    def parameter_names(self) -> dict[int, str]:
        """The names of the models' parameters, by the id of the parameter."""
        return {
            id(parameter): name
            for managed in self.models
            for name, parameter in managed.model.named_parameters()
        }

    def promote_mixed_dtypes(self, managed: ManagedModel) -> None:
        """From now on, cast calls in the model's forward that get both FP32 and half tensors."""
        if managed.policy is None:
            managed.policy = self.policies.mixed_dtypes_policy
            self.policies.cast_on({param.device.type for param in managed.model.parameters()})
            if self.is_open:
                registry.refresh()

    def stop_casting(self) -> None:
        """Cast no calls from now on.  Models and loss scales are not changed."""
        self.may_cast = False
        for managed in self.models:
            managed.policy = None
        registry.refresh()

    # Optimizers

    def manage_optimizer(self, optimizer: Any) -> ManagedOptimizer:
        """Manage an optimizer: its `step`, `zero_grad` and `load_state_dict`."""
        managed = ManagedOptimizer(optimizer, self)
        self._add_entry(self.optimizer_entries, optimizer, managed)
        managed.install()
        return managed

    def add_scalers(self, count: int) -> range:
        """Make `count` more loss scalers.  Returns the range of their `loss_id`."""
        self.scalers += _make_scalers(self.properties, count)
        return range(len(self.scalers) - count, len(self.scalers))

    # Training

    def scale_loss_block(
        self,
        loss: Tensor,
        optimizers: list[ManagedOptimizer],
        loss_id: int,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """The context manager of `scale_loss`.  At a static scale of 1, it yields the loss."""
        scaler = self.scalers[loss_id]
        observers = registry.observers
        for entry in list(self.model_entries.values()):
            model = entry()
            if model is not None and model.frame is not None and not model.frame.is_installed():
                model.warn_of_lost_frame(
                    param for optimizer in optimizers for param in optimizer.parameters()
                )
        if observers.registered:
            observers.notify("on_loss", loss, loss_id)
            observers.notify("on_scale", scaler.peek(), loss_id)
            observers.notify("on_block", scaler)  # internal: for `ampatch.debug`
        block: AbstractContextManager[Tensor]
        if scaler.is_one:
            block = PlainBlock(loss)
            for optimizer in optimizers:
                optimizer.gradients.report_scaled_by_other_block()
        else:
            self.last_loss = weakref.ref(loss)
            optimizers, others = self._split_optimizers(optimizers)
            block = ScaleLossBlock(
                loss,
                optimizers,
                scaler,
                delay_unscale,
                delay_overflow_check,
                others,
                skips_together=self.has_apex_tables,
                counts_passes=not self.scales_automatically,
            )
        return observers.around(block, loss_id) if observers.registered else block

    def _split_optimizers(
        self, optimizers: list[ManagedOptimizer]
    ) -> tuple[list[ManagedOptimizer], list[ManagedOptimizer]]:
        """Return two lists of managed optimizers.

        The first: these optimizers and all that share parameters with them.  The second: the
        others; empty under `scales_automatically`.
        """
        entries = self.optimizer_entries
        is_alone = len(optimizers) == len(entries) == 1 and id(optimizers[0].optimizer) in entries
        if not is_alone:
            optimizers = with_optimizers_sharing_params(optimizers, self.optimizers)
        if self.scales_automatically or (is_alone and len(registry.sessions) == 1):
            return optimizers, []
        return optimizers, [other for other in registry.optimizers() if other not in optimizers]

    @property
    def requires_scale_loss_blocks(self) -> bool:
        """Whether a step needs a `scale_loss` block before it."""
        return self.checks_for_overflow() and not self.scales_automatically

    def checks_for_overflow(self) -> bool:
        """Whether steps are skipped after an overflow: under a dynamic loss scale."""
        return self.properties.loss_scale == "dynamic"

    def computes_in_half(self, parameter: Tensor) -> bool:
        """Whether forwards of a managed model use a half copy of this weight."""
        return registry.has_half_copy(parameter)

    def after_step(self, managed: ManagedOptimizer) -> None:
        """Drop half copies, write reports and notify observers after a step of an optimizer."""
        weight_cache.drop_copies()
        for ref in list(self.model_entries.values()):
            model = ref()
            if model is not None and model.running_statistics is not None:
                model.running_statistics.after_step(managed.last_step_skipped)
        managed.reports.after_step(self)
        if self.observers.registered:
            self.observers.notify("on_step", managed.optimizer, managed.last_step_skipped)

    # After a failed `take_over`

    def restore(
        self,
        models: list[ManagedModel],
        optimizers: list[ManagedOptimizer],
        unmanaged: list[Any],
    ) -> None:
        """Manage released models and optimizers again."""
        for managed in models:
            if id(managed.model) not in self.model_entries:
                self._manage_model(managed.model)
        for optimizer in unmanaged:
            self._add_entry(self.unmanaged_entries, optimizer, optimizer)
        for managed_optimizer in optimizers:
            self._add_entry(self.optimizer_entries, managed_optimizer.optimizer, managed_optimizer)
            managed_optimizer.reinstall()
        self._match_all_state_dtypes()
        registry.refresh()


@contextlib.contextmanager
def take_over(*objs: Any) -> Iterator[None]:
    """Context manager: releases models and optimizers from the sessions that have them.

    On an exception these sessions manage them again, and training can go on.
    """
    owners = [(session, obj) for obj in objs if (session := registry.objects.session_of(obj))]
    owned_before = {
        session: (session.models, session.optimizers, live_counterparts(session.unmanaged_entries))
        for session, _ in owners
    }
    try:
        for session, obj in owners:
            session.release(obj)
        yield
    except BaseException:
        for session, owned in owned_before.items():
            session.restore(*owned)
        raise


def _match_state_dtypes(
    managed: ManagedOptimizer, converted: set[int], replaced: ReplacedValues | None = None
) -> None:
    """Cast the optimizer's state for converted parameters (ids) to their present dtypes."""
    if converted:
        match_state_dtypes(managed.optimizer, converted, replaced)
        zero_redundancy.rebuild_buckets(managed.optimizer)


def _make_scalers(properties: Properties, count: int) -> list[Any]:
    is_needed = properties.opt_level != "O0" and properties.dtype is torch.float16
    settings = dataclasses.asdict(properties.scale_settings)
    return [make_scaler(properties.loss_scale, is_needed, **settings) for _ in range(count)]


dynamo_skip.run_eagerly()  # at import: Dynamo must not compile ampatch's own files
