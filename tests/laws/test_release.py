"""What a release hands out: a wheel and a source archive, with all that belongs there, and both
install.  Type checkers know each setting.
"""

import inspect
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import ampatch
from ampatch import types
from ampatch.compat.apex import amp
from ampatch.compat.apex.packages import VERSION
from ampatch.config.scale_settings import ScaleSettings

NOT_RELEASED = re.compile(r"\.git.*|\.ci/.*")  # what serves this repository alone


def run(*command: object, **options: Any) -> str:
    """What it prints."""
    options = {"check": True, "capture_output": True, "text": True, **options}
    return subprocess.run(command, **options).stdout


def git_files() -> list[str]:
    """The files of the checkout that are no packager's business to leave out."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [name for name in listed.stdout.splitlines() if not NOT_RELEASED.fullmatch(name)]


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the source archive, built from a copy of the checkout."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("release") / "checkout"
    for name in git_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    run(sys.executable, "setup.py", "-q", "sdist", "bdist_wheel", cwd=copy)
    (wheel,), (source,) = (copy / "dist").glob("*.whl"), (copy / "dist").glob("*.tar.gz")
    return wheel, source


def test_the_source_archive_has_what_a_packager_needs(archives):
    _, source = archives
    with tarfile.open(source) as archive:
        results = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in git_files() if name not in results] == []
    assert [name for name in results if NOT_RELEASED.fullmatch(name)] == []


def test_the_wheel_has_the_whole_package_alone_and_its_license(archives):
    """Modules, `py.typed`, the sources of the native part, templates, and apex's stand-in."""
    with zipfile.ZipFile(archives[0]) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    described = f"ampatch-{ampatch.__version__}.dist-info/"
    package = {name: files[name] for name in files if not name.startswith(described)}
    names = [name for name in git_files() if name.startswith("ampatch/")]
    assert package == {name: (ROOT / name).read_bytes() for name in names}
    assert b"\nLicense-Expression: BSD-3-Clause\n" in files[f"{described}METADATA"]
    assert f"{described}licenses/LICENSE" in files
    apex = package["ampatch/compat/apex_path/apex.dist-info/METADATA"].decode()
    assert f"\nVersion: {VERSION}\n" in apex


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "source archive"])
def test_what_is_released_installs_and_trains(archives, kind, tmp_path):
    """In a fresh environment, which sees torch and wrapt of this one."""
    python = tmp_path / "fresh" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "fresh")
    here = "import sysconfig; print(sysconfig.get_path('purelib'))"
    places = [run(program, "-c", here).strip() for program in (sys.executable, python)]
    Path(places[1], "beside.pth").write_text(places[0])
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*wheel, "-w", tmp_path, archives[kind])
    run(python, "-m", "pip", "install", "-q", "--no-deps", *tmp_path.glob("*.whl"))
    program = (
        "import ampatch, torch; model = torch.nn.Linear(2, 2);"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1);"
        "ampatch.initialize(model, optimizer, opt_level='O2', verbosity=0);"
        "print(ampatch.__file__, model(torch.ones(1, 2)).dtype)"
    )
    file, dtype = run(python, "-c", program, cwd=tmp_path).split()
    assert Path(file).is_relative_to(tmp_path)
    assert dtype == "torch.float32"


OWN = {"models", "optimizers", "enabled", "opt_level", "num_losses"}


@pytest.mark.parametrize(
    "function, settings, spelled_out",
    [
        (ampatch.initialize, types.Settings, OWN | {"dtype"}),
        (amp.initialize, types.ApexSettings, OWN),
        (ScaleSettings, types.ScaleSettings, set()),
    ],
    ids=["initialize", "apex", "loss scale"],
)
def test_type_checkers_know_each_setting(function, settings, spelled_out):
    """`tests/types/calls.py` tries the types."""
    names = set(inspect.signature(function).parameters)
    assert settings.__optional_keys__ == names - spelled_out
