"""Situations: hooks on modules, weights, gradient accumulators and the engine."""

import torch
from situations import batches, mlp, mse, plain_loop, situation, trained
from torch import nn


@situation()
def full_backward_hooks_see_gradients(amp):
    model, optimizer = amp.start(mlp())

    def hook(module, grad_input, grad_output):
        amp.record(grad_output[0], *[g for g in grad_input if g is not None])

    model[1].register_full_backward_hook(hook)
    model[2].register_full_backward_hook(hook)
    plain_loop(amp, model, optimizer)


@situation("O1")
@situation("O2", halves="bf16", against="FP32", within=2e-2, cases={"at_o2": None})
def full_backward_hooks_read_their_weights_gradients(amp, case=None):
    model, optimizer = trained(amp, count=1)
    model[2].register_full_backward_hook(lambda *_: amp.record(model[2].weight.grad))
    plain_loop(amp, model, optimizer, 2)
    amp.record(len(amp.seen))


@situation("O1")
def a_hook_of_all_modules_reads_gradients(amp):
    model, optimizer = trained(amp, count=1)

    def hook(module, *_):
        if module in (model[0], model[2]):
            amp.record(*[float("nan") if p.grad is None else p.grad for p in module.parameters()])

    handle = nn.modules.module.register_module_full_backward_hook(hook)
    try:
        for x, y in batches(2):
            amp.step(mse(model(x.requires_grad_()), y), optimizer)
    finally:
        handle.remove()
    amp.record(len(amp.seen))


@situation("O0 O1 O2")
def accumulator_hooks(amp):
    """Added between steps, and behind a forward."""
    model, optimizer = trained(amp, count=1)
    results = {}
    for name, param in model.named_parameters():

        def hook(p, name=name):
            assert p.grad.dtype is torch.float32
            results.setdefault(name, []).append(p.grad.clone())

        param.register_post_accumulate_grad_hook(hook)
    plain_loop(amp, model, optimizer, 2)
    for x, y in batches(2):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: amp.record(p.grad))
        amp.backward(loss, optimizer)
        handle.remove()
        optimizer.step()
    for name, _ in model.named_parameters():
        amp.record(*results[name])


@situation("O1")
def hooks_on_the_gradient_accumulator_node(amp):
    model, optimizer = amp.start(mlp())
    node = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda grad_input, grad_output: amp.record(grad_output[0]))
    plain_loop(amp, model, optimizer)
    amp.record(len(amp.seen))


@situation("O1")
def an_engine_callback_reads_gradients(amp):
    model, optimizer = amp.start(mlp())
    engine = torch.autograd.Variable._execution_engine

    def at_end():
        amp.record(*[p.grad for p in model.parameters()])

    for x, y in batches(3):
        optimizer.zero_grad()
        out = model(x)
        out.register_hook(lambda g: engine.queue_callback(at_end))
        amp.backward(mse(out, y), optimizer)
        optimizer.step()


@situation()
def multi_grad_hook_between_forward_and_backward(amp):
    model, optimizer = amp.start(mlp())
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        handle = torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grads: amp.record(*grads)
        )
        amp.backward(loss, optimizer)
        handle.remove()
        optimizer.step()
    amp.record(len(amp.seen))


@situation("O1")
def a_step_in_backward(amp):
    """An optimizer for each weight, called by its accumulator; no scaler can know of it."""
    model, _optimizer = amp.start(mlp(), loss_scale=1.0)
    single = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(param):
        single[param].step()
        single[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for x, y in batches(3):
        amp.plain_backward(mse(model(x), y))


@situation("O1")
def a_layer_wise_step_in_module_hooks(amp):
    """Each layer steps, and frees its gradient, as soon as its backward is through."""
    model, optimizer = trained(amp, count=1, loss_scale=1.0)
    optimizer.zero_grad()

    def step(module, grad_input, grad_output):
        for param in module.parameters():
            param.data -= 0.1 * param.grad
            param.grad = None

    model[0].register_full_backward_hook(step)
    model[2].register_full_backward_hook(step)
    for x, y in batches(3):
        amp.plain_backward(mse(model(x.requires_grad_()), y))
