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
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from ..errors import AmpatchError
from ..models.hooks import Hook
from ..torch_private.ddp import parameters_of_ranks, pass_verification, store_of_ranks

Settings = dict[str, dict[str, str]]
"""By the part of a model that a session manages: names and values of what it was given."""


class Trained(Protocol):
    """What this rank's sessions have for a model."""

    def settings(self, model: nn.Module) -> Settings:
        """What `initialize` was given for the parts of a model; empty: nothing is managed."""

    def scales(self, model: nn.Module) -> dict[str, list[dict[str, Any]]]:
        """The states of the loss scalers, by the same parts."""

    def take_scales(self, model: nn.Module, scales: dict[str, list[dict[str, Any]]]) -> None:
        """Have those of another rank."""


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
    meeting.say(settings, trained.scales(model))
    if pass_verification(group, sent):
        trained.take_scales(model, meeting.conclude())


def say_inactive(wrapper: DistributedDataParallel) -> None:
    """For `agree_at_first_forward` on other ranks: this one does not manage a wrapped model."""
    store = store_of_ranks()
    if store is not None:
        _Meeting(store, wrapper.process_group, "forward", wrapper).say({}, {})


def agree_at_first_forward(
    trained: Trained, wrapper: DistributedDataParallel
) -> Callable[[], None]:
    """`initialize` was given a model that had been wrapped; returns what calls the meeting off.

    The ranks meet in the first forward whose gradients are averaged: in its backward pass they
    wait for each other in any case.
    """

    def before_forward(model: DistributedDataParallel, args: Any) -> None:
        if is_dynamo_compiling() or not (
            model.training and torch.is_grad_enabled() and model.require_backward_grad_sync
        ):
            return
        handle.remove()
        settings, store = trained.settings(model), store_of_ranks()
        if settings and store is not None:
            meeting = _Meeting(store, model.process_group, "forward", model)
            meeting.say(settings, trained.scales(model))
            meeting.wait()
            trained.take_scales(model, meeting.conclude())

    handle = wrapper.register_forward_pre_hook(Hook(before_forward))
    return handle.remove


class _Meeting:
    """One comparison between the ranks of a process group.

    Meetings of a kind are counted in the store: ranks come to them in the same order.
    """

    def __init__(self, store: Any, group: Any, kind: str, model: nn.Module) -> None:
        distributed = torch.distributed
        self._store = store
        self._ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        self._me = distributed.get_rank()
        self._model = model
        name = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]
        self._place = f"ampatch/{kind}/{name}"
        number = store.add(f"{self._place}/{self._me}", 1)
        self._place += f"/{number}"
        self._mine: dict[str, Any] = {}

    def say(self, settings: Settings, scales: dict[str, list[dict[str, Any]]]) -> None:
        """What this rank has."""
        self._mine = {"settings": settings, "scales": scales}
        self._store.set(self._key(self._me), json.dumps(self._mine))

    def wait(self) -> None:
        """Until every rank that this one hears of has written, or the store's patience ends."""
        first = self._ranks[0]
        others = self._ranks[1:] if self._me == first else [first]
        try:
            self._store.wait([self._key(rank) for rank in others])
        except RuntimeError as error:
            missing = [rank for rank in others if not self._store.check([self._key(rank)])]
            raise AmpatchError(
                f"{self._call()}: rank {self._me} is in the first forward that ranks train "
                f"together. Ranks without ampatch, or not there in time: {missing}. Expected "
                "ampatch.initialize on every rank."
            ) from error

    def conclude(self) -> dict[str, list[dict[str, Any]]]:
        """The loss scales of the first rank.  Raises `AmpatchError` where settings differ."""
        first = self._ranks[0]
        if self._me == first:
            verdict = self._compare()
            self._store.set(self._key("verdict"), json.dumps(verdict))
        else:
            theirs = self._said(first)
            verdict = self._difference(first, theirs["settings"], self._me, self._mine["settings"])
            if theirs["settings"]:
                verdict = json.loads(self._store.get(self._key("verdict")))
        if verdict is not None:
            raise AmpatchError(f"{self._call()}: {verdict}")
        return self._said(first)["scales"]

    def _compare(self) -> str | None:
        for rank in self._ranks[1:]:
            theirs = self._said(rank)["settings"]
            found = self._difference(self._me, self._mine["settings"], rank, theirs)
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

    def _said(self, rank: int) -> dict[str, Any]:
        if not self._store.check([self._key(rank)]):
            return {"settings": {}, "scales": {}}
        return json.loads(self._store.get(self._key(rank)))

    def _key(self, part: Any) -> str:
        return f"{self._place}/{part}"

    def _call(self) -> str:
        inner = getattr(self._model, "module", self._model)
        return f"DistributedDataParallel({type(inner).__name__})"


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
