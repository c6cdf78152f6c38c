"""`func is F.linear`: what `__torch_function__` and TorchFunctionModes are given."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from engine import STATE
from small_training import in_threads
from torch import nn
from torch.masked import masked_tensor
from torch.overrides import TorchFunctionMode, resolve_name

import ampatch

H = torch.bfloat16
X, FIRST = torch.randn(3, 4), torch.tensor([0])


def o1(level: str = "O1", **options) -> nn.Module:
    options = {"patch_scope": "process", **options}
    return ampatch.initialize(Net(), opt_level=level, dtype=H, verbosity=0, **options)


class Net(nn.Module):
    """Builtins, Python functions of F, methods, operators, an RNN and attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.recurrent, self.conv = nn.LSTM(4, 4), nn.Conv1d(3, 3, 1)

    def forward(self, x):
        y = F.relu(self.norm(self.layer(x)))
        y = self.recurrent(self.conv(y))[0]
        z = y.matmul(y.t()) + y @ y.t() + torch.mm(y, y.t())
        return F.softmax(z, -1), F.cross_entropy(y, torch.tensor([0, 1, 2])), y**2


CALLS = {  # what is called, and the name by which a handler asks for it
    "builtin of F": (lambda x: F.linear(x, X), lambda: F.linear),
    "builtin of torch": (lambda x: torch.mm(x, X.t()), lambda: torch.mm),
    "one function, two names": (lambda x: torch.conv1d(x[None], X[:, :3, None]), lambda: F.conv1d),
    "its other name": (lambda x: F.conv1d(x[None], X[:, :3, None]), lambda: torch.conv1d),
    "python function of F": (lambda x: F.softmax(x, -1), lambda: F.softmax),
    "method": (lambda x: x.softmax(-1), lambda: torch.Tensor.softmax),
    "operator": (lambda x: x @ X.t(), lambda: torch.Tensor.matmul),
    "power": (lambda x: x**2, lambda: torch.Tensor.__pow__),
    "in a list": (lambda x: torch.linalg.multi_dot([X, x.t()]), lambda: torch.linalg.multi_dot),
    "keyword": (lambda x: F.linear(input=X, weight=x), lambda: F.linear),
    "own dtype": (lambda x: torch.sum(x, dtype=torch.float64), lambda: torch.sum),
    "half rule of its own": (lambda x: torch.matrix_power(x[:, :3], 2), lambda: torch.matrix_power),
    "promoting": (lambda x: x.index_add(0, FIRST, X[:1]), lambda: torch.Tensor.index_add),
    "in place": (lambda x: x.index_add_(0, FIRST, X[:1]), lambda: torch.Tensor.index_add_),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None], X[None], X[None]),
        lambda: F.scaled_dot_product_attention,
    ),
    "fourier": (lambda x: torch.fft.fft(x), lambda: torch.fft.fft),
}  # fmt: skip


def subclass(ask) -> tuple[type, list]:
    """A subclass that asks of each call whether it is `ask()`, and a list of the answers."""
    seen = []

    class Asking(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func is ask())
            return super().__torch_function__(func, types, args, kwargs or {})

    return Asking, seen


class Mode(TorchFunctionMode):
    """Keeps what it sees: functions, and the dtypes of their tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor)]
        self.seen.append((func, dtypes))
        return func(*args, **(kwargs or {}))


def test_a_subclass_is_given_what_torch_has():
    o1()
    for title, (call, ask) in CALLS.items():
        cls, seen = subclass(ask)
        for casts in (ampatch.disable_casts, lambda: ampatch.precision("half")):
            with torch.no_grad(), casts():
                expected = call(X.clone()).dtype
                seen.clear()
                result = call(X.clone().as_subclass(cls))
                answers, asked = list(seen), True  # `found.dtype` is a call too
                assert answers.count(asked) == 1, title
                assert result.dtype is expected, title


def test_a_mode_is_given_what_torch_has_once_and_uncast():
    plain = {}
    for title, (call, _) in CALLS.items():
        with Mode() as plain[title]:
            call(X.clone())
    o1()
    for title, (call, ask) in CALLS.items():
        expected = call(X.clone()).dtype
        with Mode() as outer, Mode() as inner:
            result = call(X.clone())
        for mode in (inner, outer):
            functions = [func for func, _ in mode.seen if func.__name__ != "__get__"]
            assert functions.count(ask()) == 1, title
            assert len(functions) == len(plain[title].seen), title
        assert [dtypes for _, dtypes in inner.seen] == [dtypes for _, dtypes in plain[title].seen]
        assert result.dtype is expected, title


class Recording(torch.Tensor):
    """Keeps the names of the functions that it was called with."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


ADDED = {"__get__", "to", "is_floating_point", "is_inference", "data_ptr", "_version", "new_empty"}
"""What the casts at the ends of a half model, and the check of an RNN, look at and call."""


def test_modes_and_subclasses_see_a_model_s_own_calls_only(opt_level):
    in_modes, in_subclasses = [], []
    for make in (Net, lambda: o1(opt_level)):
        model = make()
        for _ in range(2):
            with Mode() as mode:
                expected = model(X)
            Recording.seen.clear()
            outputs = model(X.as_subclass(Recording))
            in_subclasses.append([name for name in Recording.seen if name not in ADDED])
        in_modes.append([func.__name__ for func, _ in mode.seen])
        for output, other in zip(outputs, expected, strict=True):
            assert type(output) is Recording
            plain = output.as_subclass(torch.Tensor)
            assert plain.dtype is other.dtype and torch.equal(plain, other)
    assert in_modes[1] == in_modes[0] and len(in_subclasses[0]) > 10
    assert in_subclasses == in_subclasses[:1] * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_attention_asks_for_the_builtin_below():
    def run():
        torch.manual_seed(0)
        parts = [torch.randn(3, 2, 8), torch.randn(5, 2, 8)]
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        return F.scaled_dot_product_attention(jagged, jagged, jagged).values()

    with torch.no_grad():
        reference = run()
        o1()
        result = run()
    assert result.dtype is H
    torch.testing.assert_close(result.float(), reference, rtol=0.03, atol=0.03)


HANDLED = {}


def implements(*functions):
    def decorate(handler):
        HANDLED.update(dict.fromkeys(functions, handler))
        return handler

    return decorate


@implements(F.linear, torch.mm, torch.Tensor.softmax, F.interpolate)
def handled_before(func, args, kwargs):
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs), "handled"


class ByDict(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in HANDLED:
            return HANDLED[func](func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


class ByTuple(torch.Tensor):
    KNOWN = (F.linear, torch.mm, torch.Tensor.softmax)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return (result, "handled") if any(func is known for known in cls.KNOWN) else result


def marking(known):
    def handler(cls, func, types, args=(), kwargs=None):
        call = torch.Tensor.__torch_function__.__func__
        result = call(cls, func, types, args, kwargs or {})
        return (result, "handled") if func in known else result

    return handler


class ByClosure(torch.Tensor):
    __torch_function__ = classmethod(marking(frozenset((F.linear, torch.mm, torch.Tensor.softmax))))


class ByMode(TorchFunctionMode):
    def __init__(self, *functions):
        super().__init__()
        self.counts = dict.fromkeys(functions, 0)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.counts:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


TABLED = {
    "linear": (lambda x: F.linear(x, X), H),
    "mm": (lambda x: torch.mm(x, X.t()), H),
    "softmax": (lambda x: x.softmax(-1), torch.float32),
}


@pytest.mark.parametrize("cls", [ByDict, ByTuple, ByClosure])
@pytest.mark.parametrize("overridden", [False, True])
def test_tables_from_before_the_session(cls, overridden):
    before = dict(HANDLED)
    o1(overrides={F.interpolate: "float"} if overridden else None)
    for call, dtype in TABLED.values():
        result, word = call(X.as_subclass(cls))
        assert word == "handled" and result.dtype is dtype
    if overridden:  # a Python function of F is replaced; what F calls itself names it by a global
        assert F.interpolate(X.as_subclass(ByDict)[None], 2)[1] == "handled"
    ampatch.deactivate()
    assert before == HANDLED
    for call, _ in TABLED.values():
        result, word = call(X.as_subclass(cls))
        assert word == "handled" and result.dtype is torch.float32


def test_a_mode_counts_on():
    counting = ByMode(F.linear, torch.mm)
    o1()
    with counting:
        assert F.linear(X, X).dtype is H
        torch.mm(X, X.t())
    ampatch.deactivate()
    with counting:
        F.linear(X, X)
    assert counting.counts == {F.linear: 2, torch.mm: 1}


def test_a_handler_with_a_table_may_ask_for_identity_too():
    answers = []

    class Both(ByDict):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            answers.append((func in HANDLED, func is F.linear))
            return super().__torch_function__(func, types, args, kwargs or {})

    o1()
    F.linear(X.as_subclass(Both), X)
    assert answers[0] == (True, True)


def test_tables_filled_during_a_session_serve_then_and_afterwards():
    kept = dict(HANDLED)
    try:
        o1()
        implements(torch.bmm)(lambda func, args, kwargs: "bmm")
        x = X[None].as_subclass(ByDict)
        assert torch.bmm(x, x.mT) == "bmm"
        assert torch.mm(X.as_subclass(ByDict), X.t())[1] == "handled"
        implements(torch.mm)(lambda func, args, kwargs: "another")
        ampatch.deactivate()
        assert torch.bmm(x, x.mT) == "bmm" and torch.bmm in HANDLED
        assert torch.mm(X.as_subclass(ByDict), X.t()) == "another"
    finally:
        HANDLED.clear()
        HANDLED.update(kept)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_torchs_own_tables():
    """MaskedTensor has one; resolve_name and the tests' overrides are another."""
    masked = masked_tensor(X, X > 0)
    reference = masked.sum().get_data()
    resolve_name(F.linear)
    o1()
    assert torch.equal(masked.sum().get_data(), reference)
    assert resolve_name(F.linear) == "torch.nn.functional.linear"
    assert F.linear in torch.overrides.get_testing_overrides()
    assert torch.overrides.is_tensor_method_or_property(torch.Tensor.bmm)
    ampatch.deactivate()
    assert resolve_name(F.linear) == "torch.nn.functional.linear"
    assert F.linear in torch.overrides.get_testing_overrides()


def test_modes_are_known_however_they_come_and_go():
    early, late = Mode(), Mode()
    with early:
        o1()
        assert STATE.threads_in_function_modes == 1 and STATE.has_thread_policies
        assert F.linear(X, X).dtype is H
    assert STATE.threads_in_function_modes == 0 and not STATE.has_thread_policies

    in_threads(lambda: Mode().__enter__())
    assert STATE.threads_in_function_modes == 1
    assert F.linear(X, X).dtype is H
    with late:
        ampatch.deactivate()
    assert STATE.threads_in_function_modes == 0 and not STATE.has_thread_policies
