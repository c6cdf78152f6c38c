"""Compiles the fake accelerator: `python build.py FILE`.  Its parts at once."""

import os
import subprocess
import sys
from pathlib import Path

from torch.utils import cpp_extension


def main(target: str) -> None:
    compiler = os.environ.get("CXX", "c++")
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    flags = ["-std=c++20", "-O0", "-g0", "-w", "-fPIC"]
    objects = [f"{target}.{source.stem}.o" for source in sources]
    compiling = [
        subprocess.Popen([compiler, *flags, *includes, "-c", str(source), "-o", path])
        for source, path in zip(sources, objects, strict=True)
    ]
    failed = [process.wait() for process in compiling]
    if any(failed):
        raise SystemExit(1)
    places = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries = ["-ltorch_cpu", "-lc10"]
    fresh = f"{target}.new"
    subprocess.run([compiler, "-shared", *objects, *places, *libraries, "-o", fresh], check=True)
    for path in objects:
        os.remove(path)
    os.replace(fresh, target)


if __name__ == "__main__":
    main(sys.argv[1])
