"""The pages of the documentation: their snippets, and the commands in these.

`README.md`, `CONTRIBUTING.md` and what is in `docs/`.  A snippet is a block between fences.  One of
Python with `title="train.py"` is a file, for the commands of the page.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository import DOCS, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)(?: title=\"(.+?)\")?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
EXAMPLE = re.compile(r"(?:\A|\n\n)((?:    .*\n)(?:\n?    .*\n)*)")  # in a docstring
SHELL = ("bash", "console")  # in "console" the lines of commands begin with "$ "


@dataclass(frozen=True)
class Snippet:
    page: Path
    heading: str  # of the second level
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}, {self.heading}: {self.text.splitlines()[0]}"


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    results = []
    for block in FENCE.finditer(text):
        heading = re.findall(r"^## (.+)$", FENCE.sub("", text[: block.start()]), re.MULTILINE)
        results.append(Snippet(page, heading[-1] if heading else "", *block.group(2, 3, 4)))
    return results


def commands(snippet: Snippet) -> list[str]:
    """The commands of a snippet of the shell, as words between single spaces.

    Without variables that are set for them, and without the folder of an environment.
    """
    text = re.sub(r"(^|\s)#.*", "", snippet.text, flags=re.MULTILINE).replace("\\\n", " ")
    if snippet.language == "console":
        text = "\n".join(re.findall(r"^\$ (.+)$", text, re.MULTILINE))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&;\n")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    results: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&;\n"):
            results.append([])
        elif results[-1] or not re.match(r"\w+=", word):
            results[-1].append(word)
    return [" ".join(words).removeprefix(".venv/bin/") for words in results if words]


def examples_in_docstrings(module: Path) -> Iterator[tuple[str, str]]:
    """The name of each function or class, "" for the module, and the example in its docstring."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for results in EXAMPLE.findall(f"{ast.get_docstring(node) or ''}\n"):
                yield getattr(node, "name", ""), re.sub(r"^    ", "", results, flags=re.MULTILINE)
