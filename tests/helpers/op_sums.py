"""Calls that add up thousands of elements, and how wrong they are in half.

`enlarged` makes such calls of the samples that PyTorch tests an operator with; `WRONG` and `RIGHT`
have what it cannot make, because sizes depend on each other or stand in arguments.  All values are
in (0.5, 1): in half their sum stops at 256 (bfloat16) or 2,048 (float16) times an addend.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from op_calls import Sample, look_up, quietly, seed
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

ADDED = 4096
MOST = 2**19
"""Elements of an enlarged input; an output has twice as many at most."""
ROOM = {torch.float16: 0.02, torch.bfloat16: 0.15}
"""Of the largest value: several roundings, where a sum that has stopped loses a tenth or more."""


def values(*shape: int) -> Tensor:
    """Random values in (0.5, 1), always the same for a shape."""
    return 0.5 + 0.5 * torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def enlarged(sample: Sample) -> Iterator[Sample]:
    """The sample with more elements: each dimension for itself, and all of one size together.

    Where it has indices, also with all of them the same.
    """
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    dims = [
        (place, dim)
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel()
        for dim in range(leaf.dim())
    ]
    sizes: dict[int, list] = {}
    for place, dim in dims:
        sizes.setdefault(leaves[place].shape[dim], []).append((place, dim))
    for chosen in dict.fromkeys([*map(tuple, sizes.values()), *((single,) for single in dims)]):
        new = list(leaves)
        for place, dim in chosen:
            many = torch.arange(ADDED) % new[place].shape[dim]
            if new[place].numel() // new[place].shape[dim] * ADDED > MOST:
                break
            new[place] = new[place].index_select(dim, many)
        else:
            yield Sample(*tree_unflatten(new, spec))
            if any(map(_is_index, new)):
                yield Sample(*tree_unflatten(list(map(_all_the_same, new)), spec))


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64)


def _all_the_same(leaf: Any) -> Any:
    return torch.full_like(leaf, leaf.min().item()) if _is_index(leaf) else leaf


def is_small(call: Callable, sample: Sample) -> bool:
    """Whether the result has few elements, as far as PyTorch can say without computing it."""
    try:
        with quietly(), torch.no_grad():
            fake = sample.fresh(lambda leaf: leaf.to("meta"))
            results = tree_leaves(call(*fake.args, **fake.kwargs))
    except Exception:
        return True
    return sum(leaf.numel() for leaf in results if isinstance(leaf, Tensor)) <= 2 * MOST


def error(call: Callable, sample: Sample, half: torch.dtype) -> float:
    """The error of `call` in half, of results and gradients, as a multiple of what it may be.

    It may be `ROOM`, and what the same call in FP32 changes by if its inputs are rounded to half
    once more: products and differences magnify the rounding of their inputs.
    """
    results = _computed(call, sample, half, lambda value: value.to(half))
    right = _computed(call, sample, half, lambda value: value.to(half).float())
    other = _computed(call, sample, half, lambda value: _shaken(value, half))
    worst = 0.0
    for new, old, beside in zip(results, right, other, strict=True):
        if new is None or old is None or new.shape != old.shape:
            continue
        new, old, beside = new.float(), old.float(), beside.float()
        fits = old.isfinite() & (old.abs() <= torch.finfo(half).max)
        if fits.any() and (largest := old[fits].abs().max().item()):
            room = ROOM[half] * largest + 4 * (old - beside)[fits].abs().max().item()
            gap = (new - old)[fits].abs().nan_to_num(torch.inf).max().item()
            worst = max(worst, gap / room)
    return worst


def _shaken(value: Tensor, half: torch.dtype) -> Tensor:
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return value.to(half).float() * (1 + signs * torch.finfo(half).eps / 2)


def _computed(
    call: Callable, sample: Sample, half: torch.dtype, change: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Floating results, and gradients, of inputs that are `change` of `values`."""
    inputs: list[Tensor] = []

    def changed(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.clone()
        inputs.append(change(values(*leaf.shape)).requires_grad_())
        return inputs[-1]

    args, kwargs = tree_map_only(Tensor, changed, (sample.args, sample.kwargs))
    seed()
    with quietly():
        actual = [leaf for leaf in tree_leaves(call(*args, **kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in actual if leaf.requires_grad]
        results: list = [leaf.detach() for leaf in actual if leaf.is_floating_point()]
        if outputs and torch.is_grad_enabled():
            like = [values(*leaf.shape).to(half).to(leaf.dtype) for leaf in outputs]
            results += torch.autograd.grad(outputs, inputs, like, allow_unused=True)
    return results


def tried(call: Callable, sample: Sample, half: torch.dtype) -> float | None:
    """`error`, or None where PyTorch refuses the call: it is none, or has no kernel for half."""
    try:
        return error(call, sample, half)
    except Exception:
        return None


ZEROS = torch.zeros(ADDED, dtype=torch.long)
COLUMN = ZEROS[:, None]
ROWS = ((3, 4), (ADDED, 4))
"""Shapes: a table of three rows, and rows that are added to one of them."""
NUMBERS = ((3,), (ADDED,))

Shapes = tuple[tuple[int, ...], ...]
Case = tuple[Callable, Shapes]


def at(place: str, name: str) -> Callable:
    """The function of torch that is there when it is called; one that writes gets a copy."""
    is_in_place = name.endswith("_")

    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(look_up(place), name)(
            first.clone() if is_in_place else first, *args, **kwargs
        )

    return call


def like(x: Tensor, numbers: Tensor) -> Tensor:
    """The values of `given`, with the gradients of `x`."""
    return x - x.detach() + numbers.to(x.dtype)


def peak(x: Tensor) -> Tensor:
    """`x` with one largest value, in the middle of each dimension."""
    numbers = torch.zeros(x.shape)
    numbers[tuple(size // 2 for size in x.shape)] = 1
    return like(x, numbers)


def _everywhere(name: str, use: Callable, shapes: Shapes) -> Iterator[tuple[str, Case]]:
    """`use(function, *inputs)` of a function of torch, and of the method of that name."""
    for place in ("torch", "torch.Tensor"):
        if hasattr(look_up(place), name):
            yield f"{place}.{name}", (partial(use, at(place, name)), shapes)


def _written() -> Iterator[tuple[str, Case]]:
    """Functions that read from one place often, or add to one."""

    def adding(f: Callable, x: Tensor, s: Tensor) -> Tensor:
        return f(x, (ZEROS,), s, accumulate=True)

    def reducing(f: Callable, x: Tensor, s: Tensor) -> Tensor:
        return f(x, 0, ZEROS, s, "mean")

    def histogram(f: Callable, x: Tensor) -> Tensor:
        return f(torch.ones_like(x), 3)

    many = torch.tensor([ADDED, 1, 1])
    yield from _everywhere("take", lambda f, x: f(x, ZEROS), ((3, 4),))
    yield from _everywhere("index_select", lambda f, x: f(x, 0, ZEROS), ((3,),))
    yield from _everywhere("repeat_interleave", lambda f, x: f(x, many, 0), ((3,),))
    yield from _everywhere("histc", histogram, ((ADDED,),))
    for name in ("index_add", "index_add_"):
        yield from _everywhere(name, lambda f, x, s: f(x, 0, ZEROS, s), NUMBERS)
    for name in ("index_put", "index_put_"):
        yield from _everywhere(name, adding, ROWS)
    for name in ("put", "put_"):
        yield from _everywhere(name, lambda f, x, s: f(x, ZEROS, s, True), NUMBERS)
    for name in ("index_reduce", "index_reduce_"):
        yield from _everywhere(name, reducing, ROWS)
    for name in ("addbmm", "addbmm_"):
        yield from _everywhere(
            name, lambda f, *args: f(*args), ((3, 4), (ADDED, 3, 1), (ADDED, 1, 4))
        )


def _pools() -> Iterator[tuple[str, Case]]:
    for dims, window in ((1, 2048), (2, 64), (3, 16)):
        shape, few = (1, 1, *[2 * window] * dims), (1, 1, *[2] * dims)
        name = f"max_pool{dims}d"
        yield name, (partial(_max_pool, name, window), (shape,))
        yield f"{name} with places", (partial(_max_pool, f"{name}_with_indices", window), (shape,))
        if dims < 3:  # no kernel for half
            name = f"avg_pool{dims}d"
            yield name, (lambda x, f=name, n=window: getattr(F, f)(x, n, 1), (shape,))
            name = f"lp_pool{dims}d"
            yield name, (lambda x, f=name, n=window: getattr(F, f)(x, 1.0, n, 1), (shape,))
        for kind in ("avg", "max"):
            name = f"adaptive_{kind}_pool{dims}d"
            more = {1: ADDED, 2: 64, 3: 16}[dims] * 2
            yield f"{name} to more", (lambda x, f=name, n=more: getattr(F, f)(x, n), (few,))
            yield f"{name} to few", (lambda x, f=name: getattr(F, f)(x, 2), (shape,))


def _max_pool(name: str, window: int, x: Tensor) -> Tensor:
    results = getattr(F, name)(peak(x), window, 1)
    return results[0] if isinstance(results, tuple) else results


def _sampled(name: str, dims: int, x: Tensor) -> Tensor:
    return at("torch", name)(x, x.new_zeros(1, *[ADDED, 1, 1][:dims], dims), 0, 0, True)


FAR = 8 + (8 * values(ADDED, 4)).round() / 8
"""Values that half dtypes have, and a mean that they do not have."""

WRONG: dict[str, Case] = {
    **dict(_pools()),
    **dict(_written()),
    "avg_pool2d of one image": (lambda x: F.avg_pool2d(x, 256), ((1, 1, 256, 256),)),
    "interpolate area": (lambda x: F.interpolate(x, (64, 64), mode="area"), ((1, 1, 1, 1),)),
    "unfold": (lambda x: F.unfold(x, (1, 2048)), ((1, 1, 1, 4095),)),
    "fold": (lambda x: F.fold(x, (1, 4095), (1, 2048)), ((1, 2048, 2048),)),
    "ReplicationPad1d": (lambda x: torch.nn.ReplicationPad1d(ADDED)(x), ((1, 1, 3),)),
    "ReplicationPad2d": (lambda x: torch.nn.ReplicationPad2d(64)(x), ((1, 1, 3, 3),)),
    "ReplicationPad3d": (lambda x: torch.nn.ReplicationPad3d(16)(x), ((1, 1, 2, 2, 2),)),
    "grid_sample": (
        lambda x: F.grid_sample(x, x.new_zeros(1, 64, 64, 2), align_corners=True),
        ((1, 2, 4, 4),),
    ),
    "grid_sampler_2d": (partial(_sampled, "grid_sampler_2d", 2), ((1, 2, 4, 4),)),
    "grid_sampler_3d": (partial(_sampled, "grid_sampler_3d", 3), ((1, 2, 4, 4, 4),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ((ADDED, 4), (4,), (4,))),
    "native_layer_norm": (
        lambda x, w, b: torch.native_layer_norm(x, (4,), w, b, 1e-5)[0],
        ((ADDED, 4), (4,), (4,)),
    ),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(like(x, FAR), None, None, w, b, True),
        ((ADDED, 4), (4,), (4,)),
    ),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(like(x, FAR.T[None]), None, None, w, b),
        ((1, 4, ADDED), (4,), (4,)),
    ),
    "embedding": (lambda x: F.embedding(ZEROS, x), ((3, 4),)),
    **{
        f"embedding_bag {mode}": (
            lambda x, mode=mode: F.embedding_bag(COLUMN, x, mode=mode),
            ((3, 4),),
        )
        for mode in ("sum", "mean", "max")
    },
    "embedding_bag, one bag": (
        lambda x: F.embedding_bag(ZEROS, x, ZEROS[:1], mode="sum"),
        ((3, 4),),
    ),
    "embedding_bag, weighted": (
        lambda x, w: F.embedding_bag(ZEROS, x, ZEROS[:1], mode="sum", per_sample_weights=w),
        ((3, 4), (ADDED,)),
    ),
    "index_reduce of equal numbers": (
        lambda x, s: like(x, torch.ones(3)).index_reduce(
            0, ZEROS, like(s, torch.ones(ADDED)), "amax"
        ),
        NUMBERS,
    ),
    **{
        f"segment_reduce {how}": (
            lambda x, how=how: torch.segment_reduce(x, how, lengths=torch.tensor([ADDED])),
            ((ADDED, 3),),
        )
        for how in ("sum", "mean")
    },
    "segment_reduce from places": (
        lambda x: torch.segment_reduce(x, "sum", offsets=torch.tensor([0, ADDED])),
        ((ADDED, 3),),
    ),
    "bilinear": (lambda *args: F.bilinear(*args), ((2, 3), (2, 4), (ADDED, 3, 4), (ADDED,))),
    "sparse.mm": (lambda x, y: torch.sparse.mm(x.to_sparse(), y), ((3, ADDED), (ADDED, 4))),
    "sparse.addmm": (
        lambda z, x, y: torch.sparse.addmm(z, x.to_sparse(), y),
        ((3, 4), (3, ADDED), (ADDED, 4)),
    ),
    "sparse.sum": (lambda x: torch.sparse.sum(x.to_sparse(), 1).to_dense(), ((3, ADDED),)),
    "coalesce": (
        lambda x: torch.sparse_coo_tensor(ZEROS[None], x, (3,)).coalesce().to_dense(),
        ((ADDED,),),
    ),
    "to_dense": (lambda x: torch.sparse_coo_tensor(ZEROS[None], x, (3,)).to_dense(), ((ADDED,),)),
}
"""What PyTorch adds up in half on the CPU: a call, and the shapes of its inputs."""

RIGHT: dict[str, Case] = {
    name: WRONG.pop(name)
    for name in list(WRONG)
    if name.endswith("to few") and name != "adaptive_avg_pool3d to few"
} | {
    "index_select of rows": (lambda x: x.index_select(0, ZEROS), ((3, 4),)),
    "index_add of rows": (lambda x, s: x.index_add(0, ZEROS, s), ROWS),
    "index_reduce of rows": (lambda x, s: x.index_reduce(0, ZEROS, s, "amax"), ROWS),
    "segment_reduce max": (
        lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([ADDED])),
        ((ADDED, 3),),
    ),
    "gather": (lambda x: x.gather(0, COLUMN.expand(-1, 4)), ((3, 4),)),
    "scatter_add": (lambda x, s: x.scatter_add(0, ZEROS, s), NUMBERS),
    "scatter_reduce": (lambda x, s: x.scatter_reduce(0, ZEROS, s, "mean"), NUMBERS),
    "linear": (lambda *args: F.linear(*args), ((ADDED, 4), (3, 4), (3,))),
    "matmul": (lambda *args: torch.matmul(*args), ((3, ADDED), (ADDED, 4))),
    "expand": (lambda x: x.expand(ADDED, 4), ((4,),)),
    "repeat": (lambda x: x.repeat(ADDED, 1), ((4,),)),
}
"""What it adds up in FP32, beside functions that have rows or might need them."""


def error_of(case: Case, half: torch.dtype) -> float:
    call, shapes = case
    return error(call, Sample(tuple(torch.empty(shape) for shape in shapes), {}), half)
