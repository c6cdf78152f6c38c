"""Names that the user's modules bind: before the patches, and while they are in."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import types

import pytest
import torch
import torch.distributions.transforms
import torch.nn.functional as F

import ampatch
from ampatch.casting import install, rebind
from ampatch.casting.tables import BANNED, BEYOND, BLACKLIST, PROMOTE, WHITELIST
from ampatch.torch_private import checkpoints

H = torch.bfloat16
X = torch.ones(2, 2)
PLAIN = {"mm": torch.mm, "linear": F.linear, "exp": torch.exp}  # a dict is not rebound


def o1(**options):
    ampatch.initialize([], opt_level="O1", dtype=H, patch_scope="process", verbosity=0, **options)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file of a package; what is imported from there is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)

    def write_file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    yield write_file
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def module(monkeypatch, name: str, **names) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_packages_submodules_and_aliases(write):
    write("early_package/__init__.py", "from .layers import product\n")
    write(
        "early_package/layers.py",
        "from torch import mm as product, Tensor\n"
        "from torch.nn.functional import linear\n"
        "method = Tensor.mm\n"
        "def layer(x):\n    return linear(x, x)\n",
    )
    package = importlib.import_module("early_package")
    layers = sys.modules["early_package.layers"]
    before = {**vars(package)}, {**vars(layers)}
    o1()
    assert package.product(X, X).dtype is H and layers.layer(X).dtype is H
    assert layers.method(X, X).dtype is H
    assert package.product is layers.product is torch.mm and layers.linear is F.linear
    ampatch.deactivate()
    assert (vars(package), vars(layers)) == before
    assert package.product is PLAIN["mm"] and layers.linear is PLAIN["linear"]


def test_a_module_imported_while_patched_gets_the_originals_back(write):
    write(
        "late_module.py", "from torch import mm, exp as e\nfrom torch.nn.functional import linear\n"
    )
    o1()
    late = importlib.import_module("late_module")
    assert late.mm(X, X).dtype is H and late.mm is torch.mm
    ampatch.deactivate()
    assert (late.mm, late.e, late.linear) == (PLAIN["mm"], PLAIN["exp"], PLAIN["linear"])
    assert pickle.loads(pickle.dumps(late.mm)) is PLAIN["mm"]
    o1()  # early, by now
    assert late.mm(X, X).dtype is H
    ampatch.deactivate()
    assert late.mm is PLAIN["mm"]


def test_what_is_out_of_reach_when_the_patches_go_is_inert():
    """A closure made while patched keeps a replacement; it gives what the original gives."""
    o1()
    replacement = [torch.mm]  # lists are not searched

    def closure():
        return replacement[0](X, X)

    assert closure().dtype is H
    ampatch.deactivate()
    assert replacement[0] is not torch.mm
    assert torch.equal(closure(), torch.mm(X, X)) and closure().dtype is torch.float32
    o1()
    assert closure().dtype is H  # in force again, and cast once


def test_a_module_reloaded_while_patched(write):
    write("reloaded.py", "from torch import mm\n")
    reloaded = importlib.import_module("reloaded")
    o1()
    importlib.reload(reloaded)
    assert reloaded.mm is torch.mm
    ampatch.deactivate()
    assert reloaded.mm is PLAIN["mm"]


def test_what_the_user_rebinds_meanwhile_is_left_alone(monkeypatch, caplog):
    mine = module(monkeypatch, "my_module", mm=torch.mm, exp=torch.exp)
    ampatch.initialize([], opt_level="O1", dtype=H, patch_scope="process")
    mine.mm = own = [].append
    del mine.exp
    with caplog.at_level("WARNING", logger="ampatch"):
        ampatch.deactivate()
    assert mine.mm is own and not hasattr(mine, "exp")
    assert "my_module.mm was replaced by other code" in caplog.text


def test_in_apex_tables_and_for_overridden_functions_too(monkeypatch):
    mine = module(
        monkeypatch, "my_module", std=torch.std, relu=torch.relu, sampler=torch.grid_sampler
    )
    before = dict(vars(mine))
    model = ampatch.initialize(
        torch.nn.Identity(),
        dtype=H,
        overrides={torch.relu: "half"},
        patch_scope="process",
        verbosity=0,
    )
    assert mine.relu(X).dtype is H and model is not None
    ampatch.deactivate()
    assert vars(mine) == before
    ampatch.init()
    assert mine.std(X.half()).dtype is torch.float32
    assert mine.sampler is torch.grid_sampler  # patched by a table, and once more by apex's rows
    ampatch.deactivate()
    assert vars(mine) == before


def test_gradient_tools_bound_while_patched_are_given_back(monkeypatch):
    mine = module(monkeypatch, "my_module")
    original = [torch.nn.utils.clip_grad_norm_]
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ampatch.initialize(net, optimizer, opt_level="O2", dtype=H, verbosity=0)
    mine.clip = torch.nn.utils.clip_grad_norm_
    assert mine.clip is not original[0]
    ampatch.deactivate()
    assert mine.clip is original[0]


# Modules that are not what they seem


class Touchy(types.ModuleType):
    """Loads something, or fails, whenever it is asked for an attribute."""

    def __getattribute__(self, name):
        raise AssertionError(f"asked for {name}")

    def __setattr__(self, name, value):
        raise AssertionError(f"told {name}")


def test_modules_are_asked_for_nothing(monkeypatch):
    touchy = Touchy("touchy")
    inside = object.__getattribute__(touchy, "__dict__")
    inside["mm"] = torch.mm
    monkeypatch.setitem(sys.modules, "touchy", touchy)
    o1()
    assert inside["mm"] is torch.mm is not PLAIN["mm"]
    ampatch.deactivate()
    assert inside["mm"] is PLAIN["mm"]


def test_lazy_modules_are_not_loaded(write, monkeypatch):
    write("lazy_module.py", "raise AssertionError('loaded')\n")
    spec = importlib.util.find_spec("lazy_module")
    loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    o1()
    ampatch.deactivate()
    with pytest.raises(AssertionError, match="loaded"):
        lazy.anything  # noqa: B018


class Proxy:
    """Like wrapt's and six's: loads what it stands for when it is asked, its class included."""

    @property
    def __class__(self):
        raise AssertionError("asked for its class")


def test_what_is_no_module_in_sys_modules_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "proxy", Proxy())
    monkeypatch.setitem(sys.modules, "forbidden", None)  # as Python has it for a blocked import
    o1()


def test_torchs_own_modules_change_in_the_patched_places_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "another_name", torch.distributions.transforms)
    before = torchs_globals()
    o1()
    after = torchs_globals()
    changed = {key for key in before.keys() & after.keys() if before[key] is not after[key]}
    rows = {
        (row.where, name)
        for row in (*WHITELIST, *BLACKLIST, *PROMOTE, *BANNED, *BEYOND)
        for name in row.names
        if not row.native and isinstance(install.resolve(row.where), types.ModuleType)
    }
    parts = {
        ("torch.backends.mha", "get_fastpath_enabled"),
        ("torch.utils.checkpoint", checkpoints.no_reentry()),
        ("torch.jit", "script"),
        *((where, "parallel_apply") for where in PARALLEL),
        ("torch.nn.functional", "multi_head_attention_forward"),
        *(("torch", name) for name in AUTOCAST_S),
        *((where, name) for where in MODES_IN for name in ("_push_mode", "_pop_mode")),
        *(("torch.overrides", name) for name in OVERRIDES),
        ("torch._dynamo.trace_rules", "get_tensor_method"),  # if another test imported Dynamo
        ("torch._dynamo.trace_rules", "is_callable_allowed"),
        ("torch._dynamo.trace_rules", "load_object"),
    }
    assert changed == {(title, name) for title, name in rows | parts if (title, name) in before}
    assert {
        ("torch", "mm"),
        ("torch.nn.functional", "linear"),
        ("torch._C._nn", "mse_loss"),
    } <= changed


AUTOCAST_S = (
    "set_autocast_enabled", "is_autocast_enabled", "get_autocast_dtype",
    "set_autocast_cpu_enabled", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype",
    "get_autocast_gpu_dtype",
)  # fmt: skip


PARALLEL = ("torch.nn.parallel", "torch.nn.parallel.data_parallel")
MODES_IN = ("torch.overrides", "torch.utils._device")
OVERRIDES = (
    "get_ignored_functions", "get_testing_overrides", "_get_overridable_functions",
    "_get_tensor_methods",
)  # fmt: skip


def torchs_globals() -> dict:
    return {
        (title, name): value
        for title, found in list(sys.modules.items())
        if title.partition(".")[0] == "torch" and isinstance(found, types.ModuleType)
        for name, value in list(vars(found).items())
    }


def test_a_failure_halfway_gives_everything_back(monkeypatch):
    """The search for early names is the last thing that `install` does."""
    mine = module(monkeypatch, "my_module", mm=torch.mm, exp=torch.exp)
    real, calls = rebind.PatchSet.rebind, []

    def fails_at_the_second(self, namespace, name, put):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, namespace, name, put)

    monkeypatch.setattr(rebind.PatchSet, "rebind", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        o1()
    assert torch.mm is PLAIN["mm"] and (mine.mm, mine.exp) == (PLAIN["mm"], PLAIN["exp"])


def test_names_in_the_main_script_of_a_spawned_process(monkeypatch):
    """`multiprocessing` runs it in a module that it drops; functions keep that one's globals."""
    run = {"__name__": "__mp_main__"}
    exec("from torch.nn.functional import linear\ndef called():\n    return linear", run)
    main = types.ModuleType("__mp_main__")
    vars(main).update(run)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    original = torch.nn.functional.linear
    ampatch.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert run["called"]() is torch.nn.functional.linear is not original
    ampatch.deactivate()
    assert run["called"]() is original
