"""Who may import whom, which class may derive from which, and who may ask for kinds of devices.

The operator side (`casting`) and the optimizer side (`scaling`) never meet; imports go
downwards only, and never in a circle.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_names import ROOT, tree_of
from repository import TESTS
from warm_python import python

FILES = sorted(ROOT.rglob("*.py"))

LEAVES = {"errors", "log", "torch_private", "types", "_version"}
ABOVE = LEAVES | {"config", "native", "__init__", "session.facade", "casting.tables"}
ALLOWED = {
    "errors": set(),
    "log": set(),
    "types": set(),
    "_version": set(),
    "torch_private": {"errors", "log"},
    "device_figures": {"torch_private"},  # for the commands below that measure
    "config": LEAVES,
    "native": {"errors", "log", "config.environment"},
    "scaling": LEAVES | {"config", "native"},
    "casting": LEAVES | {"config", "native"},
    "models": LEAVES | {"config", "native", "casting"},
    "interop": LEAVES | {"config", "casting", "models"},
    "session": LEAVES | {"config", "native", "casting", "scaling", "models", "interop"},
    "api": LEAVES | {"config", "native", "casting", "scaling", "models", "interop", "session"},
    "__init__": LEAVES | {"api", "native", "compat.apex_checkpoints"},
    # above the public API: they use `ampatch`, its settings, and the facade
    "auto": ABOVE,
    "compat": ABOVE,
    "integrations": ABOVE,
    "launch": ABOVE | {"auto", "compat"},
    "diagnose": ABOVE | {"launch", "device_figures"},
    "sweep": ABOVE
    | {"auto", "launch", "device_figures", "diagnose.speed", "integrations.framework_patches"},
    "tune": ABOVE | {"launch", "device_figures", "sweep"},
    "cli": ABOVE | {"launch", "device_figures", "diagnose", "sweep", "tune"},
    "__main__": {"cli"},
}
DERIVED = {
    *("AmpatchFabricPrecision", "AmpatchPrecision"),  # Lightning's: what they share stands once
    *("FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"),  # one `_update` each
    *("LossScaler", "DynamicLossScaler", "FusedMixedPrecisionLamb"),  # public, of apex
    *("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),  # of apex
    *("PluginSettings", "ScaleSettings", "Settings"),  # keywords, for type checkers
    "Lines",  # what a sweep says, line by line; the base says nothing
}
"""Classes of ours that derive from a class of ours, and why that is not one class cut in two."""


def module_name(path: Path) -> str:
    """The dotted name inside the package: "casting.rules", a package's own name, "__init__"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


MODULES = {module_name(path): path for path in FILES}


def room(module: str) -> str:
    return module.partition(".")[0]


def imported(path: Path, text: str | None = None, annotations: bool = False) -> set[str]:
    package = ["ampatch", *path.relative_to(ROOT).parts[:-1]]
    results = set()
    tree = tree_of(path) if text is None else ast.parse(text)
    for node in ast.walk(tree) if annotations else _at_run_time(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        results |= {_module(name) for name in names if name.split(".")[0] == "ampatch"}
    return results - {module_name(path)}


def _at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from _at_run_time(node)


def _module(dotted: str) -> str:
    """The module that `ampatch.a.b.name` means: the longest name that is one."""
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "__init__"


@pytest.fixture(scope="module")
def graph():
    return {name: imported(path) for name, path in MODULES.items()}


def test_imports_go_downwards_only(graph):
    rooms = set(map(room, graph))
    assert rooms - ALLOWED.keys() == set(), "a new room needs its row in this table"
    allowed = {here: ALLOWED[here] | {here} for here in rooms}
    upwards = {
        (module, imports)
        for module, met in graph.items()
        for imports in met
        if {imports, room(imports)}.isdisjoint(allowed[room(module)])
    }
    assert upwards == set()


def test_no_imports_in_a_circle(graph):
    """In functions too: what is imported late to break a circle is a circle."""
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("room_of", ["scaling", "session"])
def test_no_circle_by_annotations_either(room_of):
    inside = {name for name in MODULES if room(name) == room_of}
    graph = {name: imported(MODULES[name], annotations=True) & inside for name in inside}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_the_check_can_see_a_forbidden_import():
    bad = ROOT / "scaling" / "loss_scaler.py"
    assert imported(bad, "def f():\n    from ..casting.rules import cast") == {"casting.rules"}
    assert imported(bad, "from ampatch import casting") == {"casting"}
    hidden = "if TYPE_CHECKING:\n    from ..casting import rules"
    assert imported(bad, hidden) == set()
    assert imported(bad, hidden, annotations=True) == {"casting.rules"}


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            yield node


def test_no_class_is_cut_by_inheritance():
    """A base class of ours is a protocol, an error, or has its reason in `DERIVED`."""
    nodes = [node for path in FILES for node in classes(path)]
    bases_of = {node.name: list(map(ast.unparse, node.bases)) for node in nodes}

    def is_open(name: str) -> bool:
        return any(b == "Protocol" or b.endswith(("Error", "Exception")) for b in bases_of[name])

    results = {
        node.name
        for node in nodes
        for base in map(ast.unparse, node.bases)
        if base in bases_of and not is_open(base)
    }
    assert results == DERIVED


ENGINE = {"api", "casting", "interop", "models", "scaling", "session"}
OPEN = {"casting.tables", "session.facade"}
"""What the rooms above the public API import of the engine; tests may, too."""
LOOK_INSIDE = ("native", "torch_private", "helpers", "conftest.py")
"""Tests of parts that no user sees, and what all tests share: `helpers/engine.py`."""
OTHER_ROOMS = {
    "casting/test_modules_o1.py": "a policy that thinks that there is a GPU",
    "casting/test_scopes.py": "as above",
    "cli/test_tables_command.py": "what is patched beside the tables",
    "integrations/conftest.py": "the search for early names, which meets large libraries",
    "laws/test_interruptions.py": "Ctrl-C between two optimizers of a block",
    "models/test_submodule_calls.py": "a policy that thinks that there is a GPU",
    "scaling/test_optimizer_state.py": "a failure as the state of an optimizer moves",
    "session/test_deactivate.py": "failures as weights and gradients are given back",
    "session/test_sessions.py": "what is said once of the state of sessions",
    "session/test_torch_tools.py": "where a tool of torch is bound",
}
"""Tests that import modules of the engine of another room than theirs, and what for."""


def _of_the_engine(path: Path) -> set[str]:
    """The modules of the engine that a test imports, or names by `ampatch.room.module`."""
    tree = ast.parse(path.read_text())
    named = {
        _module(ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("ampatch.")
    }
    results = imported(ROOT / "__init__.py", path.read_text()) | named
    return {module for module in results - OPEN if "." in module and room(module) in ENGINE}


def test_tests_import_of_the_engine_what_is_of_their_own_room():
    """What a script cannot see changes without the tests of other rooms."""
    strangers = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if name.startswith(LOOK_INSIDE):
            continue
        foreign = {module for module in _of_the_engine(path) if room(module) != name.split("/")[0]}
        if foreign:
            strangers[name] = foreign
    assert strangers.keys() == OTHER_ROOMS.keys(), strangers


def test_tables_import_no_torch():
    tree = tree_of(ROOT / "casting" / "tables.py")
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert modules <= {"enum", "typing", "__future__"}


def test_ampatch_imports_without_extras():
    """The core needs torch and wrapt; the extras may be missing."""
    code = """
import sys
for name in ("rich", "matplotlib", "scipy", "sklearn", "pytest", "hypothesis"):
    sys.modules[name] = None
import ampatch
assert callable(ampatch.initialize)
assert not sys.modules.keys() & {"ampatch.sweep", "ampatch.diagnose", "apex"}
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# Two modules know kinds of devices: no other of the package asks for CUDA, or for its siblings

HOMES = ("torch_private/devices.py", "device_figures.py")
KINDS = ("cuda", "xpu", "mps", "mtia", "hpu", "xla", "npu", "musa")

NAMING = {
    "casting/autocast_interop.py": "torch's functions that name no device mean CUDA",
    "sweep/execution/fork_server.py": "a process that has started CUDA is not forked",
    "sweep/options.py": "an example in the help of --devices",
    "native/loading.py": "which build of torch a native part was built for",
}
"""Other files that name a kind, each with the reason."""


def kinds_named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.removeprefix("torch.").partition(":")[0].partition(".")[0]
        elif isinstance(node, ast.Attribute):
            name = node.attr.removeprefix("is_")
        else:
            continue
        if name in KINDS:
            yield name


def test_no_other_module_names_a_kind():
    results = {str(path.relative_to(ROOT)): set(kinds_named(tree_of(path))) for path in FILES}
    naming = {name: kinds for name, kinds in results.items() if kinds and name not in HOMES}
    assert naming.keys() == NAMING.keys(), naming
