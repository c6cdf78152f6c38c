"""A sweep's results as files: JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import write_json, write_whole
from ampatch.sweep.measure.step_parts import PARTS
from ampatch.sweep.report.judge import method
from ampatch.sweep.report.results import SUMMARY, Results, Row
from ampatch.sweep.report.table import PARTS_NOTE, Column, columns, notes, part_columns

_PLAIN = (
    "label", "opt_level", "dtype", "engine", "status", "outcome", "runs", "good_runs", "seeds",
    "step_ms", "cpu_ms", "speed", "pace", "samples_per_second", "memory_bytes", "memory_kind",
    "first_loss", "last_loss", "steps", "skipped", "non_finite", "loss_scale", "seconds",
)  # fmt: skip
_JUDGED = (
    "name", "mean", "sd", "base_mean", "base_sd", "difference", "low", "high", "p", "corrected_p",
    "smallest",
)  # fmt: skip


def write_files(directory: Path, results: Results) -> None:
    """Write `summary.json`, `summary.csv` and `summary.md`, each completely or not at all."""
    write_json(directory / SUMMARY, results.to_json())
    write_whole(directory / "summary.csv", as_csv(results.rows))
    write_whole(directory / "summary.md", as_markdown(results))


def as_csv(rows: Sequence[Row]) -> str:
    """One line for each row; a missing figure is empty.  Metrics are `metric:NAME`."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    ends = ("low", "high")
    head = [*_PLAIN, *(f"step_ms_{end}" for end in ends), *(f"speed_{end}" for end in ends)]
    head += [f"part_ms:{part}" for part in PARTS]
    head += [f"metric:{name}" for name in metrics] + [f"judged_{name}" for name in _JUDGED]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "verdict"])
    for row in rows:
        cells: list[Any] = [getattr(row, name) for name in _PLAIN]
        cells += [getattr(row.step_times, end, None) for end in ends]
        cells += [getattr(row.speeds, end, None) for end in ends]
        cells += [row.parts.get(part) for part in PARTS]
        cells += [row.metrics.get(name) for name in metrics]
        judged = row.comparisons[0] if row.comparisons else None
        cells += [getattr(judged, name, None) for name in _JUDGED]
        writer.writerow([*cells, row.verdict])
    return text.getvalue()


def as_markdown(results: Results) -> str:
    """The table, the verdicts and the method, for a paper's appendix."""
    rows = results.rows
    parts = part_columns(rows)
    lines = [
        f"# {Path(results.script).name} at several opt levels",
        "",
        f"`{' '.join([results.script, *results.arguments])}`, {results.done} of "
        f"{results.planned} runs, begun {results.started}.",
        "",
        *_table(rows, columns(rows)),
        *([*_table(rows, parts), PARTS_NOTE, ""] if parts else []),
        *(f"- {row.name}: {_escaped(row.verdict)}" for row in rows),
        "",
        f"Recommendation: {_escaped(results.recommendation)}",
        "",
        *(f"{note}\n" for note in results.notes),
        *(f"{note}\n" for note in [*notes(rows), method("O0")]),
        ", ".join(f"{name} {version}" for name, version in results.versions.items()) + ".",
        *(f"{name.capitalize()}: {text}." for name, text in results.machine.items()),
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row], shown: Sequence[Column]) -> list[str]:
    """The lines of a table, and an empty one."""
    return [
        _line(column.title for column in shown),
        "|" + "|".join("---:" if column.right else "---" for column in shown) + "|",
        *(_line(column.text(row) for column in shown) for row in rows),
        "",
    ]


def _line(cells: Any) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
