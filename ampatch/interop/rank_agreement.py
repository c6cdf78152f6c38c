"""Ranks that wrap one model in DistributedDataParallel train it with the same settings and scales.

Their gradients are averaged, so ranks at different levels, half types or loss scales drift apart
without an error.  Each rank writes what it has into the store by which the ranks found each other,
the first rank of the process group compares, and all read its verdict.

A collective of our own would wait for ever for a rank where ampatch is not active.  The store can
say that a rank has written nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn

from ..errors import AmpatchError
from ..torch_private.ddp import parameters_of_ranks, pass_verification, store_of_ranks

Settings = dict[str, dict[str, str]]
"""By the part of a model that a session manages: names and values of settings and scales."""


def agree_at_wrapping(
    settings_of: Callable[[nn.Module], Settings], model: nn.Module, group: Any
) -> None:
    """The ranks of `group` wrap a model, and torch has not sent anything yet.

    Every rank, also one without ampatch, begins with torch's verification of shapes and waits in it
    for all others.  After it each rank that has settings has written them.

    Raises `AmpatchError` where the ranks' settings or loss scales differ.
    """
    settings, sent = settings_of(model), parameters_of_ranks(model)
    store = store_of_ranks()
    is_member = torch.distributed.get_rank(group) >= 0
    if not settings or not sent or store is None or not is_member:
        return
    comparison = _Comparison(store, group, model)
    comparison.write(settings)
    if pass_verification(group, sent) and (found := comparison.verdict(settings)) is not None:
        raise AmpatchError(f"DistributedDataParallel({type(model).__name__}): {found}")


class _Comparison:
    """One comparison between the ranks of a process group.

    Comparisons are counted in the store, for models with parameters of the same names: ranks wrap
    them in the same order.
    """

    def __init__(self, store: Any, group: Any, model: nn.Module) -> None:
        distributed = torch.distributed
        self._store = store
        self._ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        self._me = distributed.get_rank()
        parameters = [name for name, _ in model.named_parameters()]
        name = hashlib.sha256(repr((self._ranks, parameters)).encode()).hexdigest()[:16]
        place = f"ampatch/wrapping/{name}"
        self._place = f"{place}/{store.add(f'{place}/{self._me}', 1)}"

    def write(self, settings: Settings) -> None:
        """What this rank has."""
        self._store.set(self._key(self._me), json.dumps(settings))
        # `TCPStore.set` only sends: without an answer on the same connection a rank that has
        # passed torch's verification, which has a way of its own, could look before it arrives.
        self._store.check([self._key(self._me)])

    def verdict(self, mine: Settings) -> str | None:
        """What differs between two of the ranks; None: nothing."""
        first = self._ranks[0]
        if self._me == first:
            others = ((rank, self._written(rank)) for rank in self._ranks[1:])
            found = (_difference(first, mine, rank, theirs) for rank, theirs in others)
            verdict = next(filter(None, found), None)
            self._store.set(self._key("verdict"), json.dumps(verdict))
            return verdict
        own = _difference(first, self._written(first), self._me, mine)
        if own is not None:  # the first rank, which has the store, may have ended by now
            return own
        return json.loads(self._store.get(self._key("verdict")))

    def _written(self, rank: int) -> Settings:
        key = self._key(rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def _key(self, part: Any) -> str:
        return f"{self._place}/{part}"


def _difference(one: int, first: Settings, other: int, second: Settings) -> str | None:
    if first == second:
        return None
    shown = _shown(first, second)
    return (
        "the ranks average gradients, and do not train with the same settings. "
        f"Rank {one} has {shown[0]}; rank {other} has {shown[1]}. Nothing was averaged. Give "
        "ampatch.initialize the same arguments on every rank, the AMPATCH_... variables the same "
        "values, and load the same ampatch.load_state_dict(...) on every rank."
    )


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
