"""Situations: backward passes, graphs that wait, checkpoints, transforms and threads."""

import contextlib
import threading
from functools import partial

import torch
from situations import HALVES, Block, batches, each, look, mlp, mse, plain_loop, situation, trained
from small_training import in_threads
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ampatch.session.facade import session_of

EARLY = (torch.autograd.backward,)  # a tuple is not rebound


class Early:
    backward = staticmethod(torch.autograd.backward)
    retaining = partial(torch.autograd.backward, retain_graph=True)


class Loss(torch.Tensor):
    def backward(self, *args, **kwargs):
        return EARLY[0](self.as_subclass(torch.Tensor), *args, **kwargs)


BACKWARDS = {
    "bound early": EARLY[0],
    "a method": lambda loss: loss.backward(),
    "a class attribute": Early.backward,
    "a partial": Early.retaining,
    "of lists": lambda loss: torch.autograd.backward([loss], [None]),
    "a subclass's": lambda loss: loss.as_subclass(Loss).backward(),
}


@situation()
def backward_by_other_names(amp):
    model, optimizer = amp.start(mlp())
    for backward in each(amp, BACKWARDS):
        for x, y in batches(2):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            amp.record(loss)
            with amp.scaled(loss, optimizer) as scaled:
                backward(scaled)
            optimizer.step()


class Checkpointed(Block):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        x = checkpoint(self.encode, x, **self.options)
        x = checkpoint(lambda x: x + self.second(torch.tanh(self.second(x))), x, **self.options)
        return self.head(x)


def that_keeps(*ops):
    """A selective checkpoint."""
    kinds = torch.utils.checkpoint.CheckpointPolicy

    def policy(ctx, op, *args, **kwargs):
        return kinds.MUST_SAVE if op in ops else kinds.PREFER_RECOMPUTE

    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    return Checkpointed(use_reentrant=False, context_fn=contexts)


ATEN = torch.ops.aten


class InARow(nn.Module):
    """Without early stop."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=False))


CHECKPOINTS = {
    "plain": lambda: Checkpointed(use_reentrant=False),
    "reentrant": lambda: nn.Sequential(nn.Linear(4, 4), Checkpointed(use_reentrant=True)),
    "selective": lambda: that_keeps(ATEN.addmm.default, ATEN.mm.default),
    "of_all_but_casts": lambda: that_keeps(ATEN._to_copy.default),
    "in_a_row": InARow,
}


@situation(cases=CHECKPOINTS)
def checkpoints(amp, case):
    """At the end with a forward in between, which casts weights anew before the recompute."""
    model, optimizer = trained(amp, case())
    is_reentrant = isinstance(
        model, nn.Sequential
    )  # then torch warns where nothing wants gradients
    for x, y in batches(0 if is_reentrant else 2):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        with torch.no_grad():
            model(-x)
        amp.backward(loss, optimizer)
        optimizer.step()


class Again(torch.autograd.Function):
    """Calls a part again in the backward pass, as reversible networks, adjoint solvers of equations
    and equilibrium models do.  It asks for the gradients of the `params`; where there are none
    given, the part's backward pass leaves them in its weights."""

    @staticmethod
    def forward(ctx, part, x, *params):
        ctx.part = part
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.part(x)
            if params:
                return None, *torch.autograd.grad(out, (x, *params), grad)
            out.backward(grad)
        return None, x.grad


class CalledAgain(Block):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.head(self.call(self.second, self.first(x)))


def an_adjoint(part, x):
    return Again.apply(part, x, *part.parameters())


CALLED_AGAIN = {
    "a_part_and_goes_back_through_it": Again.apply,
    "a_part_and_asks_for_its_weights": an_adjoint,
    "a_part_in_a_checkpoint": partial(checkpoint, an_adjoint, use_reentrant=False),
}


@situation("O2 O3", cases=CALLED_AGAIN)
def a_function_whose_backward_calls(amp, case):
    trained(amp, CalledAgain(case))


@situation()
def saved_tensors_on_the_side_and_anomaly_detection(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        with torch.autograd.graph.save_on_cpu():
            out = model(x)
        amp.step(mse(out, y), optimizer)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            amp.step(mse(model(x), y), optimizer)


@situation("O1")
def functional_calls_and_jacobian_vector_products(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        weights = {name: param * 0.9 for name, param in model.named_parameters()}
        with amp.casts():
            out = functional_call(model, weights, (x,))
            amp.record(*torch.func.jvp(lambda x: model(x).float(), (x,), (x,)))
        amp.step(mse(out, y), optimizer)


@situation("O1", within=1e-6)
def per_sample_gradients(amp):
    """vmap's kernels sum in another order; without casts gradients are 1e-4 to 1e-3 away."""
    model, optimizer = amp.start(mlp())

    def loss_of(params, x, y):
        with amp.casts():
            return mse(functional_call(model, params, (x[None],))[0], y)

    for x, y in batches(3):
        params = {name: param.detach() for name, param in model.named_parameters()}
        results = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        for name, param in model.named_parameters():
            param.grad = results[name].mean(0)
        optimizer.step()


@situation("O1")
def two_threads_that_meet_in_backward(amp):
    """With a loss scale a block looks at the other optimizer's gradients, too."""
    (first, second), optimizers = amp.start([mlp(0), mlp(1)])
    barrier = threading.Barrier(2, timeout=60)

    def work(model, optimizer):
        for x, y in batches(2):
            optimizer.zero_grad()
            out = model(x)
            out.register_hook(lambda g: (barrier.wait(), None)[1])
            with amp.scaled(mse(out, y), optimizer) as scaled:
                scaled.backward()
            barrier.wait()
            optimizer.step()

    pairs = zip((first, second), optimizers)
    assert in_threads(*(partial(work, *pair) for pair in pairs)) == [None, None]


@situation()
def forward_here_and_backward_in_a_thread(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        assert in_threads(partial(amp.backward, loss, optimizer)) == [None]
        optimizer.step()


@situation("O1 O2")
def a_fake_tensor_mode_before_a_real_step(amp):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, optimizer = amp.start(mlp())
    if not amp.by_hand:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.empty(6, 4))
    plain_loop(amp, model, optimizer)


PLANS = {
    "model": ("O1 fp16", "O1 bf16", "O2 fp16", "O3 bf16", "O0 bf16"),
    "process": ("O1 fp16", "O2 fp16", "O3 bf16", "O0 bf16"),  # losses follow the one session at O1
}


TURNS = {
    f"scope_{scope}_begun_by_{plan[first]}": (scope, plan[first:] + plan[:first])
    for scope, plan in PLANS.items()
    for first in range(len(plan))
}


@situation("O1", halves="fp16", cases=TURNS)
def sessions_that_take_turns(amp, case):
    """The first of them is closed before the others; a model is in none."""
    scope, plan = case
    plain, trainings = mlp(9), []
    for seed, cell in enumerate(plan):
        level, half = cell.split()
        driver = amp if cell == "O1 fp16" else amp.another(level, HALVES[half])
        started = driver.start(mlp(seed, norm=True), patch_scope=scope, loss_scale=128.0)
        trainings.append((driver, *started))
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            _, closed, _ = trainings.pop(0)
            if not amp.by_hand:
                session_of(closed).close()
                assert {param.dtype for param in closed.parameters()} == {torch.float32}
        for driver, model, optimizer in reversed(trainings):
            driver.step(mse(model(x), y), optimizer)
            look(driver, model)
        with amp.no_casts() if scope == "process" else contextlib.nullcontext():
            look(amp, plain)


@situation("O1")
def two_sessions_in_two_half_dtypes(amp):
    """Recomputation and a custom backward run under their own forward's policy."""
    other = amp.another(half={torch.float16: torch.bfloat16}.get(amp.half, torch.float16))
    first, first_optimizer = amp.start(Checkpointed(use_reentrant=False), loss_scale=1.0)
    second, second_optimizer = other.start(
        Checkpointed(use_reentrant=False), loss_scale=1.0, patch_scope="model"
    )
    for x, y in batches(3):
        a, b = mse(first(x), y), mse(second(x), y)
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        amp.backward(a, first_optimizer)
        other.backward(b, second_optimizer)
        first_optimizer.step()
        second_optimizer.step()
