"""One training loop, run by ampatch and by its oracle.

A situation is written once against the methods that `Ampatch` and `ByHand` share.  `ByHand` does
what the opt level means with PyTorch's own means and nothing of ours: autocast around forwards
(O1), half copies of FP32 weights in a forward (O2), a half model (O3); losses are scaled by hand.
`test_situations.py` compares it with `torch.amp.GradScaler`.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import ampatch

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
INIT_SCALE = 1024.0


class Driver:
    """What both sides share: what was started, and what is compared in the end."""

    device = "cpu"

    def __init__(self, level: str, half: torch.dtype) -> None:
        self.level = level
        self.half = half
        self.is_half_model = level in ("O2", "O3")
        self.seen: list[Tensor] = []
        self.met: list[str] = []  # the cases in which these were seen
        self.case = ""
        self.started: list[tuple[nn.Module, Any]] = []
        self._others: list[Driver] = []
        self._settings = {"opt_level": level, "dtype": half, "init_scale": INIT_SCALE}

    def another(self, level: str | None = None, half: torch.dtype | None = None) -> Any:
        """A driver for a second session, whose weights are compared too."""
        other = type(self)(level or self.level, half or self.half)
        other.seen, other.met = self.seen, self.met
        self._others.append(other)
        return other

    def _started(self, net: Any, nets: list, optimizers: list) -> tuple[Any, Any]:
        if len(nets) == 1:
            nets = nets * len(optimizers)
        self.started += zip(nets, optimizers, strict=True)
        single = not isinstance(net, list) and len(optimizers) == 1
        return (net, optimizers[0]) if single else (net, optimizers)

    def record(self, *values: Any) -> None:
        """Compare these with what the other driver records at the same place."""
        self.seen += [torch.as_tensor(value).detach().double().clone() for value in values]
        self.met += [self.case] * len(values)

    def backward(
        self, loss: Tensor, optimizers: Any, block: dict | None = None, **options: Any
    ) -> None:
        """Record the loss and call its backward pass through the scaler.

        `block` is what `scale_loss` gets besides: when gradients are unscaled, and by which of
        several equal scales, makes no difference to the oracle.
        """
        self.record(loss)
        with self.scaled(loss, optimizers, **(block or {})) as scaled:
            scaled.backward(**options)

    def plain_backward(self, loss: Tensor) -> None:
        self.record(loss)
        loss.backward()

    def step(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.backward(loss, optimizer)
        optimizer.step()

    def weights(self) -> list[Tensor]:
        results = []
        for model, optimizer in self.started:
            results += [value for value in model.state_dict().values() if isinstance(value, Tensor)]
            results += [] if optimizer is None else list(ampatch.master_params(optimizer))
        results += [value for other in self._others for value in other.weights()]
        return [value.detach().double().clone() for value in results]


class Ampatch(Driver):
    """The situation as a script writes it."""

    by_hand = False

    def start(self, net: Any, make: Any = SGD, **settings: Any) -> tuple[Any, Any]:
        """`initialize` of a model and an optimizer, or of lists of both; `make` makes optimizers.

        With one model and a list of optimizers they all are that model's.
        """
        nets, optimizers = _made(net, make, self.device)
        self._settings |= {"verbosity": 1, **settings}
        ampatch.initialize(nets, [o for o in optimizers if o is not None], **self._settings)
        return self._started(net, nets, optimizers)

    def scaled(self, loss: Tensor, optimizers: Any, **block: Any) -> AbstractContextManager[Tensor]:
        return ampatch.scale_loss(loss, optimizers, **block)

    def casts(self, *_: Any) -> AbstractContextManager:
        """The session does what the oracle does there by hand."""
        return contextlib.nullcontext()

    half_weights = parts = casts

    def no_casts(self) -> AbstractContextManager:
        """Around calls that are not to be cast."""
        return ampatch.disable_casts()

    def uncast(self, model: nn.Module, *args: Any) -> Any:
        """A forward without casts, at O1."""
        with ampatch.disable_casts():
            return model(*args)

    def set_scale(self, value: float) -> None:
        ampatch.set_loss_scale(value)

    def pair(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """A deep copy of both, which is plain."""
        return copy.deepcopy((model, optimizer))

    def renew(self) -> None:
        nets, optimizers = zip(*self.started, strict=True)
        started, self.started = self.started, []
        ampatch.deactivate()
        ampatch.initialize(list(dict.fromkeys(nets)), list(optimizers), **self._settings)
        self.started = started

    def scale(self, loss_id: int = 0) -> float:
        """The loss scale that the next loss is multiplied by."""
        return ampatch.loss_scale(loss_id)


class ByHand(Driver):
    """The oracle.  At "O0" it is plain FP32, at "O2" FP32 weights with half copies in forwards."""

    by_hand = True

    def __init__(self, level: str, half: torch.dtype) -> None:
        super().__init__(level, half)
        self._dynamic = False
        self._waits = False  # gradients wait scaled, and are judged with the next ones
        self._in_half: list[nn.Module] = []  # models whose forward runs
        self._copies: dict[nn.Module, dict[int, Tensor]] = {}  # of its last forward with a graph

    def start(self, net: Any, make: Any = SGD, **settings: Any) -> tuple[Any, Any]:
        scaled = self.half is torch.float16 and self.level in ("O1", "O2")
        wanted = settings.get("loss_scale") or ("dynamic" if scaled else 1.0)
        self._dynamic = wanted == "dynamic"
        self._interval = settings.get("growth_interval", 2000)
        self._first_scale = (
            settings.get("init_scale", INIT_SCALE) if self._dynamic else float(wanted)
        )
        self._cap = settings.get("max_loss_scale", 2.0**24)
        self._scales = [[self._first_scale, 0] for _ in range(settings.get("num_losses", 1))]
        nets, optimizers = _made(net, make, self.device)
        for model in nets:
            self._convert(model)
        for optimizer in filter(None, optimizers):
            optimizer.__class__ = _stepping(self, type(optimizer))
        return self._started(net, nets, optimizers)

    def _convert(self, net: nn.Module) -> None:
        """Weights are half at O3; buffers stay FP32, but for those of half norms."""
        fp32 = _BatchNorm if self.level == "O2" else ()
        for module in net.modules() if self.is_half_model else ():
            if isinstance(module, fp32):
                continue
            for param in module.parameters(recurse=False) if self.level == "O3" else ():
                if param.dtype is torch.float32:
                    param.data = param.data.to(self.half)
            for buffer in module.buffers(recurse=False):
                if isinstance(module, _NormBase) and buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.half)
        net.__class__ = _calling(self, type(net))

    @contextmanager
    def half_weights(self, net: nn.Module, again: bool = False) -> Iterator[None]:
        """Around parts of a model that are called by themselves: all FP32 weights but those of
        batch norms; `again`: the copies of the last forward."""
        if self.level != "O2" or net in self._in_half:
            yield
            return
        places = [
            (module, name, param)
            for module in net.modules()
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
            if param.dtype is torch.float32 and not isinstance(module, _BatchNorm)
        ]
        weights = {id(param): param for _, _, param in places}
        copies = self._copies[net] if again else self._rounded(weights)
        if torch.is_grad_enabled():
            self._copies[net] = copies
        before = {key: copy.detach().clone() for key, copy in copies.items()}
        for module, name, param in places:
            self._put(module, name, copies.get(id(param), param))
        self._in_half.append(net)
        try:
            yield
        finally:
            self._in_half.remove(net)
            for module, name, param in places:
                if module._parameters.get(name) is copies.get(id(param)):
                    self._put(module, name, param)
            for key, param in weights.items():
                self._take(param, copies.get(key, param), before.get(key, param))

    @contextmanager
    def parts(self, model: nn.Module) -> Iterator[None]:
        """Around code that calls parts of a model: at O2 each casts its inputs to half and its
        result to FP32."""
        handles = []
        for part in model.children() if self.level == "O2" else ():
            if isinstance(part, _BatchNorm) or not list(part.parameters()):
                continue
            handles += [
                part.register_forward_pre_hook(lambda _, args: to(self.half, args)),
                part.register_forward_hook(lambda _, args, out: to(torch.float32, out)),
            ]
        with self.half_weights(model), self.casts():
            yield
        for handle in handles:
            handle.remove()

    def _rounded(self, weights: dict[int, Tensor]) -> dict[int, Tensor]:
        with torch.inference_mode(False):
            graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            with torch.set_grad_enabled(graph):
                return {key: Rounded.apply(param, self.half) for key, param in weights.items()}

    def _put(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        module._parameters[name] = tensor
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [module._parameters[key] for key in module._flat_weights_names]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, param: Tensor, copy: Tensor, before: Tensor) -> None:
        """What the forward wrote into a copy goes to the parameter."""
        written = differ(copy, before)
        if written.any():
            param.copy_(torch.where(written, copy.to(param.dtype), param))

    @contextmanager
    def scaled(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        scale = self.scale(loss_id)
        optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        params = list({p: None for o in optimizers for g in o.param_groups for p in g["params"]})
        with ExitStack() as around:
            for net in self._copies:  # checkpoints run parts of the forward again
                around.enter_context(self.half_weights(net, again=True))
            if scale == 1.0 and not self._dynamic:  # as in FP32 training
                yield loss.float()
                return
            passed = around.enter_context(self._collecting(params, scale))
            yield loss.float() * scale
        judged = [param.grad for param in params] if self._waits else passed
        self._waits = delay_unscale
        if self._dynamic and not delay_unscale:
            self._move(self._scales[loss_id], all(map(finite, judged)))

    def _move(self, state: list, is_clean: bool) -> None:
        """The scale and the clean steps since it moved."""
        scale, clean = state[0], state[1] + 1
        if not is_clean:
            state[:] = scale / 2, 0
        elif clean == self._interval:
            state[:] = min(scale * 2, self._cap), 0
        else:
            state[1] = clean

    @contextmanager
    def _collecting(self, params: list[Tensor], scale: float) -> Iterator[list[Tensor | None]]:
        """Set earlier gradients aside; add what a pass leaves, unscaled.  Gives the pass's own."""
        earlier = [param.grad for param in params]
        for param in params:
            param.grad = None
        passed: list[Tensor | None] = []
        try:
            yield passed
            passed += [param.grad for param in params]
        finally:
            new = passed or [None] * len(params)  # it broke off: what was there before
            for param, before, grad in zip(params, earlier, new, strict=True):
                if grad is not None:  # into the memory that is there, as autograd adds
                    grad = grad / scale
                    before = grad.clone() if before is None else before.add_(grad)
                param.grad = before

    def step_is_skipped(self, optimizer: Optimizer) -> bool:
        """Under a dynamic scale a step on infs or NaNs is left out."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return self._dynamic and not all(finite(p.grad) for p in params)

    def casts(self) -> AbstractContextManager:
        """Around calls outside a model's forward: at O1 they are cast."""
        if self.level != "O1":
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.half)

    def no_casts(self) -> AbstractContextManager:
        return torch.autocast(self.device, enabled=False)

    def uncast(self, model: nn.Module, *args: Any) -> Any:
        return super(type(model), model).__call__(*args)

    def set_scale(self, value: float) -> None:
        self._scales[0][0] = value

    def pair(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        fresh = copy.deepcopy(model)
        groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
        params = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
        names = {id(p): name for name, p in model.named_parameters()}
        for group in groups:
            owned = [names[id(params[index])] for index in group["params"]]
            group["params"] = [fresh.get_parameter(name) for name in owned]
        copied = type(optimizer).__mro__[1](groups, lr=0.1)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return fresh, copied

    def renew(self) -> None:
        """What a second `initialize` keeps is everything, so there is nothing to do."""
        self._scales = [[self._first_scale, 0] for _ in self._scales]

    def scale(self, loss_id: int = 0) -> float:
        return self._scales[loss_id][0]


class Rounded(torch.autograd.Function):
    """`weight.to(half)`, whose gradient may be sparse."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, half: torch.dtype) -> Tensor:
        return weight.to(half)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


def _made(net: Any, make: Any, device: str) -> tuple[list[nn.Module], list[Any]]:
    nets = net if isinstance(net, list) else [net]
    for model in nets:
        model.to(device)
    makes = make if isinstance(make, list) else [make] * len(nets)
    owners = nets if len(nets) > 1 else nets * len(makes)
    optimizers = [
        maker and (maker if isinstance(maker, Optimizer) else maker(model.parameters()))
        for model, maker in zip(owners, makes, strict=True)
    ]
    return nets, optimizers


def _calling(oracle: ByHand, kind: type) -> type:
    """The model's class with the oracle's forward; copies of the model are plain."""

    class Calling(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not oracle.is_half_model:
                with oracle.casts():
                    return super().__call__(*args, **kwargs)
            args, kwargs = to(oracle.half, (args, kwargs))
            with oracle.half_weights(self):
                result = super().__call__(*args, **kwargs)
            return to(torch.float32, result)

        def __deepcopy__(self, memo: dict) -> nn.Module:
            plain = copy.copy(self)
            plain.__class__ = kind
            return copy.deepcopy(plain, memo)

    Calling.__name__ = Calling.__qualname__ = kind.__name__
    return Calling


def _stepping(oracle: ByHand, kind: type) -> type:
    """The optimizer's class; a step may be skipped."""

    class Stepping(kind):
        def step(self, closure: Callable | None = None) -> Any:
            if closure is None and oracle.step_is_skipped(self):
                return None
            return super().step(*([] if closure is None else [closure]))

    Stepping.__name__ = Stepping.__qualname__ = kind.__name__
    return Stepping


def to(dtype: torch.dtype, tree: Any) -> Any:
    """The FP32 and half tensors of a tree in `dtype`."""
    movable = (torch.float32, torch.float16, torch.bfloat16)
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in movable else leaf,
        tree,
    )


def differ(first: Tensor, second: Tensor) -> Tensor:
    """Elementwise; two NaNs are the same."""
    return (first != second) & ~(first.isnan() & second.isnan())


def finite(grad: Tensor | None) -> bool:
    """Whether a gradient holds neither inf nor NaN."""
    if grad is None:
        return True
    return bool((grad.coalesce().values() if grad.is_sparse else grad).isfinite().all())
