"""The answer for readers: lines for the terminal, and one page with the tree of the model.

Needs the packages of `ampatch[sweep]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ampatch.sweep.json_files import write_whole
from ampatch.sweep.report.numbers import MISSING
from ampatch.tune.answer import CURED, NO_CURE, PAGE, PASSES, UNDECIDED, Answer
from ampatch.tune.globs import covered
from ampatch.tune.remedies import SETTINGS, WHY
from ampatch.tune.sensitivity import Sensitivity

MOST_ROWS = 20  # of the table on the terminal
MOST_NAMES = 8  # of modules in a sentence
WIDTH = 120  # letters in a line where the output is no terminal
LIGHT, DARK = -4.0, 0.0  # decimal exponents of the errors that are white and full colour
_HEADS = ("module", "class", "outputs", "gradients", "overflow", "to zero", "FP32")


def summary(answer: Answer) -> list[str]:
    """What was found, in sentences."""
    level = f"{answer.opt_level} in {answer.dtype}"
    if answer.outcome == PASSES:
        return [f"{level} passes as it is: no module needs FP32.{_shown(answer)}"]
    if answer.outcome == UNDECIDED:
        return [
            f"Not known yet: {answer.candidates} candidates were tried, none passed, and that was "
            "all. --resume --candidates N goes on."
        ]
    if answer.outcome == NO_CURE:
        return [f"{level} does not come back to O0, {_left_in_half(answer)}"]
    modules = [name for name in answer.needed if name.partition("=")[0] not in SETTINGS]
    lines = []
    if modules:
        count = f"{len(modules)} module{'s' * (len(modules) > 1)}"
        lines.append(f"{level} comes back to O0 with {count} in FP32: {', '.join(modules)}.")
    for name in answer.settings:
        cause = "Another cause" if modules else "The cause is no module, it"
        lines.append(f"{cause} is {WHY[name]}: {name}={answer.settings[name]!r}.")
    if not answer.is_smallest:
        lines.append(
            f"{answer.candidates} candidates were tried, and that was all: a smaller set may do. "
            "--resume --candidates N goes on."
        )
    return [*lines, _shown(answer).strip(), answer.line, _speeds(answer)]


def _left_in_half(answer: Answer) -> str:
    """What no candidate had in FP32, and how the level fails."""
    named = "".join(f" and {name}={value!r}" for name, value in answer.settings_tried.items())
    uncalled = ", ".join(answer.uncalled[:MOST_NAMES])
    if len(answer.uncalled) > MOST_NAMES:
        uncalled += f" and {len(answer.uncalled) - MOST_NAMES} more"
    others = f" modules whose forward was not seen to be called ({uncalled})," if uncalled else ""
    return (
        f"not even with every module in FP32{named}. What is left in half: functions of the "
        "model's own forward and what it hands from one module to the next,"
        f"{others} and code outside the model (a loss in half, weights changed by hand). As it is: "
        f"{answer.failure}. ampatch run --debug shows where the first inf or NaN comes from."
    )


def _shown(answer: Answer) -> str:
    """How small a difference the trials would have shown, or why that is too little."""
    if answer.not_shown:
        return f" But {answer.not_shown}"
    if answer.unseen is None:
        return ""
    return f" A difference in {answer.judged} of {answer.unseen:.2g} would have been seen."


def _speeds(answer: Answer) -> str:
    """What the cure costs."""
    shown = {"level": answer.opt_level, "cure": "with the cure"}
    said = [f"{text}: {answer.paces[name]}" for name, text in shown.items() if name in answer.paces]
    return f"Speed, {'; '.join(said)}." if said else ""


def cells(answer: Answer) -> Iterator[tuple[str, ...]]:
    """The table's rows, the most sensitive module first."""
    for one in answer.modules:
        yield (
            one.path,
            one.kind,
            *(_largest(one, name) for name in ("output", "gradient")),
            _share(one.overflow),
            _share(one.vanish),
            "needed" if one.path in answer.needed else "",
        )


def troubles(answer: Answer) -> list[str]:
    """The modules that have no figures, and why."""
    return [
        f"{'' if one.is_refused else 'Not measured: '}{one.path}: {one.trouble}"
        for one in answer.modules
        if one.trouble
    ]


def _largest(one: Sensitivity, name: str) -> str:
    found = [getattr(sample, name) for sample in one.samples]
    known = [value for value in found if value is not None]
    return f"{max(known):.2g}" if known else MISSING


def _share(share: float) -> str:
    return f"{100 * share:.2g} %" if share else ""


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
        for row in list(cells(answer))[:MOST_ROWS]:
            table.add_row(*row)
        console.print(table, markup=False)
        console.print(_note(answer), markup=False)
    for line in troubles(answer):
        console.print(line, markup=False)
    for line in filter(None, summary(answer)):
        console.print(line, markup=False)


def _note(answer: Answer) -> str:
    more = len(answer.modules) - MOST_ROWS
    hidden = f" {more} more modules are in {PAGE}." if more > 0 else ""
    return (
        f"Relative errors of outputs and gradients in {answer.dtype} beside FP32, the largest of a "
        f"module's samples; shares of values that overflow, and that become 0.{hidden}"
    )


@dataclass(frozen=True)
class Box:
    """A module in the picture of the tree: where it is, its colour, and what it says."""

    first: int  # of the leaves, which are in rows
    leaves: int
    depth: int
    name: str
    title: str
    strength: float | None  # of its colour, 0 to 1; None: not measured
    is_needed: bool


def tree(answer: Answer) -> list[Box]:
    """The model as an icicle: each module beside those in it, as high as all of its leaves."""
    children: dict[str, list[str]] = {}
    known = set(answer.paths)
    for path in dict.fromkeys(answer.paths):
        parent = path.rpartition(".")[0]
        children.setdefault(parent if parent in known else "", []).append(path)
    by_path = {one.path: one for one in answer.modules}
    boxes: list[Box] = []

    def place(path: str, first: int, depth: int) -> int:
        end = first
        for child in children.get(path, []):
            end = place(child, end, depth + 1)
        leaves = max(end - first, 1)
        if path:
            boxes.append(_box(path, by_path.get(path), answer.needed, first, leaves, depth))
        return first + leaves

    place("", 0, -1)
    return boxes


def _box(
    path: str, one: Sensitivity | None, needed: Sequence[str], first: int, leaves: int, depth: int
) -> Box:
    title, strength = path, None
    if one is not None and (one.samples or one.is_refused):
        said = "does not run in half" if one.is_refused else f"relative error {one.error:.2g}"
        title = f"{path} ({one.kind}): {said}"
        strength = _strength(one.error)
    name = path.rpartition(".")[2]
    return Box(first, leaves, depth, name, title, strength, covered(needed, path))


def _strength(error: float) -> float:
    if not math.isfinite(error):
        return 1.0
    exponent = math.log10(error) if error > 0 else LIGHT
    return min(max((exponent - LIGHT) / (DARK - LIGHT), 0.0), 1.0)


def write_page(directory: Path, answer: Answer) -> None:
    """Write the page of an answer."""
    import jinja2

    source = resources.files("ampatch.tune").joinpath("page.html.j2").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    boxes = tree(answer)
    text = page.from_string(source).render(
        answer=answer,
        summary=[line for line in summary(answer) if line],
        heads=_HEADS,
        rows=list(cells(answer)),
        troubles=troubles(answer),
        boxes=boxes,
        leaves=max((box.first + box.leaves for box in boxes), default=0),
        levels=max((box.depth + 1 for box in boxes), default=0),
        cured=CURED,
    )
    write_whole(directory / PAGE, text)
