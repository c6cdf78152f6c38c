"""What the native part does with lists of tensors is what the ways in Python do, to the bit."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from native_runs import different
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampatch import native
from ampatch.scaling import scale_value, tensor_lists
from ampatch.scaling.masters import comparison
from ampatch.scaling.masters.comparison import Comparison, Pair
from ampatch.torch_private.half_grads import raw_grad, set_raw_grad

pytestmark = pytest.mark.skipif(native.part is None, reason="the native part is not in force")

ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 1e-40, 3.4e38, 6e-8, 65520.0, 1.00390625]
SHAPES = [(), (0,), (1,), (3, 5), (64,), (65,), (70, 70), (2, 3, 4, 5), (300, 300)]
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


class Asked(nn.Parameter):
    """A parameter whose `.grad` is a property of its own."""

    seen = 0

    @property
    def grad(self) -> Tensor | None:
        type(self).seen += 1
        return raw_grad(self)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        type(self).seen += 1
        set_raw_grad(self, grad)


def numbers(shape: tuple, *, odd: bool = False) -> Tensor:
    """FP32 numbers, some of them where rounding has special cases."""
    made = torch.randn(shape)
    if odd and made.numel() >= len(ODD):
        made.view(-1)[: len(ODD)] = torch.tensor(ODD)
    return made


def layouts() -> list[Tensor]:
    """FP32 tensors of all sizes, some transposed, with gaps, or in channels_last."""
    torch.manual_seed(0)
    made = [numbers(shape, odd=odd) for shape in SHAPES for odd in (False, True)]
    made += [numbers((6, 7)).t(), numbers((8, 8))[:, ::2], numbers((5, 9))[1:, 2:]]
    made.append(numbers((2, 3, 4, 5)).to(memory_format=torch.channels_last))
    return made


def pairs(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Half weights and masters; most of the weights have gradients."""
    masters: list[Tensor] = [nn.Parameter(values) for values in layouts()]
    halves: list[Tensor] = [nn.Parameter(master.detach().to(dtype)) for master in masters]
    for index, half in enumerate(halves):
        if index % 5 != 3:
            grad = numbers(tuple(half.shape), odd=index % 2 == 0).to(dtype)
            half.grad = grad.t().contiguous().t() if grad.dim() == 2 and index % 3 == 0 else grad
    return halves, masters


def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_lists, scale_value, comparison):
        monkeypatch.setattr(module, "part", None)


# Questions


def questions() -> list[tuple[str, list[Tensor]]]:
    plain: list[Tensor] = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    plain[1].grad, plain[3].grad = torch.ones(3), torch.zeros(3)
    half: list[Tensor] = [nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2).half())]
    asked = Asked(torch.randn(3))
    set_raw_grad(asked, torch.ones(3))
    sparse = nn.Parameter(torch.randn(3, 2))
    sparse.grad = torch.eye(3)[:, :2].to_sparse()
    with FakeTensorMode():
        fake = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
    meta = nn.Parameter(torch.empty(2, device="meta"))
    plain[0].data.add_(1)
    with torch.no_grad():
        plain[2].add_(1)
    found = {"none": [], "plain": plain, "half": half, "asked": [*plain, asked, Asked(plain[0])]}
    return list({**found, "sparse": [sparse, *half], "no data": [fake, meta]}.items())


@pytest.mark.parametrize("name", [name for name, _ in questions()])
@pytest.mark.parametrize(
    "function", ["any_half", "with_grads", "grads_of", "any_raw_grad", "versions", "places"]
)
def test_answers(function: str, name: str) -> None:
    tensors = dict(questions())[name]
    if (function, name) == ("places", "no data"):
        pytest.skip("has no place")
    answer = getattr(native.part, function)(tensors)
    expected = getattr(tensor_lists, f"_{function}")(tensors)
    assert type(answer) is type(expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], Tensor):
        assert list(map(id, answer)) == list(map(id, expected))
    else:
        assert answer == expected
    assert getattr(native.part, function)(tuple(tensors)) is not None  # groups may hold tuples


@pytest.mark.parametrize("function", ["drop_grads", "drop_raw_grads"])
def test_gradients_are_dropped(function: str) -> None:
    for _, tensors in questions():
        getattr(native.part, function)(tensors)
        assert not tensor_lists._any_raw_grad(tensors)


def test_a_subclass_is_asked_for_its_gradient() -> None:
    asked = Asked(torch.randn(3))
    for function in ("with_grads", "grads_of", "drop_grads"):
        before = Asked.seen
        getattr(native.part, function)([asked])
        assert Asked.seen == before + 1


@pytest.mark.parametrize("function", ["any_half", "any_raw_grad", "drop_raw_grads", "versions"])
def test_what_is_no_tensor_is_refused(function: str) -> None:
    with pytest.raises(TypeError):
        getattr(native.part, function)([1])
    with pytest.raises(TypeError):
        getattr(native.part, function)(1)


# Gradients


def unscaled(grads: list[Tensor]) -> bool | None:
    return native.part.unscale(grads, torch.zeros(()), torch.tensor(0.5))


@HALF
def test_gradients_come_up_alike(dtype: torch.dtype) -> None:
    ways = native.part.take_up, tensor_lists._take_up
    found = []
    for way in ways:
        halves, masters = pairs(dtype)
        taken, grads = way(halves, masters)
        assert not tensor_lists._any_raw_grad(halves)
        found.append(([[master is one for one in taken].count(True) for master in masters], grads))
    assert 0 in found[0][0]
    assert different(*found) == []


def test_gradients_in_parts_come_up_alike() -> None:
    found = []
    for way in (native.part.take_up, tensor_lists._take_up):
        torch.manual_seed(0)
        masters: list[Tensor] = [nn.Parameter(torch.randn(n)) for n in (2**17, 5, 2**16, 2**18, 0)]
        halves: list[Tensor] = [nn.Parameter(master.detach().half()) for master in masters]
        for half in halves:
            half.grad = torch.randn_like(half)
        taken, grads = way(halves, masters)
        assert [one is master for one, master in zip(taken, masters, strict=True)] == [True] * 5
        found.append(grads)
    assert different(*found) == []


def test_no_gradients_come_up_alike() -> None:
    half, master = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    for way in (native.part.take_up, tensor_lists._take_up):
        assert way([half], [master]) == way([], []) == ([], [])


def sparse_pair() -> tuple[Tensor, Tensor]:
    half = nn.Parameter(torch.randn(3, 2).bfloat16())
    half.grad = torch.eye(3)[:, :2].bfloat16().to_sparse()
    return half, nn.Parameter(half.detach().float())


def pair_in_a_graph() -> tuple[Tensor, Tensor]:
    half = nn.Parameter(torch.randn(3).bfloat16())
    half.grad = (half * 2).detach().requires_grad_() * 2
    return half, nn.Parameter(half.detach().float())


@pytest.mark.parametrize("make", [sparse_pair, pair_in_a_graph])
def test_unusual_gradients_are_left_to_python(make) -> None:
    half, master = make()
    usual, its_master = nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))
    usual.grad = torch.ones(2).half()
    assert native.part.take_up([usual, half], [its_master, master]) is None
    assert usual.grad is not None  # nothing was done
    _, grads = tensor_lists.take_up([usual, half], [its_master, master])
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    assert grads[1].is_sparse == (make is sparse_pair)
    assert grads[1].requires_grad == (make is pair_in_a_graph)


def test_nothing_is_done_where_a_mode_looks_on() -> None:
    halves, masters = pairs(torch.bfloat16)
    before = copy.deepcopy(halves)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert native.part.take_up(halves, masters) is None
        assert unscaled([torch.ones(2)]) is None
        assert native.part.round_down(halves, masters) is False
        assert native.part.are_rounded([], []) is False
    assert different([h.detach() for h in halves], [h.detach() for h in before]) == []


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_gradients_are_unscaled_alike(
    odd: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_host() -> tuple[list[Tensor], bool]:
        torch.manual_seed(0)
        grads = [numbers(shape, odd=odd) for shape in SHAPES] + [numbers((8, 8))[:, ::2]]
        numbers_of_host = scale_value.HostNumbers(scale, 0, torch.device("cpu"))
        return grads, numbers_of_host.unscale_(grads, scale)

    natively = on_host()
    assert natively[1] is odd
    assert unscaled([torch.ones(2)]) is False
    without_native(monkeypatch)
    assert different(natively, on_host()) == []


def test_unusual_gradients_are_unscaled_in_python() -> None:
    sparse = torch.eye(3).to_sparse()
    in_graph = torch.ones(3, requires_grad=True) * 2
    is_complex = torch.ones(3, dtype=torch.complex64)
    for unusual in (sparse, in_graph, is_complex, torch.ones(3, device="meta")):
        usual = torch.ones(2)
        assert unscaled([usual, unusual]) is None
        assert usual.tolist() == [1, 1]
    scale_value.HostNumbers(2.0, 0, torch.device("cpu")).unscale_([sparse], 2.0)
    assert sparse.to_dense().trace() == 1.5


# Weights


@HALF
def test_masters_are_rounded_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded() -> tuple[list[Tensor], list[int]]:
        _, masters = pairs(dtype)
        halves: list[Tensor] = [
            nn.Parameter(torch.zeros_like(master, dtype=dtype)) for master in masters
        ]
        halves[3] = nn.Parameter(torch.zeros_like(halves[3]).t().contiguous().t())
        before = tensor_lists.versions(halves)
        tensor_lists.round_down(halves, masters)
        after = tensor_lists.versions(halves)
        return halves, [new - old for old, new in zip(before, after, strict=True)]

    natively = rounded()
    assert set(natively[1]) == {1}
    without_native(monkeypatch)
    assert different(natively, rounded()) == []


BITS = torch.arange(-(2**15), 2**15).to(torch.int16)


def written(half: Tensor, place: int, bits: int) -> None:
    half.view(-1).view(torch.int16)[place] = bits


@HALF
@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_the_comparison_decides_alike(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing() -> list[list[int]]:
        torch.manual_seed(0)
        found = []
        masters = [nn.Parameter(torch.randn(size)) for _ in range(3)]
        halves = [nn.Parameter(master.detach().to(dtype)) for master in masters]
        both = [Pair(half, master) for half, master in zip(halves, masters, strict=True)]
        comparing = Comparison(both)
        places = {id(half): place for place, half in enumerate(halves)}

        def ask() -> None:
            found.append([places[id(pair.half)] for pair in comparing.differing()])

        ask()
        for place in {0, size // 2, size - 1}:
            for value in (*ODD, 1.0 + 2**-8, 1.0 + 3 * 2**-8):
                with torch.no_grad():
                    masters[1][place] = value
                ask()
                with torch.no_grad():
                    halves[1].copy_(masters[1])
                ask()
                bits = int(halves[1].detach().view(torch.int16)[place])
                with torch.no_grad():
                    written(halves[1].detach(), place, bits ^ 1)
                ask()
                written(halves[1].detach(), place, bits)
        return found

    natively = differing()
    without_native(monkeypatch)
    assert natively == differing()
    assert [] in natively
    assert [1] in natively


def test_every_bfloat16_is_its_own_rounding() -> None:
    halves = BITS.view(torch.bfloat16)
    usual = halves[~halves.isnan()]
    assert native.part.are_rounded([usual], [usual.float()])
    nan = halves[halves.isnan()]
    for one in (nan[:1], nan[-1:]):
        assert not native.part.are_rounded([one], [one.float()])  # the way in Python decides
    between = usual.float() * (1 + 2**-9)
    assert native.part.are_rounded([between.bfloat16()], [between])


def test_what_cannot_be_told_is_no_agreement() -> None:
    half, wide = torch.ones(4).bfloat16(), torch.ones(4)
    assert native.part.are_rounded([half], [wide])
    for one, other in (
        (half, wide.double()),
        (half.half(), wide),
        (half[::2], wide[::2]),
        (half, wide[:2]),
        (half.to("meta"), wide.to("meta")),
    ):
        assert not native.part.are_rounded([one], [other])
    assert not native.part.are_rounded([half], [])


def test_memory_that_was_freed_is_an_error_as_in_torch() -> None:
    half, wide = torch.ones(4).bfloat16(), torch.ones(4)
    half.grad = torch.ones(4).bfloat16()
    for tensor in (half, wide, half.grad):
        tensor.untyped_storage().resize_(0)
    assert not native.part.are_rounded([half], [torch.ones(4)])
    for call in (
        lambda: native.part.copies([wide], torch.bfloat16),
        lambda: native.part.take_up([half], [torch.ones(4)]),
        lambda: native.part.round_down([half], [torch.ones(4)]),
        lambda: native.part.round_down([torch.ones(4).bfloat16()], [wide]),
    ):
        with pytest.raises(RuntimeError, match="not allocated"):
            call()
