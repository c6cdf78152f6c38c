"""Text for people, markdown for `docs/op_tables.md`, JSON for programs.

Text and JSON say what the running torch lacks.  Markdown does not: it is the
same wherever it is made.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterable

import torch

from .content import BESIDE_TABLES, RULES, TITLES, Entry

_WIDTH = 88
OTHER_LISTS = ("autocast", "apex")
"""Systems that an entry is compared with: `torch.autocast` for CUDA, and apex."""
_NAMES = dict(zip(OTHER_LISTS, ("torch.autocast", "apex")))

_HEAD = """\
# What is cast: the operator tables

In the forward of an O1 model, `torch.matmul(a, b)` casts FP32 arguments to half, because its row
below has the rule `half`. `ampatch tables matmul` prints this row. `ampatch tables` prints all
rows, and the functions that your torch lacks.

- **You do not find a function?** Search for the builtin that it calls: `F.cross_entropy` calls
  `torch._C._nn.cross_entropy_loss`. A function without a row is not cast.
- **In-place functions** (`exp_`, `add_`) are not cast. Exceptions have a row: `like first`
  (`index_add_`), EVERY_LEVEL and APEX.
- **Never cast:** calls with `out=`, and float64, complex, integer and bool tensors. A function that
  your code stored before `initialize` may not be cast either: [functions bound
  early](early_names.md).
- **The last column** says what `torch.autocast` for CUDA and apex do instead. If it is empty, they
  do the same as ampatch, or what the sentence above the table says of all its rows.

WHITELIST and BLACKLIST are apex's names. This page is made by `ampatch tables --format markdown`.
"""


def write_text(entries: Iterable[Entry], missing: list[str], is_complete: bool) -> str:
    """Blocks of lines at most 88 wide; `is_complete` adds what is patched beside the tables."""
    lines: list[str] = []
    last_table = None
    for entry in entries:
        if entry.table != last_table:
            lines += [_fill(f"{entry.table}: {TITLES[entry.table]}", 0), ""]
            last_table = entry.table
        lines += [_text(entry), ""]
    if is_complete:
        lines += ["BESIDE THE TABLES", ""]
        lines += [
            f"{where}.{name}\n{_fill(why, 2)}\n" for (where, name), why in BESIDE_TABLES.items()
        ]
    lacks = ", ".join(missing) if missing else "nothing of these"
    return "\n".join([*lines, _fill(f"This torch ({torch.__version__}) lacks {lacks}.", 0)])


def _text(entry: Entry) -> str:
    native = "; PyTorch does this itself" if entry.native else ""
    lines = [f"{entry.rule}: {entry.where}{native}", _fill(" ".join(entry.names), 4)]
    lines.append(_fill(entry.why, 2))
    for other in OTHER_LISTS:
        difference = getattr(entry, other)
        if difference:
            lines.append(_fill(f"{other}: {difference}", 2))
    if entry.missing:
        lines.append(_fill(f"missing in this torch: {' '.join(entry.missing)}", 2))
    return "\n".join(lines)


def _fill(text: str, indent: int) -> str:
    space = " " * indent
    return textwrap.fill(
        text, _WIDTH, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    )


def write_markdown(entries: Iterable[Entry]) -> str:
    """The text of `docs/op_tables.md`."""
    by_table: dict[str, list[Entry]] = {}
    for entry in entries:
        by_table.setdefault(entry.table, []).append(entry)
    lines = [_HEAD]
    lines.append("| rule | what it does |\n|---|---|")
    lines += [f"| {rule.value} | {meaning} |" for rule, meaning in RULES.items()]
    for table, rows in by_table.items():
        usual = {name: _most_common(getattr(entry, name) for entry in rows) for name in OTHER_LISTS}
        lines.append(f"\n## {table}\n\n{TITLES[table]}{_other_rules_text(usual)}\n")
        lines.append("| rule | functions | why | elsewhere |\n|---|---|---|---|")
        groups: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in rows:
            unusual = {
                name: getattr(entry, name) or "does the same as ampatch"
                for name in OTHER_LISTS
                if getattr(entry, name) != usual[name]
            }
            columns = (entry.rule, entry.why, _other_rules_text(unusual).strip())
            groups.setdefault(columns, []).append(entry)
        lines += [_markdown(*columns, group) for columns, group in groups.items()]
    lines.append("\n## Beside the tables\n\n| what | why |\n|---|---|")
    lines += [f"| `{where}.{name}` | {why} |" for (where, name), why in BESIDE_TABLES.items()]
    return "\n".join(lines)


def _most_common(texts: Iterable[str]) -> str:
    """What most rows of a table say of another system."""
    return Counter(texts).most_common(1)[0][0]


def _other_rules_text(texts: dict[str, str]) -> str:
    """What other systems do, by their names, for those that differ."""
    return "".join(f" {_NAMES[name]} {text.rstrip('.')}." for name, text in texts.items() if text)


def _markdown(rule: str, why: str, elsewhere: str, group: list[Entry]) -> str:
    """One line for rows that differ only in `where`."""
    where: dict[str, list[str]] = {}
    for entry in group:
        names = " ".join(f"`{name}`" for name in entry.names)
        where.setdefault(names, []).append(f"`{entry.where}`")
    functions = "; ".join(f"{names} of {', '.join(owners)}" for names, owners in where.items())
    cells = [text.replace("_", r"\_") for text in (why, elsewhere)]
    return f"| {' | '.join([rule, functions, *cells])} |"


def write_json(entries: Iterable[Entry], missing: list[str]) -> str:
    """An object: `torch` (version), `missing` (dotted names), `rows`, `beside`."""
    beside = [{"where": w, "name": n, "why": why} for (w, n), why in BESIDE_TABLES.items()]
    content = {
        "torch": torch.__version__,
        "missing": missing,
        "rows": [dataclasses.asdict(entry) for entry in entries],
        "beside": beside,
    }
    return json.dumps(content, indent=1)
