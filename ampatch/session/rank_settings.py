"""What the open sessions have for a model that several ranks train, for these to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..config.opt_levels import OF_MODELS, Properties
from ..errors import AmpatchError
from ..interop import rank_agreement
from ..interop.rank_agreement import FirstPass, Scales, Settings
from ..torch_private.ddp import store_of_ranks

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ..scaling.loss_scaler import Scaler
    from .registry import Registry
    from .session import Session

_COMPARED = ("opt_level", "dtype", *OF_MODELS, "cast_model_outputs", "patch_scope")
_EVERYWHERE = "every model"  # what a session without models concerns


class RankSettings:
    """Settings and loss scales of this rank, by parts of a model."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.expected: list[FirstPass] = []  # of models that had been wrapped

    def expect(self, wrappers: list[DistributedDataParallel], session: Session) -> None:
        """A session was given models that had been wrapped: ranks are to agree later."""
        if not wrappers or store_of_ranks() is None:
            return
        for wrapper in wrappers:
            if session.properties.enabled:
                first_pass = FirstPass(self, wrapper)
                session.at_close.append(first_pass.call_off)
                self.expected.append(first_pass)
            else:
                rank_agreement.say_inactive(wrapper)

    def before_pass(self, loss: Tensor) -> None:
        """A loss is about to be scaled.  Raises `AmpatchError` if ranks differ."""
        self.expected = [one for one in self.expected if not one.is_over()]
        for first_pass in self.expected:
            first_pass.before_pass(loss)

    def join_begins(self, model: DistributedDataParallel) -> None:
        """Have other ranks know what this one has: it may have no data."""
        for first_pass in self.expected:
            if first_pass.is_of(model) and (settings := self.settings(model)):
                first_pass.say(settings)

    def shadow(self, model: DistributedDataParallel) -> None:
        """This rank has no data any more, and others go on."""
        for first_pass in self.expected:
            if first_pass.is_of(model):
                first_pass.shadow(model)

    def settings(self, model: nn.Module) -> Settings:
        """What `initialize` was given for the parts of a model; empty: nothing is managed."""
        return {
            part: _settings(session, properties) for part, session, properties in self._parts(model)
        }

    def scales(self, model: nn.Module) -> Scales:
        """The states of the loss scalers, by the same parts."""
        return {
            part: [_state(scaler) for scaler in session.scalers]
            for part, session, _ in self._parts(model)
        }

    def take_scales(self, model: nn.Module, scales: Scales) -> None:
        """Have those of another rank, with the settings that were changed there."""
        for part, session, _ in self._parts(model):
            for scaler, theirs in zip(session.scalers, scales[part], strict=True):
                mine = _state(scaler)
                news = {name: value for name, value in theirs.items() if mine.get(name) != value}
                if news:
                    scaler.load_state_dict({**scaler.state_dict(), **news})

    def broadcast_scales(self, model: nn.Module, send: Callable[[list], None]) -> None:
        """Have `send` make the states of loss scalers equal, of sessions with parts of `model`."""
        for session in self._sessions_of(model):
            states = [scaler.state_dict() for scaler in session.scalers]
            send(states)
            for scaler, state in zip(session.scalers, states, strict=True):
                scaler.load_state_dict(state)

    def refuse_uneven(self, model: nn.Module) -> None:
        """Raise `AmpatchError` for a model whose ranks share a flag, which `join` cannot shadow."""
        if any(session.process_group is not None for session in self._sessions_of(model)):
            raise AmpatchError(
                f"{type(model).__name__}.join(): "
                "ampatch.initialize(process_group=...) has the ranks share a flag in each block, "
                "for which a rank without data would not be there. Leave process_group out: "
                "DistributedDataParallel shows each rank the overflows of the others."
            )

    def _sessions_of(self, model: nn.Module) -> list[Session]:
        return list({id(session): session for _, session, _ in self._parts(model)}.values())

    def _parts(self, model: nn.Module) -> Iterator[tuple[str, Session, Properties]]:
        """Names in `model` of what it shares with managed models: their whole, or a part of one."""
        names = {
            id(module): name
            for name, module in model.named_modules()
            if next(module.parameters(), None) is not None
        }
        for number, session in enumerate(self._registry.sessions):
            if not session.properties.enabled:
                continue
            if not session.model_rows:
                yield f"{_EVERYWHERE} ({number})", session, session.properties
            for managed in session.models:
                shared = [names[key] for key in map(id, managed.model.modules()) if key in names]
                if shared:
                    yield shared[0], session, managed.properties


def _settings(session: Session, properties: Properties) -> dict[str, str]:
    """Level, half type, what was given beside them; overrides; how many scalers, and their rules.

    Overrides decide in which types calls compute, and weights are sent.  Scales that move are no
    settings.
    """
    shown = {name: getattr(properties, name) for name in _COMPARED}
    if properties.opt_level == "O0":
        del shown["dtype"]
    given = [*session.rules.modules, *session.rules.functions.items()]
    named = [f"{getattr(key, '__name__', key)}: {precision}" for key, precision in given]
    of_session = session.properties
    scales = ["dynamic" if one.is_dynamic else of_session.loss_scale for one in session.scalers]
    shown |= {"overrides": f"{{{', '.join(named)}}}", "loss_scale": ", ".join(map(str, scales))}
    if "dynamic" in scales:
        shown |= dataclasses.asdict(of_session.scale_settings)
    return {name: str(value) for name, value in shown.items()}


def _state(scaler: Scaler) -> dict[str, Any]:
    rules = {} if scaler.settings is None else dataclasses.asdict(scaler.settings)
    return {**rules, **scaler.state_dict()}
