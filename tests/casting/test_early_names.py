"""Functions that were bound before the patches, or under other names: by modules and in models."""

import functools
import gc
import importlib
import importlib.util
import pickle
import sys
import types
import weakref
from collections import namedtuple

import pytest
import torch
import torch.distributions.transforms
import torch.nn.functional as F
from torch import nn

import ampatch
from ampatch.casting.patches import PatchSet

H = torch.bfloat16
X = torch.ones(2, 2)
PLAIN = {"mm": torch.mm, "linear": F.linear, "exp": torch.exp}  # a dict is not rebound


def o1(model=None, **options):
    model = [] if model is None else model
    options = {"patch_scope": "process", "verbosity": 0, **options}
    return ampatch.initialize(model, opt_level="O1", dtype=H, **options)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file of a package; what is imported from there is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    written = set()

    def write_file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        written.add(name.partition("/")[0].removesuffix(".py"))

    yield write_file
    for title in list(sys.modules):
        if title.partition(".")[0] in written:
            del sys.modules[title]


def module(monkeypatch, name: str, **names) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)
    return module


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


def test_a_module_imported_or_reloaded_while_patched_gets_the_originals_back(write):
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
    importlib.reload(late)
    assert late.mm is torch.mm
    ampatch.deactivate()
    assert late.mm is PLAIN["mm"]


def test_what_the_user_rebinds_meanwhile_is_left_alone(monkeypatch, caplog):
    mine = module(monkeypatch, "my_module", mm=torch.mm, exp=torch.exp)
    o1(verbosity=1)
    mine.mm = own = [].append
    del mine.exp
    with caplog.at_level("WARNING", logger="ampatch"):
        ampatch.deactivate()
    assert mine.mm is own and not hasattr(mine, "exp")
    assert "my_module.mm was replaced by other code" in caplog.text


def test_in_apex_tables_and_for_overridden_functions_and_tools_too(monkeypatch):
    mine = module(
        monkeypatch, "my_module", std=torch.std, relu=torch.relu, sampler=torch.grid_sampler
    )
    before, clip = dict(vars(mine)), [torch.nn.utils.clip_grad_norm_]
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ampatch.initialize(net, optimizer, opt_level="O2", dtype=H, verbosity=0)
    o1(torch.nn.Identity(), overrides={torch.relu: "half"})
    assert mine.relu(X).dtype is H
    mine.clip = torch.nn.utils.clip_grad_norm_
    assert mine.clip is not clip[0]
    ampatch.deactivate()
    assert vars(mine) == {**before, "clip": clip[0]}
    ampatch.init()
    assert mine.std(X.half()).dtype is torch.float32
    assert mine.sampler is torch.grid_sampler  # a row at every level, and one of apex's
    ampatch.deactivate()
    assert vars(mine) == {**before, "clip": clip[0]}


def test_names_in_the_main_script_of_a_spawned_process(monkeypatch):
    """`multiprocessing` runs it in a module that it drops; functions keep that one's globals."""
    run = {"__name__": "__mp_main__"}
    exec("from torch.nn.functional import linear\ndef called():\n    return linear", run)
    module(monkeypatch, "__mp_main__", **run)
    o1()
    assert run["called"]() is F.linear is not PLAIN["linear"]
    ampatch.deactivate()
    assert run["called"]() is PLAIN["linear"]


class Touchy(types.ModuleType):
    """Loads something, or fails, whenever it is asked for an attribute."""

    def __getattribute__(self, name):
        raise AssertionError(f"asked for {name}")

    def __setattr__(self, name, value):
        raise AssertionError(f"told {name}")


class Proxy:
    """Like wrapt's and six's: loads what it stands for when it is asked, its class included."""

    @property
    def __class__(self):
        raise AssertionError("asked for its class")


def test_modules_are_asked_for_nothing_and_lazy_ones_are_not_loaded(monkeypatch, write):
    touchy = Touchy("touchy")
    inside = object.__getattribute__(touchy, "__dict__")
    inside["mm"] = torch.mm
    write("lazy_module.py", "raise AssertionError('loaded')\n")
    spec = importlib.util.find_spec("lazy_module")
    loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    loader.exec_module(lazy)
    others = {"touchy": touchy, "lazy_module": lazy, "proxy": Proxy()}
    for name, value in {**others, "forbidden": None}.items():  # None: a blocked import
        monkeypatch.setitem(sys.modules, name, value)
    o1()
    assert inside["mm"] is torch.mm is not PLAIN["mm"]
    ampatch.deactivate()
    assert inside["mm"] is PLAIN["mm"]
    with pytest.raises(AssertionError, match="loaded"):
        lazy.anything  # noqa: B018


def test_torchs_own_modules_keep_what_they_have_bound(monkeypatch):
    """Under another name too: what is in them is torch's own code."""
    own = torch.distributions.transforms
    monkeypatch.setitem(sys.modules, "another_name", own)
    before = dict(vars(own))
    o1()
    assert vars(own) == before and own.softplus is not F.softplus


def test_a_failure_halfway_gives_everything_back(monkeypatch):
    """The search for early names is the last thing that `initialize` does to torch."""
    mine = module(monkeypatch, "my_module", mm=torch.mm, exp=torch.exp)
    real, calls = PatchSet.rebind, []

    def fails_at_the_second(self, namespace, name, put):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, namespace, name, put)

    monkeypatch.setattr(PatchSet, "rebind", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        o1()
    assert torch.mm is PLAIN["mm"] and (mine.mm, mine.exp) == (PLAIN["mm"], PLAIN["exp"])


IMAGES = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", "function, number")
EARLY = torch.fft.fftn


class Net(nn.Module):
    def __init__(self, held, call):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.held, self.call = nn.Linear(16, 16), held, call

    def forward(self, x):
        return self.call(self.held, self.layer(x))


HELD = {
    "a function": (lambda: torch.logsumexp, lambda held, x: held(x, 1)),
    "a partial": (
        lambda: functools.partial(torch.fft.fftn, dim=(1, 2)),
        lambda held, x: held(x).real,
    ),
    "a partial with a tensor": (
        lambda: functools.partial(torch.matmul, torch.eye(16)),
        lambda held, x: held(x),
    ),
    "a list": (lambda: [torch.exp, torch.log1p], lambda held, x: held[1](held[0](x))),
    "a tuple": (
        lambda: (torch.exp, functools.partial(torch.matmul, torch.eye(16))),
        lambda held, x: held[1](held[0](x)),
    ),
    "a named tuple": (lambda: Pair(torch.logsumexp, 1), lambda held, x: held[0](x, held.number)),
    "a dict": (
        lambda: {"inside": {"f": [torch.matmul]}},
        lambda held, x: held["inside"]["f"][0](x, torch.eye(16)),
    ),
}


WITHOUT_PRODUCTS = ("a function", "a list", "a named tuple")  # with FP32 tensors of their own


@pytest.mark.parametrize(
    "level, name",
    [
        *(("O1", name) for name in HELD),
        *((f"O{n}", name) for n in "23" for name in WITHOUT_PRODUCTS),
    ],
)
def test_what_a_module_holds_computes_as_its_name_does(level, name):
    make, call = HELD[name]
    model = Net(make(), call)
    expected, held = model(IMAGES), model.held
    before = repr(held)
    ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
    output = model(IMAGES)
    torch.testing.assert_close(output.float(), expected, atol=0.1, rtol=0.03)
    ampatch.deactivate()
    assert model.held is held and repr(held) == before
    assert torch.equal(model(IMAGES), expected) or level == "O3"


def test_one_identity_and_other_sessions():
    """A later session that exchanges the patches exchanges what is held, too."""
    first, second = (Net([torch.exp], lambda held, x: held[0](x)) for _ in range(2))
    inside, original = first.held, torch.exp
    ampatch.initialize(first, opt_level="O1", dtype=H, verbosity=0)
    assert first.held is inside and first.held[0] is torch.exp is not original
    ampatch.initialize(second, opt_level="O1", dtype=H, verbosity=0, overrides={torch.exp: "half"})
    assert first.held[0] is second.held[0] is torch.exp
    assert second(IMAGES).dtype is H and first(IMAGES).dtype is torch.float32
    ampatch.deactivate()
    assert first.held[0] is second.held[0] is torch.exp is original


def test_what_holds_itself_and_a_model_that_goes():
    model = Net([torch.exp], lambda held, x: held[0](x))
    model.held.append(model.held)
    model.me = functools.partial(torch.matmul, model.layer.weight)
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    assert model.me(IMAGES[0]).dtype is H
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class OfTheClass(Net):
    early = staticmethod(EARLY)

    def forward(self, x):
        return self.early(self.layer(x))


class InAClosure(Net):
    def forward(self, x):
        return (lambda y: self.call(y))(self.layer(x))


def closure(function):
    def call(x):
        return function(x)

    return call


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: OfTheClass(None, None), "`self.early` has held `torch.fft.fftn`"),
        (lambda: InAClosure(None, closure(EARLY)), "`function` has held `torch.fft.fftn`"),
    ],
    ids=["a class attribute", "a closure"],
)
def test_the_note_of_an_error_names_what_is_not_reachable(model, words):
    ampatch.initialize(net := model(), opt_level="O1", dtype=H, verbosity=0)
    with pytest.raises(Exception, match="BFloat16") as error:
        net(IMAGES)
    notes = "".join(getattr(error.value, "__notes__", [str(error.value)]))
    assert words + " since before `initialize`, so this call is not cast" in notes
