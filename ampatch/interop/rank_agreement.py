"""Ranks that train one model under DistributedDataParallel train it with the same settings.

Their gradients are averaged, so ranks at different levels, half types or loss scales drift apart
without an error.  Each rank writes what it has into the store by which the ranks found each other,
the first rank of the process group compares, and all read its verdict.  Where they agree they take
over the first rank's loss scales, as DistributedDataParallel has them take over its weights.

A collective of our own would wait for ever for a rank where ampatch is not active.  The store can
say that a rank has written nothing.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from ..errors import AmpatchError
from ..models.hooks import Hook
from ..torch_private.ddp import parameters_of_ranks, pass_verification, store_of_ranks

Settings = dict[str, dict[str, str]]
"""By the part of a model that a session manages: names and values of what it was given."""
Scales = dict[str, list[dict[str, Any]]]
"""The states of its loss scalers, by the same parts."""


class Trained(Protocol):
    """What this rank's sessions have for a model."""

    def settings(self, model: nn.Module) -> Settings:
        """What `initialize` was given for the parts of a model; empty: nothing is managed."""

    def scales(self, model: nn.Module) -> Scales:
        """The states of the loss scalers, by the same parts."""

    def take_scales(self, model: nn.Module, scales: Scales) -> None:
        """Have those of another rank."""

    def broadcast_scales(self, model: nn.Module, send: Callable[[list], None]) -> None:
        """Have `send` make the loss scales of the model's losses equal on all ranks."""

    def refuse_uneven(self, model: nn.Module) -> None:
        """Raise `AmpatchError` if the ranks communicate in a way that `join` does not know."""

    def join_begins(self, model: DistributedDataParallel) -> None:
        """Have other ranks know what this one has: it may have no data."""

    def shadow(self, model: DistributedDataParallel) -> None:
        """This rank has no data any more, and others go on."""


def agree_at_wrapping(trained: Trained, model: nn.Module, group: Any) -> None:
    """The ranks of `group` wrap a model, and torch has not sent anything yet.

    torch's own verification of shapes, which every rank begins with, is the one thing that ranks
    without ampatch wait in too: behind it each rank that will write has written.

    Raises `AmpatchError` where the ranks' settings differ.
    """
    settings, sent = trained.settings(model), parameters_of_ranks(model)
    store = store_of_ranks()
    is_member = torch.distributed.get_rank(group) >= 0
    if not settings or not sent or store is None or not is_member:
        return
    meeting = _Meeting(store, group, "wrapping", model)
    meeting.say(settings)
    if pass_verification(group, sent):
        trained.take_scales(model, meeting.conclude(trained.scales(model)))


def say_inactive(wrapper: DistributedDataParallel) -> None:
    """For `FirstPass` on other ranks: this one does not manage a wrapped model."""
    _Meeting(store_of_ranks(), wrapper.process_group, "pass", wrapper).say({})


class FirstPass:
    """`initialize` was given a model that had been wrapped.

    Each rank says what it has in its first forward whose gradients are to be averaged, and waits
    for nobody: a rank may look at shapes or validate alone.  The ranks meet in the backward pass
    of such a forward, where DistributedDataParallel has them wait for each other in any case:
    before its loss is scaled, or without a `scale_loss` at the first gradient.
    """

    def __init__(self, trained: Trained, wrapper: DistributedDataParallel) -> None:
        self._trained = trained
        self._wrapper = weakref.ref(wrapper)  # a session must not keep its models
        self._meeting = _Meeting(store_of_ranks(), wrapper.process_group, "pass", wrapper)
        self._has_said = self._is_hooked = False
        self._is_averaged = False  # the gradients of the last forward
        # First of all: behind a hook of the managed model half copies are in the weights' places.
        self._handles = [
            wrapper.register_forward_pre_hook(Hook(self._before_forward), prepend=True)
        ]

    def call_off(self) -> None:
        """The ranks have met, or the session closes."""
        while self._handles:
            self._handles.pop().remove()

    def is_over(self) -> bool:
        """Whether nothing is to be done any more."""
        return not self._handles or self._wrapper() is None

    def is_of(self, wrapper: DistributedDataParallel) -> bool:
        """Whether it is that model's, and the ranks have not met."""
        return not self.is_over() and self._wrapper() is wrapper

    def say(self, settings: Settings) -> None:
        """Once, what this rank has: in `join()` at its beginning, a rank may have no data."""
        if not self._has_said:
            self._has_said = True
            self._meeting.say(settings)

    def shadow(self, wrapper: DistributedDataParallel) -> None:
        """This rank has no data in `join()`.  If it is the first, the others need its verdict."""
        if self._meeting.is_led_from_here():
            self._meet(wrapper)

    def before_pass(self, loss: Tensor) -> None:
        """A loss is about to be scaled for its backward pass."""
        wrapper = self._wrapper() if self._is_averaged else None
        if wrapper is not None and _reaches(loss, parameters_of_ranks(wrapper.module)):
            self._meet(wrapper)

    def _before_forward(self, model: DistributedDataParallel, args: Any) -> None:
        if is_dynamo_compiling():
            return
        self._is_averaged = torch.is_grad_enabled() and model.require_backward_grad_sync
        settings = self._trained.settings(model)
        if self._is_hooked or not (self._is_averaged and settings):
            return
        self._is_hooked = True
        self.say(settings)
        hook = Hook(self._before_reduction)
        self._handles += [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in parameters_of_ranks(model.module)
        ]

    def _before_reduction(self, parameter: Tensor) -> None:
        wrapper = self._wrapper()
        if wrapper is not None and self._is_averaged:
            self._meet(wrapper)

    def _meet(self, wrapper: DistributedDataParallel) -> None:
        self.call_off()
        self._meeting.wait()
        scales = self._meeting.conclude(self._trained.scales(wrapper))
        self._trained.take_scales(wrapper, scales)


def _reaches(loss: Tensor, parameters: list[Tensor]) -> bool:
    """Whether the backward pass of a loss has gradients for one of these parameters."""
    wanted = set(map(id, parameters))
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if id(getattr(node, "variable", None)) in wanted:
                return True
            waiting += [following for following, _ in node.next_functions]
    return False


class _Meeting:
    """One comparison between the ranks of a process group.

    Meetings of a kind are counted in the store, for models with parameters of the same names: ranks
    prepare them in the same order.
    """

    def __init__(self, store: Any, group: Any, kind: str, model: nn.Module) -> None:
        distributed = torch.distributed
        self._store = store
        self._ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        self._me = distributed.get_rank()
        self._call = f"DistributedDataParallel({type(getattr(model, 'module', model)).__name__})"
        parameters = [name for name, _ in model.named_parameters()]
        name = hashlib.sha256(repr((self._ranks, parameters)).encode()).hexdigest()[:16]
        self._place = f"ampatch/{kind}/{name}"
        number = store.add(f"{self._place}/{self._me}", 1)
        self._place += f"/{number}"
        self._mine: Settings = {}
        store.set(self._key(f"{self._me} is active"), "")

    def is_led_from_here(self) -> bool:
        """Whether this is the first rank, which compares."""
        return self._me == self._ranks[0]

    def say(self, settings: Settings) -> None:
        """What this rank has."""
        self._mine = settings
        self._store.set(self._key(self._me), json.dumps(settings))
        # `TCPStore.set` only sends: without an answer on the same connection a rank that has
        # passed torch's verification, which has a way of its own, could look before it arrives.
        self._has(self._me)

    def wait(self) -> None:
        """Until every rank that this one hears of has written, or the store's patience ends."""
        first = self._ranks[0]
        others = self._ranks[1:] if self._me == first else [first]
        try:
            self._store.wait([self._key(rank) for rank in others])
        except RuntimeError as error:
            missing = [rank for rank in others if not self._has(rank)]
            active = [rank for rank in missing if self._has(f"{rank} is active")]
            raise AmpatchError(
                f"{self._call}: rank {self._me} has waited in a backward pass, whose gradients "
                f"all ranks average, for ranks {missing}. Of these {active} have not begun such a "
                f"pass; without ampatch.initialize for this model are "
                f"{sorted({*missing} - {*active})}. Expected initialize and the same passes on "
                "every rank."
            ) from error

    def conclude(self, scales: Scales) -> Scales:
        """The loss scales of the first rank; `scales` are those of this one.

        Raises `AmpatchError` where settings differ.
        """
        first = self._ranks[0]
        if self._me == first:
            found = self._compare()
            self._store.set(self._key("verdict"), json.dumps([found, scales]))
        else:
            found = self._difference(first, self._said(first), self._me, self._mine)
            if found is None:  # else the first rank, which has the store, may have ended by now
                found, scales = json.loads(self._store.get(self._key("verdict")))
        if found is not None:
            raise AmpatchError(f"{self._call}: {found}")
        return scales

    def _compare(self) -> str | None:
        for rank in self._ranks[1:]:
            found = self._difference(self._me, self._mine, rank, self._said(rank))
            if found is not None:
                return found
        return None

    def _difference(self, one: int, first: Settings, other: int, second: Settings) -> str | None:
        if first == second:
            return None
        shown = _shown(first, second)
        return (
            "the ranks average gradients, and do not train with the same settings. "
            f"Rank {one} has {shown[0]}; rank {other} has {shown[1]}. Nothing was averaged. Give "
            "ampatch.initialize the same arguments on every rank, and the AMPATCH_... variables "
            "the same values."
        )

    def _said(self, rank: int) -> Settings:
        return json.loads(self._store.get(self._key(rank))) if self._has(rank) else {}

    def _has(self, part: Any) -> bool:
        return self._store.check([self._key(part)])

    def _key(self, part: Any) -> str:
        return f"{self._place}/{part}"


def _shown(first: Settings, second: Settings) -> tuple[str, str]:
    """Two ranks' settings as text, as far as they differ."""
    if not (first and second):
        return _level(first), _level(second)
    if first.keys() != second.keys():
        return f"managed {list(first)}", f"managed {list(second)}"
    texts: tuple[list[str], list[str]] = ([], [])
    for part, settings in first.items():
        differing = [name for name, value in settings.items() if second[part].get(name) != value]
        differing += [name for name in second[part] if name not in settings]
        if "opt_level" in differing:  # most of the others follow from it
            differing = [name for name in ("opt_level", "dtype") if name in differing]
        for text, own in zip(texts, (settings, second[part]), strict=True):
            text += [f"{name}={own.get(name, 'unused')}" for name in differing]
    return ", ".join(texts[0]), ", ".join(texts[1])


def _level(settings: Settings) -> str:
    for own in settings.values():
        return f"opt_level={own['opt_level']}"
    return "no active ampatch (enabled=False, or initialize was not called for this model)"
