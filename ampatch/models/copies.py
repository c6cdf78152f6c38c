"""Plain copies of one managed model: FP32, no hooks, usable where ampatch is not installed.

`copy.deepcopy`, `pickle` and `torch.save` give them.  `copy.copy` and DataParallel's
replicas share weights and hooks.  A parameter and its master become one parameter in
a copy, whichever of model and optimizer is copied first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch import Tensor, nn

from .conversion import flatten_rnns
from .hooks import drop_plain_hooks
from .lent_weights import parameter_behind
from .plain_parameters import PlainParameters

_OWN_METHODS = ("__deepcopy__", "__reduce_ex__", "__prepare_scriptable__")


class ModelCopies:
    """Copies one model.

    `float_value(tensor)` gives the FP32 values of one of its tensors, up to date: its master, the
    tensor itself where there is nothing to widen, or a widened copy.  `plain_parameters` gives what
    stands in pickles for parameters that have only a widened copy.
    """

    def __init__(
        self,
        model: nn.Module,
        float_value: Callable[[Tensor], Tensor],
        plain_parameters: PlainParameters,
    ) -> None:
        self._model = model
        self._float_value = float_value
        self._plain_parameters = plain_parameters

    def install(self) -> None:
        """Have the model copied and pickled so."""
        own = vars(self._model)
        own["__deepcopy__"] = self._deepcopy
        own["__reduce_ex__"] = self._reduce
        own["__prepare_scriptable__"] = self._scriptable

    def uninstall(self) -> None:
        """Copies are torch's own again."""
        for name in _OWN_METHODS:
            vars(self._model).pop(name, None)

    def plain_copy(self, memo: dict | None = None) -> nn.Module:
        """A deep copy without hooks and patches, its weights in FP32."""
        memo, widened = {} if memo is None else memo, False
        for tensor, value in self._float_values():
            if value is tensor or id(tensor) in memo:
                continue
            if id(value) not in memo:  # else its optimizer was copied before it
                memo[id(value)] = _like(tensor, value.detach().clone())
                memo.setdefault(id(memo), []).append(value)  # as deepcopy does: ids stay taken
            memo[id(tensor)], widened = memo[id(value)], True
        plain = self._copy(memo)
        if widened:
            flatten_rnns(plain)
        return plain

    def plain_view(self) -> nn.Module:
        """As `plain_copy`, on the same memory where there are FP32 values to share.

        Its parameters are the masters themselves, as they are in the optimizer.
        """
        return self._copy(
            {
                id(tensor): tensor if value is tensor else self._viewed(tensor, value)
                for tensor, value in self._float_values()
            }
        )

    def _viewed(self, tensor: Tensor, value: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return value.detach()
        return value if isinstance(value, nn.Parameter) else self._plain_parameters.of(tensor)

    def _float_values(self) -> Iterator[tuple[Tensor, Tensor]]:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if parameter_behind(tensor) is None:  # else it is copied as what it stands for
                yield tensor, self._float_value(tensor)

    def _copy(self, memo: dict) -> nn.Module:
        own = vars(self._model)
        taken = {name: own.pop(name) for name in _OWN_METHODS if name in own}
        try:
            plain = copy.deepcopy(self._model, memo)
        finally:
            own.update(taken)
        for module in plain.modules():
            drop_plain_hooks(module)
        return plain

    def _deepcopy(self, memo: dict) -> nn.Module:
        return self.plain_copy(memo)

    def _reduce(self, protocol: int) -> Any:
        """Pickle takes a plain copy; `copy.copy`, which asks here too, shares weights and hooks."""
        model = self._model
        reduced: Any = type(model).__reduce_ex__(model, protocol)
        make, args, state, *rest = reduced
        if (rest and any(rest)) or not isinstance(
            state, dict
        ):  # a class that pickles in its own way
            return _kept(self.plain_view()).__reduce_ex__(protocol)
        shared = {name: value for name, value in state.items() if name not in _OWN_METHODS}
        return make, args, SharedState(shared, self._plain_state(protocol))

    def _plain_state(self, protocol: int) -> Callable[[], dict]:
        def state() -> dict:
            plain = _kept(self.plain_view())
            reduced: Any = type(plain).__reduce_ex__(plain, protocol)
            return reduced[2]

        return state

    def _scriptable(self) -> nn.Module:
        """What torch.jit.script compiles, since it compiles no hooks: FP32, weights shared."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        return self.plain_copy({id(t): t for t in tensors if self._float_value(t) is t})


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def _kept(plain: nn.Module) -> nn.Module:
    """`plain`; on its way to a spawned process its tensors live until that has opened them."""
    process = get_spawning_popen()
    if process is not None:
        vars(process).setdefault("_ampatch_sent", []).append(plain)
    return plain


class SharedState(dict):
    """An object's attributes as they are, for `copy.copy`; pickled, what `plain()` gives."""

    def __init__(self, shared: dict, plain: Callable[[], dict]) -> None:
        super().__init__(shared)
        self._plain = plain

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (self._plain(),)
