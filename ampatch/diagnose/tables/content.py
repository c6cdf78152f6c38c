"""The content of `ampatch tables`: the rows, what this torch lacks, where others differ."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator

from ampatch.casting import tables
from ampatch.casting.tables import Row, Rule
from ampatch.session.facade import listed_function

from . import differences

TITLES = {
    "WHITELIST": "To the half dtype.",
    "BLACKLIST": "To FP32.",
    "PROMOTE": "To the widest floating dtype among the inputs.",
    "BANNED": "Refused in half, or run in FP32 with a warning.",
    "BEYOND": "Autocast leaves it alone: refused in half or in two dtypes.",
    "EVERY_LEVEL": "Wrong in half: FP32 inside at all levels; if its gradient alone, in graphs.",
    "APEX": "Only with apex's tables (`ampatch.init()`, the `apex` package), in addition.",
}
RULES = {
    Rule.HALF: "FP32 inputs are cast to the half dtype, and inputs of the other half dtype too.",
    Rule.CONTRACTION: "Half if each operand of the equation shares a summed label with another "
    "operand; as float if the equation has other sums; else as promote.",
    Rule.FLOAT: "Half inputs are cast to FP32.",
    Rule.FLOAT_ON_CPU: "As float on the CPU, elsewhere as promote.",
    Rule.FLOAT_ON_CPU_UNLESS_SPARSE: "As float on the CPU, unless the call says `sparse=True`.",
    Rule.FLOAT_ON_CPU_IF_VECTOR: "As float on the CPU, if the first input has one dimension.",
    Rule.FLOAT_ON_CPU_IF_ADDING: "As float on the CPU, if the call says `accumulate=True` or "
    '`mode="replicate"`.',
    Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT: "As float on the CPU, if the weight is half and running "
    "statistics are not.",
    Rule.FLOAT_ON_CPU_IF_OVERLAPPING: "As float on the CPU, if more than 16 windows may have one "
    "element, or a window has more than 65,504.",
    Rule.FLOAT_UNLESS_DTYPE: "As float, unless the call itself says `dtype=`.",
    Rule.PROMOTE: "Inputs are cast to the widest floating dtype among them.",
    Rule.LIKE_FIRST: "Inputs are cast to the dtype of the first, which the call writes into.",
    Rule.POWER: "As half for exponents from 2 on, as float for negative ones.",
    Rule.BANNED: "A call with a half input runs in FP32 and warns once; with "
    "`allow_banned=False` it raises NotImplementedError.",
    Rule.REFUSE_IN_PLACE: "A call on a half tensor raises NotImplementedError.",
}
PARTS = {
    ("torch.nn.RNNBase", "check_input"): "Refuses an input whose dtype is not the weights', "
    "before the cast that would make them equal.",
    ("torch.backends.mha", "get_fastpath_enabled"): "Whether MultiheadAttention and "
    "TransformerEncoderLayer call their fused kernels: not where calls are cast.",
    ("torch.nn.functional", "multi_head_attention_forward"): "A graph of torch.compile has it as "
    "one call, which takes the casting of its forward along.",
    ("torch.utils.checkpoint", "checkpoint"): "The recompute in backward may run in another "
    "thread, and takes the casting of its forward along.",
}
"""What is replaced beside the functions of the tables, and why."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row as it is shown.

    `missing` are the `names` that the running torch lacks; `autocast` and `apex` say how
    these differ from the row, and are empty if they do not.
    """

    table: str
    rule: str
    where: str
    names: tuple[str, ...]
    why: str
    native: bool
    missing: tuple[str, ...]
    autocast: str
    apex: str


def entries(rule: str | None = None, pattern: str | None = None) -> Iterator[Entry]:
    """The rows with this rule and names like `pattern`, with only those names."""
    for table in TITLES:
        for row in getattr(tables, table):
            names = tuple(name for name in row.names if _is_like(row.where, name, pattern))
            if names and rule in (None, row.rule.value):
                yield _entry(table, row._replace(names=names))


def _entry(table: str, row: Row) -> Entry:
    is_of_apex = table == "APEX"
    return Entry(
        table=table,
        rule=row.rule.value,
        where=row.where,
        names=row.names,
        why=row.why,
        native=row.native,
        missing=tuple(name for name in row.names if is_missing(row.where, name)),
        autocast=differences.AT_EVERY_LEVEL
        if table == "EVERY_LEVEL"
        else differences.from_autocast(row, table in ("APEX", "BEYOND")),
        apex="" if is_of_apex else differences.from_apex(row),
    )


def _is_like(where: str, name: str, pattern: str | None) -> bool:
    """Whether a name contains `pattern`, or matches it if it has wildcards."""
    if pattern is None:
        return True
    path = f"{where}.{name}"
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(path, pattern)
    return pattern in path


def is_missing(where: str, name: str) -> bool:
    """Whether the running torch lacks this name."""
    return listed_function(where, name) is None


def missing() -> list[str]:
    """Everything that ampatch would patch and the running torch lacks."""
    rows = [f"{entry.where}.{name}" for entry in entries() for name in entry.missing]
    parts = [f"{where}.{name}" for where, name in PARTS if is_missing(where, name)]
    return list(dict.fromkeys(rows + parts))
