"""`ampatch run --auto`: plain training loops, held against the same loops in FP32."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from auto_loops import asked, batch, begin, both, close, grads, net, plain, weights  # noqa: F401
from torch import nn
from torch.nn import functional as F

import ampatch
from ampatch import auto


def test_a_plain_loop_trains_as_in_fp32(asked):
    close(*both(plain, asked))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.RMSprop(params, lr=0.001),
    ],
    ids=["adamw", "fused", "rmsprop"],
)
def test_other_optimizers(make):
    close(*both(lambda: plain(make)), atol=5e-3)


def test_gradients_are_accumulated(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = []
        for step in range(8):
            x, y = batch()
            (F.mse_loss(model(x), y) / 4).backward()
            seen.append(grads(model))
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return seen, weights(model)

    close(*both(loop, asked))


@pytest.mark.parametrize("clip", ["norm", "value", "by hand"])
def test_clipping_sees_true_gradients(clip, asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms = []
        for _ in range(5):
            x, y = batch()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if clip == "norm":
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            elif clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            else:
                for p in model.parameters():
                    p.grad.data.clamp_(-0.05, 0.05)
            norms.append(sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5)
            optimizer.step()
        return norms, weights(model)

    close(*both(loop, asked))


def test_two_players(asked):
    """As a GAN: each loss reaches the other's weights, whose owner zeroes their gradients."""

    def loop():
        maker, judge = net(), nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (maker, judge)]
        for _ in range(5):
            x, y = batch()
            optimizers[1].zero_grad()
            real = F.binary_cross_entropy_with_logits(judge(y), torch.ones(16, 1))
            real.backward()
            fake = maker(x)
            F.binary_cross_entropy_with_logits(judge(fake.detach()), torch.zeros(16, 1)).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.binary_cross_entropy_with_logits(judge(fake), torch.ones(16, 1)).backward()
            optimizers[0].step()
        return weights(maker), weights(judge), grads(judge)

    close(*both(loop, asked))


def test_two_losses_of_one_graph_and_one_shared_part(asked):
    def loop():
        trunk, heads = nn.Linear(4, 8), [nn.Linear(8, 1) for _ in range(2)]
        optimizers = [
            torch.optim.SGD([*trunk.parameters(), *heads[0].parameters()], lr=0.05),
            torch.optim.SGD([*heads[1].parameters(), *trunk.parameters()], lr=0.05),
        ]
        for _ in range(4):
            x, y = batch()
            for optimizer in optimizers:
                optimizer.zero_grad()
            shared = torch.tanh(trunk(x))
            F.mse_loss(heads[0](shared), y).backward(retain_graph=True)
            torch.autograd.backward([F.l1_loss(heads[1](shared), y), heads[0](shared).mean()])
            for optimizer in optimizers:
                optimizer.step()
        return weights(trunk), grads(trunk), [weights(head) for head in heads]

    close(*both(loop, asked))


def test_schedulers_are_content():
    """No warning of a scheduler that steps before its optimizer, a skipped first step included."""
    model = net()
    begin({})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
    skipped = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            x, y = batch()
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) * (1e9 if step == 0 else 1)).backward()
            optimizer.step()
            scheduler.step()
            skipped.append(ampatch.step_was_skipped(optimizer))
    assert skipped[0] and not skipped[-1]
    assert scheduler.last_epoch == 6


def test_closures():
    def loop():
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        x, y = batch()

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).detach() for _ in range(3)]

    expected, found = both(loop)
    close(expected, found, atol=2e-2)
    assert found[-1] < found[0]


def test_checkpoints(asked):
    def loop():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        state = torch.load(saved)
        model, optimizer = net(), None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return weights(model), state["optimizer"]["state"][0]["exp_avg"]

    close(*both(loop, asked), atol=5e-3)


def test_evaluation_casts_and_leaves_no_trace():
    begin()
    model = net().eval()
    with torch.no_grad():
        first = model(torch.ones(2, 4))
        for p in model.parameters():
            p.data.mul_(2)
        assert first.dtype is torch.float16
        assert not torch.equal(model(torch.ones(2, 4)), first)
    with torch.inference_mode():
        assert model(torch.ones(2, 4)).dtype is torch.float16


def test_data_are_prepared_as_ever():
    class Items(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (torch.eye(2) @ torch.eye(2) for _ in range(4))

    items = [torch.eye(2)] * 4
    begin()
    loaders = [
        torch.utils.data.DataLoader(Items(), batch_size=2),
        torch.utils.data.DataLoader(items, collate_fn=lambda items: items[0] @ items[0]),
    ]
    for loader in loaders:
        assert [batch.dtype for batch in loader][:2] == [torch.float32] * 2
    assert (torch.eye(2) @ torch.eye(2)).dtype is torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_go_to_numpy_in_fp32(dtype):
    numpy = pytest.importorskip("numpy")
    auto.start({"dtype": dtype})
    with torch.no_grad():
        out = net()(torch.ones(2, 4))
    assert out.dtype is dtype
    for array in (out.numpy(), numpy.asarray(out), out.cpu().numpy(force=True)):
        assert array.dtype == numpy.float32
        assert array.tolist() == out.tolist()
    shared = torch.ones(2)
    shared.numpy()[0] = 5
    assert shared[0] == 5
    with pytest.raises(RuntimeError, match="requires grad"):
        net()(torch.ones(2, 4)).numpy()
