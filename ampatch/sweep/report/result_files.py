"""Writes a sweep's results as JSON, CSV, Markdown and LaTeX, after each run.

Values in a template are escaped as its format requires, unless they are marked as `safe`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2  # torch depends on it
from pandas import DataFrame

from ampatch.sweep.json_files import to_json, write_json, write_whole
from ampatch.sweep.report import provenance
from ampatch.sweep.report.numbers import pluralize
from ampatch.sweep.report.results import SUMMARY, TABLES, Results, Row
from ampatch.sweep.report.table import mark_notes, notes, table

_ROW_COLUMNS = (
    "label", "opt_level", "dtype", "engine", "status", "outcome", "runs", "good_runs", "seeds",
    "step_ms", "cpu_ms", "speed", "pace", "by_cpu", "memory_bytes",
    "memory_kind", "first_loss", "last_loss", "steps", "skipped", "loss_scale",
    "seconds",
)  # fmt: skip
_JUDGED_COLUMNS = (
    "name", "better", "mean", "sd", "base_mean", "base_sd", "difference", "low", "high", "p",
    "corrected_p", "smallest",
)  # fmt: skip
_LATEX_ESCAPES = str.maketrans(
    {
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

    Metrics have columns `metric:NAME`.  The last columns, `from:NAME`, repeat the provenance of the
    figures in each line, because most programs refuse comments at the top.
    """
    lines = DataFrame([to_json(_csv_line(row)) for row in results.rows], dtype=object)
    for name, text in provenance.facts(results).items():
        lines[f"from:{name.replace(',', '').replace(' ', '_')}"] = text
    return lines.to_csv(index=False, lineterminator="\n")


def _csv_line(row: Row) -> dict[str, Any]:
    """The figures of a row by column."""
    judged = row.comparisons[0] if row.comparisons else None
    return {
        **{name: getattr(row, name) for name in _ROW_COLUMNS},
        **{f"step_ms_{end}": getattr(row.step_times, end, None) for end in ("low", "high")},
        **{f"speed_{end}": getattr(row.speeds, end, None) for end in ("low", "high")},
        **{f"judged_{name}": getattr(judged, name, None) for name in _JUDGED_COLUMNS},
        "marks": "; ".join(mark_notes([row])),
        "verdict": row.verdict,
        **{f"metric:{name}": value for name, value in row.metrics.items()},
        **{f"sd:{name}": value for name, value in row.sds.items()},
    }


def as_markdown(results: Results) -> str:
    """The recommendation, the table and the verdicts, for a paper's appendix."""
    rows = results.rows
    return render_template(
        "summary.md", script=Path(results.script).name, called=provenance.script_command(results),
        seeds=pluralize(max((row.seeds for row in rows), default=0), "seed"),
        runs=pluralize(results.planned, "run"), results=results, figures=table(rows),
        explained=" ".join(notes(rows)), facts=provenance.facts(results),
    )  # fmt: skip


def as_latex(results: Results) -> str:
    """The main columns as a `tabular` environment; comments have the provenance."""
    columns = table(results.rows, main=True)
    form = f"@{{}}l{'r' * (columns.shape[1] - 1)}@{{}}"
    text = columns.to_latex(index=False, escape=True, column_format=form).translate(_LATEX_ESCAPES)
    facts, marks = provenance.lines(results), mark_notes(results.rows)
    comments = [*facts, *marks, r"needs \usepackage{booktabs}"]
    return "".join(f"% {line}\n" for line in comments) + text


def render_template(name: str, **values: Any) -> str:
    """The document `name`, such as `page.html`, with these values."""
    return _environment(Path(name).suffix).get_template(f"{name}.j2").render(values)


@functools.cache
def _environment(form: str) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
        **({"autoescape": True} if form == ".html" else {"finalize": _for_markdown}),
    )  # fmt: skip


def _for_markdown(value: Any) -> Any:
    """`value` as Markdown shows it, also in a table."""
    if hasattr(value, "__html__"):
        return value
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
