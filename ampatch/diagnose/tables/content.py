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
    "WHITELIST": "Cast to the half dtype.",
    "BLACKLIST": "Cast to FP32.",
    "PROMOTE": "Cast to the widest floating dtype among the inputs.",
    "BANNED": "Unsafe in half: run in FP32 with a warning, or refused (`allow_banned=False`).",
    "BEYOND": "PyTorch refuses them in half or in mixed dtypes.",
    "EVERY_LEVEL": "PyTorch computes them wrongly in half: for example, a bfloat16 sum of ones "
    "stops growing at 256. So at every level they run in FP32 internally and return half. "
    "If only the gradient would be wrong, a call stays in half when autograd records nothing.",
    "APEX": "Added by `ampatch.init()` and the `apex` package only.",
}
RULES = {
    Rule.HALF: "FP32 inputs, and inputs of the other half dtype, are cast to the half dtype.",
    Rule.CONTRACTION: "If each operand shares a summed label with another (`ij,jk->ik`, a matrix "
    "product), as half. Other sums (`ij->i`) as float; without a sum (`i,i->i`) as promote.",
    Rule.FLOAT: "Half inputs are cast to FP32.",
    Rule.FLOAT_ON_CPU: "As float on the CPU, elsewhere as promote.",
    Rule.FLOAT_ON_CPU_UNLESS_SPARSE: "As float on the CPU, unless `sparse=True`.",
    Rule.FLOAT_ON_CPU_IF_VECTOR: "As float on the CPU if the first input is 1-dim.",
    Rule.FLOAT_ON_CPU_IF_ADDING: 'As float on the CPU if `accumulate=True` or `mode="replicate"`.',
    Rule.FLOAT_ON_CPU_IF_HALF_WEIGHT: "As float on the CPU if the weight is half and the running "
    "statistics are FP32.",
    Rule.FLOAT_ON_CPU_IF_OVERLAPPING: "As float on the CPU if more than 16 windows may share an "
    "element, or a window has over 65,504 elements.",
    Rule.FLOAT_UNLESS_DTYPE: "As float, unless the call passes `dtype=`.",
    Rule.PROMOTE: "Inputs are cast to the widest floating dtype among them.",
    Rule.LIKE_FIRST: "Inputs are cast to the dtype of the first one, into which the call writes.",
    Rule.POWER: "As half for exponents of 2 or more, as float for negative ones.",
    Rule.BANNED: "A call with a half input runs in FP32 and warns once; with "
    "`allow_banned=False` it raises NotImplementedError.",
    Rule.REFUSE_IN_PLACE: "A call on a half tensor raises NotImplementedError.",
}
BESIDE_TABLES = {
    ("torch.nn.RNNBase", "check_input"): "It refuses inputs in another dtype than the weights, "
    "and is called before the casts that make the dtypes equal.",
    ("torch.backends.mha", "get_fastpath_enabled"): "It returns False where calls are cast: "
    "MultiheadAttention and TransformerEncoderLayer then skip their fused kernels.",
    ("torch.nn.functional", "multi_head_attention_forward"): "torch.compile records it as one "
    "call, so that the call keeps the casts of its forward.",
    ("torch.utils.checkpoint", "checkpoint"): "The recomputation in backward may run in another "
    "thread, and must have the casts of its forward.",
}
"""Functions whose casts need a replacement in addition to the tables, and why."""


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
        native=row.done_by_torch,
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
    """The functions of the tables and of `BESIDE_TABLES` that the running torch lacks."""
    rows = [f"{entry.where}.{name}" for entry in entries() for name in entry.missing]
    others = [f"{where}.{name}" for where, name in BESIDE_TABLES if is_missing(where, name)]
    return list(dict.fromkeys(rows + others))
