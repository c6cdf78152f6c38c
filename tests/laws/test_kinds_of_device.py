"""Two modules know kinds of devices: no other of the package asks for CUDA, or for its siblings."""

import ast
from collections.abc import Iterator

from private_names import ROOT, tree_of

HOMES = ("torch_private/devices.py", "device_figures.py")
KINDS = ("cuda", "xpu", "mps", "mtia", "hpu", "xla", "npu", "musa")

ALLOWED = {
    "casting/autocast_interop.py": "torch's functions that name no device mean CUDA",
    "sweep/execution/fork_server.py": "a process that has started CUDA is not forked",
    "sweep/options.py": "an example in the help of --devices",
    "native/loading.py": "which build of torch a native part was built for",
}
"""Other files that name a kind, each with the reason."""

FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}


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
    results = {name: set(kinds_named(tree_of(path))) for name, path in FILES.items()}
    naming = {name: kinds for name, kinds in results.items() if kinds and name not in HOMES}
    assert naming.keys() == ALLOWED.keys(), naming
