"""PyTorch's own operators (`op_db`) as calls to compare: with our patches, without, under autocast.

`op_db` binds its functions when it is imported, so each call here looks its
function up anew, at the place where a user would find it.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from autocast_oracle import cuda_autocast
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from ampatch.casting import tables
from ampatch.casting.tables import Row, Rule


def _rules(rows: Iterable[Row]) -> dict[str, Rule]:
    return {
        f"{row.where}.{name}": row.rule
        for row in rows
        if not row.done_by_torch
        for name in row.names
    }


_CAST = _rules(
    (*tables.WHITELIST, *tables.BLACKLIST, *tables.PROMOTE, *tables.BANNED, *tables.BEYOND)
)
RULE_OF = {**_rules(tables.EVERY_LEVEL), **_CAST}
IN_HALF = RULE_OF.keys() - _CAST.keys()
"""What no level casts: these rows act on calls in half."""
BEYOND_ROWS = {f"{row.where}.{name}" for row in tables.BEYOND for name in row.names}
HALVES = (torch.float16, torch.bfloat16)
CASTABLE = (torch.float32, *HALVES)
NAMES = [f"{op.name}-{op.variant_test_name}" if op.variant_test_name else op.name for op in op_db]
OPS = {
    name: op
    for name, op in zip(NAMES, op_db, strict=True)
    if not op.name.startswith("jiterator")  # compiles CUDA source
}


MANY = 30
"""Samples that show what a function written in Python calls."""
WRITTEN_IN_PYTHON = ("torch", "torch.nn.functional")


@dataclass(frozen=True)
class Call:
    """One way to reach an operator: the function, a method, an operator sign, or an alias."""

    place: str  # "torch.nn.functional.linear", or "" where op_db has a function of its own
    function: Callable
    rows: tuple[str, ...] = ()  # of the tables, that it meets
    in_place: bool = False

    @property
    def rules(self) -> set[Rule]:
        """How its arguments are cast: of what acts on calls in half, nothing is seen outside."""
        return rules_of(self.rows)

    def is_touched(self, dtype: torch.dtype) -> bool:
        return any(dtype in (HALVES if row in IN_HALF else CASTABLE) for row in self.rows)

    @property
    def is_beyond(self) -> bool:
        """Whether a row of ours acts where autocast casts nothing."""
        return any(row in BEYOND_ROWS for row in self.rows)

    def __str__(self) -> str:
        return self.place or getattr(self.function, "__name__", str(self.function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (look_up(self.place) if self.place else self.function)(*args, **kwargs)


def rules_of(rows: Iterable[str]) -> set[Rule]:
    return {RULE_OF[row] for row in rows if row not in IN_HALF}


def look_up(place: str) -> Any:
    results: Any = torch
    for name in place.split(".")[1:]:
        results = getattr(results, name)
    return results


def _is_at(place: str, function: Any) -> bool:
    try:
        return look_up(place) is function
    except AttributeError:
        return False


def rows(name: str, place: str) -> tuple[str, ...]:
    """The rows that a place meets: its own, that of the builtin right below it, or a list."""
    return COMPOSITES.get(name, _own_rows(place))


def _own_rows(place: str) -> tuple[str, ...]:
    where, _, leaf = place.rpartition(".")
    below = ("torch._C._nn", "torch._VF", "torch") if where in WRITTEN_IN_PYTHON else ()
    results = [f"{owner}.{leaf}" for owner in (where, *below) if f"{owner}.{leaf}" in RULE_OF]
    return tuple(results[:1])


def calls(name: str, op: Any) -> list[Call]:
    """The function first, then its other ways, those of its aliases included."""
    results = []
    for info in (op, *op.aliases):
        place, method = f"torch.{info.name}", f"torch.Tensor.{info.name}"
        results.append(_call(name, info.op, place, method))
        if info.method_variant is not None:
            results.append(_call(name, info.method_variant, method))
        if info.inplace_variant is not None:
            results.append(_in_place(info.inplace_variant))
    if op.operator_variant is not None:
        results.append(_call(name, op.operator_variant, f"torch.{op.name}"))
    if op.inplace_operator_variant is not None:
        results.append(_in_place(op.inplace_operator_variant))
    return results


def _call(name: str, function: Any, *places: str) -> Call:
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return Call("", function)  # below the functions that are patched
    place = next((place for place in places if _is_at(place, function)), "")
    met = [rows(name, at) for at in ([place] if place else places)]
    return Call(place, function, next(filter(None, met), ()))


def _in_place(function: Any) -> Call:
    place = f"torch.Tensor.{getattr(function, '__name__', '')}"
    return Call(
        place if _is_at(place, function) else "",
        function,
        (place,) if place in RULE_OF else (),
        in_place=True,
    )


@dataclass(frozen=True)
class Sample:
    """The arguments of a call; `fresh` gives them anew, since in-place calls write into them."""

    args: tuple
    kwargs: dict

    def fresh(self, change: Callable[[Tensor], Tensor] | None = None) -> Sample:
        def copy(leaf: Tensor) -> Tensor:
            new = leaf.detach().clone() if change is None else change(leaf)
            return new.requires_grad_() if leaf.requires_grad and change is None else new

        return Sample(*tree_map_only(Tensor, copy, (self.args, self.kwargs)))

    def in_dtype(self, dtype: torch.dtype) -> Sample:
        return self.fresh(lambda leaf: leaf.to(dtype) if leaf.dtype in CASTABLE else leaf)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def castable(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors() if tensor.dtype in CASTABLE]

    def mixed(self, half: torch.dtype, other: torch.dtype = torch.float32) -> Iterator[Sample]:
        """The first tensor in half and the others in `other`, and the other way round."""
        if len(self.castable()) > 1:
            first = self.castable()[0]
            for of_first, of_others in ((half, other), (other, half)):
                yield self.fresh(
                    lambda leaf, first=first, of_first=of_first, of_others=of_others: (
                        leaf
                        if leaf.dtype not in CASTABLE
                        else leaf.to(of_first if leaf is first else of_others)
                    )
                )


def groups(names: Iterable[str], size: int = 60) -> list:
    """Parameters of tests: some operators each, because opening a session for each takes long."""
    names = sorted(names)
    return [
        pytest.param(part, id=f"{part[0]}..{part[-1]}")
        for part in (names[start : start + size] for start in range(0, len(names), size))
    ]


def samples(op: Any, dtype: torch.dtype, limit: int | None, requires_grad: bool = False) -> list:
    """The first `limit` samples of PyTorch's for one dtype, none where it is not supported."""
    if dtype not in op.dtypes:
        return []
    seed()
    with quietly(), torch.no_grad():
        inputs = op.sample_inputs_func(op, "cpu", dtype, requires_grad)
        return [plain_sample(sample) for sample in islice(inputs, limit)]


def plain_sample(sample: Any) -> Sample:
    return Sample((sample.input, *sample.args), sample.kwargs)


def seed(number: int = 0) -> None:
    """As `torch.manual_seed`, which formats the stack three times when there is no GPU."""
    torch.default_generator.manual_seed(number)


@contextmanager
def quietly() -> Iterator[None]:
    """PyTorch's samples call what PyTorch warns of; ampatch itself warns by its logger."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Raised:
    """What a call came to that raised: equal to any other that raised the same type."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error)[:150]}"


def outcome(call: Callable, sample: Sample, **more: Any) -> list | Raised:
    """The leaves of the result, or what was raised; always with the same random numbers."""
    seed()
    with quietly():
        try:
            return tree_leaves(call(*sample.args, **sample.kwargs, **more))
        except Exception as error:
            return Raised(error)


def same(new: list | Raised, old: list | Raised, values: bool = True) -> bool:
    """Bit for bit, or the same type of exception."""
    if isinstance(new, Raised) or isinstance(old, Raised):
        return type(getattr(new, "error", None)) is type(getattr(old, "error", None))
    return len(new) == len(old) and all(
        _same_leaf(ours, other, values) for ours, other in zip(new, old, strict=True)
    )


def _same_leaf(new: Any, old: Any, values: bool) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return type(new) is type(old) and (not values or repr(new) == repr(old))
    alike = (new.dtype, new.shape, new.layout) == (old.dtype, old.shape, old.layout)
    return alike and (not values or torch.equal(_bits(new), _bits(old)))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def under_autocast(call: Callable, sample: Sample, half: torch.dtype) -> list | Raised:
    """What autocast for CUDA makes of the call: fake tensors, which have dtypes but no values."""
    with cuda_autocast(half):
        return on_fake_cuda(call, sample)


def on_fake_cuda(call: Callable, sample: Sample) -> list | Raised:
    """The call on fake tensors that claim to be on CUDA."""

    def fake(leaf: Tensor) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda")

    with FakeTensorMode(), _fake_errors_unlogged():
        return outcome(call, sample.fresh(fake))


@contextmanager
def _fake_errors_unlogged() -> Iterator[None]:
    """FakeTensorMode logs a traceback with each refusal that it also raises."""
    logger = logging.getLogger(fake_tensor.__name__)
    results, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = results


def backward(call: Callable) -> Callable:
    def call_and_go_back(*args: Any, **kwargs: Any) -> list:
        inputs = [tensor for tensor in Sample(args, kwargs).tensors() if tensor.requires_grad]
        results = tree_leaves(call(*args, **kwargs))
        outputs = [leaf for leaf in results if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not inputs or not outputs:
            return []
        seed(1)
        like = [torch.randn(out.shape, dtype=wide(out.dtype)).to(out.dtype) for out in outputs]
        return list(torch.autograd.grad(outputs, inputs, like, allow_unused=True))

    return call_and_go_back


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def _composites() -> dict[str, tuple[str, ...]]:
    """The rows that functions written in Python meet, of torch and of `op_db`, if not their own."""
    tried = {
        name: samples(op, torch.float32, MANY) or samples(op, torch.float64, MANY)
        for name, op in OPS.items()
        if not inspect.isbuiltin(op.op)
        if f"torch.{op.name}" not in RULE_OF or not _is_at(f"torch.{op.name}", op.op)
    }
    results: dict[str, set[str]] = {}
    running: list[str] = []  # the operator, and the rows that are met within each other

    def spy(row: str, original: Callable) -> Callable:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if len(running) == 1:
                results.setdefault(running[0], set()).add(row)
            running.append(row)
            try:
                return original(*args, **kwargs)
            finally:
                running.pop()

        return spied

    with pytest.MonkeyPatch.context() as patch:
        for row in RULE_OF:
            where, _, leaf = row.rpartition(".")
            if hasattr(look_up(where), leaf):  # else it is for another version of torch
                patch.setattr(look_up(where), leaf, spy(row, getattr(look_up(where), leaf)))
        for name, tries in tried.items():
            running[:] = [name]
            for sample in tries:
                outcome(OPS[name].op, sample.fresh())
    return {
        name: tuple(sorted(met))
        for name, met in results.items()
        if met != set(_own_rows(f"torch.{OPS[name].name}"))
    }


# Bound at import, hence before any session.
COMPOSITES = _composites()
CALLS = {name: calls(name, op) for name, op in OPS.items()}
