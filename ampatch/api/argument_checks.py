"""Checks of models, optimizers and losses that a script gives; sharded models are refused here.

The checks of `initialize` run before it changes anything.  Single numbers and words are checked
in `config/validation.py`, settings of an opt level in `config/opt_levels.py`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..casting.places import NAMESPACES
from ..config.opt_levels import HALF_TYPES, Properties, slow_float16
from ..config.overrides import Overrides
from ..config.validation import whole_number
from ..errors import AmpatchError, did_you_mean, type_name
from ..log import logger
from ..models.managed_model import ManagedModel
from ..models.module_overrides import matching
from ..models.sharded_weights import sharded_parameters
from ..session.registry import registry
from ..torch_private import zero_redundancy
from ..torch_private.dtensors import can_exchange_data, is_dtensor, is_part_of_dtensor

# The arguments


def as_models(models: Any, call: str = "ampatch.initialize") -> list[nn.Module]:
    """The models as a list.  Raises `TypeError` for anything that is no module."""
    listed = _listed(models)
    for index, model in enumerate(listed):
        if not isinstance(model, nn.Module):
            hint = " The first argument is the model, the second the optimizer."
            raise TypeError(
                f"{call}({_where('models', models, index)}=...): expected a torch.nn.Module, or a "
                f"list or tuple of them, got {type_name(model)}."
                + (hint if hasattr(model, "param_groups") else "")
            )
        if isinstance(model, torch.jit.RecursiveScriptModule):
            raise TypeError(
                f"{call}(models=...): {model.original_name} was compiled by "
                "torch.jit.script, and such modules take no hooks. Expected the model as it "
                "was before, or a module around the compiled one: torch.nn.Sequential(model)."
            )
    if len(set(map(id, listed))) != len(listed):
        raise ValueError(f"{call}(models=[...]): the same object is listed twice. List each once.")
    return listed


def as_optimizers(optimizers: Any, call: str = "ampatch.initialize") -> list[Any]:
    """The optimizers as a list.  Any object with `param_groups` and `step` is one (LARC).

    In the place of one that stands for a managed optimizer there is that optimizer.
    Raises `TypeError` for anything else, `ValueError` for the same object twice.
    """
    listed = _listed(optimizers)
    for index, optimizer in enumerate(listed):
        if not is_optimizer(optimizer):
            raise TypeError(
                f"{call}({_where('optimizers', optimizers, index)}=...): expected a "
                "torch.optim.Optimizer (or an object with param_groups and step), or a list or "
                f"tuple of them, got {type_name(optimizer)}."
            )
        if not hasattr(optimizer, "__dict__"):
            raise TypeError(
                f"{call}(optimizers=...): {type_name(optimizer)} has __slots__, so its "
                "step cannot be replaced. Expected an optimizer with a __dict__: derive a class "
                "from it without __slots__."
            )
    if len(set(map(id, listed))) != len(listed):
        raise ValueError(
            f"{call}(optimizers=[...]): the same object is listed twice. List each once."
        )
    listed = list(map(registry.table.optimizer_behind, listed))
    return list({id(optimizer): optimizer for optimizer in listed}.values())


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _where(argument: str, given: Any, index: int) -> str:
    return f"{argument}[{index}]" if isinstance(given, (list, tuple)) else argument


def is_optimizer(value: Any) -> bool:
    """Whether an object has what `initialize` needs of an optimizer."""
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def one_group(group: Any) -> None:
    """Raise `TypeError` for a `process_group` that is no group of processes."""
    kind = getattr(torch.distributed, "ProcessGroup", ())  # none in a torch without distributed
    if group is not None and not isinstance(group, kind):
        raise TypeError(
            f"ampatch.initialize(process_group={group!r}): expected a group of ranks, such as "
            f"torch.distributed.group.WORLD or mesh.get_group(), got {type_name(group)}."
        )


def one_optimizer(optimizer: Any, call: str) -> None:
    """Raise `TypeError` for an object that is no optimizer."""
    if not is_optimizer(optimizer):
        raise TypeError(
            f"{call}(optimizer=...): expected an object with param_groups and step, "
            f"got {type_name(optimizer)}."
        )


# Models under an opt level


def models_can_change(models: list[nn.Module], properties: Properties) -> None:
    """Raise `AmpatchError` for models that cannot get what the level gives them."""
    call = f"ampatch.initialize(opt_level={properties.opt_level!r})"
    for index, model in enumerate(models):
        for name in _wrapped_parts(model, properties):
            raise AmpatchError(
                f"{call}: models[{index}]{'.' + name if name else ''} is already wrapped in "
                "DistributedDataParallel, which would miss the gradients of parameters that are "
                f"cast to {properties.cast_model_type or torch.float32}. Call initialize first and "
                "wrap the model it returns."
            )
        if not properties.casts_model:
            continue
        for name, why in _unfit_weights(model, properties):
            raise AmpatchError(
                f"{call}: models[{index}], a {type(model).__name__}, has {name!r}, {why} Nothing "
                "was changed. Expected FP32 weights that can be cast, or "
                'opt_level="O1", which leaves them as they are.'
            )


def _wrapped_parts(model: nn.Module, properties: Properties) -> Iterator[str]:
    """Names of parts, or "" for what is around the model, in DDP though their dtype changes.

    New data gives a parameter a new AccumulateGrad node.  DDP's hooks are on the old node, so the
    ranks would silently train different weights.  Weights that are lent do not change.
    """
    managed = registry.table.managed(model)
    is_half = isinstance(managed, ManagedModel) and bool(managed.converted())  # FP32 when it leaves
    if is_half or (_has_others(model, properties) and not properties.lends_weights):
        for name, module in model.named_modules():
            is_wrapper = isinstance(module, DistributedDataParallel)
            if is_wrapper and (is_half or _has_others(module, properties)):
                yield name
        if wrappers_around([model]):
            yield ""


def _is_other(tensor: Tensor, properties: Properties) -> bool:
    is_other = tensor.dtype is not properties.cast_model_type
    return properties.casts_model and is_other and tensor.is_floating_point()


def _has_others(model: nn.Module, properties: Properties) -> bool:
    return any(_is_other(parameter, properties) for parameter in model.parameters())


def wrappers_around(models: list[nn.Module]) -> list[DistributedDataParallel]:
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
    kinds = _with_subclasses(DistributedDataParallel)
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
        _notes_at(leaf)[mark] = None
    found = [_notes_at(leaf).pop(mark, 0) is None for leaf in leaves]
    return any(found)


def _notes_at(leaf: Tensor) -> dict[Any, Any]:
    """What can be noted at the node that adds to its gradient, as long as the node lives."""
    return get_gradient_edge(leaf).node.metadata  # type: ignore[return-value]  # a property


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _unfit_weights(model: nn.Module, properties: Properties) -> Iterator[tuple[str, str]]:
    """Names of weights that can neither be cast in place nor have half copies, and why not."""
    by_policy = sharded_parameters(model)  # FSDP2 casts them by its own policy
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in by_policy:
            why = _unfit(tensor, properties, kinds)
            if why is not None:
                yield name, why


def _unfit(tensor: Tensor, properties: Properties, kinds: set[str]) -> str | None:
    """Why a weight, in a model of modules of these kinds, can have no other dtype, if it cannot.

    FullyShardedDataParallel has views of its own of the data, and would go on gathering the old
    data.  The DTensors of tensor parallel hold their data themselves.
    """
    is_sharded = isinstance(tensor, nn.Parameter) and "FullyShardedDataParallel" in kinds
    if is_dtensor(tensor):
        is_sharded |= "FSDPModule" in kinds or not can_exchange_data(tensor)
    if is_sharded and _is_other(tensor, properties):
        return (
            f"a sharded parameter (FSDP, DTensor) in {tensor.dtype}. Models sharded by "
            "torch.distributed.fsdp.fully_shard work at every level."
        )
    if properties.cast_model_type not in HALF_TYPES:
        return None
    if is_lazy(tensor):
        return (
            "which has no shape yet (a lazy module), so it has no values to round. Run one forward "
            "of the model, model(example), before initialize."
        )
    if hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):
        return f"a {type(tensor).__name__}, which wraps other tensors."
    if properties.lends_weights and is_part_of_dtensor(tensor):
        return (
            "a part of a DTensor. DistributedDataParallel(device_mesh=...) makes a DTensor of it "
            "in each forward, and would not know its half copy."
        )
    return None


def overridden_exist(rules: Overrides, models: list[nn.Module], from_outside: bool = False) -> None:
    """Raise `ValueError` for `overrides` that name no submodule, or no function of torch's.

    `from_outside`: they hold for all calls of the script, and each call has some of the modules; a
    warning says which of them this one has not.
    """
    for key, precision in rules.modules:
        if not any(matching(model, [(key, precision)]) for model in models):
            if from_outside:
                logger.warning(
                    "overrides from outside: no submodule of this initialize matches %r.", key
                )
                continue
            shown = key if isinstance(key, str) else key.__name__
            names = [name for model in models for name, _ in model.named_modules() if name]
            raise ValueError(
                f"ampatch.initialize(overrides={{{shown!r}: {precision!r}}}): no "
                f"submodule matches {shown!r}. Expected a path such as those of "
                "model.named_modules()." + did_you_mean(shown, names)
            )
    installation = registry.installation
    for function, precision in rules.functions.items():
        if not installation.can_patch(installation.replacements.original(function)):
            raise ValueError(
                f"ampatch.initialize(overrides={{{function!r}: {precision!r}}}): this function is "
                f"not found in {', '.join(NAMESPACES)}. For functions of your own use "
                "ampatch.register_float_function or register_half_function."
            )


def slow_half_note(models: list[nn.Module], properties: Properties) -> str | None:
    """The warning about float16 on a CPU, or None."""
    if properties.dtype is not torch.float16 or properties.opt_level == "O0":
        return None
    for model in models:
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            return slow_float16()
    return None


# Optimizers under an opt level


def optimizers_can_train(
    optimizers: list[Any],
    models: list[nn.Module],
    properties: Properties,
    process_group: Any,
    call: str = "ampatch.initialize",
) -> None:
    """Raise an error for optimizers that could not train these models, or would do so wrongly.

    `ValueError` if it has none of their parameters or leaves half ones as they are, else
    `AmpatchError`.
    """
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for index, optimizer in enumerate(optimizers):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if owned and params and owned.isdisjoint(map(id, params)):
            raise ValueError(
                f"{call}(optimizers=...): optimizer {index} ({type_name(optimizer)}) "
                "holds none of the model's parameters. Expected an optimizer built from "
                "model.parameters(), after model.to(device) and not from a copy of the model. An "
                "optimizer of parameters outside of any model (a learned temperature) gets a "
                "session of its own: ampatch.initialize([], optimizer)."
            )
        if _leaves_half(optimizer, models, properties):
            raise ValueError(
                f"{call}: in this torch ({torch.__version__}) SGD(fused=True) on the CPU leaves "
                f"parameters in {properties.cast_model_type} (opt level {properties.opt_level}) "
                'unchanged. Use fused=False, or opt_level="O2".'
            )
        if (
            properties.loss_scale == "dynamic"
            and process_group is None
            and any(map(is_part_of_dtensor, params))
        ):  # around tensor parallel: plain parameters to DDP, which do not know their mesh
            raise AmpatchError(
                f"{call}(optimizers=...): {type(optimizer).__name__} has parts of DTensors, which "
                "DistributedDataParallel(device_mesh=...) has made plain parameters. An overflow "
                "in one rank's part would skip the step on that rank alone. Expected the ranks "
                "that decide together: ampatch.initialize(model, optimizer, "
                "process_group=torch.distributed.group.WORLD)."
            )
        if (
            properties.loss_scale != 1.0
            and zero_redundancy.is_zero(optimizer)
            and zero_redundancy.steps_in_backward(optimizer)
        ):
            raise AmpatchError(
                f"{call}(opt_level={properties.opt_level!r}): ZeroRedundancyOptimizer("
                "overlap_with_ddp=True) steps inside the backward pass, where gradients are still "
                "scaled. Nothing was changed. Use overlap_with_ddp=False, or loss_scale=1.0 with "
                "dtype=torch.bfloat16."
            )


def _leaves_half(optimizer: Any, models: list[nn.Module], properties: Properties) -> bool:
    """Whether a fused optimizer leaves half parameters as they are, without an error.

    Fused SGD on the CPU does, in torch 2.13.
    """
    dtype = properties.cast_model_type
    return (
        dtype in HALF_TYPES
        and not properties.master_weights
        and isinstance(optimizer, torch.optim.SGD)
        and any(group.get("fused") for group in optimizer.param_groups)
        and any(parameter.device.type == "cpu" for m in models for parameter in m.parameters())
        and not _fused_sgd_moves(dtype)
    )


@functools.cache
def _fused_sgd_moves(dtype: torch.dtype) -> bool:
    parameter = nn.Parameter(torch.ones(256, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter < 1).all())


# Losses


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
            "numbered from 0."
            + (f" Call initialize(..., num_losses={loss_id + 1})." if loss_id >= 0 else "")
        )
