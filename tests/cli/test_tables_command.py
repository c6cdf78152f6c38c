"""`ampatch tables`: what it says is so, and `docs/op_tables.md` says the same.

Where autocast differs: tests/casting/test_op_db_listed.py.
"""

import json
from pathlib import Path

import pytest
import torch
from repository import DATA
from warm_python import python

import ampatch
from ampatch.casting import special_ops, tables
from ampatch.casting.calls import CastState
from ampatch.casting.tables import APEX, EVERY_LEVEL, Rule
from ampatch.diagnose.tables import content, differences

ROOT = Path(ampatch.__file__).parents[1]
ROWS = (*tables.WHITELIST, *tables.BLACKLIST, *tables.PROMOTE, *tables.BANNED, *tables.BEYOND)


# What is printed


def test_the_document_is_fresh_whatever_the_torch_at_hand(monkeypatch, here):
    """To make it: ampatch tables --format markdown > docs/op_tables.md"""
    monkeypatch.delattr(torch, "linalg")
    monkeypatch.setattr(torch, "__version__", "9.9")
    document = (ROOT / "docs" / "op_tables.md").read_text(encoding="utf-8")
    assert here("tables", "--format", "markdown").stdout == document


def test_text_and_json_hold_every_row(here):
    tables = json.loads(here("tables", "--format", "json").stdout)
    shown = {(row["where"], name, row["rule"]) for row in tables["rows"] for name in row["names"]}
    rows = (*ROWS, *EVERY_LEVEL, *APEX)
    assert shown == {(r.where, name, r.rule.value) for r in rows for name in r.names}
    assert tables["torch"] == torch.__version__
    assert tables["missing"] == content.missing()
    assert {(entry["where"], entry["name"]) for entry in tables["beside"]} == set(
        content.BESIDE_TABLES
    )
    assert set(content.RULES) == set(Rule)  # each has its legend
    text = " ".join(here("tables").stdout.split())
    for row in rows:
        assert f"{row.rule.value}: {row.where}" in text
        assert " ".join(row.why.split()) in text and " ".join(row.names) in text


def test_what_is_patched_beside_the_tables_is_named():
    patched = {(where, name) for where, name, _ in special_ops.module_functions(CastState())}
    by_another_name = ("torch.utils.checkpoint", "checkpoint")  # what it calls is patched
    assert set(content.BESIDE_TABLES) == patched | {by_another_name}


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["einsum"], {"torch._VF.einsum"}),
        (["special.*soft*"], set()),
        (["torch.special.*soft*"], {"torch.special.log_softmax", "torch.special.softmax"}),
        (["cross_entropy_l"], {"torch._C._nn.cross_entropy_loss"}),
        (["lo[gs]", "--rule", "float"], {"torch.log", "torch.Tensor.log"}),
        (["relu", "--rule", "banned"], set()),
    ],
)
def test_rows_are_asked_for_by_name(arguments, names, here):
    done = here("tables", "--format", "json", *arguments)
    rows = json.loads(done.stdout)["rows"] if names else []
    assert {f"{row['where']}.{name}" for row in rows for name in row["names"]} == names
    assert done.returncode == (0 if names else 1)
    by_rule = f" with the rule {arguments[-1]!r}" if len(arguments) > 1 else ""
    said = f"No row{by_rule} names {arguments[0]!r}"
    assert done.stderr.startswith("" if names else said)


def test_text_is_plain_and_narrow_when_piped():
    done = python("-m", "ampatch", "tables")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.isascii() and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 88
    assert "autocast: raises RuntimeError whatever the dtype" in done.stdout
    assert "RNNBase.check_input" in done.stdout


def test_a_missing_function_is_named_where_it_is_missed(monkeypatch, here):
    row = tables.Row("torch.nn.functional", ("linear", "no_such"), Rule.HALF, "Because.")
    monkeypatch.setattr(tables, "WHITELIST", (row,))
    out = here("tables", "--rule", "half").stdout
    assert "BLACKLIST" not in out
    assert "missing in this torch: no_such\n" in out
    assert out.endswith("lacks torch.nn.functional.no_such.\n")


def test_native_rows_are_none_of_autocasts():
    """So that "the same" is right for them too."""
    registered = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    native = {name.strip("_") for row in ROWS if row.done_by_torch for name in row.names}
    assert "mm" in registered and not native & registered


# Where apex differs: the facts that were read from its lists


def test_apex_differs_as_its_lists_say():
    """By aten's names, of which one can have many of ours; null: in none of apex's tables."""
    facts = json.loads((DATA / "apex_policies.json").read_text())
    words = {rule.value: rule for rule in Rule}
    said = {name: rule for rule, names in differences.APEX.items() for name in names.split()}
    differ = {
        name
        for name, word in facts.items()
        if said.get(name) is not (words[word] if word else None)
    }
    through_its_callers = {name for name in facts if "upsample" in name} | {"nll_loss2d"}
    cells = {"gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"}  # in apex's rnn_compat
    assert differ == through_its_callers | cells
    assert len(facts) > 90
