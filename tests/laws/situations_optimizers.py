"""Situations: optimizers, closures, schedulers, groups, and optimizers of optimizers.

Each of torch's, in each way that it runs: tests/scaling/test_optimizer_state.py.
"""

import contextlib
import itertools
from functools import partial
from unittest import mock

import torch
from drivers import SGD
from situations import PLAIN, batches, mlp, mse, plain_loop, situation, trained
from torch import nn


@situation()
def schedules_and_param_groups_with_their_own_rates(amp):
    net = mlp(norm=True)
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[1:].parameters()}]
    model, optimizer = amp.start(net, torch.optim.SGD(groups, lr=0.2, weight_decay=0.1))
    schedulers = torch.optim.lr_scheduler
    cycle = schedulers.OneCycleLR(optimizer, 0.5, total_steps=8)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), 0.5)
    for scheduler in (cycle, schedulers.StepLR(optimizer, 2, 0.5)):
        for _ in range(4):
            plain_loop(amp, model, optimizer, 1, on_gradients=clip)
            scheduler.step()
            amp.record(*scheduler.get_last_lr())
        optimizer.param_groups[0]["lr"] *= 2


@situation()
def hooks_around_steps(amp):
    """One of them clips."""
    model, optimizer = amp.start(mlp())

    def clip(optimizer, args, kwargs):
        amp.record(1)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: amp.record(2))
    plain_loop(amp, model, optimizer)


# Closures


def closure_of(amp, model, optimizer, x, y, block=None):
    """What the docs pass to `step`."""

    def closure():
        if not isinstance(optimizer, ZeroFirst):
            optimizer.zero_grad()
        loss = mse(model(x), y)
        amp.backward(loss, optimizer, block)
        return loss

    return closure


class ZeroFirst(torch.optim.SGD):
    def step(self, closure):
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Extragradient(torch.optim.SGD):
    """A half step, the gradient there, a step from where it began."""

    @torch.no_grad()
    def step(self, closure):
        params = self.param_groups[0]["params"]
        was = [p.clone() for p in params]
        with torch.enable_grad():
            closure()
        for p in params:
            p.sub_(p.grad, alpha=0.1)
        with torch.enable_grad():
            loss = closure()
        for p, value in zip(params, was):
            p.copy_(value).sub_(p.grad, alpha=0.1)
        return loss


LBFGS = partial(torch.optim.LBFGS, lr=0.5, max_iter=3)
SEARCHING = partial(LBFGS, line_search_fn="strong_wolfe")
REFUSED = {"halves": "fp16", "refuses": "under a dynamic loss scale"}
STATIC, LATE = {"loss_scale": 128.0}, {"delay_unscale": True}


@situation("O1", cases={"lbfgs_with_line_search": (SEARCHING, STATIC)})
@situation(
    "O1 O2",
    cases={
        "lbfgs": (LBFGS, STATIC),
        "sgd": (SGD, STATIC),
        "sgd_under_the_levels_scale": (SGD, {}),
        "sgd_and_late_unscaling": (SGD, {}, LATE),
        "an_optimizer_that_zeroes_first": (partial(ZeroFirst, lr=0.1), STATIC),
        "one_that_zeroes_first_and_late_unscaling": (partial(ZeroFirst, lr=0.1), STATIC, LATE),
        "extragradient": (partial(Extragradient, lr=0.1), STATIC),
    },
)
@situation("O1 O2", cases={"lbfgs_under_a_dynamic_scale": (LBFGS, {})}, **REFUSED)
def closures(amp, case):
    """LBFGS looks at gradients that are unscaled already.  Under a dynamic scale it could not go
    back after an overflow, as under `torch.amp.GradScaler`.  A closure called before `ZeroFirst`
    asks would leave it with no gradients at all."""
    make, settings, *block = case
    model, optimizer = amp.start(mlp(), make, **settings)
    for x, y in batches(3):
        with torch.no_grad():  # the optimizer evaluates it with gradients
            loss = optimizer.step(closure=closure_of(amp, model, optimizer, x, y, *block))
        if loss is not None:
            amp.record(loss)


class Mezo(torch.optim.SGD):
    """Two losses at perturbed weights and no gradient; the closure calls no backward."""

    @torch.no_grad()
    def step(self, closure):
        params, losses = self.param_groups[0]["params"], []
        noise = [torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for p in params]
        for move in (0.1, -0.2):
            for p, z in zip(params, noise):
                p.add_(z.to(p.dtype), alpha=move)
            losses.append(closure())
        slope = (losses[0] - losses[1]) / 0.2
        for p, z in zip(params, noise):
            p.add_(z.to(p.dtype), alpha=0.1)
            p.sub_(z.to(p.dtype) * slope.to(p.dtype), alpha=0.01)
        return losses[0]


@situation("O1 O2")
def zeroth_order_steps(amp):
    model, optimizer = amp.start(mlp(), partial(Mezo, lr=0.1), loss_scale=128.0)
    for x, y in batches(4):
        amp.record(optimizer.step(lambda x=x, y=y: mse(model(x), y)))


class Lookahead:
    """An optimizer around an optimizer, and none of torch's."""

    def __init__(self, params):
        self.inner, self.slow = SGD(params), None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        self.slow = self.slow or [p.clone() for p in params]
        self.inner.step()
        for p, slow in zip(params, self.slow):
            p.copy_(slow.lerp_(p, 0.5))


class Borrowing(torch.optim.Optimizer):
    """Its methods are those of an optimizer that it holds."""

    def __init__(self, params):
        inner = SGD(params)
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self.step, self.zero_grad = inner.step, inner.zero_grad


@situation("O1 O2", cases={"an_optimizer_around_another": Lookahead, "with_its_methods": Borrowing})
def optimizers_of_other_kinds(amp, case):
    trained(amp, make=case, count=5)


ALL_LEVELS, DYNAMIC = "O0 O1 O2 O3", {"loss_scale": "dynamic"}


@situation(ALL_LEVELS)
def losses_several_times_through_one_graph(amp):
    """Their sum, unscaled late, and each with its loss scale, for an optimizer that is named twice
    and has the weights of two models, of which each loss reaches one."""
    nets = [nn.Sequential(mlp(0), nn.Linear(2, 4)), mlp(1), mlp(2)]
    makes = [SGD, SGD([*nets[1].parameters(), *nets[2].parameters()]), None]
    (body, *heads), (first, second, _) = amp.start(nets, makes, num_losses=2, **DYNAMIC)
    for x, y in batches(4):
        hidden = body(x)
        losses = [mse(head(hidden), y) for head in heads]
        amp.backward(sum(losses), [first, second], LATE, retain_graph=True)
        for number, loss in enumerate(losses):
            order = [second, first, second]
            amp.backward(loss, order, {"loss_id": number}, retain_graph=number == 0)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


@situation(ALL_LEVELS, cases={"both": [0, 1], "reversed": [1, 0], "first": [0], "second": [1]})
def a_weight_of_two_optimizers(amp, case):
    """It is unscaled once, also where a loss is given one of them."""
    net = mlp()
    model, both = amp.start(net, [SGD(net.parameters()), PLAIN(net[2].parameters())], **DYNAMIC)
    named = both if amp.by_hand else [both[index] for index in case]
    for x, y in batches(4):
        for block in (LATE, {}, {}):
            amp.backward(mse(model(x), y), named, block)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


@situation(ALL_LEVELS, cases={"model": 0, "optimizer": 1})
def zero_grad_inside_the_block_by_the(amp, case):
    """Before `backward`, where some put it, or behind: what was there, and what waits scaled, is
    gone, not only set aside."""
    pair = amp.start(mlp(), **DYNAMIC)
    model, optimizer = pair
    for is_before, block in itertools.product((True, False), (LATE, {})):
        for x, y in batches(2):
            amp.backward(mse(model(-x), y), optimizer, block)
            loss = mse(model(x), y)
            if amp.by_hand and is_before:
                pair[case].zero_grad()
            with amp.scaled(loss, optimizer) as scaled:
                if is_before and not amp.by_hand:
                    pair[case].zero_grad(set_to_none=bool(block))
                scaled.backward()
                if not (is_before or amp.by_hand):
                    pair[case].zero_grad(set_to_none=bool(block))
            if amp.by_hand and not is_before:
                pair[case].zero_grad()
            amp.backward(mse(model(2 * x), y), optimizer)
            optimizer.step()


@situation("O1 O2")
def a_part_of_the_model_in_no_optimizer(amp):
    net = mlp()
    trained(amp, net, torch.optim.SGD(net[2].parameters(), lr=0.1))


@situation()
def step_patched_on_the_class_after_initialize(amp):
    """What a profiler or a test puts on `SGD.step` is called."""
    model, optimizer = amp.start(mlp(), PLAIN)
    original, calls = torch.optim.SGD.step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        return original(self, *args, **kwargs)

    with mock.patch.object(torch.optim.SGD, "step", step):
        plain_loop(amp, model, optimizer)
    amp.record(len(calls))


@situation("O1 O2")
def an_exception_in_a_closure(amp):
    """The step that broke off changes nothing, and the next ones go on."""
    model, optimizer = amp.start(mlp())
    for number, (x, y) in enumerate(batches(4)):
        ordinary = closure_of(amp, model, optimizer, x, y)

        def closure(ordinary=ordinary, number=number):
            loss = ordinary()
            if number == 1:
                raise ZeroDivisionError
            return loss

        with contextlib.suppress(ZeroDivisionError):
            optimizer.step(closure)


@situation("O0 O1 O2")
def state_by_the_models_parameters(amp):
    """Momentum is damped, read and forgotten through `optimizer.state[p]`, which keeps what a
    sharpness-aware step has ascended by."""
    model, optimizer = trained(amp, count=1)
    for x, y in batches(4):
        amp.step(mse(model(x), y), optimizer)
        with torch.no_grad():
            for p in model.parameters():
                optimizer.state[p]["up"] = up = p.grad * 0.3
                p.add_(up)
        optimizer.zero_grad()
        amp.backward(mse(model(x), y), optimizer)
        for p in model.parameters():
            p.data.sub_(optimizer.state[p].pop("up"))
            amp.record(optimizer.state[p]["momentum_buffer"])
            optimizer.state[p]["momentum_buffer"].mul_(0.5)
        optimizer.step()
    optimizer.state.pop(model[0].weight)
    plain_loop(amp, model, optimizer, 2)


@situation("O0 O1 O2")
def an_optimizer_that_was_not_given(amp):
    """Made after `initialize`, beside one that was given: it steps on the same weights."""
    model, optimizer = amp.start(mlp(), loss_scale=1.0)
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(4):
        own.zero_grad()
        amp.plain_backward(mse(model(x), y))
        own.step()
        amp.record(*model.parameters())
        plain_loop(amp, model, optimizer, 1, seed=8)


WRAPPERS = {"a_container": nn.Sequential, "data_parallel": nn.DataParallel}


@situation(ALL_LEVELS, cases=WRAPPERS)
def the_model_is_wrapped_before_and_after_initialize_by(amp, case):
    trained(amp, case(mlp()))
    model, optimizer = amp.another().start(mlp(1))
    plain_loop(amp, case(model), optimizer)
