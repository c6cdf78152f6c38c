"""The command `ampatch tables`."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tables",
        help="show which function gets which dtype, and why",
        description="Prints the patched functions, with the rule of each and its reason. Also "
        "prints which of them this torch lacks, and where torch.autocast for CUDA and apex differ.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="only functions whose name contains or matches NAME: 'torch.linalg.*'",
    )
    parser.add_argument("--rule", help="only the rows with this rule, such as half or float")
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="markdown is docs/op_tables.md (default: text)",
    )


def run(options: argparse.Namespace) -> int:
    from ampatch.casting.tables import Rule
    from ampatch.diagnose.tables import content, formats

    rules = [rule.value for rule in Rule]
    if options.rule not in (None, *rules):
        options.parser.error(f"unknown rule {options.rule!r}; expected one of {', '.join(rules)}")
    rows = list(content.entries(options.rule, options.name))
    if not rows:
        print(
            f"No row{f' with the rule {options.rule!r}' if options.rule else ''} names "
            f"{options.name!r}. A function without a row runs as in PyTorch. If it is written in "
            "Python, functions that it calls may have rows. `ampatch tables` shows all rows.",
            file=sys.stderr,
        )
        return 1
    missing = [f"{row.where}.{name}" for row in rows for name in row.missing]
    is_all = options.rule is None and options.name is None
    if options.format == "markdown":
        print(formats.write_markdown(rows))
    elif options.format == "json":
        print(formats.write_json(rows, content.missing() if is_all else missing))
    else:
        print(formats.write_text(rows, content.missing() if is_all else missing, is_all))
    return 0
