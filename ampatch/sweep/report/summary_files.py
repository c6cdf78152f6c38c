"""A sweep's results as files: JSON, CSV, Markdown and LaTeX.

They are written after each run, and without an extra: so by Python's own `csv` and by `templates/`.
What a template shows is escaped as its format needs it, unless it is marked as `safe`.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import write_json, write_whole
from ampatch.sweep.report import provenance
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.report.results import SUMMARY, TABLES, Results, Row
from ampatch.sweep.report.table import Table, by_row, columns, mark_notes, notes

_PLAIN = (
    "label", "opt_level", "dtype", "engine", "status", "outcome", "runs", "good_runs", "seeds",
    "step_ms", "cpu_ms", "speed", "pace", "by_cpu", "memory_bytes",
    "memory_kind", "first_loss", "last_loss", "steps", "skipped", "loss_scale",
    "seconds",
)  # fmt: skip
_JUDGED = (
    "name", "better", "mean", "sd", "base_mean", "base_sd", "difference", "low", "high", "p",
    "corrected_p", "smallest",
)  # fmt: skip


_IN_LATEX = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "{}$&#%_"},
        "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
        "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
        "\N{PLUS-MINUS SIGN}": r"$\pm$",
        "\N{DOWNWARDS ARROW}": r"$\downarrow$", "\N{UPWARDS ARROW}": r"$\uparrow$",
        "\N{DAGGER}": r"$^{\dagger}$", "\N{DOUBLE DAGGER}": r"$^{\ddagger}$",
    }
)  # fmt: skip


def write_files(directory: Path, results: Results) -> None:
    """Write `summary.json` and the tables, each completely or not at all."""
    write_json(directory / SUMMARY, results.to_json())
    write_tables(directory, results)


def write_tables(directory: Path, results: Results) -> None:
    """Write `summary.csv`, `.md` and `.tex`."""
    for name, make in zip(TABLES, (as_csv, as_markdown, as_latex)):
        write_whole(directory / name, make(results))


def as_csv(results: Results) -> str:
    """One line for each row; a missing figure is empty.

    Metrics are `metric:NAME`.  The last columns, `from:NAME`, say in each line where the
    figures come from; comments at the top would have to be told to every reader.
    """
    metrics = list(dict.fromkeys(name for row in results.rows for name in row.metrics))
    scatter = list(dict.fromkeys(name for row in results.rows for name in row.sds))
    origin = {
        f"from:{name.replace(',', '').replace(' ', '_')}": text
        for name, text in provenance.facts(results).items()
    }
    lines = [{**_csv_line(row, metrics, scatter), **origin} for row in results.rows]
    text = io.StringIO()
    head = {**_csv_line(_NOTHING, metrics, scatter), **origin}
    writer = csv.DictWriter(text, list(head), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


_NOTHING = Row("", "", "")


def _csv_line(row: Row, metrics: Sequence[str], scatter: Sequence[str]) -> dict[str, Any]:
    """The figures of a row by their columns, which are the same for every row."""
    judged = row.comparisons[0] if row.comparisons else None
    return {
        **{name: getattr(row, name) for name in _PLAIN},
        **{f"step_ms_{end}": getattr(row.step_times, end, None) for end in ("low", "high")},
        **{f"speed_{end}": getattr(row.speeds, end, None) for end in ("low", "high")},
        **{f"metric:{name}": row.metrics.get(name) for name in metrics},
        **{f"sd:{name}": row.sds.get(name) for name in scatter},
        **{f"judged_{name}": getattr(judged, name, None) for name in _JUDGED},
        "marks": "; ".join(mark_notes([row])),
        "verdict": row.verdict,
    }


def as_markdown(results: Results) -> str:
    """The recommendation, the table and the verdicts, for a paper's appendix."""
    rows = results.rows
    return filled(
        "summary.md",
        script=Path(results.script).name,
        called=provenance.called(results),
        seeds=counted(max((row.seeds for row in rows), default=0), "seed"),
        runs=counted(results.planned, "run"),
        results=results,
        figures=Table.of(columns(rows), rows),
        explained=" ".join(notes(rows)),
        facts=provenance.facts(results),
    )


def as_latex(results: Results) -> str:
    """The main columns as a `tabular` environment; comments say where they come from."""
    main = [column for column in by_row(columns(results.rows)) if column.main]
    origin = [*provenance.lines(results), *mark_notes(results.rows)]
    return filled("summary.tex", origin=origin, table=Table.of(main, results.rows))


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
