"""Private names of torch in ampatch's syntax trees: where they stand, and how to take some away."""

import ast
import collections
import functools
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "ampatch"
HOMES = ("torch_private/", "casting/tables.py", "casting/dynamo_patches.py")

ALLOWED = {
    "_version": "a tensor's version; torch's notes on autograd and its errors speak of it",
    "_values": "of an uncoalesced sparse tensor; documented in torch.sparse",
    "_parameters": "nn.Module's own dictionary, for subclasses and kept in pickles",
    "_buffers": "as _parameters",
    "_growth_tracker": "a key of the state dict of torch.amp.GradScaler, in files",
    "_amp_stash": "apex's, for scripts that reach for it",
    "_optimizers": "accelerate's list of what it has prepared, for classes derived from it",
    "_lazy_init_maybe_master_weights": "apex's, for scripts that reach for it",
}
"""Private names that may stand anywhere, each with the reason."""

_SWITCHES = {
    *("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"),
    *("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
}
"""Without one of these weights are cast one by one, or steps are taken by torch's own `step`, which
hides the loss of the others.
"""

_OF_PYTHON = {"_fields", "_make", "_replace", "_getframe", "_current_frames", "_exit"}
"""Of namedtuples, sys and os; documented."""


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    begins = name.startswith("_") and not name.startswith("__")
    return begins and name != "_" and name not in _OF_PYTHON


def is_home(path: Path) -> bool:
    """Whether private names of torch may stand in this file."""
    return str(path.relative_to(ROOT)).startswith(HOMES)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def private_names(tree: ast.AST, own: frozenset[str], torchs: frozenset[str]) -> Iterator[str]:
    """Each use of a private name that is not ampatch's own.

    `own` are names that ampatch gives to attributes.  One of them counts as torch's only where
    `torchs`, attributes of torch's objects, has it too and it is not asked of `self`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from filter(is_private, (node.module or "").split("."))
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield from filter(is_private, alias.name.split("."))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_ours = node.attr in own and (is_self(node.value) or node.attr not in torchs)
            if not is_ours:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _in_text(node.value, own, torchs)


def _in_text(text: str, own: frozenset[str], torchs: frozenset[str]) -> Iterator[str]:
    parts = text.split(".")
    if parts[0] == "torch" and all(part.isidentifier() for part in parts):
        yield from filter(is_private, parts)
    elif text.isidentifier() and is_private(text) and not text.startswith("_ampatch_"):
        is_ours = text in own and (text not in torchs or text in _slots())
        yield from () if is_ours else (text,)


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@functools.cache
def own_names(apart: str = "") -> frozenset[str]:
    """Private names that ampatch gives, and slots; `apart`: a room that is left out."""
    paths = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != apart]
    return frozenset(filter(is_private, _slots().union(*map(names_given, map(tree_of, paths)))))


def names_given(tree: ast.AST) -> set[str]:
    """What a file calls its functions, classes, variables and attributes of `self`."""
    nodes = list(ast.walk(tree))
    kept = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    results = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    results |= {node.id for node in kept if isinstance(node, ast.Name)}
    return results | {
        node.attr for node in kept if isinstance(node, ast.Attribute) and is_self(node.value)
    }


@functools.cache
def _slots() -> frozenset[str]:
    return frozenset(
        results.value
        for path in ROOT.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for results in ast.walk(node.value)
        if isinstance(results, ast.Constant) and isinstance(results.value, str)
    )


@functools.cache
def attributes_of_torch() -> frozenset[str]:
    """Private attributes of torch's modules and of the objects that ampatch meets."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    met = [
        *(torch, torch._C, torch.nn, torch.nn.functional, torch.autograd, torch.overrides),
        *(weight, weight.untyped_storage(), (weight * 1).grad_fn, torch.ops.aten.add.Tensor),
        *(torch.nn.LSTM(1, 1), torch.nn.Linear(1, 1), optimizer),
        *(torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu")),
    ]
    return frozenset(name for module in met for name in dir(module) if is_private(name))


def losable() -> list[list[str]]:
    """The names that stand in the homes, in groups: each can lose all of its names at once.

    No two names of a group stand in one statement of a module.  Within one, such as a `try` and
    what it falls back to, or a function, the loss of a name may hide what the loss of another does.
    """
    own = own_names()
    places: dict[str, set] = collections.defaultdict(set, {name: {"switch"} for name in _SWITCHES})
    for path in filter(is_home, sorted(ROOT.rglob("*.py"))):
        for statement in tree_of(path).body:
            for name in private_names(statement, own, frozenset()):
                places[name].add(statement)
    groups: list[list[str]] = []
    for name in sorted(places.keys() - ALLOWED.keys(), key=lambda key: (-len(places[key]), key)):
        free = [g for g in groups if not any(places[name] & places[other] for other in g)]
        if free:
            min(free, key=len).append(name)
        else:
            groups.append([name])
    return groups


class _Loader(importlib.machinery.SourceFileLoader):
    """Private names of torch become others in the source, which torch does not have."""

    lost: frozenset[str] = frozenset()

    def get_code(self, fullname: str) -> object:
        names = "|".join(self.lost)
        source = re.sub(rf"\b({names})\b", r"\1_lost", self.get_source(fullname) or "")
        return compile(source, self.path, "exec")


class TorchWithout(importlib.abc.MetaPathFinder):
    """Has ampatch, when it is imported, find torch without some private names.

    torch itself keeps them, since it may need them; files in which such names do not stand
    are imported as they are.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def _stands_in(self, path: Path) -> bool:
        return is_home(path) and any(map(path.read_text().__contains__, self._names))

    def find_spec(self, fullname: str, path: object, target: object = None) -> object:
        """The spec of a file with a name, with a loader that renames it; None for others."""
        if not fullname.startswith("ampatch."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        if spec is None or spec.origin is None or not self._stands_in(Path(spec.origin)):
            return None
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.lost = self._names
        return spec


def take_away(names: Iterable[str]) -> None:
    """Before the first `import ampatch` of a process: torch is without `names` from then on."""
    sys.meta_path.insert(0, TorchWithout(frozenset(names)))
