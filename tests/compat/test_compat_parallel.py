"""apex.parallel and apex.normalization: two gloo ranks against one process with all the data."""

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


def reduced(rank: int) -> dict:
    """The gradients of one backward under each way of reducing."""
    grads = {name: gradients(DistributedDataParallel(network(rank), **options), rank)
             for name, options in DDP.items()}  # fmt: skip
    parallel = DistributedDataParallel(network(rank))
    parallel.disable_allreduce()
    grads["local"] = gradients(parallel, rank)
    half = DistributedDataParallel(network(rank).half(), allreduce_always_fp32=True)
    (half(batch(rank)[0][:1].half()).float().sum() * 40_000).backward()
    grads["half"] = [half.module[2].bias.grad]
    model = network(rank)
    reducer = Reducer(model)
    gradients(model, rank)
    reducer.reduce()
    grads["reducer"] = [param.grad for param in model.parameters()]
    values = torch.full((2,), float(rank))
    Reducer([values]).reduce()
    grads["list"] = [values]
    alone = create_syncbn_process_group(1)
    grads["groups"] = [dist.get_world_size(alone), create_syncbn_process_group(0)]
    try:
        create_syncbn_process_group(3)
    except ValueError as error:
        grads["groups"].append(str(error))
    return grads


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


def normalized(rank: int, channel_last: bool, dtype: torch.dtype = torch.float32) -> dict:
    """A batch norm over both ranks' images: two on rank 0, four on rank 1."""
    part = slice(0, 2) if rank == 0 else slice(2, 6)
    x, weights = (value[part] for value in images())
    x = x.to(dtype).requires_grad_()
    model = convert_syncbn_model(nn.Sequential(batch_norm()), channel_last=channel_last)
    assert isinstance(model[0], SyncBatchNorm)
    output = model(x.movedim(1, -1)).movedim(-1, 1) if channel_last else model(x)
    (output.float() * weights).sum().backward()
    norm = model[0]
    for param in model.parameters():
        dist.all_reduce(param.grad)
    return {
        "output": output.detach(),
        "x": x.grad,
        "params": [norm.weight.grad, norm.bias.grad],
        "running": [norm.running_mean, norm.running_var],
        "count": norm.num_batches_tracked,
    }


def batch_norm() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 5.0))
        norm.bias.copy_(torch.arange(4.0))
    return norm


def small_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 3), batch_norm(), nn.Flatten(), nn.Linear(36, 2))


def half_of(rank: int, values: torch.Tensor) -> torch.Tensor:
    return values[:3] if rank == 0 else values[3:]


def synchronized(rank: int, wrapper: type) -> dict:
    """A network with batch norms over the ranks, in DDP: three images on each rank."""
    model = wrapper(convert_syncbn_model(small_network()))
    output = model(half_of(rank, images()[0]))
    output.square().mean().backward()
    norm = model.module[1]
    return {
        "output": output.detach(),
        "grads": [param.grad for param in model.parameters()],
        "running": [norm.running_mean, norm.running_var],
    }


def validated(rank: int) -> dict:
    """apex's DDP around a batch norm of each rank's own; rank 0 validates between two steps."""
    model = DistributedDataParallel(small_network())
    own = half_of(rank, images()[0])
    seen = []
    for _ in range(2):
        model(own).square().mean().backward()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                seen.append(model(own))
            model.train()
    norm = model.module[1]
    return {"running": [norm.running_mean, norm.running_var], "validated": seen}


def on_a_rank(rank: int) -> dict:
    return {
        "reduced": reduced(rank),
        "trained": {level: trained(rank, level) for level in ("O1", "O2")},
        "norm": normalized(rank, channel_last=False),
        "channel_last": normalized(rank, channel_last=True),
        "half": normalized(rank, channel_last=False, dtype=torch.float16),
        "apex's DDP": synchronized(rank, DistributedDataParallel),
        "torch's DDP": synchronized(rank, nn.parallel.DistributedDataParallel),
        "validated": validated(rank),
    }


@pytest.fixture(scope="module")
def both(ranks) -> list[dict]:
    """What two ranks found."""
    return ranks(on_a_rank)


@pytest.mark.parametrize("name", [*DDP, "reducer"])
def test_gradients_are_reduced_as_asked(both, name):
    model = network()  # rank 0's weights, which the broadcast gave to rank 1
    alone = [gradients(model, number) for number in range(RANKS)]
    for of_rank in both:
        for grad, first, second in zip(of_rank["reduced"][name], *alone, strict=True):
            expected = first + second if name == "sum" else (first + second) / 2
            torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-5)


def test_gradients_stay_local_while_reduction_is_off_and_wrong_arguments_are_refused(both):
    for rank, of_rank in enumerate(both):
        expected = gradients(network(), rank)
        assert all(map(torch.equal, of_rank["reduced"]["local"], expected))
        assert of_rank["reduced"]["list"][0].tolist() == [0.5, 0.5]
        size, everybody, error = of_rank["reduced"]["groups"]
        assert (size, everybody) == (1, None) and "divides the 2 ranks" in error
    with pytest.raises(ValueError, match="delay_allreduce=True"):
        DistributedDataParallel(nn.Linear(1, 1), shared_param=True)


def test_half_gradients_do_not_overflow_on_the_way_to_their_mean(both):
    for of_rank in both:  # 80000 is inf in FP16
        assert of_rank["reduced"]["half"][0].tolist() == [40_000.0] * 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_under_apexs_ddp(both, level):
    first, second = (of_rank["trained"][level] for of_rank in both)
    assert all(map(torch.equal, first, second))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(5):
        optimizer.zero_grad()
        for rank in range(RANKS):
            inputs, targets = batch(10 * rank + number)
            (F.cross_entropy(model(inputs), targets) / RANKS).backward()
        optimizer.step()
    for ours, expected in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), atol=5e-3, rtol=2e-2)


@pytest.mark.parametrize("name", ["norm", "channel_last", "half"])
def test_batch_norm_over_the_ranks_is_that_of_the_whole_batch(both, name):
    x, weights = images()
    x.requires_grad_()
    norm = batch_norm()
    output = norm(x)
    (output * weights).sum().backward()
    atol = 2e-2 if name == "half" else 2e-5
    norms = [rank[name] for rank in both]
    for key, expected in {"output": output.detach(), "x": x.grad}.items():
        whole = torch.cat([of_rank[key] for of_rank in norms]).float()
        torch.testing.assert_close(whole, expected, atol=atol, rtol=1e-2)
    for of_rank in norms:
        for ours, param in zip(of_rank["params"], norm.parameters(), strict=True):
            torch.testing.assert_close(ours, param.grad, atol=10 * atol, rtol=1e-3)
        running = [norm.running_mean, norm.running_var]
        torch.testing.assert_close(of_rank["running"], running, atol=atol, rtol=1e-3)
        assert of_rank["count"] == 1


@pytest.mark.parametrize("name", ["apex's DDP", "torch's DDP"])
def test_batch_norm_over_the_ranks_in_ddp(both, name):
    model = small_network()
    output = model(images()[0])
    output.square().mean().backward()
    grads = [param.grad for param in model.parameters()]
    outputs = torch.cat([of_rank[name]["output"] for of_rank in both])
    torch.testing.assert_close(outputs, output.detach(), atol=2e-5, rtol=1e-4)
    for of_rank in both:
        torch.testing.assert_close(of_rank[name]["grads"], grads, atol=2e-5, rtol=1e-3)
        running = [model[1].running_mean, model[1].running_var]
        torch.testing.assert_close(of_rank[name]["running"], running, atol=2e-5, rtol=1e-4)


def test_apexs_ddp_sends_no_buffers(both):
    """So that one rank may validate alone; each keeps its own statistics."""
    for rank, of_rank in enumerate(both):
        model = small_network()
        own = half_of(rank, images()[0])
        seen = []
        for _ in range(2):
            model(own)
            seen.append(model.eval()(own).detach())
            model.train()
        running = [model[1].running_mean, model[1].running_var]
        torch.testing.assert_close(of_rank["validated"]["running"], running)
        torch.testing.assert_close(of_rank["validated"]["validated"], seen if rank == 0 else [])


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
