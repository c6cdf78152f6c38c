"""Documents made of the templates in `templates/`: HTML, LaTeX and Markdown.

What a template shows is escaped as its format needs it, unless it is marked as `safe`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

_IN_LATEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "{}$&#%_"},
        "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
        "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
        "\N{PLUS-MINUS SIGN}": r"$\pm$",
        "\N{DAGGER}": r"$^{\dagger}$", "\N{DOUBLE DAGGER}": r"$^{\ddagger}$",
    }
)  # fmt: skip


def filled(name: str, **shown: Any) -> str:
    """The document `name`, such as `page.html`, with what it shows."""
    return _environment(Path(name).suffix).get_template(f"{name}.j2").render(shown)


@functools.cache
def _environment(form: str) -> Any:
    import jinja2  # torch depends on it, so it is there without an extra

    settings: dict[str, Any] = {
        ".html": {"autoescape": True},
        ".md": {"finalize": _escape_by(markdown)},
        ".tex": {"finalize": _escape_by(latex)},
    }
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **settings[form],
    )


def _escape_by(escape: Any) -> Any:
    def finalize(value: Any) -> Any:
        return value if hasattr(value, "__html__") else escape(str(value))

    return finalize


def markdown(text: str) -> str:
    """`text` as Markdown shows it, also in a table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def latex(text: str) -> str:
    """`text` as LaTeX shows it, also in a table."""
    return text.translate(_IN_LATEX)
