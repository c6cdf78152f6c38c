"""Settings and loss scales of a model that several ranks train, for these ranks to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from ..config.opt_levels import OF_MODELS
from ..errors import AmpatchError
from ..interop.rank_agreement import Settings

if TYPE_CHECKING:
    from .registry import Registry
    from .session import Session

_COMPARED = ("opt_level", "dtype", *OF_MODELS, "cast_model_outputs", "patch_scope")
_EVERYWHERE = "every model"  # what a session without models concerns


class RankSettings:
    """Settings and loss scales of this rank, by parts of a model."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def settings(self, model: nn.Module) -> Settings:
        """What the parts of a model are trained with; empty: nothing is managed."""
        return {part: _settings(session) for part, session in self._parts(model)}

    def refuse_uneven(self, model: nn.Module) -> None:
        """Raise `AmpatchError` for a model whose ranks `join` would let drift apart."""
        for _, session in self._parts(model):
            if session.looks_for_overflow() or session.process_group is not None:
                raise AmpatchError(
                    f"{type(model).__name__}.join(): a rank without data takes no part in "
                    "the decision whether a step overflowed, and its loss scale would stay behind. "
                    "Expected a static scale and no process_group: dtype=torch.bfloat16, or "
                    "ampatch.initialize(loss_scale=128.0)."
                )

    def _parts(self, model: nn.Module) -> Iterator[tuple[str, Session]]:
        """By name the parts of `model` that managed models have too, and these models' sessions."""
        names = {
            id(module): name
            for name, module in model.named_modules()
            if next(module.parameters(), None) is not None
        }
        for number, session in enumerate(self._registry.sessions):
            if not session.properties.enabled:
                continue
            if not session.model_rows:
                yield f"{_EVERYWHERE} ({number})", session
            for managed in session.models:
                shared = [names[key] for key in map(id, managed.model.modules()) if key in names]
                if shared:
                    yield shared[0], session


def _settings(session: Session) -> dict[str, str]:
    """Level, half type, what was given beside them; overrides; the scalers' rules and states.

    Overrides decide in which types calls compute, and weights are sent.
    """
    properties = session.properties
    shown = {name: getattr(properties, name) for name in _COMPARED}
    if properties.opt_level == "O0":
        del shown["dtype"]
    given = [*session.rules.modules, *session.rules.functions.items()]
    named = [f"{getattr(key, '__name__', key)}: {precision}" for key, precision in given]
    scales = ["dynamic" if one.is_dynamic else properties.loss_scale for one in session.scalers]
    shown |= {"overrides": f"{{{', '.join(named)}}}", "loss_scale": ", ".join(map(str, scales))}
    if "dynamic" in scales:
        shown |= dataclasses.asdict(properties.scale_settings)
    for number, scaler in enumerate(session.scalers):
        shown[f"state of loss_id {number}"] = scaler.state_dict()
    return {name: str(value) for name, value in shown.items()}
