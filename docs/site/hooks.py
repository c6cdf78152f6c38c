"""What the site has beyond the pages as they are: help of commands, links into the repository,
tables of advice for a phone.

MkDocs calls `on_page_markdown` with each page's text, and `on_page_content` with its HTML.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from typing import Any

from ampatch.cli.main import NAMES, build_parser

COMMANDS = "<!-- commands -->"
REPOSITORY = "https://github.com/ampatch/ampatch/blob/main"
ADVICE = re.compile(r"<table>\s*<thead>(?:(?!</thead>).)*<th>what to do</th>.*?</table>", re.DOTALL)
"""A table of sentences, which site.css shows one below the other on a phone."""
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text, completed."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    text = LINK.sub(lambda found: f"]({_outside(found[1], folder)}", markdown)
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML, with what site.css looks for."""
    return ADVICE.sub(lambda table: f'<div class="advice">{table[0]}</div>', html)


def commands() -> str:
    """A section for each command of `ampatch`, from the parsers."""
    os.environ["COLUMNS"] = "92"
    [choices] = [
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return "\n\n".join(
        f"## ampatch {name}\n\n```text\n{choices[name].format_help().strip()}\n```"
        for name in NAMES
    )


def _outside(link: str, folder: str) -> str:
    """A link that leaves `docs/` leads to the repository; others stay."""
    path = posixpath.normpath(posixpath.join(folder, link))
    return link if path.startswith("docs/") else f"{REPOSITORY}/{path}"
