"""The probe in a run at O0: what it finds, and that the run does not notice."""

import contextlib
import itertools
import math
import random
import types

import numpy
import pytest
import torch
from small_training import Made, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch.tune.module_call import HalfMode, ModuleCall
from ampatch.tune.probe import SAMPLES, Probe, ProbeOptions
from ampatch.tune.sensitivity import Findings, ranked


class Hot(nn.Module):
    """A softmax by hand over logits that float16 cannot hold."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return F.softmax(x * 3e5, -1)


class Mixing(nn.Module):
    """It calls functions of its own between those of the modules in it."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.softmax(self.q(x) @ self.k(x).T, -1) @ x


def vanishing(module, x):
    """The gradients of its weight are too small for float16 at loss scale 1."""
    faint = module.linear(x) * 1.0
    faint.register_hook(lambda gradient: gradient * 1e-7)
    return x + faint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.mixing = nn.Dropout(0.2), Mixing()
        self.holder = Made(lambda module, x: x + module.hot(x), hot=Hot())  # harmless but for `hot`
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.vanishing = Made(vanishing, linear=nn.Linear(16, 16))
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))

    def forward(self, x):
        x = self.mixing(self.drop(self.drop(self.norm(self.first(x)))))
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        return self.body(self.holder(self.vanishing(x)))


OFF = types.SimpleNamespace(allow_autocast=contextlib.nullcontext)  # the script's torch.autocast


def trained(folder, steps=30, last=None, probe=True, writes=True, **asked):
    """A training at O0, and what the probe found in it."""
    file = folder / "sensitivity.json"
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model = Net()
    calls = []
    first = next(part for part in model.modules() if not any(part.children()))
    first.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    if probe:
        asked = {"opt_level": "O3", "dtype": "float16", "scale": None, **asked}
        stop = ampatch.observe(Probe(ProbeOptions(str(file), steps, **asked), OFF, writes))
    model, optimizer = ampatch.initialize(model, optimizer, opt_level="O0", verbosity=0)
    losses = []
    for _ in range(last or steps + 2):
        loss = F.cross_entropy(model(torch.randn(32, 8)), torch.randint(0, 3, (32,)))
        step(loss, optimizer)
        losses.append(loss.item())
    if probe:
        stop()
    hot = (part.calls for part in model.modules() if isinstance(part, Hot))
    calls = [len(calls), *hot]
    seen = [losses, torch.rand(3).tolist(), calls, model.state_dict()]
    ampatch.deactivate()
    return seen, Findings.read(file)


def found_in(folder, **options):
    """What the probe found of each module, by its path."""
    _, findings = trained(folder, **options)
    return {module.path: module for module in findings.modules}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    return found_in(tmp_path_factory.mktemp("probe"))


class Named(nn.Module):
    """It returns a mapping; its random numbers are those of Python and of NumPy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x = x * random.random() + numpy.random.rand()
        return {"hidden": self.linear(x), "more": [x * 2]}

    def encode(self, x):
        return self.linear(x) * 2


class Winding(Net):
    """Its modules stand in lists, are called often, without gradients, or not by `forward`."""

    def __init__(self):
        super().__init__()
        self.named, self.coder, self.idle = Named(), Named(), nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU())])
        self.deep = nn.ModuleDict({"er": nn.ModuleList([nn.Linear(16, 16)])})
        self.first.requires_grad_(False)

    def forward(self, x):
        x = self.norm.eval()(self.first(x))
        with torch.no_grad():
            x = x + self.idle(x)
        for block in self.blocks:
            x = block(x)
        for _ in range(3):
            x = torch.tanh(checkpoint(self.mixing, self.drop(x), use_reentrant=False))
        named = self.named(self.holder(self.coder.encode(self.deep["er"][0](x))))
        return self.body(named["hidden"] + named["more"][0])


@pytest.mark.parametrize("kind", (Net, Winding))
def test_the_run_does_not_notice_the_probe(kind, tmp_path, monkeypatch):
    """Also where modules are repeated, recomputed, frozen, without gradients, of random numbers."""
    monkeypatch.setitem(globals(), "Net", kind)
    plain, _ = trained(tmp_path, probe=False)
    probed, findings = trained(tmp_path)
    assert findings.modules and probed[:3] == plain[:3]
    for name, value in plain[3].items():
        assert torch.equal(probed[3][name], value), name


def test_every_module_that_computes_has_its_samples(findings):
    computing = {"first", "norm", "drop", "mixing", "mixing.q", "mixing.k", "attention"}
    computing |= {"holder", "holder.hot", "vanishing", "vanishing.linear"}
    computing |= {f"body.{n}" for n in range(3)}
    assert set(findings) == computing  # not Sequential, nor what attention reads without a call
    for module in findings.values():
        assert SAMPLES <= len(module.samples) <= SAMPLES + 2 and not module.trouble, module


def test_of_several_ranks_all_compute_and_one_writes(tmp_path, monkeypatch):
    """A module may wait for the other ranks; a file that two write at once is an error in one."""
    compared, compare = [], ModuleCall.compare
    monkeypatch.setattr(ModuleCall, "compare", lambda *of: compared.append(of) or compare(*of))
    _, findings = trained(tmp_path, writes=False)
    assert findings is None and len(compared) > 30 and not list(tmp_path.iterdir())


def test_copies_are_kept_of_the_modules_whose_turn_it_is_alone(tmp_path, monkeypatch):
    """One in a step where the steps are many."""
    watch, compare, done = ModuleCall.record_gradients, ModuleCall.compare, []
    monkeypatch.setattr(
        ModuleCall, "record_gradients", lambda *of: done.append("kept") or watch(*of)
    )
    monkeypatch.setattr(ModuleCall, "compare", lambda *of: done.append("compared") or compare(*of))

    def most_kept(steps):
        done.clear()
        trained(tmp_path, steps=steps)
        return max(len(list(group)) for what, group in itertools.groupby(done) if what == "kept")

    assert most_kept(80) == 1 and most_kept(20) > 2


def test_overflow_ranks_first_and_ordinary_modules_are_within_rounding(findings):
    """The formula: rounding to 11 bits gives about 2**-12 per value, and more in sums."""
    first, *_ = ranked(findings.values())
    assert first.path == "holder.hot" and math.isinf(first.error) and first.overflow > 0.5
    for path in ("first", "norm", "drop", "holder", "body.0", "body.1", "body.2"):
        assert findings[path].error < 2e-3, findings[path]
    assert 2**-13 < findings["first"].error < 2**-9


def test_gradients_that_vanish_depend_on_the_loss_scale(tmp_path, findings):
    at_1 = found_in(tmp_path, scale=1.0)
    assert at_1["vanishing.linear"].vanish > 0.2
    assert findings["vanishing.linear"].vanish < 0.05  # dynamic


def test_o1_follows_its_lists_of_functions(tmp_path):
    at_o1 = found_in(tmp_path, opt_level="O1")
    assert at_o1["holder.hot"].error == at_o1["norm"].error == 0.0  # in FP32 there
    assert 0 < at_o1["first"].error < 2e-3


def test_bfloat16_has_the_range_and_fewer_bits(tmp_path, findings):
    in_bfloat16 = found_in(tmp_path, dtype="bfloat16")
    assert math.isfinite(in_bfloat16["holder.hot"].error)
    assert in_bfloat16["first"].error > 4 * findings["first"].error


def test_gradients_arrive_in_a_reentrant_checkpoint_too():
    """Its backward pass runs inside another."""
    layer, before, calls = nn.Linear(4, 4), nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda _, args: calls.append(ModuleCall(layer, args, {}, True)))
    layer.register_forward_hook(lambda *call: calls[-1].record_gradients(call[-1]))
    checkpoint(layer, before(torch.randn(3, 4)), use_reentrant=True).sum().backward()
    assert [call.largest_gradient for call in calls] == [0.0, 1.0]
    exact, recomputed = [call.compare(HalfMode(torch.float16)) for call in calls]
    assert exact.gradient is None and recomputed.gradient > 0


def test_what_nothing_calls_is_no_candidate(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "Net", Winding)
    by_path = found_in(tmp_path)
    computing = {"first", "norm", "drop", "mixing", "mixing.q", "mixing.k", "holder", "holder.hot"}
    computing |= {"blocks.0.0", "blocks.0.1", "deep.er.0", "named", "named.linear", "coder.linear"}
    computing |= {f"body.{n}" for n in range(3)}  # but neither `attention` nor `vanishing`
    assert set(by_path) == computing | {"idle"}
    assert "without gradients" in by_path.pop("idle").trouble
    assert all(module.samples for module in by_path.values())


def test_a_module_that_cannot_be_copied_says_so(tmp_path, monkeypatch):
    def refuse(self, memo):
        raise RuntimeError("no copies of me")

    monkeypatch.setattr(Hot, "__deepcopy__", refuse, raising=False)
    hot = found_in(tmp_path)["holder.hot"]
    assert not hot.samples and "no copies of me" in hot.trouble


@pytest.mark.parametrize(
    ("error", "is_refused", "said"),
    (
        (RuntimeError("not implemented for 'Half'"), True, "does not run in half: not impl"),
        (torch.OutOfMemoryError("device out of memory"), False, "--probe-steps"),
        (RuntimeError("can't allocate memory"), False, "--probe-steps"),
    ),
)
def test_a_module_that_half_refuses_ranks_first_and_one_without_room_for_a_copy_last(
    tmp_path, monkeypatch, error, is_refused, said
):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise error
        return x * 2

    monkeypatch.setattr(Mixing, "forward", forward)
    _, findings = trained(tmp_path)
    first, second, *_, last = ranked(findings.modules)
    mixing = first if is_refused else last
    assert (mixing.path, mixing.is_refused, mixing.samples) == ("mixing", is_refused, ())
    assert f"{error}" in mixing.trouble and said in mixing.trouble
    assert (second if is_refused else first).path == "holder.hot"


def test_a_module_that_does_not_run_twice_says_so_and_is_not_taken_for_the_cause():
    class Once(nn.Linear):
        def forward(self, x):
            if hasattr(self, "was_run"):
                raise RuntimeError("once")
            self.was_run = True
            return super().forward(x)

    module, x = Once(4, 4), torch.randn(3, 4)
    module(x)
    call = ModuleCall(module, (x,), {}, as_group=True)
    with pytest.raises(RuntimeError, match="^once"):
        call.compare(HalfMode(torch.float16))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_weight_that_a_hook_computes_is_copied_and_computed_anew():
    module, x = nn.utils.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    module(x)
    assert not module.weight.is_leaf  # which deepcopy refuses
    call = ModuleCall(module, (x,), {}, as_group=True)
    call.record_gradients(module(x))
    assert 0 < call.compare(HalfMode(torch.float16)).output < 2e-3


def test_modules_whose_turn_did_not_come_are_candidates_too(tmp_path):
    """Or "every module in FP32" would leave them out."""
    _, whole = trained(tmp_path, steps=30)
    _, few = trained(tmp_path, steps=300, last=6)
    late = [
        module for module in few.modules if "its turn did not come in 6 steps" in module.trouble
    ]
    assert {module.path for module in few.modules} >= {module.path for module in whole.modules}
    assert len(late) > 5 and not any(module.samples for module in late)
    assert ranked(few.modules)[-len(late) :] == ranked(late)
