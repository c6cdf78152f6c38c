"""clients/ is run by hand (docs/clients.md); here only that it hangs together."""

import ast
import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

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


def _the_command():
    spec = importlib.util.spec_from_file_location("clients_run", CLIENTS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMAND = _the_command()


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


@pytest.mark.parametrize("name", TESTED)
def test_a_client_finds_the_helpers_that_it_imports(name):
    """In its own environment only the folders of clients/pytest.ini are on the path."""
    settings = configparser.ConfigParser()
    settings.read(CLIENTS / "pytest.ini")
    folders = [CLIENTS / folder for folder in settings["pytest"]["pythonpath"].split()]
    tree = ast.parse((CLIENTS / f"test_{name}.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for helper in imported & {"matrix_kernels", "small_task"}:
        assert any((folder / f"{helper}.py").exists() for folder in folders), helper
    assert "small_task" in imported


def test_there_are_clients_and_each_framework_of_the_law_has_an_environment():
    assert WITH_APEX == ["catalyst", "ignite", "lightning", "timm", "transformers"]
    assert set(COMMAND.NAMES) == {*WITH_APEX, *COMMAND.INTEGRATED, WEIGHTS}
    runs = (ROOT / "tests" / "integrations").glob("runs_with_*.py")
    frameworks = [name for names in COMMAND.INTEGRATED.values() for name in names]
    assert sorted(frameworks) == sorted(path.stem.removeprefix("runs_with_") for path in runs)


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


@pytest.mark.parametrize("name", COMMAND.INTEGRATED)
def test_newest_versions_but_of_torch(name):
    """A torch without a pin may be one for CUDA, of several gigabytes."""
    assert COMMAND.named("base")[0].startswith("torch==")
    own = [COMMAND.unpinned(requirement) for requirement in COMMAND.named(name)]
    assert PACKAGES.get(name, name) in own
    assert "=" not in "".join(own)
    assert "torch" not in own


def test_the_tests_of_integrations_run_for_the_frameworks_that_are_there():
    """With setup.cfg's settings, where a warning is an error, but for warnings."""
    [arguments] = COMMAND.commands("lightning2")
    assert "lightning or fabric" in arguments
    assert not [argument for argument in arguments if "ignite" in argument]
    with_apex, integrated = COMMAND.commands("ignite")
    assert with_apex == ["test_ignite.py"]
    assert str(ROOT / "tests" / "integrations" / "test_ignite_steps.py") in integrated


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["keras"], "no such client: keras; there are accelerate, catalyst, ignite"),
        (["--newest", "catalyst"], "newest version: catalyst; there are accelerate, ignite"),
    ],
)
def test_an_unknown_client_is_refused_by_name(arguments, said):
    command = [sys.executable, str(CLIENTS / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr
