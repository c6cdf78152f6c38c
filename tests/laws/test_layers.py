"""Who may import whom.  The operator side and the optimizer side never meet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ampatch"

LEAVES = {"errors", "foreach", "half_grads", "log", "surroundings", "_version"}
ALLOWED = {
    "errors": set(),
    "foreach": set(),
    "half_grads": set(),
    "log": set(),
    "surroundings": set(),
    "_version": set(),
    "opt_levels": LEAVES,
    "checks": LEAVES | {"opt_levels"},
    "environment": {"opt_levels", "scaling"},
    "hooks": set(),
    "frames": {"casting", "hooks", "inputs", "managed_model", "models", "overrides", "parts"}
    | {"surroundings"},
    "whereabouts": {"members"},  # for type checking only
    "members": {"casting", "log", "managed_model", "opt_levels", "plain_parameters", "scaling"}
    | {"whereabouts", "widened"},
    "widened": set(),
    "checkpoints": {"hooks"},
    "casting_members": {"casting", "members", "opt_levels", "whereabouts"},
    "handover": {"managed_model", "scaling"} | {"registry", "session"},  # for type checking only
    "models": set(),
    "gradients": set(),
    "averaging": LEAVES,
    "distributed_state": set(),
    "broadcast": set(),
    "data_access": set(),
    "casting": LEAVES | {"casting"},
    "scaling": LEAVES | {"scaling"},
    "overrides": LEAVES | {"casting", "hooks", "models", "opt_levels"},
    "managed_model": LEAVES
    | {"casting", "checkpoints", "hooks", "inputs", "model_copies", "models", "opt_levels"}
    | {"overrides", "parts", "plain_parameters", "widened"},
    "conversions": LEAVES,
    "parts": {"hooks", "inputs", "opt_levels"},
    "inputs": LEAVES | {"models", "opt_levels"},
    "model_copies": {"hooks", "models", "plain_parameters"},
    "optimizer_copies": {"model_copies", "opt_levels", "plain_parameters", "scaling"},
    "plain_parameters": set(),
    "tracing": LEAVES | {"casting", "managed_model", "models"},
    "registry": LEAVES
    | {"averaging", "broadcast", "casting", "data_access", "gradients", "registered"}
    | {"schedulers", "tracing", "whereabouts"}
    | {"casting_members", "conversions", "distributed_state"}
    | {"managed_model", "scaling", "session"},  # for type checking only
    "registered": {"casting", "log"},
    "schedulers": {"casting"},
    "session": LEAVES
    | {"casting", "casting_members", "scaling", "managed_model", "opt_levels", "overrides"}
    | {"frames", "handover", "members", "widened", "optimizer_copies", "registry", "tracing"},
    "frontend": LEAVES
    | {"checks", "environment", "handover", "opt_levels", "overrides", "session"},
    "training": LEAVES | {"checks", "scaling", "session"},
    "control": LEAVES | {"casting", "session"},
    "handle": LEAVES | {"environment", "opt_levels", "session"},
    "__init__": LEAVES | {"frontend", "training", "control", "handle", "diagnose", "session"},
    "auto": LEAVES
    | {"__init__", "auto", "casting", "environment", "opt_levels", "scaling"}
    | {"session"},
    # the rooms around the engine use its public API (and the tables)
    "diagnose": LEAVES
    | {"__init__", "casting", "diagnose", "environment", "run", "session"}
    | {"tables_command"},
    "compat": LEAVES | {"__init__", "compat", "session", "casting"},
    "run": LEAVES | {"__init__", "auto", "compat", "diagnose", "environment", "run"},
    "sweep": LEAVES | {"__init__", "environment", "run", "sweep", "opt_levels"},
    "tables_command": LEAVES | {"__init__", "casting", "tables_command"},
    "sweep_command": LEAVES | {"sweep"},
    "report_command": {"sweep", "sweep_command"},
    "cli": LEAVES | {"report_command", "run", "sweep_command", "diagnose", "tables_command"},
    "__main__": {"cli"},
}


def room(path: Path) -> str:
    """The part of the house a file is in: a package of ours, or a module at the top."""
    inside = path.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported_rooms(path: Path) -> set[str]:
    """The rooms a file imports from, absolutely or relatively."""
    package = ["ampatch", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ampatch":
                found.add(first_room(parts))
    return found


def first_room(parts: list[str]) -> str:
    """`ampatch.x.y` is in room x, if there is such a room; else it is a public name."""
    known = {room(path) for path in ROOT.rglob("*.py")}
    return parts[1] if len(parts) > 1 and parts[1] in known else "__init__"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downwards_only(path):
    here = room(path)
    assert here in ALLOWED, f"{path.name}: a new room needs its line in this table"
    assert imported_rooms(path) - ALLOWED[here] - {here} == set()


def test_the_check_can_see_a_forbidden_import(tmp_path, monkeypatch):
    bad = ROOT / "scaling" / "loss_scaler.py"
    monkeypatch.setattr(Path, "read_text", lambda self: "from ..casting.casts import cast")
    assert imported_rooms(bad) == {"casting"}


def test_tables_import_no_torch():
    tree = ast.parse((ROOT / "casting" / "tables.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert modules <= {"enum", "typing", "__future__"}


def test_ampatch_imports_without_extras():
    """The core needs torch and wrapt; the extras may be missing."""
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'sklearn', 'pytest', 'hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "import ampatch\n"
        "assert callable(ampatch.initialize)\n"
        "assert 'ampatch.sweep' not in sys.modules\n"
        "assert 'apex' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
