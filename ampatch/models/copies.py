"""Plain copies of one managed model: no hooks, usable where ampatch is not installed.

`copy.deepcopy`, `pickle` and `torch.save` give them.  `copy.copy` and DataParallel's
replicas share weights and hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from ..torch_private.modules import REPLICATE
from .hooks import drop_plain_hooks
from .lent_weights import parameter_behind


class ModelCopies:
    """Copies one model, and holds the methods that are put into the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._methods: dict[str, Callable] = {}
        self._covered: dict[str, Any] = {}  # a forward that the script has put into the model

    def install(self, forward: Callable | None = None) -> None:
        """Have the model copied and pickled so; `forward` answers `model.forward(...)`.

        Copies and replicas have the `forward` of their class.
        """
        self._methods = {
            "__deepcopy__": self.plain_copy,
            "__reduce_ex__": self._reduce,
            "__prepare_scriptable__": self.plain_view,
        }
        if forward is not None and hasattr(self._model, REPLICATE):
            self._methods |= {"forward": forward, REPLICATE: self._replica}
        own = vars(self._model)
        self._covered = {name: own[name] for name in self._methods if name in own}
        own.update(self._methods)

    def uninstall(self) -> None:
        """Copies are torch's own again."""
        own = vars(self._model)
        for name, method in self._methods.items():
            if own.get(name) is method:  # else the script has put another one there
                del own[name]
                own.update(self._had(name))
        self._methods, self._covered = {}, {}

    def _replica(self) -> nn.Module:
        replica: Any = getattr(type(self._model), REPLICATE)(self._model)
        own = vars(replica)
        if own.get("forward") is self._methods.get("forward"):
            del own["forward"]
            own.update(self._had("forward"))
        return replica

    def _had(self, *names: str) -> dict[str, Any]:
        return {name: self._covered[name] for name in names if name in self._covered}

    def plain_copy(self, memo: dict | None = None) -> nn.Module:
        """A deep copy without hooks and patches."""
        own = vars(self._model)
        ours = [name for name, method in self._methods.items() if own.get(name) is method]
        taken = {name: own.pop(name) for name in ours}
        own.update(self._had(*taken))
        try:
            plain = copy.deepcopy(self._model, {} if memo is None else memo)
        finally:
            own.update(taken)
        for module in plain.modules():
            drop_plain_hooks(module)
        return plain

    def plain_view(self) -> nn.Module:
        """As `plain_copy`, with the very parameters and buffers; torch.jit.script compiles it."""
        memo = {}
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            parameter = parameter_behind(tensor)  # where a forward that runs has a copy in place
            memo[id(tensor)] = tensor if parameter is None else parameter
        return self.plain_copy(memo)

    def _reduce(self, protocol: int) -> Any:
        """Pickle takes a plain view; `copy.copy`, which asks here too, shares weights and hooks."""
        model = self._model
        reduced: Any = type(model).__reduce_ex__(model, protocol)
        make, args, state, *rest = reduced
        if any(rest) or not isinstance(state, dict):  # a class that pickles in its own way
            return self.plain_view().__reduce_ex__(protocol)
        shared = self._covered | {
            name: value for name, value in state.items() if value is not self._methods.get(name)
        }
        return make, args, _SharedState(shared, self.plain_view)


class _SharedState(dict):
    """A model's attributes as they are, for `copy.copy`; pickled, those of `view()`."""

    def __init__(self, shared: dict, view: Callable[[], nn.Module]) -> None:
        super().__init__(shared)
        self._view = view

    def __reduce_ex__(self, protocol: Any) -> tuple:
        plain = self._view()
        reduced: Any = type(plain).__reduce_ex__(plain, protocol)
        return dict, (reduced[2],)
