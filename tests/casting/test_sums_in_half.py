"""What PyTorch adds up in half on the CPU is FP32 inside at every level; the oracle is FP32.

A run over PyTorch's operators (`op_db`), and calls that it cannot reach, each with thousands of
elements that come to one place, in the result or in a gradient.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from op_calls import CALLS, OPS, groups, samples
from op_samples import ints
from op_sums import ADDED, RIGHT, WRONG, ZEROS, enlarged, error_of, is_small, tried, values
from operators import Operators
from torch import nn

import ampatch
from ampatch.casting.places import exists, resolve
from ampatch.casting.tables import EVERY_LEVEL, Rule

HALVES = (torch.float16, torch.bfloat16)

PLACES = {
    (row.where, name): row.only_gradient
    for row in EVERY_LEVEL
    for name in row.names
    if row.rule is not Rule.FLOAT and exists(row.where, name)
}
"""Whether only the gradient is wrong in half."""

OUT_OF_BOUNDS = {"grid_sampler", "grid_sampler_2d", "grid_sampler_3d"}
"""Their values are right, for images that 16 bits can count."""

REFUSED = {"batch_norm", "instance_norm"}
"""Their values are right, and where statistics are FP32 torch refuses half weights."""


MANY = 70_000  # more than float16 can count
LARGE = {
    "cross_entropy, large": (lambda x: F.cross_entropy(x, ints(3, MANY)), ((MANY, 3),)),
    "nll_loss, large": (lambda x: F.nll_loss(x, ints(3, MANY)), ((MANY, 3),)),
    "nll_loss, large images": (lambda x: F.nll_loss(x, ints(3, 1, 265, 265)), ((1, 3, 265, 265),)),
    "nll_loss, large images, weighted": (
        lambda x, w: F.nll_loss(x, ints(3, 1, 400, 400), w.detach()),
        ((1, 3, 400, 400), (3,)),
    ),
}
MANY_PIXELS = (  # which 16 bits cannot count: without us it reads outside of memory
    lambda x, grid: F.grid_sample(x, grid.detach() * 4 - 3, align_corners=False),
    ((1, 1, 190, 190), (1, 40, 40, 2)),
)


@pytest.fixture(params=["O1", "O2", "O3"])
def session(request):
    """A session of that level, for all calls."""
    if request.param == "O1":
        ampatch.initialize([], opt_level="O1", patch_scope="process", verbosity=0)
    else:
        ampatch.initialize(nn.Linear(1, 1), opt_level=request.param, verbosity=0)
    return request.param


def test_what_pytorch_adds_up_in_half_is_right(session, half):
    """Where only a gradient is wrong in half, a call without a graph is left as it is."""
    for with_graph in (True, False) if session == "O1" else (True,):
        with torch.set_grad_enabled(with_graph):
            errors = {name: error_of(case, half) for name, case in {**WRONG, **RIGHT}.items()}
        assert {name: error for name, error in errors.items() if not error <= 1} == {}


def test_without_us_these_calls_are_wrong_and_each_row_is_of_one(monkeypatch):
    """Else a row is needless, or the run sees nothing."""
    met: dict[int, set] = {}
    originals = {place: getattr(resolve(place[0]), place[1]) for place in PLACES}

    def spy(original):
        def spied(*args, **kwargs):
            met.setdefault(id(original), set()).add(running)
            return original(*args, **kwargs)

        return spied

    for (where, name), original in originals.items():
        monkeypatch.setattr(resolve(where), name, spy(original))
    wrong, wrong_values = set(), set()
    for running, case in {**WRONG, **RIGHT, **LARGE}.items():
        if any(error_of(case, half) > 1 for half in HALVES):
            wrong.add(running)
        with torch.no_grad():
            if any(error_of(case, half) > 1 for half in HALVES):
                wrong_values.add(running)
    assert wrong == {**WRONG, **LARGE}.keys()
    for place, function in originals.items():
        assert met.get(id(function), set()) & wrong, place
        is_right = not met[id(function)] & wrong_values
        assert is_right is (PLACES[place] or place[1] in OUT_OF_BOUNDS | REFUSED), place


def test_what_half_cannot_count_is_right(session, half):
    """In FP32 inside, and of the dtype that the level has."""
    for name, (call, shapes) in {**LARGE, "grid_sample": MANY_PIXELS}.items():
        assert error_of((call, shapes), half) <= 1, name
        result = call(*(values(*shape).to(half) for shape in shapes))
        assert result.dtype is (torch.float32 if session == "O1" else half), name


def test_out_is_written_as_without_us(session, half):
    """PyTorch's builtin has `out=`; a result in FP32 would not be written into it."""
    x, targets, out = values(4, 3).to(half), ints(3, 4), torch.zeros(4, dtype=half)
    assert torch._C._nn.nll_loss(x, targets, reduction=0, out=out) is out
    assert torch.equal(out, -x.gather(1, targets[:, None])[:, 0])


NUMBERS = torch.ones(ADDED)
IN_PLACE = {
    "index_add_": lambda x, to: x.index_add_(0, ZEROS, to(NUMBERS)),
    "index_put_": lambda x, to: x.index_put_((ZEROS,), to(NUMBERS), accumulate=True),
    "put_": lambda x, to: x.put_(ZEROS, to(NUMBERS), accumulate=True),
    "index_reduce_": lambda x, to: x.index_reduce_(0, ZEROS, to(NUMBERS), "mean"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_writes_in_place_writes_into_the_callers_tensor(session, name, half):
    whole = torch.full((6,), 3, dtype=half)
    part = whole[:3]
    assert IN_PLACE[name](part, lambda values: values.to(half)) is part
    total = torch.tensor(3.0 + ADDED)
    first = (total / (ADDED + 1) if name == "index_reduce_" else total).to(half)
    assert torch.equal(whole, torch.tensor([first, 3, 3, 3, 3, 3], dtype=half))
    leaf = torch.ones(3, dtype=half, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        IN_PLACE[name](leaf, lambda values: values.to(half))


def of(why: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


POLYGAMMAS = " ".join(f"polygamma-polygamma_n_{n}" for n in range(5))
CONVOLUTIONS = " ".join(f"nn.functional.conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3))
SPARED = {
    **of("limits.md", CONVOLUTIONS),
    **of("whatever was in memory", "empty empty_like empty_permuted empty_strided"),
    **of("whatever was in memory", "new_empty new_empty_strided"),
    **of("reads and writes outside of memory for enlarged pivots or offsets", "lu_unpack"),
    **of("offsets that go back", "nn.functional.embedding_bag"),
    **of("results grow with the square of the elements", "combinations cartesian_prod block_diag"),
    **of("leaves the range of half", "matrix_exp norm linalg.norm prod masked.var masked.std"),
    **of("leaves the range of half", "nn.functional.normalize nn.functional.cosine_similarity"),
    **of("leaves the range of half", "linalg.norm-subgradients_at_zero corrcoef"),
    **of("leaves the range of half", "nn.functional.pairwise_distance"),
    **of("leaves the range of half", f"{POLYGAMMAS} special.polygamma-special_polygamma_n_0"),
    **of("leaves the range of half", " ".join(f"mvlgamma-mvlgamma_p_{n}" for n in (1, 3, 5))),
    **of("differences of near values", "cov trapz trapezoid nn.functional.poisson_nll_loss"),
    **of("the backward pass begins from a rounded result", "log_softmax masked.log_softmax"),
    **of("products, rounded, and then a softmax", "nn.functional.multi_head_attention_forward"),
    **of("products, rounded, and then a softmax", "nn.functional.linear_cross_entropy"),
    **of("products, rounded, and then a softmax", "nn.functional.linear_cross_entropy-chunked"),
    **of(
        "products, rounded, and then a softmax", "nn.functional.linear_cross_entropy-chunked_none"
    ),
    **of("draws random numbers of the dtype", "nn.functional.fractional_max_pool2d"),
    **of("autograd adds a gradient for each of thousands of results", "tensor_split"),
    **of("for graphs of compilers", "_unsafe_masked_index _unsafe_masked_index_put_accumulate"),
}
"""Operators that differ from FP32 by more than rounding for another reason."""

ROWS = {f"{where}.{name}" for where, name in PLACES}
FEW = [
    name
    for name, calls in CALLS.items()
    if name not in SPARED and any(ROWS.intersection(call.rows) for call in calls)
]
"""Those that meet a row."""


@pytest.mark.parametrize(
    "names, limit",
    [pytest.param(FEW, 1, id="few")]
    + [
        pytest.param(part.values[0], 4, id=part.id, marks=pytest.mark.slow)
        for part in groups(OPS.keys() - SPARED.keys())
    ],
)
def test_no_operator_adds_up_in_half(names, limit):
    ampatch.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    wrong: dict[str, list] = {}
    for name in names:
        call = CALLS[name][0]
        for sample in samples(OPS[name], torch.float32, limit):
            for large in filter(lambda candidate: is_small(call, candidate), enlarged(sample)):
                for half in HALVES:
                    error = tried(call, large, half)
                    if error is not None and not error <= 1:
                        shapes = [tuple(tensor.shape) for tensor in large.tensors()]
                        wrong.setdefault(name, []).append((half, shapes, error))
    assert wrong == {}


class _Dtypes(Operators):
    def __init__(self, names):
        super().__init__()
        self.names = re.compile(names)

    def look(self, function, args):
        if self.names.fullmatch(function.overloadpacket.__name__):
            self.seen.append(args[0].dtype)


USUAL = [
    lambda x: F.max_pool2d(x, 3, (2, 2)),
    lambda x: F.avg_pool2d(x, (3, 3), 2),
    lambda x: F.avg_pool2d(x, [2], [1]),
    lambda x: F.max_pool1d(x.flatten(0, 1), (2,), (1,)),
    lambda x: F.avg_pool1d(x.flatten(0, 1), 3, 2),
    lambda x: F.max_pool3d(x[:, :, None], (1, 2, 2)),
    lambda x: F.max_pool2d(x, kernel_size=2, stride=2, return_indices=True),
    lambda x: F.max_pool2d(x, 3, 2, 1),
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, (3, 3), (1, 1)),
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: F.adaptive_max_pool2d(x, (7, None)),
    lambda x: torch.max_pool2d(x, kernel_size=2, stride=1),
]
OVERLAPPING = [
    lambda x: F.max_pool2d(x, 9, (1, 2)),
    lambda x: F.max_pool2d(x, 5, 1),
    lambda x: F.avg_pool2d(x, (9, 1), (1, 1)).mean() + F.avg_pool2d(x, (8, 8), stride=1).mean(),
    lambda x: F.adaptive_avg_pool2d(x, 64),
    lambda x: F.adaptive_max_pool2d(x, output_size=(64, 64)),
]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_pooling_is_fp32_inside_where_many_windows_have_an_element_alone(level):
    """A ResNet's pooling stays in half, as under autocast."""
    model = torch.nn.Linear(1, 1)
    ampatch.initialize(model, opt_level=level, dtype="bfloat16", verbosity=0)
    x = torch.randn(2, 4, 12, 12).bfloat16().requires_grad_()
    for calls, expected in ((USUAL, torch.bfloat16), (OVERLAPPING, torch.float32)):
        for call in calls:
            with _Dtypes(".*(pool|mean).*") as dtypes:
                call(x)
            assert expected in dtypes.seen
            assert expected is torch.float32 or set(dtypes.seen) == {expected}
            with torch.no_grad(), _Dtypes(".*(pool|mean).*") as dtypes:
                call(x)
            assert set(dtypes.seen) == {torch.bfloat16}  # its gradient alone is wrong


def test_pooling_that_torch_refuses_or_that_is_empty_is_left_to_torch():
    model = torch.nn.Linear(1, 1)
    ampatch.initialize(model, opt_level="O2", dtype="bfloat16", verbosity=0)
    empty = torch.zeros(2, 0, 4, 4).bfloat16()
    assert F.adaptive_avg_pool2d(empty, 2).shape == (2, 0, 2, 2)
    with pytest.raises(RuntimeError, match="stride should not be zero"):
        F.max_pool2d(torch.ones(1, 1, 4, 4).bfloat16(), 2, (0, 0))


class Normed(nn.Module):
    """A norm of the user's, whose weights are the model's own."""

    def __init__(self, norm, with_statistics):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 8), norm
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8) if with_statistics else None)
        self.register_buffer("var", torch.ones(8) if with_statistics else None)

    def forward(self, x):
        x = self.first(x) + 8
        if self.norm is F.instance_norm:
            x = x.T[None]
        x = self.norm(x, self.mean, self.var, self.weight, self.bias, self.training)
        return x[0].T if self.norm is F.instance_norm else x


@pytest.mark.parametrize("with_statistics", [False, True])
@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm], ids=lambda norm: norm.__name__)
def test_norms_with_the_models_own_half_weights(norm, with_statistics):
    """Whatever is added to the inputs of a norm over the batch has no gradient."""
    gradients, values = {}, {}
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    for level in ("O0", "O1", "O2"):
        model = ampatch.initialize(
            Normed(norm, with_statistics), opt_level=level, dtype="bfloat16", verbosity=0
        )
        model(x).float().relu().pow(2).mean().backward()
        gradients[level] = model.first.bias.grad.abs().sum().item()
        if with_statistics:
            with torch.no_grad():
                values[level] = model.eval()(x).float()
            assert model.mean.dtype is torch.float32 and model.mean.abs().sum() > 1
        ampatch.deactivate()
    assert gradients["O2"] < 3 * gradients["O1"]
    for value in values.values():
        torch.testing.assert_close(value, values["O0"], rtol=0.02, atol=0.1)


def test_batch_norms_of_torch_keep_their_kernel():
    """FP32 weights beside half inputs, as under autocast; half statistics are written into."""
    for level in ("O1", "O2", "O3"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        ampatch.initialize(model, opt_level=level, dtype="bfloat16", verbosity=0)
        with _Dtypes("native_batch_norm") as norms:
            model(torch.randn(16, 8)).float().sum().backward()
        assert norms.seen == [torch.bfloat16]
        assert model[1].running_mean.float().abs().sum() > 0
        ampatch.deactivate()
