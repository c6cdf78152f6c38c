"""What the site has beyond the pages as they are: help of commands, links into the repository.

MkDocs calls the functions `on_...` for each page, with its text, its HTML or its whole document.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError

from ampatch.cli.main import NAMES, build_parser

COMMANDS = "<!-- commands -->"
REPOSITORY = "https://github.com/ampatch/ampatch/blob/main"
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
STACKED = (
    "explanation/why_fp32_here.md",
    "explanation/why_slower.md",
    "from_apex.md",
    "how_to/nan.md",
    "limits.md",
    "tutorials/from_torch_amp.md",
)
"""Pages with tables of sentences, which site.css lays out as paragraphs on a phone."""
RANKS = {"design.md": 0.2, "performance.md": 0.5, "clients.md": 0.5, "examples.md": 0.5}
"""Pages that the search shows after others: a reader with a question seldom means them."""
ASKS_GITHUB = ' data-md-component="source"'
"""With this mark on the link to the repository, Material fetches its stars when a page is viewed."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text, completed."""
    if page.file.src_uri in RANKS:
        page.meta["search"] = {"boost": RANKS[page.file.src_uri]}
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    text = LINK.sub(lambda found: f"]({_outside(found[1], folder)}", markdown)
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """The page's HTML, marked for site.css."""
    return f'<div class="stacked">{html}</div>' if page.file.src_uri in STACKED else html


def on_post_page(output: str, **_: Any) -> str:
    """The whole document, which asks no other host for anything."""
    if ASKS_GITHUB not in output:
        raise PluginError(f"Material's pages have no{ASKS_GITHUB}: what fetches from GitHub now?")
    return output.replace(ASKS_GITHUB, "")


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
