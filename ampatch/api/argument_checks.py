"""Checks of models, optimizers and losses that a script gives; sharded models are refused here.

The checks of `initialize` run before it changes anything.  Single numbers and words are checked
in `config/validation.py`, settings of an opt level in `config/opt_levels.py`.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from ..casting.install import Installation
from ..casting.places import NAMESPACES
from ..config.opt_levels import HALF_TYPES, Properties
from ..config.overrides import ModuleKey
from ..config.validation import whole_number
from ..errors import AmpatchError, did_you_mean, type_name
from ..models.module_overrides import matching
from ..models.sharded_weights import sharded_parameters
from ..torch_private import zero_redundancy
from ..torch_private.dtensors import can_exchange_data, is_dtensor, is_part_of_dtensor


def unknown_keywords(function: Callable, unknown: dict[str, Any]) -> None:
    """Raise `TypeError` for keywords `function` does not have."""
    for name in unknown:
        known = [
            key
            for key, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        raise TypeError(
            f"ampatch.initialize() got an unknown keyword argument {name!r}."
            + (did_you_mean(name, known) or f" Known are: {', '.join(known)}.")
        )


def as_models(models: Any, call: str = "ampatch.initialize") -> list[nn.Module]:
    """The models as a list.  Raises `TypeError` for anything that is no module."""
    listed = list(models) if isinstance(models, (list, tuple)) else [models]
    for index, model in enumerate(listed):
        if not isinstance(model, nn.Module):
            where = f"models[{index}]" if isinstance(models, (list, tuple)) else "models"
            hint = (
                " The first argument is the model, the second the optimizer."
                if hasattr(model, "param_groups")
                else ""
            )
            raise TypeError(
                f"{call}({where}=...): expected a torch.nn.Module, or a "
                f"list or tuple of them, got {type_name(model)}.{hint}"
            )
        if isinstance(model, torch.jit.RecursiveScriptModule):
            raise TypeError(
                f"{call}(models=...): {model.original_name} was compiled by "
                "torch.jit.script, and such modules take no hooks. Expected the model as it "
                "was before, or a module around the compiled one: torch.nn.Sequential(model)."
            )
    _no_repeats("models", listed)
    return listed


def as_optimizers(optimizers: Any, call: str = "ampatch.initialize") -> list[Any]:
    """The optimizers as a list.  Any object with `param_groups` and `step` is one (LARC).

    Raises `TypeError` for anything else.
    """
    if optimizers is None:
        return []
    listed = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for index, optimizer in enumerate(listed):
        if not is_optimizer(optimizer):
            where = (
                f"optimizers[{index}]" if isinstance(optimizers, (list, tuple)) else "optimizers"
            )
            raise TypeError(
                f"{call}({where}=...): expected a torch.optim.Optimizer "
                f"(or an object with param_groups and step), or a list or tuple of "
                f"them, got {type_name(optimizer)}."
            )
        if not hasattr(optimizer, "__dict__"):
            raise TypeError(
                f"{call}(optimizers=...): {type_name(optimizer)} has __slots__, so its "
                "step cannot be replaced. Expected an optimizer with a __dict__: derive a class "
                "from it without __slots__."
            )
    return list({id(optimizer): optimizer for optimizer in listed}.values())


def is_optimizer(value: Any) -> bool:
    """Whether an object has what `initialize` needs of an optimizer."""
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def one_optimizer(optimizer: Any, call: str) -> None:
    """Raise `TypeError` for an object that is no optimizer."""
    if not is_optimizer(optimizer):
        raise TypeError(
            f"{call}(optimizer=...): expected an object with param_groups and step, "
            f"got {type_name(optimizer)}."
        )


def _no_repeats(argument: str, listed: list[Any]) -> None:
    if len({id(item) for item in listed}) != len(listed):
        raise ValueError(
            f"ampatch.initialize({argument}=[...]): the same object is listed twice. "
            "List each once."
        )


def optimizers_own_parameters(
    models: list[nn.Module],
    optimizers: list[Any],
    call: str = "ampatch.initialize",
) -> None:
    """Raise `ValueError` for an optimizer none of whose parameters is in the models."""
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    if not owned:
        return
    for index, optimizer in enumerate(optimizers):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if params and owned.isdisjoint(map(id, params)):
            raise ValueError(
                f"{call}(optimizers=...): optimizer {index} ({type_name(optimizer)}) "
                "holds none of the model's parameters. Expected an optimizer built from "
                "model.parameters(), after model.to(device) and not from a copy of the model. An "
                "optimizer of parameters outside of any model (a learned temperature) gets a "
                "session of its own: ampatch.initialize([], optimizer)."
            )


def not_wrapped_before(models: list[nn.Module], properties: Properties) -> None:
    """Raise `AmpatchError` for DDP around parameters that are about to change dtype.

    New data gives a parameter a new AccumulateGrad node.  DDP's hooks are on the old
    node, so the ranks would silently train different weights.  Weights that are lent do not change.
    """
    if not properties.casts_model or properties.lends_weights:
        return
    target = properties.cast_model_type
    for index, model in enumerate(models):
        outside = [("", outer) for outer in wrappers_around([model])]
        for name, module in (*model.named_modules(), *outside):
            if isinstance(module, nn.parallel.DistributedDataParallel) and any(
                parameter.dtype is not target and parameter.is_floating_point()
                for parameter in module.parameters()
            ):
                raise AmpatchError(
                    f"ampatch.initialize(opt_level={properties.opt_level!r}): models[{index}]"
                    f"{'.' + name if name else ''} is already wrapped in DistributedDataParallel, "
                    f"which would miss the gradients of parameters cast to {target}. "
                    "Call initialize first and wrap the model it returns."
                )


def wrapped_model_keeps_dtypes(
    model: nn.Module, is_converted: bool, properties: Properties
) -> None:
    """Raise `AmpatchError` for DDP around a model whose parameters are about to change dtype."""
    target = properties.cast_model_type
    changes = properties.casts_model and not properties.lends_weights
    changes &= any(p.is_floating_point() and p.dtype is not target for p in model.parameters())
    if (is_converted or changes) and wrappers_around([model]):
        raise AmpatchError(
            f"ampatch.set_opt_level({type(model).__name__}, {properties.opt_level!r}): the model "
            "is wrapped in DistributedDataParallel, which would miss the gradients of parameters "
            "that change their dtype. Nothing was changed. Levels among O0, O1 and O2 change none; "
            "for another one call ampatch.initialize on the bare model and wrap it anew."
        )


def wrappers_around(models: list[nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    """The DistributedDataParallel that models, or parts of them, were put into earlier.

    A model holds no reference to it, so all living objects are searched, where something holds
    the nodes that add to the parameters' gradients: it does.
    """
    distributed = torch.distributed
    if not (models and distributed.is_available() and distributed.is_initialized()):
        return []
    if not _are_accumulators_held(models):
        return []
    gc.collect()  # garbage is no reason to refuse
    inside = {id(module) for model in models for module in model.modules()}
    kinds = _with_subclasses(nn.parallel.DistributedDataParallel)
    return [
        outer
        for outer in gc.get_objects()
        if type(outer) in kinds and any(id(module) in inside for module in outer.modules())
    ]


def _are_accumulators_held(models: list[nn.Module]) -> bool:
    """Whether any accumulator of gradients outlives its last use here: a mark on it is found."""
    mark = object()
    leaves = [
        p
        for model in models
        for p in model.parameters()
        if p.requires_grad and p.is_leaf and p.layout is torch.strided and not is_lazy(p)
    ]
    for leaf in leaves:
        get_gradient_edge(leaf).node.metadata[mark] = None
    found = [get_gradient_edge(leaf).node.metadata.pop(mark, 0) is None for leaf in leaves]
    return any(found)


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def not_sharded(
    models: list[nn.Module], properties: Properties, managed: Callable[[nn.Module], Any]
) -> None:
    """Raise `AmpatchError` for sharded parameters that would change dtype, or be lent.

    Those of `fully_shard` change by its policy, and the DTensors of tensor parallel hold their data
    themselves.  FullyShardedDataParallel keeps its own views of their data, and would go on
    gathering the old data.  `managed(model)` is the managed
    counterpart of a model in an earlier session, which gives back what it has changed, or None.
    """
    call = f"ampatch.initialize(opt_level={properties.opt_level!r})"
    for index, model in enumerate(models):
        by_wrapper = any(_is_fsdp(module) for module in model.modules())
        by_policy = sharded_parameters(model) if properties.casts_model else set()
        earlier = managed(model)
        if earlier is not None:
            by_policy |= earlier.sharded.converted()
        by_fully_shard = any(_is_fsdp(module, "FSDPModule") for module in model.modules())
        for name, parameter in model.named_parameters():
            if id(parameter) in by_policy:
                continue
            sharded = by_wrapper or (
                is_dtensor(parameter) and (by_fully_shard or not can_exchange_data(parameter))
            )
            if sharded and _would_change(parameter, properties):
                raise AmpatchError(
                    f"{call}: models[{index}] has the sharded parameter {name!r} (FSDP, DTensor) "
                    f"in {parameter.dtype}, which can neither be cast nor have a half copy. "
                    'Expected FP32 parameters and opt_level="O1", or a model sharded by '
                    "torch.distributed.fsdp.fully_shard, which works at O2 and O3 too."
                )


def parts_share_overflow(
    optimizers: list[Any], properties: Properties, process_group: Any, call: str
) -> None:
    """Raise `AmpatchError` for parts of DTensors whose ranks would not learn of an overflow.

    Around tensor parallel DDP trains each rank's part of a DTensor as a plain parameter, which
    does not know its mesh.
    """
    if properties.loss_scale != "dynamic" or process_group is not None:
        return
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(map(is_part_of_dtensor, params)):
            raise AmpatchError(
                f"{call}(optimizers=...): {type(optimizer).__name__} has parts of DTensors, which "
                "DistributedDataParallel(device_mesh=...) has made plain parameters. An overflow "
                "in one rank's part would skip the step on that rank alone. Expected the ranks "
                "that decide together: ampatch.initialize(model, optimizer, "
                "process_group=torch.distributed.group.WORLD)."
            )


def parts_are_not_lent(models: list[nn.Module], properties: Properties) -> None:
    """Raise `AmpatchError` for parts of DTensors at a level that lends half copies.

    DistributedDataParallel makes DTensors of them in each forward, and knows them by an attribute.
    """
    if not properties.lends_weights:
        return
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if is_part_of_dtensor(parameter):
                raise AmpatchError(
                    f"ampatch.initialize(opt_level={properties.opt_level!r}): models[{index}] has "
                    f"{name!r}, a part of a DTensor, which DistributedDataParallel(device_mesh=...)"
                    " has put there. It would not know the half copies that forwards have at this "
                    'level. Nothing was changed. Expected opt_level="O1".'
                )


def _is_fsdp(module: nn.Module, name: str = "FullyShardedDataParallel") -> bool:
    """FSDP's first version, or another class; importing it for this question would be slow."""
    return any(base.__name__ == name for base in type(module).__mro__)


def _would_change(parameter: nn.Parameter, properties: Properties) -> bool:
    is_other = parameter.dtype is not properties.cast_model_type
    return parameter.is_floating_point() and properties.casts_model and is_other


def weights_convert(models: list[nn.Module], properties: Properties) -> None:
    """Raise `AmpatchError` where a model's weights cannot change their dtype in place."""
    if properties.cast_model_type not in HALF_TYPES:
        return
    for model in models:
        by_policy = sharded_parameters(model)
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if id(parameter) in by_policy:
                continue
            if is_lazy(parameter):
                raise AmpatchError(
                    f"ampatch.initialize(opt_level={properties.opt_level!r}): {name} of "
                    f"{type(model).__name__} has no shape yet (a lazy module), so it has no values "
                    "to keep in FP32 and to round. Nothing was changed. Run one forward of the "
                    'model, model(example), before initialize; or use opt_level="O1".'
                )
            if hasattr(parameter, "__tensor_flatten__") and not is_dtensor(parameter):
                raise AmpatchError(
                    f"ampatch.initialize(opt_level={properties.opt_level!r}): {name} of "
                    f"{type(model).__name__} is a {type(parameter).__name__}, which wraps other "
                    "tensors; its dtype cannot be changed in place. Nothing was changed. Use "
                    'opt_level="O1", which leaves weights as they are.'
                )


def fused_steps_work(
    models: list[nn.Module],
    optimizers: list[Any],
    properties: Properties,
    call: str = "ampatch.initialize",
) -> None:
    """Raise `ValueError` for a fused optimizer that would leave half parameters as they are.

    Fused SGD on the CPU does, in torch 2.13: no error, no update.
    """
    if properties.cast_model_type not in HALF_TYPES or properties.master_weights:
        return
    on_cpu = any(parameter.device.type == "cpu" for m in models for parameter in m.parameters())
    for optimizer in optimizers:
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if (
            on_cpu
            and fused
            and isinstance(optimizer, torch.optim.SGD)
            and not _fused_sgd_moves(properties.cast_model_type)
        ):
            raise ValueError(
                f"{call}: in this torch ({torch.__version__}) SGD(fused=True) on the CPU leaves "
                f"parameters in {properties.cast_model_type} (opt level {properties.opt_level}) "
                'unchanged. Use fused=False, or opt_level="O2".'
            )


def zero_steps_by_itself(
    optimizers: list[Any], properties: Properties, call: str = "ampatch.initialize"
) -> None:
    """Raise `AmpatchError` for a `ZeroRedundancyOptimizer` whose steps nothing can prepare.

    With `overlap_with_ddp` hooks of DDP step inside the backward pass, on scaled gradients.
    """
    if properties.loss_scale == 1.0:
        return
    for optimizer in optimizers:
        if zero_redundancy.is_zero(optimizer) and zero_redundancy.steps_in_backward(optimizer):
            raise AmpatchError(
                f"{call}(opt_level={properties.opt_level!r}): ZeroRedundancyOptimizer("
                "overlap_with_ddp=True) steps inside the backward pass, where gradients are still "
                "scaled. Nothing was changed. Use overlap_with_ddp=False, or loss_scale=1.0 with "
                "dtype=torch.bfloat16."
            )


def overridden_modules_exist(rules: list[tuple[ModuleKey, str]], models: list[nn.Module]) -> None:
    """Raise `ValueError` for a rule of `overrides` that names no submodule of any model."""
    names = [name for model in models for name, _ in model.named_modules() if name]
    for key, precision in rules:
        if not any(matching(model, [(key, precision)]) for model in models):
            shown = key if isinstance(key, str) else key.__name__
            raise ValueError(
                f"ampatch.initialize(overrides={{{shown!r}: {precision!r}}}): no "
                f"submodule matches {shown!r}. Expected a path such as those of "
                f"model.named_modules()." + did_you_mean(str(shown), names)
            )


def overridden_functions_exist(functions: dict[Callable, str], installation: Installation) -> None:
    """Raise `ValueError` for functions in `overrides` that cannot be patched."""
    for function, precision in functions.items():
        if not installation.can_patch(installation.original(function)):
            raise ValueError(
                f"ampatch.initialize(overrides={{{function!r}: {precision!r}}}): this function is "
                f"not found in {', '.join(NAMESPACES)}. For functions of your own use "
                "ampatch.register_float_function or register_half_function."
            )


@functools.cache
def _fused_sgd_moves(dtype: torch.dtype) -> bool:
    parameter = nn.Parameter(torch.ones(256, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter < 1).all())


def floating_loss(loss: Any, call: str) -> None:
    """Raise `TypeError` for a loss that is no floating tensor."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"{call}(loss=...): expected a floating tensor, got {type_name(loss)}."
            " Pass the loss itself, not loss.item()."
        )
    if not loss.is_floating_point():
        raise TypeError(f"{call}(loss=...): expected a floating tensor, got {loss.dtype}.")


def loss_number(loss_id: Any, count: int, call: str) -> None:
    """Raise `TypeError` or `ValueError` for a `loss_id` outside `0 <= loss_id < num_losses`."""
    if not 0 <= whole_number(f"{call}(loss_id={loss_id!r})", loss_id) < count:
        raise ValueError(
            f"{call}(loss_id={loss_id}): this session has {count} loss scaler(s), "
            f"numbered from 0. Call initialize(..., num_losses={max(loss_id, 0) + 1})."
        )


def slow_half_note(models: list[nn.Module], properties: Properties) -> str | None:
    """The warning about float16 on a CPU, or None."""
    if properties.dtype is not torch.float16 or properties.opt_level == "O0":
        return None
    for model in models:
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            return (
                "The model is on the CPU, where float16 products are often many times slower "
                "than float32. For speed pass dtype=torch.bfloat16."
            )
    return None
