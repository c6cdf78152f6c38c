"""Errors about dtypes, explained: which tensor is half, and which cast made it so.

PyTorch says which two dtypes met.  If ampatch made one of them half, the user needs to know
which tensor it is and which call made it.  The answer is looked for after the error: in
the locals of the failing frame, in their autograd graphs, in the source of the line that
bound them.  Calls without an error cost nothing more.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_ABOUT = (
    *("dtype", "scalar type", "data type", "same type", "Type does not"),
    *("'Half'", "'BFloat16'", "c10::Half", "c10::BFloat16", "HalfTensor", "BFloat16Tensor"),
    *("HalfType", "BFloat16Type"),
)
_KINDS = {
    **dict.fromkeys(("half", "float16", "bfloat16"), "half"),
    **dict.fromkeys(("float", "float32"), "single"),
    **dict.fromkeys(("double", "float64"), "double"),
    **dict.fromkeys(("bool", "byte", "char", "short", "int", "long"), "whole"),
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), "whole"),
    **dict.fromkeys(("complexhalf", "complexfloat", "complexdouble"), "complex"),
}
"""What torch's messages call dtypes, in small letters: `c10::Half`, `torch.HalfTensor`, `Half`."""
_CONSTANT = "Half without overflow"
"""In torch's message about a constant that float16 cannot hold, as of `masked_fill(mask, -1e9)`."""
_LARGEST = (
    "float16 holds numbers up to 65504. Where a mask is meant, write torch.finfo(x.dtype).min for "
    "the constant, or -torch.inf where no row is masked as a whole; else compute with x.float()."
)
_OURS = __name__.partition(".")[0]
_FAR = 64
"""How many steps back in a graph to look for the call that made a tensor half."""

_FEW = 4
_NOTED = "_ampatch_noted"

MADE_BY = {
    "Addmm": "torch.nn.functional.linear or torch.addmm",
    "Mm": "torch.mm or a matrix product",
    "Bmm": "torch.bmm or a matrix product",
    "Mv": "torch.mv",
    "Baddbmm": "torch.baddbmm",
    "Addbmm": "torch.addbmm",
    "Addmv": "torch.addmv",
    "Addr": "torch.addr",
    "Convolution": "a convolution",
    "ScaledDotProduct": "torch.nn.functional.scaled_dot_product_attention",
    "PreluKernel": "torch.nn.functional.prelu",
    "Linear": "torch.nn.functional.linear",
    "MkldnnRnn": "a recurrent layer",
    "CudnnRnn": "a recurrent layer",
}
"""Names of autograd's nodes begin with these, where a call that casts to half made a tensor."""


def note(error: BaseException | None, cause: str) -> None:
    """Add to an error about dtypes which tensors are half and what made them; once per error.

    `cause` says why anything is half here.
    """
    if not isinstance(error, (RuntimeError, TypeError, ValueError)) or hasattr(error, _NOTED):
        return
    if _CONSTANT in str(error):
        _add(error, f"ampatch: {cause}, and {_LARGEST}")
        return
    if not _is_due_to_half(error):
        return
    text = _describe(error, cause)
    if text is not None:
        _add(error, text)


def _is_due_to_half(error: BaseException) -> bool:
    """Whether a message is about half beside FP32: it names these two dtypes, or, torch's, none.

    One that names other dtypes has another cause: in FP32 it would be the same.
    """
    text = str(error)
    if not any(word in text for word in _ABOUT):
        return False
    text = re.sub(r"complex<\w+>", "complexfloat", text)
    words = re.findall(r"[a-z]+\d*", re.sub(r"Tensor|Type|CPU|CUDA", "", text).lower())
    named = {_KINDS[word] for word in words if word in _KINDS}
    return named == {"half", "single"} or (not named and type(error) is RuntimeError)


def _add(error: BaseException, text: str) -> None:
    setattr(error, _NOTED, True)
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # before Python 3.11
        error.args = (f"{error}\n{text}", *error.args[1:])


def _describe(error: BaseException, cause: str) -> str | None:
    """The first frame outwards that holds a half tensor; without one, the line that made it."""
    frames = list(_frames(error))
    for frame, line in frames:
        tensors = _tensors(frame, line)
        halves = [name for name, value in tensors.items() if value.dtype in _HALF]
        if halves:
            said = [
                f"{name} is {tensors[name].dtype}{_origin(name, tensors[name], frame, line)}"
                for name in halves
            ] + [
                f"{name} is {value.dtype}"
                for name, value in tensors.items()
                if name not in halves and value.is_floating_point()
            ]
            return (
                f"ampatch: {cause}. In {_place(frame, line)}: {'; '.join(said)}. Cast one of them "
                f"yourself, such as {halves[0]}.float(), {_REMEDY}"
            )
    user_s = [found for found in frames if _package(found[0]) != "torch"] or frames
    if not user_s:
        return None
    frame, line = user_s[0]
    return (
        f"ampatch: {cause}. In {_place(frame, line)}: a half tensor was made within this line, by "
        f"{' or '.join(_calls(frame, line)) or 'one of its calls'}. Cast it yourself, {_REMEDY}"
    )


_REMEDY = (
    "or keep the call that made it in FP32: see `overrides=` of ampatch.initialize and "
    'ampatch.precision("float").'
)


def _place(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename}:{line}, `{_source(frame, line)}`)"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _calls(frame: FrameType, line: int) -> list[str]:
    """The calls in a line that are arguments of others."""
    tree, first = _tree(frame.f_code)
    inner: dict[str, None] = {}  # an ordered set
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and node.lineno + first - 1 == line:
            for argument in (*node.args, *(word.value for word in node.keywords)):
                for found in ast.walk(argument):
                    if isinstance(found, ast.Call):
                        inner[ast.unparse(found)] = None
    return [f"`{call}`" for call in inner]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """`(frame, line)` of what raised it, innermost first, without ampatch's."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    for frame, line in reversed(found):
        if _package(frame) != _OURS:
            yield frame, line


def _tensors(frame: FrameType, line: int) -> dict[str, Tensor]:
    """A frame's tensors under their names there: those of its line, if one of them is half."""
    found = {}
    for name, value in frame.f_locals.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value[:8]):
                if isinstance(item, Tensor):
                    found[f"{name}[{place}]"] = item
    words = set(re.findall(r"\w+", _source(frame, line)))
    named = {name: value for name, value in found.items() if name.partition("[")[0] in words}
    return named if any(value.dtype in _HALF for value in named.values()) else found


def _origin(name: str, value: Tensor, frame: FrameType, line: int) -> str:
    """What made a tensor half, as far as its graph and the source say."""
    maker, bound = _maker(value), _bindings(name, frame, line)
    said = f", made by {maker}" if maker else ""
    return said + (f" (from {', '.join(bound)})" if bound else "")


def _maker(value: Tensor) -> str | None:
    waiting, seen = [value.grad_fn], 0
    while waiting and seen < _FAR:
        node = waiting.pop(0)
        if node is None:
            continue
        seen += 1
        for start, maker in MADE_BY.items():
            if node.name().startswith(start):
                return maker
        if not node.name().startswith("ToCopy"):  # what was cast is half by the cast alone
            waiting.extend(inner for inner, _ in node.next_functions)
    return None


def _bindings(name: str, frame: FrameType, line: int) -> list[str]:
    """The lines above that bound a local, by the source; the last few."""
    tree, first = _tree(frame.f_code)
    lines = set()
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            names = {inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name)}
            if name in names and node.lineno + first - 1 < line:
                lines.add(node.lineno + first - 1)
    return [f"`{_source(frame, number)}`" for number in sorted(lines)[-_FEW:]]


def _tree(code: CodeType) -> tuple[ast.AST | None, int]:
    try:
        lines, first = inspect.getsourcelines(code)
        return ast.parse(textwrap.dedent("".join(lines))), max(first, 1)
    except (OSError, SyntaxError, TypeError):
        return None, 0


def _source(frame: FrameType, line: int) -> str:
    return linecache.getline(frame.f_code.co_filename, line).strip() or "source not found"
