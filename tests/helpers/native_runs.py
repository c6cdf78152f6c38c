"""A build of the native part for the tests, and programs that run with and without it."""

import fcntl
import os
import shutil
import subprocess
import sysconfig
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import environment, python

from ampatch.native import building, loading

HAS_COMPILER = (
    shutil.which(os.environ.get("CXX", "c++")) is not None
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler and Python headers")

CHECKED = """
import os, sys, torch
from ampatch import native
assert native.status().active is (os.environ["AMPATCH_NATIVE"] == "1"), native.status()
"""


def cache_with_build(factory: pytest.TempPathFactory, compiles: bool) -> str:
    """The caller's cache if it has a build that matches, else (slow) one made for all workers."""
    if loading.built_file().is_file():
        return os.environ["AMPATCH_CACHE"]
    if not HAS_COMPILER:
        pytest.skip("no C++ compiler and Python headers")
    if not compiles:
        pytest.skip("AMPATCH_CACHE has no build of `ampatch build`")
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    cache = str(root / "native-cache")
    with open(root / "native-lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("AMPATCH_CACHE", cache)
        if not loading.built_file().is_file():
            building.build()
    return cache


def run_native(
    program: str, *arguments: object, native: str, cache: str
) -> subprocess.CompletedProcess:
    """The Python program in a process with `AMPATCH_NATIVE=native`; `""` leaves it unset."""
    variables = environment(AMPATCH_NATIVE=native, AMPATCH_CACHE=cache)
    return python("-c", textwrap.dedent(program), *arguments, env=variables)


def same_bits(program: str, cache: str) -> Any:
    """Run `program` without and with the native part: what it saves has the same bits.

    The program saves a dict (of tensors, numbers, text, lists and dicts) with
    `torch.save(found, sys.argv[1])`; torch and sys are imported.  Returns the dict.
    """
    results = []
    for native in ("0", "1"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found.pt")
            text = CHECKED + textwrap.dedent(program)
            done = run_native(text, path, native=native, cache=cache)
            assert done.returncode == 0, f"AMPATCH_NATIVE={native}:\n{done.stderr}"
            results.append(torch.load(path, weights_only=True))
    assert results[0], "the program saved nothing"
    assert different(*results) == [], "other bits with the native part"
    return results[0]


def different(first: Any, other: Any, where: str = "") -> list[str]:
    """The paths of what differs, in bits, types or order."""
    if type(first) is not type(other):
        return [f"{where}: {type(first).__name__} and {type(other).__name__}"]
    if isinstance(first, dict):
        if list(first) != list(other):
            return [f"{where}: keys {list(first)} and {list(other)}"]
        return [line for k in first for line in different(first[k], other[k], f"{where}.{k}")]
    if isinstance(first, (list, tuple)):
        if len(first) != len(other):
            return [f"{where}: {len(first)} and {len(other)} items"]
        pairs = enumerate(zip(first, other, strict=True))
        return [line for n, pair in pairs for line in different(*pair, f"{where}[{n}]")]
    if isinstance(first, torch.Tensor):
        return [] if _bits(first) == _bits(other) else [f"{where}: {first} and {other}"]
    return [] if repr(first) == repr(other) else [f"{where}: {first!r} and {other!r}"]


def _bits(tensor: torch.Tensor) -> tuple:
    """All that can be seen of a tensor: the bytes, so that NaN equals NaN and -0.0 not 0.0."""
    flat = tensor.detach().contiguous().reshape(-1)
    seen = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad)
    return (*seen, bytes(flat.view(torch.uint8).tolist()))
