"""apex.parallel and apex.normalization: two gloo ranks against one process with all the data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ampatch
from ampatch.compat.apex import amp, normalization
from ampatch.compat.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

RANKS = 2
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(3)
    return torch.randn(6, 4, 5, 5, generator=data) * 3 + 1, torch.randn(6, 4, 5, 5, generator=data)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=data), torch.randint(0, 3, (8,), generator=data)


def gradients(model: nn.Module, number: int) -> list[torch.Tensor]:
    inputs, targets = batch(number)
    model.zero_grad()
    F.cross_entropy(model(inputs).float(), targets).backward()
    return [param.grad.float() for param in model.parameters()]


DDP = {
    "average": {},
    "delayed": {"delay_allreduce": True, "message_size": 100_000_000},
    "sum": {"gradient_average": False},
    "half of the sum": {"gradient_average": False, "gradient_predivide_factor": 2.0},
    "divided before": {"gradient_predivide_factor": 2.0, "allreduce_always_fp32": True},
    "fp32": {"allreduce_always_fp32": True},
}


def reduced(rank: int, name: str) -> list[torch.Tensor]:
    """The gradients of one backward pass under a way of reducing."""
    model = network(rank)
    if name == "reducer":
        reducer = Reducer(model)
        gradients(model, rank)
        reducer.reduce()
        return [param.grad for param in model.parameters()]
    parallel = DistributedDataParallel(model, **DDP.get(name, {}))
    if name == "local":
        parallel.disable_allreduce()
    return gradients(parallel, rank)


@pytest.mark.parametrize("name", [*DDP, "reducer", "local"])
def test_gradients_are_reduced_as_asked(ranks, name):
    model = network()  # rank 0's weights, which the broadcast gave to rank 1
    alone = [gradients(model, rank) for rank in range(RANKS)]
    for rank, grads in enumerate(ranks(reduced, name)):
        if name == "local":
            assert all(map(torch.equal, grads, alone[rank]))
            continue
        expected = [(a + b) / (1 if name == "sum" else 2) for a, b in zip(*alone, strict=True)]
        torch.testing.assert_close(grads, expected, atol=1e-6, rtol=1e-5)


def lists_half_and_groups(rank: int) -> list:
    values = torch.full((2,), float(rank))
    Reducer([values]).reduce()
    half = DistributedDataParallel(network(rank).half(), allreduce_always_fp32=True)
    (half(batch(rank)[0][:1].half()).float().sum() * 40_000).backward()
    alone, all_ranks = create_syncbn_process_group(1), create_syncbn_process_group(0)
    with pytest.raises(ValueError, match="divides the number of ranks"):
        create_syncbn_process_group(3)
    mean = half.module[2].bias.grad.tolist()
    return [values.tolist(), mean, dist.get_world_size(alone), all_ranks]


def test_lists_half_gradients_groups_and_wrong_arguments(ranks):
    expected = [[0.5] * 2, [40_000.0] * 3, 1, None]  # the sum, 80000, is inf in FP16
    assert ranks(lists_half_and_groups) == [expected] * RANKS
    with pytest.raises(ValueError, match="delay_allreduce=True"):
        DistributedDataParallel(nn.Linear(1, 1), shared_param=True)


def trained(rank: int, level: str) -> list[torch.Tensor]:
    """apex's distributed example: initialize first, then its DDP."""
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model = DistributedDataParallel(model, delay_allreduce=True)
    for number in range(5):
        inputs, targets = batch(10 * rank + number)
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(model(inputs), targets), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    values = [param.detach().float().clone() for param in amp.master_params(optimizer)]
    ampatch.deactivate()
    return values


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_under_apexs_ddp(ranks, level):
    first, second = ranks(trained, level)
    assert all(map(torch.equal, first, second))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(5):
        optimizer.zero_grad()
        for rank in range(RANKS):
            inputs, targets = batch(10 * rank + number)
            (F.cross_entropy(model(inputs), targets) / RANKS).backward()
        optimizer.step()
    expected = [param.detach() for param in model.parameters()]
    torch.testing.assert_close(first, expected, atol=5e-3, rtol=2e-2)


def batch_norm() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 5.0))
        norm.bias.copy_(torch.arange(4.0))
    return norm


def normalized(rank: int, channel_last: bool, dtype: torch.dtype) -> list:
    """A batch norm over both ranks' images: two on rank 0, four on rank 1."""
    part = slice(0, 2) if rank == 0 else slice(2, 6)
    x, weights = (value[part] for value in images())
    x = x.to(dtype).requires_grad_()
    model = convert_syncbn_model(nn.Sequential(batch_norm()), channel_last=channel_last)
    assert isinstance(model[0], SyncBatchNorm)
    output = model(x.movedim(1, -1)).movedim(-1, 1) if channel_last else model(x)
    (output.float() * weights).sum().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    grads = [param.grad for param in model.parameters()]
    return [output.detach(), x.grad, grads, list(model.buffers())]


@pytest.mark.parametrize(
    "channel_last, dtype", [(False, torch.float32), (True, torch.float32), (False, torch.float16)]
)
def test_batch_norm_over_the_ranks_is_that_of_the_whole_batch(ranks, channel_last, dtype):
    x, weights = images()
    x.requires_grad_()
    norm = batch_norm()
    expected = norm(x)
    (expected * weights).sum().backward()
    atol = 2e-2 if dtype is torch.float16 else 2e-5
    outputs, of_x, *both = zip(*ranks(normalized, channel_last, dtype), strict=True)
    torch.testing.assert_close(torch.cat(outputs).float(), expected.detach(), atol=atol, rtol=1e-2)
    torch.testing.assert_close(torch.cat(of_x).float(), x.grad, atol=atol, rtol=1e-2)
    for grads, buffers in zip(*both, strict=True):
        wanted = [param.grad for param in norm.parameters()]
        torch.testing.assert_close(grads, wanted, atol=10 * atol, rtol=1e-3)
        torch.testing.assert_close(buffers, list(norm.buffers()), atol=atol, rtol=1e-3)


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 3), batch_norm(), nn.Flatten(), nn.Linear(36, 2))


def half_of(rank: int) -> torch.Tensor:
    return images()[0][3 * rank : 3 * rank + 3]


def synchronized(rank: int, wrapper: type) -> list:
    """A network with batch norms over the ranks, in DDP: three images on each rank."""
    model = wrapper(convert_syncbn_model(small_network()))
    output = model(half_of(rank))
    output.square().mean().backward()
    grads = [param.grad for param in model.parameters()]
    return [output.detach(), grads, list(model.module[1].buffers())]


@pytest.mark.parametrize("ddp", [DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_batch_norm_over_the_ranks_in_ddp(ranks, ddp):
    model = small_network()
    expected = model(images()[0])
    expected.square().mean().backward()
    outputs, *both = zip(*ranks(synchronized, ddp), strict=True)
    torch.testing.assert_close(torch.cat(outputs), expected.detach(), atol=2e-5, rtol=1e-4)
    for grads, buffers in zip(*both, strict=True):
        wanted = [param.grad for param in model.parameters()]
        torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=1e-3)
        torch.testing.assert_close(buffers, list(model[1].buffers()), atol=2e-5, rtol=1e-4)


def validated(rank: int, wrapper: Any, validates: bool) -> list:
    """Two steps of a batch norm of each rank's own, and validations between; the statistics."""
    model = wrapper(small_network())
    own, seen = half_of(rank), []
    for _ in range(2):
        model(own).square().mean().backward()
        if validates:
            with torch.no_grad():
                seen.append(model.eval()(own))
            model.train()
    return [seen, [*model.buffers()]]


def validating_alone(rank: int) -> list:
    return validated(rank, DistributedDataParallel, rank == 0)


def test_apexs_ddp_sends_no_buffers(ranks):
    """So that one rank may validate alone; each keeps its own statistics."""
    for rank, results in enumerate(ranks(validating_alone)):
        torch.testing.assert_close(results, validated(rank, nn.Sequential, rank == 0))


# One process


def test_convert_syncbn_model_takes_everything_over():
    model = nn.ModuleDict({
        "a": nn.Sequential(nn.BatchNorm1d(4, eps=1e-3, momentum=None), nn.InstanceNorm1d(4)),
        "b": nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    })  # fmt: skip
    weight = model["a"][0].weight
    model.eval()
    group = object()
    converted = convert_syncbn_model(model, process_group=group)
    assert converted is model and isinstance(model["b"], SyncBatchNorm)
    norm = model["a"][0]
    assert norm.weight is weight and (norm.eps, norm.momentum) == (1e-3, None)
    assert norm.process_group is group and not norm.training
    assert isinstance(model["a"][1], nn.InstanceNorm1d)
    assert model["b"].weight is None and model["b"].running_mean is None
    assert isinstance(convert_syncbn_model(nn.BatchNorm1d(3)), SyncBatchNorm)


def test_sync_batch_norm_in_one_process():
    x = torch.randn(5, 4)
    z = torch.randn(5, 4)
    expected = nn.BatchNorm1d(4)(x)
    assert torch.equal(SyncBatchNorm(4)(x), expected)
    assert torch.equal(SyncBatchNorm(4, fuse_relu=True)(x, z), torch.relu(expected + z))
    image = torch.randn(2, 3, 3, 4)
    expected = nn.BatchNorm2d(4)(image.movedim(-1, 1)).movedim(1, -1)
    assert torch.equal(SyncBatchNorm(4, channel_last=True)(image), expected)


@pytest.mark.parametrize("mixed", ["", "Mixed"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(kind, mixed):
    make = getattr(normalization, f"{mixed}Fused{kind}")
    x = torch.randn(3, 2, 4) * 5
    ours, theirs = make((2, 4), eps=1e-3), getattr(nn, kind)((2, 4), eps=1e-3)
    with torch.no_grad():
        for norm in (ours, theirs):
            for number, param in enumerate(norm.parameters(), 1):
                param.copy_(torch.arange(number, number + 8.0).reshape(2, 4))
    torch.testing.assert_close(ours(x), theirs(x))
    assert list(ours.state_dict()) == list(theirs.state_dict())  # checkpoints go both ways
    assert make(4).eps == 1e-5  # apex's, not torch's
    if mixed:
        assert ours.float()(x.half()).dtype is torch.float32
        assert ours.half()(x).dtype is torch.float16  # FP32 input, half weights: the weights' dtype
        with pytest.raises(RuntimeError, match="FusedLayerNorm"):
            make(4, elementwise_affine=False)


def test_norms_as_functions():
    x, weight, bias = torch.randn(3, 4), torch.arange(1.0, 5.0), torch.arange(4.0)
    expected = F.layer_norm(x, [4], weight, bias, 1e-3)
    assert torch.equal(normalization.fused_layer_norm_affine(x, weight, bias, 4, 1e-3), expected)
    function = normalization.FusedLayerNormAffineFunction
    assert torch.equal(function.apply(x, weight, bias, (4,), 1e-3), expected)
    assert torch.equal(normalization.fused_layer_norm(x, (4,)), F.layer_norm(x, [4], eps=1e-6))
    ours = normalization.fused_rms_norm_affine(x, weight, 4)
    assert torch.equal(ours, F.rms_norm(x, [4], weight, 1e-6))
    assert torch.equal(normalization.fused_rms_norm(x, 4), F.rms_norm(x, [4], eps=1e-6))


def test_a_norm_s_forward_is_registered_as_bert_does_it():
    layer_norm = normalization.FusedLayerNorm
    amp.register_half_function(layer_norm, "forward")
    norm = layer_norm(4).half()
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    assert norm(torch.randn(2, 4)).dtype is torch.float32  # layer_norm itself is in FP32
    ampatch.deactivate()
    assert "forward" not in vars(layer_norm)
    ampatch.unregister_function(layer_norm, "forward")
