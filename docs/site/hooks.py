"""What the site adds to the pages: links into the repository, tables for a phone, a diagram.

MkDocs calls the functions `on_...` for each page, with its text, its HTML and its whole document.
"""

from __future__ import annotations

import html as entities
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

REPOSITORY = "https://github.com/ampatch/ampatch/blob/main"
ADVICE = re.compile(r"<table>\s*<thead>(?:(?!</thead>).)*<th>what to do</th>.*?</table>", re.DOTALL)
"""A table of sentences, which site.css shows one below the other on a phone."""
DIAGRAM = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
PICTURE = "site/o2_step.svg"
"""The diagram of design.md, drawn by `diagram.py`: Material would fetch the code that draws."""
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
ASKS_GITHUB = ' data-md-component="source"'
"""With this mark on the link to the repository, a page asks GitHub for its stars."""
RANKS = {
    "clients.md": 0.5,
    "design.md": 0.2,
    "examples.md": 0.5,
    "explanation/loss_scaling.md": 4,
    "performance.md": 0.5,
    "reference/api.md": 0.5,
    "reference/frameworks.md": 0.3,
}
"""Pages that the search shows before others (above 1) or after them: what a reader seldom means."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text, completed."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # the tabs have it
    if page.file.src_uri in RANKS:
        page.meta["search"] = {"boost": RANKS[page.file.src_uri]}
    markdown = DIAGRAM.sub(lambda found: _drawn(found[1]), markdown)
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    return LINK.sub(lambda found: f"]({_outside(found[1], folder)}", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page's HTML, with what site.css looks for."""
    return ADVICE.sub(lambda table: f'<div class="advice">{table[0]}</div>', html)


def on_post_page(output: str, **_: Any) -> str:
    """The whole document, which asks no other host for anything."""
    if ASKS_GITHUB not in output:
        raise PluginError(f"Material's pages have no{ASKS_GITHUB}: what fetches from GitHub now?")
    return output.replace(ASKS_GITHUB, "")


def _drawn(source: str) -> str:
    """The picture of the diagram; an error if it lacks a text of the source."""
    picture = entities.unescape((Path(__file__).parents[1] / PICTURE).read_text(encoding="utf-8"))
    missing = [text for text in re.findall(r": (.+)$", source, re.M) if text not in picture]
    if missing:
        raise PluginError(f"{PICTURE} lacks {missing}: draw it by docs/site/diagram.py.")
    return f"![A training step at O2: the diagram in design.md]({PICTURE})\n"


def _outside(link: str, folder: str) -> str:
    """A link that leaves `docs/` leads to the repository; others stay."""
    path = posixpath.normpath(posixpath.join(folder, link))
    return link if path.startswith("docs/") else f"{REPOSITORY}/{path}"
