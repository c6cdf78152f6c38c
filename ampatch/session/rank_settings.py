"""What the open sessions have for a model that several ranks train, for these to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..config.opt_levels import Properties
from ..errors import AmpatchError
from ..interop import rank_agreement
from ..interop.rank_agreement import FirstPass, Scales, Settings

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from ..scaling.loss_scaler import Scaler
    from .registry import Registry
    from .session import Session

_OF_A_MODEL = (
    "opt_level",
    "dtype",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "cast_model_outputs",
    "patch_scope",
)
_EVERYWHERE = "every model"  # what a session without models concerns


class RankSettings:
    """Settings and loss scales of this rank, by parts of a model."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.expected: list[FirstPass] = []  # of models that had been wrapped

    def agree(self, model: nn.Module, group: Any) -> None:
        """The ranks of a process group wrap a model.  Raises `AmpatchError` if they differ."""
        rank_agreement.agree_at_wrapping(self, model, group)

    def expect(self, wrappers: list[DistributedDataParallel], session: Session) -> None:
        """A session was given models that had been wrapped: ranks are to agree later."""
        if not (wrappers and rank_agreement.can_meet()):
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

    def settings(self, model: nn.Module) -> Settings:
        """What `initialize` was given for the parts of a model; empty: nothing is managed."""
        return {
            part: _of_model(properties) | _of_overrides(session) | _of_scalers(session)
            for part, session, properties in self._parts(model)
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


def _of_model(properties: Properties) -> dict[str, str]:
    """Level and half type, and what was given beside them."""
    shown = {name: str(getattr(properties, name)) for name in _OF_A_MODEL}
    if properties.opt_level == "O0":
        del shown["dtype"]
    return shown


def _of_overrides(session: Session) -> dict[str, str]:
    """They decide in which types calls compute, and weights are sent."""
    modules, functions = session.rules
    given = [*modules, *functions.items()]
    shown = [f"{getattr(key, '__name__', key)}: {precision}" for key, precision in given]
    return {"overrides": f"{{{', '.join(shown)}}}"}


def _of_scalers(session: Session) -> dict[str, str]:
    """How many, and the rules of dynamic ones; values that move are no settings."""
    properties = session.properties
    scales = ["dynamic" if one.is_dynamic else properties.loss_scale for one in session.scalers]
    shown = {"loss_scale": ", ".join(map(str, scales))}
    if "dynamic" in scales:
        settings = dataclasses.asdict(properties.scale_settings)
        shown |= {name: str(value) for name, value in settings.items()}
    return shown


def _state(scaler: Scaler) -> dict[str, Any]:
    rules = {} if scaler.settings is None else dataclasses.asdict(scaler.settings)
    return {**rules, **scaler.state_dict()}
