"""What a release hands out: a wheel and a source archive, and both install."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

import ampatch

NOT_RELEASED = re.compile(r"\.git.*|\.ci/.*")  # what serves this repository alone


def git_files() -> list[str]:
    """The files of the checkout that are no packager's business to leave out."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [name for name in listed.stdout.splitlines() if not NOT_RELEASED.fullmatch(name)]


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the source archive, built from a copy of the checkout."""
    copy = tmp_path_factory.mktemp("release") / "checkout"
    for name in git_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "bdist_wheel"],
        cwd=copy,
        check=True,
        capture_output=True,
    )
    (wheel,), (source,) = (copy / "dist").glob("*.whl"), (copy / "dist").glob("*.tar.gz")
    return wheel, source


@pytest.mark.slow
def test_the_source_archive_has_what_a_packager_needs(archives):
    _, source = archives
    with tarfile.open(source) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert [name for name in git_files() if name not in found] == []
    assert [name for name in found if NOT_RELEASED.fullmatch(name)] == []


@pytest.mark.slow
def test_the_wheel_has_the_package_alone_and_its_license(archives):
    with zipfile.ZipFile(archives[0]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"ampatch", f"ampatch-{ampatch.__version__}.dist-info"}
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "source archive"])
def test_what_is_released_installs_and_trains(archives, kind, tmp_path):
    """In a fresh environment, which sees torch and wrapt of this one."""
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    here = "import sysconfig; print(sysconfig.get_path('purelib'))"
    places = [
        subprocess.run([run, "-c", here], check=True, capture_output=True, text=True).stdout.strip()
        for run in (sys.executable, python)
    ]
    Path(places[1], "beside.pth").write_text(places[0])
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "-w", tmp_path, archives[kind]], check=True, capture_output=True)
    install = [python, "-m", "pip", "install", "-q", "--no-deps", *tmp_path.glob("*.whl")]
    subprocess.run(install, check=True, capture_output=True)
    program = (
        "import ampatch, torch; model = torch.nn.Linear(2, 2);"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1);"
        "ampatch.initialize(model, optimizer, opt_level='O2', verbosity=0);"
        "print(ampatch.__file__, model(torch.ones(1, 2)).dtype)"
    )
    done = subprocess.run(
        [python, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    file, dtype = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert dtype == "torch.float32"
