"""The answer as a table of the most sensitive modules, as sentences, and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampatch.sweep import read_sweep, write_report
from ampatch.sweep.json_files import write_json
from ampatch.sweep.report.numbers import MISSING
from ampatch.sweep.report.results import SUMMARY
from ampatch.tune.answer import ANSWER, NO_CURE, PASSES, Answer
from ampatch.tune.remedies import SETTINGS, WHY
from ampatch.tune.sensitivity import Sensitivity

MAX_ROWS = 20  # of the table on the terminal
WIDTH = 120  # characters per line if the output is not a terminal
_HEADS = ("module", "class", "outputs", "gradients", "overflow", "to zero", "FP32")


def summary(answer: Answer) -> list[str]:
    """The answer in sentences."""
    level = f"{answer.opt_level} in {answer.dtype}"
    resume = f"--resume --candidates {2 * answer.candidates}"
    if answer.outcome == PASSES:
        return [f"{level} passes as it is: no module needs FP32.{_detectable(answer)}"]
    if answer.outcome == NO_CURE:
        return [f"{level} does not train as O0 does, {_left_in_half(answer)}"]
    if answer.not_shown and not answer.needed:
        return [f"Not known yet whether {level} trains as O0 does: {answer.not_shown}"]
    if not answer.needed:
        return [
            f"Not known yet: {answer.candidates} candidates were tried, which is the limit, and "
            f"none passed. {resume} continues."
        ]
    modules = [name for name in answer.needed if name.partition("=")[0] not in SETTINGS]
    lines = []
    if answer.not_shown:
        lines.append(f"Not known yet whether this is enough: {answer.not_shown}")
    if modules:
        count = f"{len(modules)} module{'s' * (len(modules) > 1)}"
        trains = "may train" if answer.not_shown else "trains"
        lines.append(f"{level} {trains} as O0 does with {count} in FP32: {', '.join(modules)}.")
    for name in answer.settings:
        cause = "Another cause" if modules else "The cause is no module, it"
        lines.append(f"{cause} is {WHY[name]}: {name}={answer.settings[name]!r}.")
    if not answer.is_smallest:
        lines.append(
            f"{answer.candidates} candidates were tried, which is the limit: a smaller set may do. "
            f"{resume} continues."
        )
    titles = {"level": answer.opt_level, "cure": "with the cure"}
    paces = [f"{text}: {answer.paces[key]}" for key, text in titles.items() if key in answer.paces]
    speeds = f"Speed, {'; '.join(paces)}." if paces else ""
    return [*lines, _detectable(answer).strip(), answer.line, speeds]


def _left_in_half(answer: Answer) -> str:
    """Say what stays in half with every remedy, and how the level fails."""
    settings = "".join(f" and {name}={value!r}" for name, value in answer.settings_tried.items())
    return (
        f"not even with every module that calls torch's functions in FP32{settings}. What is left "
        "in half: functions of the model's own forward and what it passes from one module to the "
        "next, modules whose forward is not called (model.encoder.encode(x)), and code outside the "
        f"model (a loss in half, weights changed by hand). As it is: {answer.failure}. "
        "ampatch run --debug shows where the first inf or NaN comes from."
    )


def _detectable(answer: Answer) -> str:
    """The smallest difference that the trials would have shown, as a sentence."""
    if answer.not_shown or answer.unseen is None:
        return ""
    return f" A difference in {answer.judged} of {answer.unseen:.2g} would have been seen."


def table_rows(answer: Answer) -> Iterator[tuple[str, ...]]:
    """The table's rows, the most sensitive module first."""
    for module in answer.modules:
        yield (
            module.path,
            module.kind,
            *(_largest(module, name) for name in ("output", "gradient")),
            _percent(module.overflow),
            _percent(module.vanish),
            "needed" if module.path in answer.needed else "",
        )


def troubles(answer: Answer) -> list[str]:
    """The modules that have no figures, and why."""
    return [
        f"{'' if module.is_refused else 'Not measured: '}{module.path}: {module.trouble}"
        for module in answer.modules
        if module.trouble
    ]


def _largest(module: Sensitivity, name: str) -> str:
    values = [getattr(sample, name) for sample in module.samples]
    known = [value for value in values if value is not None]
    return f"{max(known):.2g}" if known else MISSING


def _percent(fraction: float) -> str:
    """A fraction in percent with two digits: "over 99 %" just below 1, "" for 0."""
    percent = "over 99" if 0.995 <= fraction < 1 else f"{float(f'{100 * fraction:.2g}'):g}"
    return f"{percent} %" if fraction else ""


def write_pages(directory: Path, answer: Answer) -> None:
    """Write the report of the trials, with this answer as the recommendation."""
    results = read_sweep(directory).results
    results.recommendation = " ".join(filter(None, summary(answer)))
    write_json(directory / SUMMARY, results.to_json())
    write_report(directory)


def write_terminal(answer: Answer, file: Any) -> None:
    """Print the answer and the most sensitive modules."""
    from rich.console import Console
    from rich.table import Table

    width = None if file.isatty() else WIDTH
    console = Console(file=file, highlight=False, soft_wrap=True, width=width)
    if answer.modules:
        table = Table(box=None, pad_edge=False)
        for head in _HEADS:
            table.add_column(head, overflow="fold")
        for row in list(table_rows(answer))[:MAX_ROWS]:
            table.add_row(*row)
        console.print(table, markup=False)
        console.print(_note(answer), markup=False)
    for line in troubles(answer):
        console.print(line, markup=False)
    for line in filter(None, summary(answer)):
        console.print(line, markup=False)


def _note(answer: Answer) -> str:
    num_hidden = len(answer.modules) - MAX_ROWS
    rest = f" {num_hidden} more modules are in {ANSWER}." if num_hidden > 0 else ""
    return (
        f"Relative errors of outputs and gradients in {answer.dtype} beside FP32, the largest of a "
        f"module's samples; shares of values that overflow, and that become 0.{rest}"
    )
