"""Writes what the pages of docs/reference/ say of functions, classes and commands.

    python docs/site/reference.py

A page says between two comments what belongs there, and keeps the rest of its text:

    <!--reference ampatch.initialize-->   a function, or a class with all public members
    <!--reference ampatch.Case: label-->  a class with these members, or, without names, with none
    <!--commands-->                       the options of each command

Functions and classes are read from the source, and commands from their parsers, so that the text is
the same for every version of Python and torch.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/reference"
PART = re.compile(r"(<!--(reference (?P<name>[\w.]+)(?P<members>:[\w ]*)?|commands)-->\n).*?"
                  r"(<!--end-->)", re.DOTALL)  # fmt: skip
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
ITEM = re.compile(r"    (\*{0,2}\w[\w, .]*): (.*)")
CODE = re.compile(r"(`[^`]*`)|[*<]")
WIDTH = 90
COMMENTS: dict[ast.AnnAssign, str] = {}
"""What the source says behind an attribute."""

Definition = ast.FunctionDef | ast.ClassDef


def completed(text: str) -> str:
    """The text of a page with each part as it is to be."""

    def part(found: re.Match[str]) -> str:
        if found["name"] is None:
            made = commands()
        else:
            members = found["members"]
            made = described(found["name"], None if members is None else members[1:].split())
        return f"{found[1]}\n{made}\n\n{found[5]}"

    return PART.sub(part, text)


# Functions and classes


def described(name: str, members: list[str] | None) -> str:
    """A section for a function or a class, with sections for its members."""
    node = find(name)
    return "\n\n".join(_section(node, "", members))


def find(name: str) -> Definition:
    """The definition behind a dotted name, through the imports of packages."""
    parts = name.split(".")
    cut = next(n for n in range(len(parts) - 1, 0, -1) if _file(parts[:n]) is not None)
    return _member(parts[:cut], parts[cut])


def _file(parts: list[str]) -> Path | None:
    path = ROOT.joinpath(*parts)
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next(filter(Path.is_file, files), None)


@cache
def _tree(file: Path) -> ast.Module:
    text = file.read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            COMMENTS[node] = rest.partition("  # ")[2]
    return tree


def _member(module: list[str], name: str) -> Definition:
    file = _file(module)
    assert file is not None, module
    tree = _tree(file)
    found = [one for one in tree.body if isinstance(one, Definition) and one.name == name]
    if found:
        return found[-1]  # behind its overloads
    package = module if file.name == "__init__.py" else module[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                base = package[: len(package) - node.level + 1] if node.level else []
                return _member([*base, *(node.module or "").split(".")], alias.name)
    raise LookupError(f"{name} is neither defined nor imported in {file}")


def _section(node: Definition, owner: str, members: list[str] | None) -> Iterator[str]:
    path = f"{owner}.{node.name}" if owner else node.name
    yield f"{'####' if owner else '###'} {path}"
    text = ast.get_docstring(node) or ""
    fields = _fields(node) if "Attributes:" in text.splitlines() else {}  # said with each attribute
    signature = f"class {path}" if fields else _signature(node, path, bool(owner))
    yield f"```py\n{signature}\n```"
    yield _markdown(text, fields)
    if isinstance(node, ast.ClassDef):
        own = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        public = [name for name, one in own.items() if name[0] != "_" and ast.get_docstring(one)]
        for name in public if members is None else members:
            yield from _section(own[name], path, None)


def _signature(node: Definition, path: str, is_method: bool) -> str:
    if isinstance(node, ast.FunctionDef):
        if any(ast.unparse(one).endswith("property") for one in node.decorator_list):
            return f"{path}{_result(node)}"
        return _call(path, node, skipped=int(is_method)) + _result(node)
    made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if made and not _is_error(node):
        return _call(path, made[0], skipped=1)
    names = [f"    {field}" for field in _fields_with_comments(node)]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if _is_error(node) else ""
    return "\n".join([f"class {path}{bases}{':' if names else ''}", *names])


def _fields(node: Definition) -> dict[str, str]:
    """The public annotated names of a class, with their types."""
    fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
    types = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    return {name: kind for name, kind in types.items() if not name.startswith("_")}


def _fields_with_comments(node: Definition) -> Iterator[str]:
    kinds = _fields(node)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and (name := ast.unparse(field.target)) in kinds:
            comment = COMMENTS[field]
            yield f"{name}: {kinds[name]}{f'  # {comment}' if comment else ''}"


def _is_error(node: ast.ClassDef) -> bool:
    return node.name.endswith("Error")


def _result(node: ast.FunctionDef) -> str:
    return "" if node.returns is None else f" -> {ast.unparse(node.returns)}"


def _call(path: str, node: ast.FunctionDef, skipped: int) -> str:
    """`name(arguments)`, on one line where it is short; `skipped` leaves `self` out."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    words = [_argument(*pair) for pair in zip(plain, defaults, strict=True)][skipped:]
    if given.vararg or given.kwonlyargs:
        words.append(f"*{_argument(given.vararg, None) if given.vararg else ''}")
    words += [_argument(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        words.append(f"**{_argument(given.kwarg, None)}")
    line = f"{path}({', '.join(words)})"
    if len(line + _result(node)) <= WIDTH:
        return line
    return "\n".join([f"{path}(", *(f"    {word}," for word in words), ")"])


def _argument(given: ast.arg, default: ast.expr | None) -> str:
    text = given.arg
    if given.annotation is not None:
        text += f": {ast.unparse(given.annotation)}"
    if default is None:
        return text
    shown = ast.unparse(default)
    sign = " = " if given.annotation is not None else "="
    return f"{text}{sign}{_numbers().get(shown, shown)}"


@cache
def _numbers() -> dict[str, str]:
    """Defaults that signatures name, as the numbers they are."""
    from ampatch.config.scale_settings import ScaleSettings
    from ampatch.sweep.cases_and_trials import ROUNDS

    found = {f"ScaleSettings.{name}": value for name, value in vars(ScaleSettings()).items()}
    return {name: repr(value) for name, value in {**found, "ROUNDS": ROUNDS}.items()}


def _markdown(docstring: str, types: dict[str, str]) -> str:
    """A docstring with its sections as lists, and the types of attributes."""
    lines: list[str] = []
    is_in = False
    for line in docstring.splitlines():
        is_in = is_in and (not line or line.startswith(" "))
        if SECTION.fullmatch(line):
            is_in = True
            lines += [f"**{line}**", ""]
        elif is_in and (item := ITEM.match(line)):
            kind = f": {types[item[1]]}" if item[1] in types else ""
            lines.append(f"- `{item[1]}{kind}`: {_escaped(item[2])}")
        elif is_in and line:
            lines.append(f"  {_escaped(line.strip())}")
        else:
            lines.append(line if line.startswith("    ") else _escaped(line))
    return "\n".join(lines).strip()


def _escaped(text: str) -> str:
    """Text whose stars and angles are shown as they are."""
    return CODE.sub(lambda found: found[1] or f"\\{found[0]}", text)


# Commands


def commands() -> str:
    """A section for each command of `ampatch`: its usage, its options, its exit codes.

    An option that an earlier command has with the same help is only named.
    """
    from ampatch.cli.main import _COMMON_CODES, NAMES, build_parser

    [choices] = [
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    known: dict[str, str] = {}
    sections = "\n\n".join(_command(choices[name], known) for name in NAMES)
    sections = sections.replace(f"; {_COMMON_CODES}", "")
    return f"Exit status of every command: {_COMMON_CODES}.\n\n{sections}"


def _command(parser: argparse.ArgumentParser, known: dict[str, str]) -> str:
    """`known` has the first command of each option, by the option's line."""
    places = [one.metavar or one.dest for one in parser._actions if not one.option_strings]
    usage = parser.usage or " ".join([parser.prog, "[options]", *(f"[{one}]" for one in places)])
    lines = [line.strip() for line in usage.splitlines()]
    parts = [f"## {parser.prog}", ", or ".join(f"`{line}`" for line in lines)]
    parts.append(_escaped(parser.description or ""))
    for group in parser._action_groups:
        shown = [one for one in group._group_actions if one.help and one.dest != "help"]
        if shown and group.title not in ("positional arguments", "options"):
            parts.append(f"**{group.title}**")
        if shown:
            parts.append("\n".join(_options(parser, shown, known)))
    return "\n\n".join([*parts, _escaped(parser.epilog or "")])


def _options(
    parser: argparse.ArgumentParser, actions: list[argparse.Action], known: dict[str, str]
) -> Iterator[str]:
    """A line for each new option, then one for those of each earlier command."""
    earlier: dict[str, list[str]] = {}
    for action in actions:
        line = f"- `{_named(action)}`: {_help(parser, action)}"
        command = known.setdefault(line, parser.prog)
        if command == parser.prog:
            yield line
        else:
            earlier.setdefault(command, []).append(f"`{_named(action)}`")
    for command, names in earlier.items():
        place = command.replace(" ", "-")
        yield f"- {', '.join(names)}: as for [{command}](#{place})"


def _named(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    choices = ",".join(map(str, action.choices or ()))
    value = action.metavar or (choices and f"{{{choices}}}")
    if action.nargs == 0 or not names:
        return names or str(value or action.dest)
    return f"{names} {value or action.dest.upper()}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values: dict[str, Any] = {**vars(action), "prog": parser.prog}
    return _escaped((action.help or "") % values)


def main() -> None:
    """Write the pages anew."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(completed(text), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
