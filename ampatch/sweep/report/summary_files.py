"""A sweep's results as files: JSON, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import write_json, write_whole
from ampatch.sweep.measure.step_parts import PARTS
from ampatch.sweep.report import provenance
from ampatch.sweep.report.judge import method
from ampatch.sweep.report.latex import as_method, as_table
from ampatch.sweep.report.numbers import counted
from ampatch.sweep.report.results import SUMMARY, TABLES, Results, Row
from ampatch.sweep.report.table import PARTS_NOTE, Column, columns, mark_notes, notes, part_columns

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
    """Write `summary.json` and the tables, each completely or not at all."""
    write_json(directory / SUMMARY, results.to_json())
    write_tables(directory, results)


def write_tables(directory: Path, results: Results) -> None:
    """Write `summary.csv`, `.md` and `.tex`, and `method.tex`."""
    for name, make in zip(TABLES, (as_csv, as_markdown, as_table, as_method)):
        write_whole(directory / name, make(results))


def as_csv(results: Results) -> str:
    """One line for each row; a missing figure is empty.

    Metrics are `metric:NAME`.  The last columns, `from:NAME`, say in each line where the
    figures come from; comments at the top would have to be told to every reader.
    """
    rows = results.rows
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    scatter = list(dict.fromkeys(name for row in rows for name in row.sds))
    ends = ("low", "high")
    origin = provenance.columns(results)
    head = [*_PLAIN, *(f"step_ms_{end}" for end in ends), *(f"speed_{end}" for end in ends)]
    head += [f"part_ms:{part}" for part in PARTS]
    head += [f"metric:{name}" for name in metrics] + [f"sd:{name}" for name in scatter]
    head += [f"judged_{name}" for name in _JUDGED] + ["marks"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "verdict", *(f"from:{name}" for name in origin)])
    for row in rows:
        cells: list[Any] = [getattr(row, name) for name in _PLAIN]
        cells += [getattr(row.step_times, end, None) for end in ends]
        cells += [getattr(row.speeds, end, None) for end in ends]
        cells += [row.parts.get(part) for part in PARTS]
        cells += [row.metrics.get(name) for name in metrics]
        cells += [row.sds.get(name) for name in scatter]
        judged = row.comparisons[0] if row.comparisons else None
        cells += [getattr(judged, name, None) for name in _JUDGED]
        cells.append("; ".join(note for note in mark_notes([row])))
        writer.writerow([*cells, row.verdict, *origin.values()])
    return text.getvalue()


def as_markdown(results: Results) -> str:
    """The recommendation, the table, the verdicts and the method, for a paper's appendix."""
    rows = results.rows
    parts = part_columns(rows)
    paragraphs = [
        f"# {_escaped(Path(results.script).name)} at several opt levels",
        _what_was_run(results),
        f"**Recommendation.** {_escaped(results.recommendation)}",
        *(f"**Note.** {_escaped(note)}" for note in results.notes),
        _table(rows, columns(rows)),
        _escaped(" ".join([*notes(rows), method("O0")])),
        *(["## Parts of a step", _table(rows, parts), _escaped(PARTS_NOTE)] if parts else []),
        "## Verdicts",
        "\n".join(f"- **{_escaped(row.name)}**: {_escaped(row.verdict)}" for row in rows),
        "## Where the figures come from",
        "\n".join(
            f"- {name}: `{text.replace('`', chr(39))}`"
            for name, text in provenance.facts(results).items()
        ),
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _what_was_run(results: Results) -> str:
    """A paragraph that says what was trained, how often, and on what."""
    seeds = max((row.seeds for row in results.rows), default=0)
    device = results.provenance.get("device", "")
    machine = device if device not in ("", "cpu") else results.versions.get("cpu", "")
    said = [
        f"`{provenance.called(results)}` was trained with {counted(seeds, 'seed')} at each "
        f"of {counted(len(results.rows), 'row')} of opt level and dtype",
        f" on {_escaped(machine)}" if machine else "",
        f", with {provenance.software(results)}. " if provenance.software(results) else ". ",
        f"{results.done} of {counted(results.planned, 'run')} have ended; the first began "
        f"{results.started}.",
    ]
    return "".join(said)


def _table(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    lines = [
        _line(column.title for column in shown),
        "|" + "|".join("---:" if column.right else "---" for column in shown) + "|",
        *(_line(column.text(row) for column in shown) for row in rows),
    ]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
