"""The tables against what PyTorch itself says.

Two oracles that do not come from us: `data/ops_places.json` (function by
function, where autocast for CUDA acts and by which policy), and the dispatcher's
registrations for autocast.
"""

import itertools
import json
from collections import Counter

import pytest
import torch
from repository import DATA

from ampatch.casting.places import resolve
from ampatch.casting.tables import (
    APEX,
    BANNED,
    BEYOND,
    BLACKLIST,
    EVERY_LEVEL,
    PROMOTE,
    WHITELIST,
    Rule,
)

TABLES = {"WHITELIST": WHITELIST, "BLACKLIST": BLACKLIST, "PROMOTE": PROMOTE, "BANNED": BANNED}
ROWS = [row for table in TABLES.values() for row in table]
RULE_OF = {
    (row.where, name): row.rule for row in ROWS for name in row.names if not row.done_by_torch
}
NATIVE = [(row.where, name) for row in PROMOTE for name in row.names if row.done_by_torch]
TO_FP32 = {Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE}
TO_WIDEST = {Rule.PROMOTE, Rule.FLOAT_ON_CPU}
ON_THE_CPU = {rule for rule in Rule if rule.value.startswith("float on the CPU")}

OPERATORS = {("torch.linalg", name): f"linalg_{name}" for name in ("matrix_sqrth", "polar")}
"""Rows for functions that not every torch has, and the operator that each of them calls."""

UNREACHABLE = {"_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "_cudnn_rnn"}
"""In autocast, not in our tables: only gru, lstm, ... call them, and those have rows."""


def places(names, *wheres):
    return {(where, name) for where in wheres for name in names}


def test_no_op_has_two_rules():
    for rows in ((*ROWS, *BEYOND), EVERY_LEVEL, APEX):
        count = Counter((row.where, name) for row in rows for name in row.names)
        assert [op for op, number in count.items() if number > 1] == []


def test_every_row_names_functions_and_says_why():
    for row in (*ROWS, *BEYOND, *EVERY_LEVEL, *APEX):
        assert row.names and all(name.isidentifier() for name in row.names)
        assert row.why[0].isupper() and row.why.endswith(".") and ". " not in row.why, row
        assert len(row.why.split()) >= 6, row


def test_each_table_holds_its_own_rules():
    expected = {
        "WHITELIST": {Rule.HALF, Rule.CONTRACTION, Rule.POWER},
        "BLACKLIST": TO_FP32,
        "PROMOTE": TO_WIDEST,
        "BANNED": {Rule.BANNED},
    }
    assert {name: {row.rule for row in table} for name, table in TABLES.items()} == expected
    assert {row.rule for row in EVERY_LEVEL} == {Rule.FLOAT, *ON_THE_CPU}
    assert not {row.rule for row in (*ROWS, *BEYOND)} & {*ON_THE_CPU} - {Rule.FLOAT_ON_CPU}
    assert {row.rule for row in [*ROWS, *BEYOND, *APEX] if row.done_by_torch} == {Rule.PROMOTE}


def test_every_function_stands_where_autocast_acts():
    text = (DATA / "ops_places.json").read_text(encoding="utf-8")
    expected = {
        (where, name): Rule(rule)
        for where, rules in json.loads(text).items()
        for rule, names in rules.items()
        for name in names
    }
    assert RULE_OF == expected


def test_whatever_the_dispatcher_registers_for_autocast_has_its_row():
    registered = {
        name.removeprefix("aten::").split(".")[0].removeprefix("linalg_")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        if name.startswith("aten::")
    }
    assert len(registered) > 100
    assert registered - {name for _, name in RULE_OF} <= UNREACHABLE


def test_every_row_resolves_in_this_torch():
    absent = {
        (row.where, name)
        for row in (*ROWS, *BEYOND, *EVERY_LEVEL, *APEX)
        for name in row.names
        if not hasattr(resolve(row.where), name)
    }
    lacking = {place for place, name in OPERATORS.items() if not hasattr(torch.ops.aten, name)}
    assert absent == lacking


def test_in_place_functions_that_write_values_in_are_those_whose_result_promotes():
    written = {
        (row.where, name) for row in BEYOND if row.rule is Rule.LIKE_FIRST for name in row.names
    }
    promoting = {
        ("torch.Tensor", f"{name}_")
        for row in (*PROMOTE, *BEYOND)
        if row.rule is Rule.PROMOTE and row.where == "torch.Tensor" and not row.done_by_torch
        for name in row.names
        if name not in {"addcdiv", "addcmul", "arctan2", "atan2", "cross", "dot", "inner", "vdot"}
    }
    assert written == promoting | {("torch.Tensor", "__setitem__"), ("torch", "index_put_")}


# Native promotion: why the commonest functions are not patched.

HALF = torch.tensor([[0.7, 1.3], [2.1, 0.4]], dtype=torch.float16)
FULL = torch.tensor([[0.3, 1.9], [1.1, 2.3]]) + 1e-5  # needs more digits than FP16 has
JOINERS = {"cat", "dstack", "hstack", "stack", "vstack"}


def call(where, name, left, right):
    """One call of a promoter that takes two tensors, with the shapes that it wants."""
    function = getattr(resolve(where), name)
    mask = torch.eye(2, dtype=torch.bool)
    if name in JOINERS:
        return function((left, right))
    if name == "outer":
        return function(left[0], right[0])
    if name == "where":
        return function(mask, left, right) if where == "torch" else function(left, mask, right)
    return function(left, right)


def test_native_rows_promote_without_us():
    for (where, name), (left, right) in itertools.product(NATIVE, ((HALF, FULL), (FULL, HALF))):
        result = call(where, name, left, right)
        by_hand = call(where, name, left.float(), right.float())
        if isinstance(result, bool):
            assert result is by_hand
        else:
            assert result.dtype in (torch.float32, torch.bool)
            assert torch.equal(result, by_hand), name


def test_the_check_of_native_rows_can_fail():
    assert not torch.equal(FULL, FULL.half().float())
    with pytest.raises(RuntimeError):
        call("torch", "inner", HALF, FULL)


NEVER_REFUSED_BY_APEX = {"log1p_", "square_"}


def test_apex_tables_adds_what_apex_ran_in_fp32():
    assert {(row.where, name) for row in APEX if row.rule is Rule.FLOAT for name in row.names} == {
        *places(["std", "var"], "torch", "torch.Tensor"),
        *places(["__ipow__", "cpu"], "torch.Tensor"),
        *places(["grid_sampler"], "torch"),
        *places(["gelu", "interpolate"], "torch.nn.functional"),
    }


def test_apex_tables_refuses_the_in_place_forms_of_blacklisted_functions():
    refused = {
        (row.where, name) for row in APEX if row.rule is Rule.REFUSE_IN_PLACE for name in row.names
    }
    assert refused == {
        (where, f"{name}_")
        for (where, name), rule in RULE_OF.items()
        if rule in TO_FP32
        and hasattr(resolve(where), f"{name}_")
        and f"{name}_" not in NEVER_REFUSED_BY_APEX
    }
    assert ("torch.Tensor", "exp_") in refused and ("torch", "exp_") in refused
    assert {row.rule for row in APEX} == {Rule.FLOAT, Rule.REFUSE_IN_PLACE}
