"""A fake accelerator: a kind of device beside the CPU, for machines that have none.

`load()` registers it with torch (PrivateUse1) for the rest of the process, as `fake`.  Its memory
is the host's, and its operators are the CPU's, so results have the CPU's bits.  It refuses what
CUDA refuses, and counts what costs time there:

    load()
    with counted() as counts:
        step()
    assert counts.waits == 0

A process that has the folders of `installed(FOLDER)` on its path has the device from
`import torch` on, as from a package of a maker of devices.  The
first `load()` compiles three C++ files into ampatch's cache, which takes about a minute.
"""

import collections
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch

from ampatch.config import environment

NAME = "fake"
_HERE = Path(__file__).parent
_FILE = "fake_accelerator.so"


class Counts(collections.Counter):
    """How often each thing happened: `"launch aten::add.Tensor"`, `"wait number read"`."""

    def _sum(self, kind: str, names: str = "") -> int:
        return sum(times for what, times in self.items() if what.startswith(f"{kind} {names}"))

    @property
    def launches(self) -> int:
        """Pieces of work for the device; a call on a list of tensors (`_foreach_*`) is one."""
        return self._sum("launch")

    @property
    def waits(self) -> int:
        """How often the host waited for the device: numbers read, copies, sizes."""
        return self._sum("wait")

    @property
    def uploads(self) -> int:
        return self._sum("launch", "copy from the host")

    @property
    def downloads(self) -> int:
        return self._sum("launch", "copy to the host")


@functools.cache
def _library() -> ctypes.CDLL:
    path = str(_built())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.fake_counts.restype = ctypes.c_char_p
    library.fake_capture.argtypes = [ctypes.c_bool]
    return library


def _built() -> Path:
    """The library, compiled once for these sources and this torch."""
    sources = sorted(_HERE.glob("*.cpp")) + sorted(_HERE.glob("*.h"))
    content = b"".join(path.read_bytes() for path in [*sources, _HERE / "build.py"])
    key = hashlib.sha256(content + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(environment.cache_folder(), "fake-accelerator", key)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _FILE).is_file():
            command = [sys.executable, str(_HERE / "build.py"), str(folder / _FILE)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / _FILE


@functools.cache
def load() -> None:
    """Make the device known to torch, once.  There is no way back in this process."""
    _library()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def installed(folder: Path) -> list[str]:
    """For PYTHONPATH: with these, `import torch` loads the device.  Writes into `folder`."""
    described = folder / f"{NAME}_accelerator-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Name: {NAME}-accelerator\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = {__name__}:load\n")
    return [str(folder), str(_HERE.parent), str(_HERE.parents[2])]


def _module() -> types.ModuleType:
    """`torch.fake`, as far as torch asks for it."""
    module = types.ModuleType(f"torch.{NAME}")
    own = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda index: contextlib.nullcontext(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed_all": lambda seed: None,  # it draws from the host's generator
        "manual_seed": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
    }
    vars(module).update(own)
    return module


def counts() -> Counts:
    """What has been counted since the process began, or since it was last forgotten."""
    results = Counts()
    for line in _library().fake_counts().decode().splitlines():
        times, _, what = line.partition(" ")
        results[what] = int(times)
    return results


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts of what happens inside, filled in when the block ends."""
    before, results = counts(), Counts()
    yield results
    results.update(counts() - before)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """As while work is recorded into a graph: whoever makes the host wait gets an error."""
    _library().fake_capture(True)
    try:
        yield
    finally:
        _library().fake_capture(False)


def has_compiler() -> bool:
    """Whether it is built already, or can be."""
    from native_runs import HAS_COMPILER

    return HAS_COMPILER and os.name == "posix"
