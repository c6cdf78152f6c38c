"""apex.amp.lists: the dtype to which functions are cast, as lists that scripts edit.

    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")

`amp.initialize` reads the lists.  A function whose name was removed is not cast.  An added one
follows the rule of its list, even if ampatch's tables have another rule.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ampatch import AmpatchError

from ...casting.tables import APEX, BANNED, BLACKLIST, BUILTINS, PROMOTE, WHITELIST, Rule

PREFIX = "apex.amp.lists"

_NAMESPACES = {
    "functional_overrides": "torch.nn.functional",
    "torch_overrides": "torch",
    "tensor_overrides": "torch.Tensor",
}
_TABLES = {  # the namespaces of the op tables, by the public namespace
    "torch.nn.functional": ("torch.nn.functional", BUILTINS["torch.nn.functional"], "torch"),
    "torch": ("torch", BUILTINS["torch"]),
    "torch.Tensor": ("torch.Tensor",),
}
_LISTS = {  # a name in several lists follows the first of these
    "FP16_FUNCS": Rule.HALF,
    "FP32_FUNCS": Rule.FLOAT,
    "CASTS": Rule.PROMOTE,
    "SEQUENCE_CASTS": Rule.PROMOTE,
}
_SEQUENCE_FUNCTIONS = ("cat", "stack", "hstack", "vstack", "dstack")
_RULES = {
    **dict.fromkeys((Rule.HALF, Rule.CONTRACTION, Rule.POWER), Rule.HALF),
    **dict.fromkeys((Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE), Rule.FLOAT),
    Rule.PROMOTE: Rule.PROMOTE,
}
# Functions of torch.nn.functional that call functions of the tables.
_COMPOSITES = {
    "torch.nn.functional": "cross_entropy ctc_loss grid_sample local_response_norm "
    "multilabel_soft_margin_loss normalize softmin"
}


def contents() -> dict[str, Any]:
    """The contents of new modules by name: `MODULE` and the lists."""
    modules: dict[str, Any] = {}
    for title, namespace in _NAMESPACES.items():
        values = {name: list(names) for name, names in _initial_lists(namespace).items()}
        values["MODULE"] = _resolve(namespace)
        modules[f"{PREFIX}.{title}"] = SimpleNamespace(
            **values, __all__=list(values), __doc__=f"The functions of {namespace} and their rules."
        )
    return modules


def edits() -> list[tuple[str, str, Rule | None]]:
    """The script's changes as `(namespace, name, rule)`; a rule of None means no cast.

    Raises `AttributeError` for a name that its module lacks, `AmpatchError` for a new
    entry in `BANNED_FUNCS`.
    """
    changes = []
    for title, namespace in _NAMESPACES.items():
        module = sys.modules.get(f"{PREFIX}.{title}")
        if module is None:
            continue
        initial, edited = _rules(_initial_lists(namespace)), _rules(vars(module))
        for name in sorted(initial.keys() | edited.keys()):
            if initial.get(name) is not edited.get(name):
                _check_edit(title, namespace, name, edited.get(name))
                changes.append((namespace, name, edited.get(name)))
    return changes


def _check_edit(title: str, namespace: str, name: str, rule: Rule | None) -> None:
    if not hasattr(_resolve(namespace), name):
        raise AttributeError(
            f"amp.lists.{title}: {namespace} has no {name!r}. Expected names of its functions."
        )
    if rule is Rule.BANNED:
        raise AmpatchError(
            f"amp.lists.{title}.BANNED_FUNCS: {name!r} was added, and ampatch refuses only what it "
            "knows to be unsafe. Add the name to FP32_FUNCS instead."
        )


def _rules(lists: Any) -> dict[str, Rule]:
    rules = {entry[0]: Rule.BANNED for entry in lists.get("BANNED_FUNCS", ())}
    for name, rule in reversed(_LISTS.items()):
        rules.update(dict.fromkeys(lists.get(name, ()), rule))
    return rules


def _initial_lists(namespace: str) -> dict[str, list]:
    lists: dict[str, list] = {name: [] for name in _LISTS}
    owner = _resolve(namespace)
    for name, rule in _rows(namespace):
        if rule is Rule.PROMOTE:
            target = "SEQUENCE_CASTS" if name in _SEQUENCE_FUNCTIONS else "CASTS"
        else:
            target = "FP16_FUNCS" if rule is Rule.HALF else "FP32_FUNCS"
        if hasattr(owner, name) and not any(name in names for names in lists.values()):
            lists[target].append(name)
    lists["BANNED_FUNCS"] = [
        (name, row.why) for row in BANNED if row.where in _TABLES[namespace] for name in row.names
    ]
    return lists


def _rows(namespace: str) -> Iterator[tuple[str, Rule]]:
    for row in (*APEX, *WHITELIST, *BLACKLIST, *PROMOTE):
        if row.where in _TABLES[namespace] and row.rule in _RULES:
            for name in row.names:
                if not name.startswith("_") or name.startswith("__"):
                    yield name, _RULES[row.rule]
    for name in _COMPOSITES.get(namespace, "").split():
        yield name, Rule.FLOAT


def _resolve(namespace: str) -> Any:
    if namespace == "torch.Tensor":
        return importlib.import_module("torch").Tensor
    return importlib.import_module(namespace)
