"""Checks of the script's models and optimizers, before anything is changed.

Single numbers and words are checked in `config/validation.py`, settings of an opt level in
`config/opt_levels.py`.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from ..casting.places import NAMESPACES, places_of
from ..config.opt_levels import HALF_DTYPES, Properties
from ..config.overrides import Overrides
from ..errors import AmpatchError, did_you_mean, type_name
from ..log import logger
from ..models.managed_model import ManagedModel
from ..models.module_overrides import overridden_submodules, resolve_overrides
from ..models.sharded_weights import checked_sharded_parameters
from ..session.session import registry
from ..torch_private.dtensors import can_replace_data, is_dtensor, is_localized_by_ddp
from ..torch_private.optimizers import is_zero_redundancy, steps_in_backward
from .plan import Plan

P = ParamSpec("P")
T = TypeVar("T")
_matched_override_keys: set[Any] = set()
"""The keys of overrides that have matched a submodule in this process."""


class _UnmatchedOverride:
    """Observes until the first step whether an override of the environment has matched a submodule.

    A later `initialize` may get the submodule.
    """

    def __init__(self, key: Any, expected: str) -> None:
        self._key = key
        self._expected = expected
        self._stop_observing = registry.observers.add(self)

    def on_deactivate(self) -> None:
        self._stop_observing()

    def on_step_begin(self, optimizer: object) -> None:
        self._stop_observing()
        if self._key not in _matched_override_keys:
            raise ValueError(
                f"--overrides or AMPATCH_OVERRIDES: {self._key!r} matches no submodule of any "
                f"model that ampatch.initialize got. {self._expected}"
            )


# The arguments


def refuse_unknown_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: raises `TypeError` for an unknown argument, and suggests the right name."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs.keys() - names.keys():
            raise TypeError(
                f"ampatch.{function.__name__}({name}=...): there is no such argument."
                f"{did_you_mean(name, names)}"
            )
        return function(*args, **kwargs)

    return checked


def as_models(models: Any, user_call: str = "ampatch.initialize") -> list[nn.Module]:
    """The models as a list.

    Raises `TypeError` if an object is not a module, `ValueError` for the same object twice.
    """
    expected = "a torch.nn.Module"
    return _as_list(
        models, lambda model: isinstance(model, nn.Module), f"{user_call}(models=", expected
    )


def as_optimizers(optimizers: Any, user_call: str = "ampatch.initialize") -> list[Any]:
    """The optimizers as a list: objects with `param_groups` and `step` (LARC too).

    An object that stands for a managed optimizer is replaced by that optimizer.

    Raises `TypeError` for anything else, and for objects without `__dict__`, whose `step` cannot be
    replaced; `ValueError` for the same object twice.
    """
    expected = "a torch.optim.Optimizer (or an object with param_groups, step and __dict__)"
    listed = _as_list(optimizers, _is_optimizer, f"{user_call}(optimizers=", expected)
    unwrapped = map(registry.objects.unwrapped_optimizer, listed)
    return list({id(optimizer): optimizer for optimizer in unwrapped}.values())


def _as_list(
    objs: Any, is_valid: Callable[[Any], bool], user_call: str, expected: str
) -> list[Any]:
    listed = list(objs) if isinstance(objs, (list, tuple)) else [objs]
    for obj in listed:
        if not is_valid(obj):
            are_swapped = isinstance(obj, (nn.Module, torch.optim.Optimizer))
            raise TypeError(
                f"{user_call}...): expected {expected}, or a list or tuple of them, got "
                f"{type_name(obj)}." + " The model comes first, then the optimizer." * are_swapped
            )
    if len(set(map(id, listed))) != len(listed):
        raise ValueError(f"{user_call}[...]): the same object is listed twice. List each once.")
    return listed


def _is_optimizer(value: Any) -> bool:
    has_step = hasattr(value, "param_groups") and callable(getattr(value, "step", None))
    return has_step and hasattr(value, "__dict__")


# Models under an opt level


def check_objects(
    plan: Plan, models: list[nn.Module], optimizers: list[Any], process_group: Any
) -> None:
    """Raise an error if models, optimizers or process group do not fit the plan."""
    check_process_group(process_group)
    if not plan.properties.enabled:
        return
    check_optimizers(optimizers, models, plan.properties, process_group)
    if any(plan.overrides):
        check_overrides_exist(plan, models)
    check_models(models, plan.properties, plan.active_overrides)


def check_models(models: list[nn.Module], properties: Properties, overrides: Overrides) -> None:
    """Raise `AmpatchError` for models that do not work at the opt level."""
    user_call = f"ampatch.initialize(opt_level={properties.opt_level!r})"
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    for index, model in enumerate(models):
        if isinstance(model, torch.jit.RecursiveScriptModule):
            raise AmpatchError(
                f"{user_call}: models[{index}], {model.original_name}, is TorchScript, whose "
                "operators cannot be cast. Nothing was changed. Pass the model from before "
                "torch.jit.script and compile it with torch.compile, or pass a model that has "
                "this model as a submodule."
            )
        if has_ranks and _changes_dtypes(model, properties) and _are_accumulators_held(model):
            raise AmpatchError(
                f"{user_call}: models[{index}], a {type(model).__name__}, is already wrapped in "
                "DistributedDataParallel, or a loss of it is still alive. Its parameters would "
                "change their dtype, and DistributedDataParallel would not average their "
                "gradients. Call initialize first and wrap the model it returns."
            )
        if properties.cast_model_type is None:
            continue
        _, stays_fp32 = resolve_overrides(model, overrides.modules, properties)
        cast_by_fsdp = checked_sharded_parameters(model, properties, stays_fp32)
        for name, why in _uncastable_weights(model, properties, cast_by_fsdp):
            raise AmpatchError(
                f"{user_call}: models[{index}], a {type(model).__name__}, has {name!r}, {why} "
                "Nothing was changed. Expected FP32 weights that can be cast, or "
                'opt_level="O1", which does not change them.'
            )


def _changes_dtypes(model: nn.Module, properties: Properties) -> bool:
    """Whether parameters would change their dtype, at O3 or back to FP32 after an earlier O3."""
    managed = registry.objects.managed(model)
    if isinstance(managed, ManagedModel) and managed.converted_ids():
        return True
    changes = properties.casts_model and not properties.uses_half_copies
    return changes and any(_needs_cast(parameter, properties) for parameter in model.parameters())


def _needs_cast(tensor: Tensor, properties: Properties) -> bool:
    """Whether the tensor's floating dtype is not the dtype in which the level computes."""
    return tensor.dtype is not properties.cast_model_type and tensor.is_floating_point()


def _are_accumulators_held(model: nn.Module) -> bool:
    """Whether other code holds the autograd nodes that accumulate the model's gradients.

    DistributedDataParallel holds them: its hooks are on these nodes.  A parameter with new data
    gets a new node, and the ranks would silently train different weights.  The model has no
    reference to the DistributedDataParallel around it, so each node gets a mark: a node that
    nothing else holds is freed at once, together with its mark.
    """
    gc.collect()  # losses in reference cycles may hold nodes
    mark = object()
    leaves = [
        p
        for p in model.parameters()
        if p.requires_grad and p.is_leaf and p.layout is torch.strided and not is_lazy(p)
    ]
    for leaf in leaves:
        _metadata_at(leaf)[mark] = None
    marks_left = [_metadata_at(leaf).pop(mark, 0) is None for leaf in leaves]
    return any(marks_left)


def _metadata_at(leaf: Tensor) -> dict[Any, Any]:
    """The metadata of the node that accumulates the leaf's gradient; freed with the node."""
    return get_gradient_edge(leaf).node.metadata  # type: ignore[return-value]  # a property


def _uncastable_weights(
    model: nn.Module, properties: Properties, cast_by_fsdp: set[int]
) -> Iterator[tuple[str, str]]:
    """Names of weights that can neither be cast in place nor have half copies, and the reasons.

    Weights in `cast_by_fsdp` (ids) are left out.
    """
    class_names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in cast_by_fsdp:
            why = _why_uncastable(tensor, properties, class_names)
            if why is not None:
                yield name, why


def _why_uncastable(tensor: Tensor, properties: Properties, class_names: set[str]) -> str | None:
    """The reason why a weight cannot have another dtype, or None if it can.

    `class_names`: the names of the classes of the model's modules.

    FullyShardedDataParallel holds views of the old data, and would still gather this data.  The
    DTensors of tensor parallel hold their own data.
    """
    is_sharded = isinstance(tensor, nn.Parameter) and "FullyShardedDataParallel" in class_names
    if is_dtensor(tensor):
        is_sharded |= "FSDPModule" in class_names or not can_replace_data(tensor)
    if is_sharded and _needs_cast(tensor, properties):
        return (
            f"a sharded parameter (FSDP, DTensor) in {tensor.dtype}. Models sharded by "
            "torch.distributed.fsdp.fully_shard work at every level."
        )
    if properties.cast_model_type not in HALF_DTYPES:
        return None
    if is_lazy(tensor):
        return (
            "which has no shape yet (a lazy module), so it has no values to round. Run one forward "
            "of the model, model(example), before initialize."
        )
    if hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):
        return f"a {type(tensor).__name__}, which wraps other tensors."
    if is_localized_by_ddp(tensor) and properties.uses_half_copies:
        return (
            "a shard of a DTensor. DistributedDataParallel(device_mesh=...) makes a DTensor of it "
            "in each forward, and would not use its half copy."
        )
    return None


def check_overrides_exist(plan: Plan, models: list[nn.Module]) -> None:
    """Raise `ValueError` for an override that matches no submodule.

    Raises `TypeError` for a function that cannot have the precision.  Overrides of the environment
    apply to every `initialize` of the script, and each gets only some of the modules: an override
    that matches in none of them raises at the first optimizer step.
    """
    overrides, properties = plan.overrides, plan.properties
    for key, precision in overrides.modules:
        if any(overridden_submodules(model, [(key, precision)]) for model in models):
            _matched_override_keys.add(key)
            continue
        shown = key if isinstance(key, str) else key.__name__
        names = [name for model in models for name, _ in model.named_modules() if name]
        expected = "Expected a path such as those of model.named_modules()."
        expected += did_you_mean(shown, names)
        if "overrides" not in plan.replaced_settings:
            raise ValueError(
                f"ampatch.initialize(overrides={{{shown!r}: {precision!r}}}): no submodule matches "
                f"{shown!r}. {expected}"
            )
        logger.warning(
            "--overrides or AMPATCH_OVERRIDES: no submodule of this initialize matches %r.", key
        )
        _UnmatchedOverride(key, expected)
    allows_half = properties.patch_torch_functions or properties.opt_level == "O0"
    replacements = registry.installation.replacements
    for function, precision in overrides.functions.items():
        name = getattr(function, "__name__", "")
        original = replacements.original_of(function)
        if replacements.replacement_of(original) is None and not places_of([function]):
            why = f"the function is not found in {', '.join(NAMESPACES)}."
        elif (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
            why = "the function works in place: it would write into a cast copy of its argument."
        elif precision == "half" and not allows_half:
            why = 'at this level only "float" is possible for a function.'
        else:
            continue
        raise TypeError(
            f"ampatch.initialize(opt_level={properties.opt_level!r}, overrides={{{function!r}: "
            f"{precision!r}}}): {why} For a submodule name the module: "
            'overrides={"name.of.the.module": "float"} or "half". For functions of your own, '
            "at O1: ampatch.register_float_function or register_half_function."
        )


def check_process_group(group: Any) -> None:
    """Raise `TypeError` unless `group` is None or a process group of `torch.distributed`."""
    group_class = getattr(torch.distributed, "ProcessGroup", None)
    if group is not None and (group_class is None or not isinstance(group, group_class)):
        raise TypeError(
            f"ampatch.initialize(process_group={group!r}): expected None or a process group, such "
            "as torch.distributed.group.WORLD or what torch.distributed.new_group(ranks) returns."
        )


# Optimizers under an opt level


def check_optimizers(
    optimizers: list[Any],
    models: list[nn.Module],
    properties: Properties,
    process_group: Any,
    user_call: str = "ampatch.initialize",
) -> None:
    """Raise an error for optimizers that cannot train these models, or would do so wrongly.

    `ValueError`: an optimizer has none of their parameters, or does not update half parameters.
    `AmpatchError`: it would step with wrong gradients, or on some ranks only.
    """
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if owned and params and owned.isdisjoint(map(id, params)):
            raise ValueError(
                f"{user_call}(optimizers=...): optimizer {index} ({type_name(optimizer)}) "
                "holds none of the model's parameters. Expected an optimizer built from "
                "model.parameters(), after model.to(device) and not from a copy of the model. For "
                "an optimizer of parameters outside of any model (a learned temperature) call "
                "initialize without models: ampatch.initialize([], optimizer)."
            )
        if _ignores_half(optimizer, models, properties):
            raise ValueError(
                f"{user_call}: SGD(fused=True) on the CPU leaves parameters in "
                f"{properties.cast_model_type} (opt level {properties.opt_level}) unchanged. Use "
                'fused=False, or opt_level="O2".'
            )
        if (
            properties.loss_scale == "dynamic"
            and process_group is None
            and any(map(is_localized_by_ddp, params))
        ):  # DDP around tensor parallel has made plain parameters of them, without a mesh
            raise AmpatchError(
                f"{user_call}(optimizers=...): {type(optimizer).__name__} has shards of DTensors, "
                "which DistributedDataParallel(device_mesh=...) turned into plain parameters. An "
                "overflow on one rank would skip the step on that rank alone. Name the ranks "
                "that decide together: ampatch.initialize(model, optimizer, "
                "process_group=torch.distributed.group.WORLD)."
            )
        if (
            properties.loss_scale != 1.0
            and is_zero_redundancy(optimizer)
            and steps_in_backward(optimizer)
        ):
            raise AmpatchError(
                f"{user_call}(opt_level={properties.opt_level!r}): ZeroRedundancyOptimizer("
                "overlap_with_ddp=True) steps inside the backward pass, where gradients are still "
                "scaled. Nothing was changed. Use overlap_with_ddp=False, or loss_scale=1.0 with "
                "dtype=torch.bfloat16."
            )


def _ignores_half(optimizer: Any, models: list[nn.Module], properties: Properties) -> bool:
    """Whether this is fused SGD with half parameters on the CPU, which torch 2.13 leaves alone."""
    return (
        properties.cast_model_type in HALF_DTYPES
        and not properties.master_weights
        and isinstance(optimizer, torch.optim.SGD)
        and any(group.get("fused") for group in optimizer.param_groups)
        and any(parameter.device.type == "cpu" for m in models for parameter in m.parameters())
    )
