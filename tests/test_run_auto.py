"""`ampatch run --auto`: plain training loops, held against the same loops in FP32.

Loops are written as a script would be, and run under FP32 first.  Static scales are powers of two,
so in bfloat16 at a scale, and wherever the model computes in FP64, results can be compared closely.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import auto
from ampatch.environment import Asked
from ampatch.session import registry

SCALE = 2.0**10


@pytest.fixture(params=["static", "dynamic"])
def asked(request):
    """float16, at a static scale or at the dynamic one, begun where these losses do not overflow."""
    return Asked(loss_scale=SCALE if request.param == "static" else None)


def begin(asked=Asked(loss_scale=SCALE)):
    """`--auto`, at a scale of `SCALE` in any case."""
    session = auto.start(asked)
    session.scalers[0].set(SCALE)
    return session


def end():
    ampatch.deactivate()


def both(loop, asked=Asked(loss_scale=SCALE)):
    """What `loop()` gives in FP32 and under `--auto`, from the same seed."""
    torch.manual_seed(0)
    expected = loop()
    begin(asked)
    torch.manual_seed(0)
    found = loop()
    end()
    return expected, found


def close(expected, found, atol=2e-3, rtol=2e-2):
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)


def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def batch(size=16):
    x = torch.randn(size, 4)
    return x, x.sum(1, keepdim=True)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def grads(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


# Loops


def plain(make=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)):
    model = net()
    optimizer = make(model.parameters())
    losses = []
    for _ in range(6):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return weights(model), losses


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
    """As a GAN: each loss reaches the other's weights, whose gradients are zeroed by their owner."""

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
    begin(Asked())
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
    auto.start(Asked(dtype=dtype))
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


# Gradients that no optimizer steps on


def test_all_gradients_are_true(asked):
    """Inputs, results with retain_grad, frozen-out weights, float64: added to earlier ones."""

    def loop():
        model = net()
        left_out = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = batch()
        x.requires_grad_()
        double = torch.ones(1, dtype=torch.float64, requires_grad=True)
        found = []
        hidden = model[:2](x)
        hidden.retain_grad()
        out = left_out(model[2](hidden)).float() * double
        for _ in range(2):
            F.mse_loss(out, y.double()).backward(retain_graph=True)
            found.append([t.grad.clone().float() for t in (x, hidden, double)] + grads(left_out))
        optimizer.step()
        return found, weights(model)

    close(*both(loop, asked))


def test_weights_updated_by_hand(asked):
    def loop():
        w = torch.zeros(4, 1, requires_grad=True)
        for _ in range(5):
            x, y = batch()
            F.mse_loss(x @ w, y).backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
                w.grad.zero_()
        return w.detach()

    close(*both(loop, asked))


def test_weights_updated_by_hand_do_not_meet_the_first_scale(caplog):
    """Nobody would skip this step, so its backward pass is not scaled."""
    auto.start(Asked())
    w = torch.ones(4, 1, requires_grad=True)
    for _ in range(2):
        w.grad = None
        (torch.ones(1, 4) @ w * 1000.0).sum().backward()
        assert torch.equal(w.grad, torch.full((4, 1), 1000.0))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "reached no parameter of a torch.optim.Optimizer" in told[0]


def test_autograd_grad_is_the_users_own(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = batch()
        x.requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        (F.mse_loss(score, y) + penalty).backward()
        optimizer.step()
        return slope.detach(), penalty.detach(), weights(model)

    close(*both(loop, asked))


def test_a_graph_of_the_gradient(asked):
    def loop():
        w = nn.Parameter(torch.full((4,), 0.5))
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w**3).sum().backward(create_graph=True)
        first = w.grad
        w.grad = None
        first.sum().backward()
        optimizer.step()
        return first.detach(), w.grad.clone(), w.detach()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
        close(*both(loop, asked))


def test_inputs_and_given_gradients(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, _ = batch()
        hidden = model[:2](x)
        out = model[2](hidden)
        first = list(model[0].parameters())
        out.backward(torch.full_like(out, 0.5), inputs=first, retain_graph=True)
        alone = grads(model)
        torch.autograd.backward((out, out * 2), (torch.ones_like(out), torch.ones_like(out)))
        optimizer.step()
        return alone[:2], alone[2:], weights(model)

    expected, found = both(loop, asked)
    assert expected[1] == found[1] == [None, None]
    close(expected[::2], found[::2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, asked):
    def loop():
        model, left_out = net(), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch()
        x.requires_grad_()
        for _ in range(2):
            out = checkpoint(lambda x: model(left_out(x)), x, use_reentrant=reentrant)
            F.mse_loss(out, y).backward()
        seen = grads(left_out), grads(model), x.grad.clone()
        optimizer.step()
        return seen, weights(model)

    close(*both(loop, asked))


def test_a_pass_within_a_pass_that_starts_from_a_loss_of_its_own(asked):
    def loop():
        model = net()
        side = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), side], lr=0.1)
        x, y = batch()
        out = model(x)

        def hook(grad):
            with torch.enable_grad():
                twice = (side * 2).sum()
            twice.backward()

        out.register_hook(hook)
        F.mse_loss(out, y).backward()
        optimizer.step()
        return side.grad.clone(), grads(model), weights(model)

    close(*both(loop, asked))


# Hooks


def test_hooks_see_true_gradients(asked):
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        model[2].weight.register_hook(lambda grad: seen.append(grad.clone().float()))
        handle = model[2].register_full_backward_hook(
            lambda module, given, got: seen.extend(g.clone().float() for g in (*given, *got))
        )
        model[0].register_full_backward_pre_hook(lambda module, got: tuple(g * 2 for g in got))
        x, y = batch()
        x.requires_grad_()  # module hooks want it
        hidden = model[:2](x)
        hidden.register_hook(lambda grad: grad.clamp(-0.005, 0.005))
        F.mse_loss(model[2](hidden), y).backward()
        handle.remove()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return seen, weights(model)

    expected, found = both(loop, asked)
    assert len(found[0]) == 4
    close(expected, found)


def test_a_hook_that_writes_in_place():
    def loop():
        w = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([w], lr=0.1)

        def halve(grad):
            grad.mul_(0.5)

        between = w * 1.0
        between.register_hook(halve)
        (between * 1.0).sum().backward()
        return w.grad.clone()

    close(*both(loop))


def test_hooks_on_tensor_subclasses():
    """Their functions call torch's again, by the names that are ours now."""

    class Named(torch.Tensor):
        pass

    def loop():
        w, seen = nn.Parameter(torch.ones(3)), []
        optimizer = torch.optim.SGD([w], lr=0.1)
        between = (w * 2.0).as_subclass(Named)
        between.register_hook(lambda grad: seen.append(grad.clone().as_subclass(torch.Tensor)))
        (between * 3.0).sum().as_subclass(torch.Tensor).backward()
        optimizer.step()
        return seen, w.detach()

    close(*both(loop))


def test_an_optimizer_step_within_the_backward_pass(asked):
    def loop():
        model = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
        return weights(model)

    close(*both(loop, asked))


# Overflow


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_only_it(fused):
    session = begin(Asked())
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    other_model = net()
    other = torch.optim.SGD(other_model.parameters(), lr=0.1)
    x, y = batch()
    before, other_before = weights(model), weights(other_model)

    (F.mse_loss(model(x), y) * float("inf")).backward()
    F.mse_loss(other_model(x), y).backward()
    optimizer.step()
    other.step()

    assert ampatch.step_was_skipped(optimizer) and not ampatch.step_was_skipped(other)
    assert all(map(torch.equal, weights(model), before))
    assert not any(map(torch.equal, weights(other_model), other_before))
    assert session.scalers[0].get() == SCALE / 2
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)
    assert not any(map(torch.equal, weights(model), before))


def test_an_overflow_where_every_weight_is_hidden():
    """Reentrant checkpointing shows the outer graph no parameter at all."""
    begin(Asked())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    before = weights(model)
    (checkpoint(model, x, use_reentrant=True).sum() * float("inf")).backward()
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.parametrize("zero", ["optimizer", "module", "module, kept", "by hand"])
def test_gradients_thrown_away_take_their_overflow_with_them(zero):
    begin(Asked())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    (F.mse_loss(model(x), y) * float("nan")).backward()
    if zero == "optimizer":
        optimizer.zero_grad()
    elif zero == "module":
        model.zero_grad()
    elif zero == "module, kept":
        model.zero_grad(set_to_none=False)
    else:
        for p in model.parameters():
            p.grad = None
    if zero != "by hand":
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert not ampatch.step_was_skipped(optimizer)


def test_a_failed_pass_leaves_earlier_gradients():
    begin()
    model, x = net(), torch.ones(2, 4, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    before = [*grads(model), x.grad.clone()]
    out = model(x)

    def refuse(grad):
        raise ZeroDivisionError

    out.register_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        (out.sum() + x.sum()).backward()
    close(before, [*grads(model), x.grad], atol=0, rtol=0)
    model(x).sum().backward()
    close([2 * grad for grad in before], [*grads(model), x.grad])


def test_grad_mode_is_no_matter():
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(2, 4)).sum()
        with torch.no_grad():
            loss.backward()
        return grads(model)

    close(*both(loop))


def test_errors_are_pytorchs():
    begin()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (torch.ones(2, requires_grad=True) * 1, torch.ones(())):
        with pytest.raises(RuntimeError, match="grad can be implicitly created|does not require"):
            wrong.backward()


def test_float16_without_a_scale_would_lose_what_is_kept():
    """The oracle of the whole: gradients below float16's smallest number arrive."""

    def loop():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(2, 4)).float().sum() * 1e-8).backward()
        return grads(model)

    expected, found = both(loop, Asked())
    close(expected, found, atol=0)
    auto.start(Asked(loss_scale=1.0))
    assert not any(grad.any() for grad in loop())


@pytest.mark.parametrize("level, dtype", [(None, None), ("O1", torch.bfloat16), ("O4", None)])
def test_half_types(level, dtype):
    session = auto.start(Asked(opt_level=level, dtype=dtype))
    half = torch.float16 if (level, dtype) == (None, None) else torch.bfloat16
    assert net()(torch.ones(1, 4)).dtype is half
    assert session.scalers[0].is_dynamic == (half is torch.float16)


def test_bfloat16_trains_too():
    close(*both(plain, Asked(dtype=torch.bfloat16)), atol=2e-2, rtol=5e-2)


# Coming and going


def test_nothing_is_left_behind():
    """What the fixture of every test checks, and what it does not see."""
    replaced = [
        (torch.optim.Optimizer, "__init__"), (torch.optim.Optimizer, "__setstate__"),
        (torch.amp.GradScaler, "__init__"), (torch.amp.autocast_mode.autocast, "__enter__"),
        (torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch"), (torch.autograd, "backward"),
        (torch.Tensor, "register_hook"), (torch.Tensor, "numpy"), (ampatch, "initialize"), (ampatch, "init"),
    ]  # fmt: skip
    before = [vars(owner).get(name) for owner, name in replaced]
    begin()
    assert all(vars(o).get(n) is not b for (o, n), b in zip(replaced, before, strict=True))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.register_hook(lambda grad: grad * 3)
    end()
    assert [vars(owner).get(name) for owner, name in replaced] == before
    assert "step" not in vars(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    expected = copy.deepcopy(model).requires_grad_()
    expected.zero_grad()
    expected[0].weight._backward_hooks = None
    expected(torch.ones(1, 4)).sum().backward()
    close(3 * expected[0].weight.grad, model[0].weight.grad)


def test_off_means_off():
    assert auto.start(Asked(enabled=False)) is None
    assert auto.start(Asked(opt_level="O0")) is None
    assert registry.sessions == []


def test_copies_of_optimizers_are_noticed():
    begin(Asked())
    model = net()
    optimizer = copy.deepcopy(torch.optim.SGD(model.parameters(), lr=0.1))
    params = optimizer.param_groups[0]["params"]
    (params[0] * float("inf")).sum().backward()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, params, before))


def test_optimizers_are_held_weakly():
    session = begin(Asked())
    alive = []
    for _ in range(5):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        alive.append(weakref.ref(optimizer))
        alive.append(weakref.ref(model[0].weight))
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None] * 10
    assert list(session.optimizers()) == []
    torch.optim.SGD(net().parameters(), lr=0.1)
    assert len(session._optimizers) <= 1


def test_threads_take_turns():
    begin()
    torch.manual_seed(0)
    pairs = [(model := net(), torch.optim.SGD(model.parameters(), lr=0.0)) for _ in range(4)]
    x = torch.ones(4, 4)
    failed = []

    def train(model, optimizer):
        try:
            for _ in range(10):
                model(x).sum().backward()
                optimizer.step()
        except Exception as error:  # a thread's error would be lost
            failed.append(error)

    threads = [threading.Thread(target=train, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end()
    assert failed == []
    for model, _ in pairs:
        found = grads(model)
        model.zero_grad()
        model(x).sum().backward()
        close([10 * p.grad for p in model.parameters()], found, atol=2e-2)


def test_gradients_that_others_change_meanwhile_are_no_matter(caplog):
    """Another thread's optimizer may have moved on while a pass ran: it was not reached by it."""
    begin()
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in (first, second)]
    caplog.clear()

    def meanwhile(grad):
        second.grad = torch.ones(2)

    first.register_hook(meanwhile)
    first.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert caplog.records == []
    close([torch.full((2,), 0.9)] * 2, [first.detach(), second.detach()])


def test_a_pass_waits_for_that_of_another_thread():
    begin()
    pairs = [(model := net(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
    other = threading.Thread(target=lambda: pairs[1][0](torch.ones(2, 4)).sum().backward())
    seen = []

    def meanwhile(grad):
        other.start()
        other.join(0.2)  # long enough to end, if it did not wait for us

    out = pairs[0][0](torch.ones(2, 4)).float()
    scaled = out * 3.0
    out.register_hook(lambda grad: seen.append(grad.clone()))
    scaled.register_hook(meanwhile)
    scaled.sum().backward()
    other.join()
    close([torch.full((2, 1), 3.0)], seen)


# Scripts with AMP code of their own


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: ampatch.initialize(net()), "ampatch.initialize"),
        (lambda: ampatch.initialize(net(), enabled=False), "ampatch.initialize"),
        (lambda: ampatch.init(), "ampatch.init"),
        (lambda: torch.autocast("cpu").__enter__(), "torch.autocast"),
        (lambda: torch.amp.GradScaler("cpu"), "torch.amp.GradScaler"),
    ],
    ids=["initialize", "off", "init", "autocast", "GradScaler"],
)
def test_other_amp_code_is_told(call, name):
    begin()
    with pytest.raises(ampatch.AmpatchError) as error:
        call()
    assert f"--auto is for scripts without AMP code, and this one calls {name}. " in str(error.value)


def test_torchs_amp_that_is_off_is_let_through():
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        x, y = batch()
        with torch.autocast("cpu", enabled=False):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen = grads(model)
        scaler.step(optimizer)
        scaler.update()
        return seen, weights(model)

    close(*both(loop))
