"""Every script in benchmarks/ starts, and says what it measures."""

from __future__ import annotations

import ast
import runpy
import sys

import pytest
from repository import BENCHMARKS

SCRIPTS = {
    path.stem: path
    for path in sorted(BENCHMARKS.glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_starts(name, monkeypatch, capsys):
    if name == "accuracy":
        pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "1000")  # or the text is broken into lines
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    assert end.value.code == 0
    purpose = ast.get_docstring(ast.parse(SCRIPTS[name].read_text())).splitlines()[0]
    assert " ".join(purpose.split()) in " ".join(capsys.readouterr().out.split())
