"""Where torch is installed beside setuptools, the native part is compiled too.

    pip install --no-build-isolation .

Without torch, with AMPATCH_NATIVE=0 and where it does not compile, ampatch is installed without it.
"""

import importlib.util
import os
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("ampatch", "native")


class BuildNative(build_ext):
    """Makes the same file as `ampatch build`, for `ampatch/native/`."""

    def get_ext_filename(self, fullname):
        """A name that says which torch it is for, so that no other loads it."""
        folders = fullname.split(".")[:-1]
        toolchain = self._toolchain()
        source = b"".join((NATIVE / name).read_bytes() for name in toolchain["SOURCES"])
        return os.path.join(*folders, toolchain["file_name"](source))

    def build_extension(self, ext):
        """Compile it in a process of its own, and move it to its place."""
        toolchain = self._toolchain()
        lacking = toolchain["missing"]()
        if lacking is not None:
            raise CompileError(lacking)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        for other in target.parent.glob(f"{toolchain['NAME']}-*"):  # of an earlier call
            other.unlink()
        with tempfile.TemporaryDirectory() as folder:
            source = (NATIVE / "native.cpp").resolve()
            command = toolchain["command"](source, Path(folder))
            done = subprocess.run(command, cwd=folder, env=toolchain["environment"]())
            if done.returncode != 0:
                raise CompileError(f"exit status {done.returncode}. ampatch works without it.")
            [made] = Path(folder).glob(f"{toolchain['NAME']}.*")
            shutil.move(made, target)

    def _toolchain(self):
        return runpy.run_path(str(NATIVE / "toolchain.py"))


def extensions():
    """The native part, if this is to be built; installing goes on where it does not compile."""
    is_off = os.environ.get("AMPATCH_NATIVE", "").strip().lower() in ("0", "false")
    if is_off or importlib.util.find_spec("torch") is None:
        return []
    name = ".".join([*NATIVE.parts, "_ampatch_native"])
    return [Extension(name, [str(NATIVE / "native.cpp")], optional=True)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
