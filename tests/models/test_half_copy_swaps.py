"""Half copies of weights in the places of FP32 parameters, while a forward runs (O2).

A forward may write through `.data` of its weights, in whichever of its forwards.
"""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
from flat_rnns import in_one_buffer
from small_training import InBackward, Made, Net, in_threads, managed, pass_back, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

HALF = torch.bfloat16
enabled = contextlib.nullcontext


def start(model=None, half=HALF, **settings):
    return managed(Net() if model is None else model, "O2", half, **settings)


def inputs(seed=1):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def is_float(model):
    entries = [
        value for m in model.modules() for value in m._parameters.values() if value is not None
    ]
    assert all(type(entry) is nn.Parameter and entry.dtype is torch.float32 for entry in entries)
    return True


def test_parameters_and_submodules_that_come_later_get_half_copies():
    """Put in between forwards, by a forward, or by a parametrization."""
    model, _ = start()
    model(inputs())
    model.first.weight = nn.Parameter(torch.zeros(8, 4))
    model.second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    seen, new = [], nn.Parameter(torch.ones(8))

    def inside(model):
        seen.extend(p.dtype for p in model.parameters())
        model.first.bias = new  # it has been used

    model.inside = inside
    model(inputs())
    assert set(seen) == {HALF} and model.first.bias is new and is_float(model)
    torch.nn.utils.parametrizations.spectral_norm(model.second[0])
    output = model(inputs())
    expected = copy.deepcopy(model).eval()(inputs())
    torch.testing.assert_close(model.eval()(inputs()), expected, rtol=0.03, atol=0.03)
    output.sum().backward()
    original = model.second[0].parametrizations.weight.original
    assert new.grad is not None and original.grad is not None


class Checkpointed(Net):
    reentrant = False

    def forward(self, x):
        hidden = checkpoint(self.again, x, use_reentrant=self.reentrant)
        self.inside(self)
        return self.second(hidden)

    def again(self, x):
        self.seen.append(self.first.weight.dtype)
        return self.encode(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_has_the_copies_of_its_forward(reentrant):
    """Though the optimizer has stepped since.  A parameter that was replaced since stays."""
    grads = []
    for kind in (Net, Checkpointed):
        model, optimizer = start(kind(), loss_scale=1.0)
        model.reentrant = reentrant
        parameters = list(model.parameters())
        out = model(inputs().requires_grad_())
        optimizer.step()
        model.second.bias = new = nn.Parameter(torch.ones(2))
        pass_back(out.square().sum(), optimizer)
        assert model.second.bias is new and is_float(model) and set(model.seen) == {HALF}
        grads.append([p.grad for p in parameters])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("how", ["a part", "a method that calls parts"])
def test_a_compiled_function_that_calls(how):
    """As eager, to the bit, in one graph; parts get half weights and inputs there too."""
    results = []
    for compiled in (False, True):
        model, optimizer = start()

        def whole(x, call=model.first if how == "a part" else model.encode):
            hidden = call(x)
            return hidden, hidden.float().square().mean()

        if compiled:
            whole = torch.compile(whole, backend="aot_eager", fullgraph=True)
        for seed in range(3):
            hidden, loss = whole(inputs(seed))
            assert hidden.dtype is torch.float32
            step(loss, optimizer)
        results.append([weight.detach().clone() for weight in model.parameters()])
        ampatch.deactivate()
        torch._dynamo.reset()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("grads", [True, False])
def test_attributes_of_a_parameter_are_its_copys(grads):
    """Libraries note things on parameters, before and within forwards (opacus counts them)."""
    model, _ = start()
    model.first.weight.calls = 0

    def inside(model):
        model.first.weight.calls += 1
        model.second.bias.seen = [part.dtype for part in (model.first.weight, model.second.bias)]

    model.inside = inside
    with torch.set_grad_enabled(grads):
        for _ in range(3):
            model(inputs())
    assert model.first.weight.calls == 3 and model.second.bias.seen == [HALF, HALF]
    assert not vars(model.second.weight)


def test_a_graph_without_its_buffers_holds_no_copies():
    """Of a loss that is kept for a log, after its backward pass."""
    model, _ = start()
    held = []

    def inside(model):
        held.extend(map(weakref.ref, (model.first.weight, model.second.weight)))
        model.noted = InBackward.apply(model.second(torch.ones(8, dtype=HALF)), lambda: None)

    model.inside = inside
    loss = model(inputs()).sum() + model.noted.sum()
    del model.noted
    loss.backward(retain_graph=True)
    loss.backward()
    gc.collect()
    assert [copied() for copied in held] == [None, None] and loss.grad_fn is not None


COPIES = {
    "state_dict": lambda module: module.state_dict(),
    "state_dict, kept": lambda module: module.state_dict(keep_vars=True),
    "deepcopy": lambda module: copy.deepcopy(module).state_dict(),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).state_dict(),
    "a model around": lambda module: copy.deepcopy(nn.Sequential(module))[0].state_dict(),
    "a thread": lambda module: in_threads(module.state_dict)[0],
}


class Recurrent(nn.Module):
    """An RNN, a tied weight and a layer that comes later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.late = nn.LSTM(4, 4), None
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.rnn.weight_ih_l0

    inside = None

    def forward(self, x):
        assert self.head.weight is self.rnn.weight_ih_l0
        hidden = self.head(self.rnn(x)[0])
        type(self).inside()
        return self.late(hidden)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(("whole", "grad"), [(True, True), (False, False)])
def test_copies_made_within_a_forward_are_of_the_parameters(how, grad, whole, monkeypatch):
    """byol-pytorch copies its encoder at the first forward."""
    model, found = Recurrent(), []
    start(model)
    model.late = nn.Linear(16, 2)
    parts = [model] if whole else list(model.children())
    expected = [part.state_dict(keep_vars=True) for part in parts]
    monkeypatch.setattr(Recurrent, "inside", lambda: found.extend(map(COPIES[how], parts)))
    with torch.set_grad_enabled(grad):
        model(torch.ones(3, 4))
    assert len(found) == len(parts)
    for copied, weights in zip(found, expected, strict=True):
        assert copied.keys() == weights.keys()
        for name, weight in weights.items():
            assert copied[name].dtype is torch.float32 and torch.equal(copied[name], weight)
            assert not copied[name].requires_grad or "kept" in how
            assert "kept" not in how or copied[name] is weight


RNNS = {
    "LSTM": lambda: nn.LSTM(4, 6, 2, dropout=0.0),
    "GRU": lambda: nn.GRU(4, 6, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 6, 3, bias=False),
    "projected": lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True),
    "many layers": lambda: nn.GRU(4, 6, 20),  # more weights than a bucket has
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind", RNNS)
@pytest.mark.parametrize("around", [enabled, torch.no_grad, torch.inference_mode])
def test_copies_of_an_rnn_lie_in_memory_as_its_weights_do(kind, around):
    """cuDNN takes them as they are then; else it copies them at every forward, and warns."""

    def look(rnn, args):
        found[:] = [(w.untyped_storage().data_ptr(), w.dtype) for w in rnn._flat_weights]
        places[:] = [(w.storage_offset(), w.stride()) for w in rnn._flat_weights]
        assert not rnn._weights_have_changed()

    found, places, results = [], [], []
    for flat in (False, True):
        torch.manual_seed(0)
        rnn = RNNS[kind]()
        next(iter(rnn.parameters())).requires_grad_(False)
        model = nn.Sequential(nn.Linear(4, 4), in_one_buffer(rnn) if flat else rnn)
        start(model)
        if flat:
            rnn.register_forward_pre_hook(look)
        with around():
            outputs = model(torch.linspace(-1, 1, 12).view(3, 4))[0]
        results.append([outputs])
        if outputs.requires_grad:
            outputs.square().sum().backward()
            results[-1] += [p.grad for p in model.parameters() if p.requires_grad]
        assert is_float(model)
    assert len(set(found)) == 1 and found[0][1] is HALF
    assert places == [(w.storage_offset(), w.stride()) for w in rnn._flat_weights]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "make", [lambda net: copy.deepcopy(net.first), lambda net: nn.Linear(4, 8)]
)
def test_a_submodule_that_the_forward_makes_has_copies_from_the_next_forward_on(make):
    """A momentum encoder, or a layer whose sizes the first input says.  Until then: an error."""

    class Making(Net):
        def encode(self, x):
            if not hasattr(self, "late"):
                self.late = make(self)
            return self.late(x) + self.first(x)

    model, _ = start(Making())
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        model(inputs())
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "Making is at O2" in told and is_float(model)
    model.late.weight.grad = None
    model(inputs()).sum().backward()
    assert is_float(model) and model.late.weight.grad.dtype is torch.float32
    assert torch.equal(model.late.weight.grad, model.first.weight.grad)


def test_a_backward_of_a_part_that_calls_the_whole_model_does_not_wait_for_itself():
    model, _ = start()
    expected = model(inputs())
    found = []

    def call():
        with torch.no_grad():
            found.append(model(inputs()))

    model.first.register_forward_hook(lambda part, args, out: InBackward.apply(out, call))
    model.first(inputs()).float().sum().backward()
    assert torch.equal(found[-1], expected) and is_float(model)
    assert torch.equal(model(inputs()), expected)


def test_a_state_dict_beside_a_training_has_no_copies():
    """In another thread: forwards begin and end while it is made."""
    model, _ = start(nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))))
    stop, seen = threading.Event(), set()

    def save():
        while not stop.is_set():
            for keep_vars in (False, True):
                saved = model.state_dict(keep_vars=keep_vars).values()
                seen.update((type(tensor), tensor.dtype) for tensor in saved)

    thread, interval = threading.Thread(target=save), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(1500):
            model(inputs())
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert seen == {(torch.Tensor, torch.float32), (nn.Parameter, torch.float32)}


def test_a_forward_that_writes_into_its_weights_is_warned_once(caplog):
    """NaN weights of a training that has diverged are not taken for written ones."""
    model, _ = start(verbosity=1)
    with torch.no_grad():
        model.first.weight.fill_(float("nan"))
    model(inputs())
    assert "writes to its weights" not in caplog.text
    model, _ = start(verbosity=1)
    model.inside = lambda model: model.first.weight.data.mul_(0.9)
    for _ in range(3):
        model(inputs())
    assert caplog.text.count("writes to its weights in its own forward (first.weight)") == 1


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_graph_holds_nothing_of_the_call_that_made_it(level):
    """A node of a custom Function keeps the half copies, not the frame with inputs and results."""
    model, _ = managed(Net(), level)
    ones = torch.ones(2, requires_grad=True)
    model.inside = lambda model: setattr(model, "noted", InBackward.apply(ones, bool))

    class Held(torch.Tensor):
        pass

    x = inputs().as_subclass(Held)
    held = weakref.ref(x)
    loss = model(x).as_subclass(torch.Tensor).sum() + model.noted.sum()
    del x
    gc.collect()
    assert held() is None and loss.dtype is torch.float32


def test_gradients_of_a_norms_weights_within_the_forward():
    """Inner loops ask for them; hooks and `retain_grad` see them too."""
    found, x = [], torch.randn(4, 8)

    def forward(self, x):
        y = self.layer(self.norm(x))
        weights = list(self.norm.parameters())
        found.append([*torch.autograd.grad(y.square().sum(), weights, create_graph=True)])
        self.norm.weight.register_hook(lambda grad: grad * 3)
        self.norm.weight.retain_grad()
        self.norm.weight.data.clamp_(0.1, 0.5)
        return y

    plain = Made(forward, norm=nn.LayerNorm(8), layer=nn.Linear(8, 8))
    ampatch.initialize(model := copy.deepcopy(plain), opt_level="O2", dtype=HALF, verbosity=0)
    for net in (plain, model):
        net(x).sum().backward()
        found[-1].append(net.norm.weight.grad)
    for right, half in zip(*found, strict=True):
        assert (right - half).norm() < 0.05 * right.norm()


@pytest.mark.filterwarnings("ignore")
def test_a_trace_is_the_same_with_and_without_gradients():
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    ampatch.initialize(net, opt_level="O2", dtype="bfloat16", verbosity=0)
    torch.jit.trace(net, torch.randn(2, 8))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Writing(nn.Module):
    """A quantizer sets its step once, or a momentum encoder goes on, from forward `first` on."""

    def __init__(self, first: int, once: bool, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.count, self.first, self.once, self.way = 0, first, once, way

    def forward(self, x):
        self.count += 1
        if self.count == self.first or (self.count > self.first and not self.once):
            new = self.key.weight.detach() * 0.5 + self.query.weight.detach() * 0.5
            if self.way == "copy_":
                self.key.weight.data.copy_(new)
            elif self.way == "mul_":
                self.key.weight.data.mul_(0.5).add_(self.query.weight.data, alpha=0.5)
            else:
                self.key.weight.data = new
        return self.query(x) + self.key(x)


@pytest.mark.parametrize("way", ["copy_", "mul_", "="])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    "first, mode",
    [
        *((first, torch.enable_grad) for first in (1, 2, 5, 10)),
        *((first, torch.no_grad) for first in (1, 2)),
        (1, torch.inference_mode),
    ],
)
def test_no_write_is_lost(first, mode, once, way):
    """Values are looked at in the forwards 1, 10, 100, ... with a graph and without; those of a
    module that writes in all that follow.
    """
    plain = Writing(first, once, way)
    model = ampatch.initialize(
        Writing(first, once, way), opt_level="O2", dtype="bfloat16", verbosity=0
    )
    begun = plain.key.weight.detach().clone()
    for _ in range(first + 2):
        with mode():
            plain(X)
            model(X)
        torch.testing.assert_close(model.key.weight, plain.key.weight, atol=8e-3, rtol=8e-3)
    assert not torch.allclose(plain.key.weight, begun, atol=0.05)
    assert torch.equal(model.query.weight, plain.query.weight)  # read through .data alone


def test_a_compiled_forward_reads_data():
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.weight.data.abs().max()

    model = ampatch.initialize(Reading(8, 8), opt_level="O2", dtype="bfloat16", verbosity=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X), atol=0.02, rtol=0.02)


def test_data_of_other_tensors_is_as_it_was():
    model = ampatch.initialize(nn.Linear(8, 8), opt_level="O2", dtype="bfloat16", verbosity=0)
    x = X.clone()
    x.data.zero_()
    assert not x.any()
    x.data = torch.ones(2)
    assert x.tolist() == [1.0, 1.0]
    model.weight.data.zero_()
    assert model(X).std(0).eq(0).all()


class Asking(nn.Linear):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("block", [ampatch.disable_casts, lambda: ampatch.precision("float")])
def test_a_block_that_changes_nothing_is_said_once(level, block, caplog):
    model = ampatch.initialize(Asking(8, 8), opt_level=level, dtype="bfloat16")
    caplog.clear()
    with block():
        model(X)
        model(X)
    said = [message for message in caplog.messages if "disable_casts" in message]
    assert len(said) == (level != "O1")
    if said:
        assert said[0].startswith("Asking is called inside") and f"at {level}" in said[0]
        assert "ampatch.unwrap(model)" in said[0] and "overrides=" in said[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_returns_data(backend):
    ampatch.initialize(nn.Linear(2, 2), opt_level="O2", dtype="bfloat16", verbosity=0)
    compiled = torch.compile(lambda x: (x.data, x + 1), backend=backend)
    data, _ = compiled(torch.ones(2, requires_grad=True))
    assert data.tolist() == [1.0, 1.0] and not data.requires_grad


def test_data_cannot_be_deleted():
    with pytest.raises(RuntimeError, match="Deleting tensor data"):
        del X.clone().data
    ampatch.initialize(nn.Linear(2, 2), opt_level="O2", dtype="bfloat16", verbosity=0)
    with pytest.raises(RuntimeError, match="Deleting tensor data"):
        del X.clone().data
