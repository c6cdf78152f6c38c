"""Compiles an extension and imports it: `python in_child.py NAME SOURCE FOLDER`.

This script has a separate process, because torch's builder changes the process that it runs in, and
a library that crashes when it is loaded must not end the user's process.
"""

from __future__ import annotations

import importlib
import os
import sys


def main(name: str, source: str, folder: str) -> None:
    """Build the extension `name` into `folder`."""
    from setuptools import setup
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    flags = ["-O3", "-g0"] if os.name == "posix" else ["/O2"]
    setup(
        name=name,
        ext_modules=[CppExtension(name, [source], extra_compile_args=flags)],
        cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
        script_args=["-q", "build_ext", "--build-lib", folder, "--build-temp", folder],
    )
    sys.path.insert(0, folder)
    importlib.import_module(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
