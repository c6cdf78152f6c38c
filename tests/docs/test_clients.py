"""clients/ is run by hand (docs/clients.md); here only that it hangs together."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

CLIENTS = ROOT / "clients"
NAMES = sorted(path.stem.removeprefix("test_") for path in CLIENTS.glob("test_*.py"))


def pins(path: Path) -> dict[str, str]:
    """What a requirements file asks for, with the files that it names."""
    found = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found.update(pins(path.parent / line.removeprefix("-r ")))
        elif line:
            name, equals, version = line.partition("==")
            assert equals, f"{path.name} does not pin {line}"
            found[name.lower()] = version
    return found


@pytest.mark.parametrize("name", NAMES)
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


def test_there_are_clients():
    assert NAMES == ["catalyst", "ignite", "lightning", "timm", "transformers"]


@pytest.mark.parametrize("name", NAMES)
def test_a_client_has_pins_for_the_torch_that_the_tests_run_with(name):
    found = pins(CLIENTS / "requirements" / f"{name}.txt")
    tested = pins(ROOT / "constraints.txt")
    for package in ("torch", "wrapt", "pytest"):
        assert found[package] == tested[package]


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_name_the_pinned_version(name):
    found = pins(CLIENTS / "requirements" / f"{name}.txt")
    package = {"lightning": "pytorch-lightning", "ignite": "pytorch-ignite"}.get(name, name)
    rows = re.findall(r"^\| (\w+) ([\d.]+) \|", (ROOT / "docs" / "clients.md").read_text(), re.M)
    assert {title.lower(): version for title, version in rows}[name] == found[package]


def test_an_unknown_client_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, str(CLIENTS / "run.py"), "keras"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no such client: keras; there are catalyst, ignite" in done.stderr
