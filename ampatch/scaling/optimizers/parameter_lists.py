"""Parameters that an optimizer keeps beside its `param_groups`, and optimizers inside it.

Cached lists (`self.params = list(...)`) and inner optimizers with groups of their own get masters
in the place of half weights as `param_groups` do, or the optimizer would go on updating the half
weights.  What cannot be exchanged in place is refused before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...errors import AmpatchError
from . import zero

_NOT_LISTS = ("param_groups", "state", "defaults")
_DEPTH = 4


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers in the attributes of one, or in lists and dictionaries there; not itself."""
    found: dict[int, Any] = {}
    for value in vars(optimizer).values():
        for one in _items(value):
            if one is not optimizer and _is_optimizer(one) and id(one) not in found:
                found[id(one)] = one
                found.update({id(deeper): deeper for deeper in inner_optimizers(one)})
    found.pop(id(optimizer), None)
    return list(found.values())


def check(optimizer: Any, halves: set[int]) -> None:
    """Raise `AmpatchError` if weights among `halves` (ids) are kept where none can be exchanged."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if held.isdisjoint(halves):
        return
    where = None
    if zero.takes_masters(optimizer):
        zero.forget_keys(optimizer)
    else:
        where = " of this torch"
    for holder in (optimizer, *inner_optimizers(optimizer)):
        for name, value in _own(holder):
            if where is None and _is_fixed(value, halves):
                where = f".{name}"
    if where is not None:
        raise AmpatchError(
            f"ampatch.initialize(optimizers=...): {type(optimizer).__name__}{where} keeps "
            "parameters in a place of its own, which cannot be given the FP32 master weights of "
            "this opt level; it would go on updating the half weights. Nothing was changed. Use "
            'opt_level="O1", where the weights stay FP32, or an optimizer that works on its '
            "param_groups."
        )


def exchange(optimizer: Any, new_of: Mapping[int, Tensor]) -> None:
    """Put `new_of[id(tensor)]` in the place of each such tensor in lists and inner optimizers."""
    if not new_of:
        return
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            _exchange(group["params"], new_of, 1)
    for holder in (optimizer, *inner_optimizers(optimizer)):
        for name, value in _own(holder):
            if isinstance(value, Tensor) and id(value) in new_of:
                vars(holder)[name] = new_of[id(value)]
            else:
                _exchange(value, new_of, _DEPTH)


def _own(holder: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(holder).items()):
        if name not in _NOT_LISTS:
            yield name, value


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _exchange(value: Any, new_of: Mapping[int, Tensor], depth: int) -> None:
    if depth == 0 or not isinstance(value, (list, dict, tuple)):
        return
    places: Any = value  # a tuple has none of the weights: `check` has refused it
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(pairs):
        if isinstance(item, Tensor):
            if id(item) in new_of:
                places[key] = new_of[id(item)]
        else:
            _exchange(item, new_of, depth - 1)


def _is_fixed(value: Any, halves: set[int], depth: int = _DEPTH) -> bool:
    """Whether such a weight is in a tuple, in a set, or a key of a dictionary."""
    if depth == 0 or not isinstance(value, (list, dict, tuple, set, frozenset)):
        return False
    if isinstance(value, dict):
        inside, loose = list(value.values()), list(value)
    else:
        inside = list(value)
        loose = [] if isinstance(value, list) else inside
    return any(id(one) in halves for one in loose) or any(
        _is_fixed(one, halves, depth - 1) for one in inside
    )
