"""What goes wrong on one rank only, wrapping in another order, and DataParallel."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 6, generator=data)
    return F.cross_entropy(model(inputs).float(), torch.randint(0, 3, (8,), generator=data))


def backward(model, optimizer, number: int, error: Exception | None = None) -> None:
    loss = loss_of(model, number)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        if error is not None:
            raise error


def everything(model, optimizer) -> list[torch.Tensor]:
    values = [*model.parameters(), *amp.master_params(optimizer)]
    return [value.detach().float().clone() for value in values]


def failing_block(rank: int, level: str, accumulated: bool) -> dict:
    """Rank 1 raises in its block, after the backward pass; both then drop the batch."""
    model, optimizer = build()
    amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", init_scale=256.0, verbosity=0
    )
    parallel = DistributedDataParallel(model)
    backward(parallel, optimizer, rank)
    optimizer.step()
    optimizer.zero_grad()
    if accumulated:
        backward(parallel, optimizer, 10 + rank)
    caught, left = False, None
    try:
        backward(parallel, optimizer, 20 + rank, ValueError("bad batch") if rank == 1 else None)
    except ValueError:
        caught = True
        casts = amp.session.session.registry.state
        left = casts.process is not None and not casts.per_thread and not casts.thread.stack
    before = everything(model, optimizer)
    if caught and not accumulated:
        optimizer.step()  # nothing is there to step with
        left = left and all(map(torch.equal, before, everything(model, optimizer)))
    largest = max(
        (p.grad.abs().max().item() for p in amp.master_params(optimizer) if p.grad is not None),
        default=0.0,
    )
    if accumulated:
        managed = amp.session.session.registry.table.managed(optimizer)
        managed.gradients.finish()
        largest = max(p.grad.abs().max().item() for p in amp.master_params(optimizer))
    optimizer.zero_grad()
    for number in range(30, 34):
        backward(parallel, optimizer, number + 100 * rank)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "caught": caught,
        "left": left,
        "largest": largest,
        "weights": everything(model, optimizer),
        "scale": amp.loss_scale(),
    }


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_exception_on_one_rank_leaves_the_ranks_equal(ranks, level, accumulated):
    one, two = ranks(failing_block, level, accumulated)
    assert (one["caught"], two["caught"]) == (False, True)
    assert two["left"] or level != "O1"  # only O1 casts
    assert all(map(torch.equal, one["weights"], two["weights"]))
    assert one["scale"] == two["scale"]
    assert two["largest"] < 10 * max(one["largest"], 0.1)  # nothing scaled is left behind


def wrapped_first(rank: int, level: str, dtype: torch.dtype) -> dict:
    """DDP before `initialize`, given either the wrapped model or what is in it."""
    found = {}
    for given in ("wrapper", "module"):
        model, optimizer = build()
        parallel = DistributedDataParallel(model)
        try:
            amp.initialize(
                parallel if given == "wrapper" else model,
                optimizer,
                opt_level=level,
                dtype=dtype,
                init_scale=256.0,
                verbosity=0,
            )
        except amp.AmpatchError as error:
            found[given] = str(error)
            continue
        for number in range(4):
            optimizer.zero_grad()
            backward(parallel, optimizer, 100 * rank + number)
            optimizer.step()
        found[given] = everything(model, optimizer)
        amp.deactivate()
    return found


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_ddp_wrapped_first_works_or_is_refused(ranks, level):
    one, two = ranks(wrapped_first, level, torch.float16)
    if level == "O3":
        assert "already wrapped in DistributedDataParallel" in one["wrapper"]
        assert "already wrapped in DistributedDataParallel" in one["module"]
    else:
        for given in ("wrapper", "module"):
            assert all(map(torch.equal, one[given], two[given]))


def other_levels(rank: int, first: str, then: str) -> dict:
    """A model in DDP gets another level; `deactivate` then says what it has to."""
    model, optimizer = build()
    amp.initialize(model, optimizer, opt_level=first, dtype=torch.bfloat16, verbosity=0)
    parallel = DistributedDataParallel(model)
    backward(parallel, optimizer, rank)
    optimizer.step()
    error = None
    try:
        amp.set_opt_level(model, then)
    except amp.AmpatchError as refusal:
        error = str(refusal)
    for number in range(3):
        optimizer.zero_grad()
        backward(parallel, optimizer, 10 * rank + number)
        optimizer.step()
    return {"error": error, "weights": everything(model, optimizer)}


@pytest.mark.parametrize(
    ("first", "then"), [("O0", "O2"), ("O2", "O1"), ("O1", "O3"), ("O3", "O2"), ("O3", "O0")]
)
def test_another_level_inside_ddp_changes_no_dtype(ranks, first, then):
    """DDP would not average gradients of parameters that have another dtype than at first."""
    one, two = ranks(other_levels, first, then)
    assert all(map(torch.equal, one["weights"], two["weights"]))
    is_refused = "O3" in (first, then)
    assert (one["error"] is not None) is is_refused
    assert not is_refused or "is wrapped in DistributedDataParallel" in one["error"]


# DataParallel


def weights_in(level: str) -> torch.dtype:
    return torch.bfloat16 if level == "O3" else torch.float32


def test_data_parallel_on_the_cpu_is_its_module(opt_level):
    """Wrapped before and after `initialize`: the same training, bit for bit."""
    results = []
    for order in ("none", "before", "after"):
        model, optimizer = build()
        wrapped = DataParallel(model) if order == "before" else model
        amp.initialize(wrapped, optimizer, opt_level=opt_level, dtype=torch.bfloat16, verbosity=0)
        wrapped = DataParallel(model) if order == "after" else wrapped
        for number in range(4):
            optimizer.zero_grad()
            backward(wrapped, optimizer, number)
            optimizer.step()
        results.append(everything(model, optimizer))
        states = list(wrapped.state_dict().values())
        assert {value.dtype for value in states} == {weights_in(opt_level)}
        amp.deactivate()
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def replicas_of(model: nn.Module, count: int) -> list[nn.Module]:
    """As DataParallel makes them: shallow copies whose parameters are no leaves."""

    def replica(module: nn.Module) -> nn.Module:
        copied = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            copied._modules[name] = replica(child)
        for name, parameter in module._parameters.items():
            setattr(copied, name, parameter * 1)  # in CUDA: a broadcast, with a gradient
        return copied

    return [replica(model) for _ in range(count)]


def test_replicas_in_threads_train_the_model(opt_level):
    """Each replica's forward in its thread, one loss: the gradients of the whole batch."""
    gradients = []
    for split in (False, True):
        model, optimizer = build()
        amp.initialize(model, optimizer, opt_level=opt_level, dtype=torch.bfloat16, verbosity=0)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        if split:
            outputs: dict[int, torch.Tensor] = {}
            replicas = replicas_of(model, 2)

            def work(index, replicas=replicas, outputs=outputs, inputs=inputs):
                outputs[index] = replicas[index](inputs.chunk(2)[index])

            threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            output = torch.cat([outputs[0], outputs[1]])
        else:
            output = model(inputs)
        assert output.dtype is (torch.bfloat16 if opt_level == "O1" else torch.float32)
        with amp.scale_loss(output.float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        gradients.append([param.grad.float() for param in amp.master_params(optimizer)])
        amp.deactivate()
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, atol=2e-3, rtol=0.02)


@pytest.mark.gpu
def test_data_parallel_on_cuda(opt_level):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model, optimizer = build()
    model.cuda()
    amp.initialize(model, optimizer, opt_level=opt_level, init_scale=256.0, verbosity=0)
    parallel = DataParallel(model)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        output = parallel(torch.ones(8, 6, device="cuda")).float()
        loss = F.cross_entropy(output, torch.zeros(8, dtype=torch.long, device="cuda"))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
