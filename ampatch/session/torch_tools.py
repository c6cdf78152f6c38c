"""Which of torch's own tools are replaced, by what, and which open sessions need that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..casting import autocast_kernels, context_propagation, weight_cache
from ..casting.calls import CastState
from ..casting.handlers import FunctionModes
from ..casting.patches import PatchSet, Replacement
from ..casting.places import give_back, rebind
from ..interop import (
    backward_passes,
    clip_grad,
    data_loading,
    ddp,
    module_dtype,
    tensor_methods,
    torchscript,
)
from ..models import own_frame
from ..scaling.optimizers.all_steps import NotifyOfSteps
from ..scaling.scaled_backward import pass_begins
from ..torch_private import dynamo_inputs
from . import ranks
from .torch_events import TorchEvents


class Needs(NamedTuple):
    """What the open sessions have, as far as it decides which tools are replaced."""

    sessions: bool
    active: bool  # a session that is not disabled
    models: bool
    optimizers: bool
    half_models: bool
    tables: bool  # torch's functions are patched


class Tool(NamedTuple):
    """Functions of torch that are replaced together, while `is_needed` is true.

    `is_over_tables`: some of them can be patched by the tables too.  They are replaced after the
    tables are in and given back before these go.
    """

    name: str
    is_needed: Callable[[Needs], bool]
    replacements: Callable[[], list[Replacement]]
    is_over_tables: bool = False


class Watch(NamedTuple):
    """A hook of torch's that `keep(needed)` registers while `is_needed` is true, and removes."""

    name: str
    is_needed: Callable[[Needs], bool]
    keep: Callable[[bool], None]


def tools(state: CastState, events: TorchEvents) -> list[Tool]:
    """Every tool of torch that is replaced outside the tables."""
    return [
        Tool(
            "clipping and zero_grad: gradients are complete, an overflow is forgotten",
            lambda needs: needs.optimizers,
            lambda: clip_grad.replacements(events.ready_gradients, events.forget_overflow),
            is_over_tables=True,
        ),
        Tool(
            "DistributedDataParallel: ranks compare settings and scales",
            lambda needs: needs.active,
            lambda: ddp.at_wrapping(
                lambda model, group: ranks.compare(events.sessions_of(model), model, group),
                events.is_lent,
            ),
            is_over_tables=True,
        ),
        Tool(
            "DistributedDataParallel.join: refused under a dynamic loss scale",
            lambda needs: needs.optimizers,
            lambda: ddp.at_join(
                lambda model: ranks.refuse_uneven(events.sessions_of(model), model)
            ),
            is_over_tables=True,
        ),
        Tool(
            "tensor.data: writes that raise no version",
            lambda needs: needs.tables or needs.half_models,
            lambda: tensor_methods.data(events.note_data_access),
        ),
        Tool(
            "torch.jit.script: it compiles the classes' forwards; a warning",
            lambda needs: needs.models or needs.tables,
            lambda: torchscript.replacements(state),
        ),
        Tool(
            "activation checkpoints: the recompute has the forward's casts and half copies",
            lambda needs: needs.tables or needs.half_models,
            lambda: context_propagation.checkpoints(state),
        ),
        Tool(
            "autograd Functions: a backward has the forward's casts and half copies",
            lambda needs: needs.tables or needs.half_models,
            lambda: context_propagation.functions(state),
        ),
        Tool(
            "autograd.grad, backward: weights asked for get nodes of their own, blocks look on",
            lambda needs: needs.tables or needs.half_models or needs.optimizers,
            lambda: backward_passes.replacements(events.note_request, pass_begins),
        ),
        Tool(
            "operators with a kernel for autocast: they run inside torch's own",
            lambda needs: needs.tables or needs.half_models,
            lambda: autocast_kernels.replacements(state),
        ),
        Tool(
            "replicas of DataParallel: they have the casts of the call",
            lambda needs: needs.tables,
            lambda: context_propagation.replicas(state),
        ),
        Tool(
            "DataLoader: data are prepared without casts",
            lambda needs: needs.tables,
            lambda: data_loading.replacements(state),
        ),
        Tool(
            "copies and pickles made within a forward: of the parameters, not of lent copies",
            lambda needs: needs.half_models,
            tensor_methods.copies,
        ),
        Tool(
            "state dicts: of the parameters, not of lent copies",
            lambda needs: needs.half_models,
            tensor_methods.saving,
        ),
        Tool(
            "load_state_dict: running statistics are noted anew",
            lambda needs: needs.models,
            lambda: tensor_methods.loading(events.has_loaded),
        ),
        Tool(
            "copies, pickles and replicas of modules: with frames of their own, or none",
            lambda needs: needs.models,
            own_frame.copies,
        ),
        Tool(
            "torch.compile: half copies of weights go into graphs, without a warning",
            lambda needs: needs.half_models and dynamo_inputs.is_imported(),
            dynamo_inputs.replacements,
        ),
        Tool(
            "module.to(dtype): refused",
            lambda needs: needs.models,
            lambda: module_dtype.replacements(events.model_with, events.is_relied_on),
        ),
    ]


def watches(state: CastState, events: TorchEvents) -> list[Watch]:
    """Every hook of torch's that is registered for the process."""
    return [
        Watch(
            "TorchFunctionModes: calls go the long way inside them",
            lambda needs: needs.sessions,
            FunctionModes(state).watch,
        ),
        Watch(
            "steps of every optimizer: weights are cast anew",
            lambda needs: needs.tables or needs.half_models,
            NotifyOfSteps(weight_cache.forget_all).keep,
        ),
    ]


class _Kept:
    """A tool, and what is replaced of it now."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.patches = PatchSet()
        self.pairs: list[tuple[Any, Any]] = []  # replacement and original

    def is_in(self) -> bool:
        return bool(self.pairs) or len(self.patches) > 0


class TorchTools:
    """Keeps tools replaced and hooks registered for as long as they are needed.

    The modules of the process are searched for names bound early once for all tools that change
    together: a search takes milliseconds, since thousands of modules are imported.
    """

    def __init__(self, tools: Iterable[Tool], watches: Iterable[Watch]) -> None:
        self._kept = [_Kept(tool) for tool in tools]
        self._watches = list(watches)

    def take_out_unneeded(self, needs: Needs) -> None:
        """Give back what is needed no longer."""
        self._give_back(kept for kept in self._kept if not kept.tool.is_needed(needs))

    def take_out_over_tables(self) -> None:
        """Give back what must not lie over patches of the tables that are about to change."""
        self._give_back(kept for kept in self._kept if kept.tool.is_over_tables)

    def put_in(self, needs: Needs) -> None:
        """Replace what is needed and not replaced yet; to be called when the tables are in."""
        new = [kept for kept in self._kept if kept.tool.is_needed(needs) and not kept.is_in()]
        for kept in new:
            for owner, name, make in kept.tool.replacements():
                original = kept.patches.replace(owner, name, make)
                kept.pairs.append((vars(owner)[name], original))
        rebind({id(original): (kept.patches, put) for kept in new for put, original in kept.pairs})
        for watch in self._watches:
            watch.keep(watch.is_needed(needs))

    def _give_back(self, leaving: Iterable[_Kept]) -> None:
        leaving = [kept for kept in leaving if kept.is_in()]
        for kept in reversed(leaving):
            kept.patches.undo()
        if leaving:
            give_back(pair for kept in leaving for pair in kept.pairs)
        for kept in leaving:
            kept.pairs.clear()
