"""clients/ is run by hand (docs/clients.md); here only that it hangs together."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import HELPERS, ROOT

CLIENTS = ROOT / "clients"
TESTED = sorted(path.stem.removeprefix("test_") for path in CLIENTS.glob("test_*.py"))
WEIGHTS = "weights"  # many libraries in one environment, none of which asks for apex
WITH_APEX = [name for name in TESTED if name != WEIGHTS]
PACKAGES = {
    "ignite": "pytorch-ignite",
    "lightning": "pytorch-lightning",
    "lightning2": "lightning",
    "transformers5": "transformers",
}
"""Of clients that are called otherwise."""


COMMAND = SimpleNamespace(**runpy.run_path(str(CLIENTS / "run.py")))


def pins(path: Path) -> dict[str, str]:
    """What a requirements file asks for, with the files that it names."""
    versions = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            versions.update(pins(path.parent / line.removeprefix("-r ")))
        elif line:
            name, equals, version = line.partition("==")
            assert equals, f"{path.name} does not pin {line}"
            versions[name.lower()] = version
    return versions


def test_there_are_clients_and_each_framework_of_the_law_has_an_environment():
    assert WITH_APEX == ["catalyst", "ignite", "lightning", "timm", "transformers"]
    assert set(COMMAND.NAMES) == {*WITH_APEX, *COMMAND.INTEGRATED, WEIGHTS}
    runs = (ROOT / "tests" / "integrations").glob("runs_with_*.py")
    frameworks = [name for names in COMMAND.INTEGRATED.values() for name in names]
    assert sorted(frameworks) == sorted(path.stem.removeprefix("runs_with_") for path in runs)


def test_the_helper_that_clients_import_is_on_their_path():
    assert " ../tests/helpers" in (CLIENTS / "pytest.ini").read_text()
    assert (HELPERS / "matrix_kernels.py").exists()


@pytest.mark.parametrize("name", COMMAND.NAMES)
def test_a_client_has_pins_for_the_tested_torch_and_the_docs_name_its_version(name):
    own = pins(CLIENTS / "requirements" / f"{name}.txt")
    tested = pins(ROOT / "constraints.txt")
    for package in ("torch", "wrapt", "pytest"):
        assert own[package] == tested[package]
    page = (ROOT / "docs" / "clients.md").read_text()
    with_apex = re.findall(r"^\| (\w+) ([\d.]+) \|", page, re.M)
    of_today = re.findall(r"^\| [\w, ]+ \| ([\d.]+) \| `(\w+)` \|$", page, re.M)
    pinned = own.get(PACKAGES.get(name, name))
    if name in WITH_APEX:
        assert {title.lower(): version for title, version in with_apex}[name] == pinned
    if name in COMMAND.INTEGRATED:
        assert {title: version for version, title in of_today}[name] == pinned


def test_the_docs_name_the_libraries_that_hold_weights():
    page = (ROOT / "docs" / "clients.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) ([\d.]+) \|", page, re.M))
    tested = (CLIENTS / f"test_{WEIGHTS}.py").read_text().lower()
    for requirement in COMMAND.named(WEIGHTS):
        name, _, version = requirement.partition("==")
        if name not in ("torchvision", "numpy"):  # what others need
            assert rows[name] == version
            assert name.replace("-", "_").removesuffix("_ppl") in tested


def test_the_tests_of_integrations_run_for_the_frameworks_that_are_there():
    """With setup.cfg's settings, where a warning is an error, but for warnings."""
    [arguments] = COMMAND.commands("lightning2")
    assert "lightning or fabric" in arguments
    assert not [argument for argument in arguments if "ignite" in argument]
    with_apex, integrated = COMMAND.commands("ignite")
    assert with_apex == ["test_ignite.py"]
    assert str(ROOT / "tests" / "integrations" / "test_ignite_steps.py") in integrated
