"""One training loop, run by ampatch and by its oracle.

A situation is written once against the methods that `Ampatch` and `ByHand` share.  `ByHand` does
what the opt level means with PyTorch's own means and nothing of ours: autocast around forwards
(O1), FP32 copies of half weights (O2), a half model (O3); losses are scaled by hand.
`test_situations.py` compares it with `torch.amp.GradScaler`.
"""

from __future__ import annotations

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
from ampatch.config.opt_levels import LENDING

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
        self.started: list[tuple[nn.Module, Any]] = []
        self._others: list[Driver] = []

    def another(self, level: str | None = None, half: torch.dtype | None = None) -> Any:
        """A driver for a second session, whose weights are compared too."""
        other = type(self)(level or self.level, half or self.half)
        other.seen = self.seen
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

    def backward(self, loss: Tensor, optimizers: Any, **options: Any) -> None:
        """Record the loss and call its backward pass through the scaler."""
        self.record(loss)
        with self.scaled(loss, optimizers) as scaled:
            scaled.backward(**options)

    def step(self, loss: Tensor, optimizer: Any) -> None:
        """An ordinary step: zero_grad, backward, step."""
        optimizer.zero_grad()
        self.backward(loss, optimizer)
        optimizer.step()

    def clip(self, model: nn.Module, optimizer: Any, norm: float) -> Tensor:
        """Clip by norm the way scripts do, through the model's parameters."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    def clip_value(self, model: nn.Module, optimizer: Any, value: float) -> None:
        """Clip by value the way scripts do."""
        torch.nn.utils.clip_grad_value_(model.parameters(), value)

    def weights(self) -> list[Tensor]:
        """All weights in FP32, buffers, and what optimizers step on."""
        found = []
        for model, optimizer in self.started:
            found += [value for value in model.state_dict().values() if isinstance(value, Tensor)]
            found += [] if optimizer is None else list(ampatch.master_params(optimizer))
        found += [value for other in self._others for value in other.weights()]
        return [value.detach().double().clone() for value in found]


class Ampatch(Driver):
    """The situation as a script writes it."""

    by_hand = False

    def start(self, net: Any, make: Any = SGD, **settings: Any) -> tuple[Any, Any]:
        """`initialize` of a model and an optimizer, or of lists of both; `make` makes optimizers.

        With one model and a list of optimizers they all are that model's.
        """
        nets, optimizers = _made(net, make, self.device)
        settings = {"verbosity": 1, "init_scale": INIT_SCALE, **settings}
        ampatch.initialize(
            nets,
            [o for o in optimizers if o is not None],
            opt_level=self.level,
            dtype=self.half,
            **settings,
        )
        return self._started(net, nets, optimizers)

    def scaled(self, loss: Tensor, optimizers: Any) -> AbstractContextManager[Tensor]:
        """Scale a loss; after the block gradients are unscaled."""
        return ampatch.scale_loss(loss, optimizers)

    def plain_backward(self, loss: Tensor) -> None:
        """`loss.backward()` without a scaler."""
        self.record(loss)
        loss.backward()

    def casts(self) -> AbstractContextManager:
        """Around calls outside a model's forward: at O1 the session casts everywhere."""
        return contextlib.nullcontext()

    def half_weights(self, model: nn.Module) -> AbstractContextManager:
        """Around parts of a model that are called by themselves."""
        return contextlib.nullcontext()

    def no_casts(self) -> AbstractContextManager:
        """Around calls that are not to be cast."""
        return ampatch.disable_casts()

    def uncast(self, model: nn.Module, *args: Any) -> Any:
        """A forward without casts, at O1."""
        with ampatch.disable_casts():
            return model(*args)

    def add_group(self, optimizer: Any, params: list[Tensor], **options: Any) -> None:
        """`add_param_group` with weights of the model."""
        optimizer.add_param_group({"params": params, **options})

    def set_scale(self, value: float) -> None:
        """Set a dynamic loss scale."""
        ampatch.set_loss_scale(value)

    def pair(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """A deep copy of both, which is plain FP32."""
        return copy.deepcopy((model, optimizer))

    def renew(self) -> None:
        """`initialize` once more on everything that was started."""
        nets, optimizers = zip(*self.started, strict=True)
        started, self.started = self.started, []
        ampatch.deactivate()
        ampatch.initialize(
            list(dict.fromkeys(nets)),
            list(optimizers),
            opt_level=self.level,
            dtype=self.half,
            init_scale=INIT_SCALE,
        )
        self.started = started

    def scale(self) -> float:
        """The loss scale that the next loss is multiplied by."""
        return ampatch.loss_scale()


class ByHand(Driver):
    """The oracle.  At "O0" it is plain FP32."""

    by_hand = True

    def __init__(self, level: str, half: torch.dtype) -> None:
        super().__init__(level, half)
        self.pairs: dict[Tensor, Tensor] = {}  # weight of the model: its FP32 master
        self._half_known: dict[Tensor, Tensor] = {}  # the half weight as it was derived
        self._master_known: dict[Tensor, Tensor] = {}  # the master it was derived from
        self.in_pass = False
        self._scale = 1.0
        self._dynamic = False

    def start(self, net: Any, make: Any = SGD, **settings: Any) -> tuple[Any, Any]:
        scaled = self.half is torch.float16 and self.level in ("O1", "O2")
        wanted = settings.get("loss_scale") or ("dynamic" if scaled else 1.0)
        self._dynamic = wanted == "dynamic"
        self._scale = settings.get("init_scale", INIT_SCALE) if self._dynamic else float(wanted)
        nets, optimizers = _made(net, make, self.device)
        trained = [p for o in filter(None, optimizers) for g in o.param_groups for p in g["params"]]
        for one in nets:
            self._convert(one, trained)
        for optimizer in filter(None, optimizers):
            optimizer.__class__ = _stepping(self, type(optimizer))
            self._adopt(optimizer)
        return self._started(net, nets, optimizers)

    def _convert(self, net: nn.Module, trained: list[Tensor]) -> None:
        """Weights that are trained get a master; buffers stay FP32, but for half norms'."""
        fp32 = _BatchNorm if self.level == "O2" else ()
        masters = {id(p) for p in trained if p.requires_grad} if self.level == "O2" else set()
        for module in net.modules() if self.is_half_model else ():
            if isinstance(module, fp32):
                continue
            for param in module.parameters(recurse=False):
                if param.dtype is torch.float32:
                    if id(param) in masters:
                        self._make_master(param)
                    param.data = param.data.to(self.half)
            for buffer in module.buffers(recurse=False):
                if isinstance(module, _NormBase) and buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.half)
        for param in self.pairs:
            self._derived(param)
        net.__class__ = _calling(self, type(net))

    def _make_master(self, param: Tensor) -> None:
        self.pairs[param] = param.detach().float().clone().requires_grad_()
        param.__class__ = _with_master(self)

    def _adopt(self, optimizer: Optimizer) -> None:
        """The optimizer steps on masters; half weights that train from now on get one."""
        if self.level == "O2":
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.requires_grad and param.dtype is self.half and param not in self.pairs:
                        self._make_master(param)
                        self._derived(param)
                group["params"] = [self.pairs.get(p, p) for p in group["params"]]
            for own in vars(optimizer).values():  # as LBFGS keeps one
                if isinstance(own, list) and own and isinstance(own[0], Tensor):
                    own[:] = [self.pairs.get(p, p) for p in own]

    def _derived(self, param: Tensor) -> None:
        self._half_known[param] = param.detach().clone()
        self._master_known[param] = self.pairs[param].detach().clone()

    @torch.inference_mode(False)
    @torch.no_grad()
    def masters_to_half(self) -> None:
        """Where a master was written, its half weight follows."""
        for param, master in self.pairs.items():
            moved = differ(master, self._master_known[param])
            if moved.any():
                param.data.copy_(torch.where(moved, master.to(self.half), param.data))
                self._master_known[param] = master.detach().clone()
                self._half_known[param] = torch.where(moved, param.data, self._half_known[param])

    @contextmanager
    def half_weights(self, net: nn.Module) -> Iterator[None]:
        """What the model's parts compute with is half, and as the masters are."""
        self.masters_to_half()
        yield

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_over(self) -> None:
        """Where a half weight was written, its master takes the value."""
        self.masters_to_half()
        for param, master in self.pairs.items():
            written = differ(param.data, self._half_known[param])
            master.copy_(torch.where(written, param.data.float(), master))
            self._derived(param)

    @contextmanager
    def masters_in_place(self) -> Iterator[None]:
        """The model holds its masters."""
        halves = {tensor: tensor.data for tensor in self.pairs}
        for tensor, master in self.pairs.items():
            tensor.data = master.data
        try:
            yield
        finally:
            for tensor, half in halves.items():
                tensor.data = half

    @contextmanager
    def scaled(self, loss: Tensor, optimizers: Any) -> Iterator[Tensor]:
        optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        for optimizer in optimizers:
            self._adopt(optimizer)
        masters = {p: None for o in optimizers for g in o.param_groups for p in g["params"]}
        with self._collecting(list(masters), self._scale):
            yield loss.float() * self._scale
        if self._dynamic and not all(finite(p.grad) for p in masters):
            self._scale /= 2

    def plain_backward(self, loss: Tensor) -> None:
        self.record(loss)
        if not self.pairs:
            return loss.backward()
        for _, optimizer in self.started:
            self._adopt(optimizer)
        params = [p for _, o in self.started for g in o.param_groups for p in g["params"]]
        with self._collecting(params, 1.0):
            loss.backward()

    @contextmanager
    def _collecting(self, masters: list[Tensor], scale: float) -> Iterator[None]:
        """Set earlier gradients aside; add what a pass leaves in the model, unscaled, in FP32."""
        owner = {id(master): param for param, master in self.pairs.items()}
        params = [owner.get(id(master), master) for master in masters]
        earlier = [master.grad for master in masters]
        self.in_pass = True
        for param in (*params, *masters):
            param.grad = None
        try:
            yield
            passed = [(param.grad, master.grad) for param, master in zip(params, masters)]
        except BaseException:  # a pass that breaks off leaves what was there before
            passed = [(None, None)] * len(params)
            raise
        finally:
            for param in params:
                param.grad = None
            self.in_pass = False
            for param, master, before, new in zip(params, masters, earlier, passed, strict=True):
                own = () if param is master else new[1:]  # the loss may reach a master itself
                added = [g.to(master.dtype) / scale for g in (new[0], *own) if g is not None]
                for grad in added:  # into the memory that is there, as autograd adds
                    before = grad.clone() if before is None else before.add_(grad)
                master.grad = before

    def step_is_skipped(self, optimizer: Optimizer) -> bool:
        """Under a dynamic scale a step on infs or NaNs is left out."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return self._dynamic and not all(finite(p.grad) for p in params)

    def casts(self) -> AbstractContextManager:
        if self.level != "O1":
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.half)

    def no_casts(self) -> AbstractContextManager:
        return torch.autocast(self.device, enabled=False)

    def uncast(self, model: nn.Module, *args: Any) -> Any:
        return super(type(model), model).__call__(*args)

    def add_group(self, optimizer: Any, params: list[Tensor], **options: Any) -> None:
        self.take_over()
        optimizer.add_param_group({"params": params, **options})
        self._adopt(optimizer)

    def set_scale(self, value: float) -> None:
        self._scale = value

    def pair(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        fresh = copy.deepcopy(model)
        groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
        params = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
        names = {id(self.pairs.get(p, p)): name for name, p in model.named_parameters()}
        for group in groups:
            owned = [names[id(params[index])] for index in group["params"]]
            group["params"] = [fresh.get_parameter(name) for name in owned]
        made = type(optimizer).__mro__[1](groups, lr=0.1)
        made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return fresh, made

    def renew(self) -> None:
        """What a second `initialize` keeps is everything, so there is nothing to do."""
        self.take_over()
        self._scale = INIT_SCALE if self._dynamic else self._scale

    def scale(self) -> float:
        return self._scale


class LentByHand(ByHand):
    """The oracle of lent weights: at O2 parameters stay FP32 and forwards have half copies."""

    def __init__(self, level: str, half: torch.dtype) -> None:
        super().__init__(level, half)
        self._lent_to: list[nn.Module] = []  # models whose forward runs
        self._copies: dict[nn.Module, dict[int, Tensor]] = {}  # of its last forward with a graph

    def _convert(self, net: nn.Module, trained: list[Tensor]) -> None:
        if self.level != "O2":
            return super()._convert(net, trained)
        for module in net.modules():
            for buffer in module.buffers(recurse=False):
                is_norm = isinstance(module, _NormBase) and not isinstance(module, _BatchNorm)
                if is_norm and buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.half)
        net.__class__ = _calling(self, type(net))

    @contextmanager
    def half_weights(self, net: nn.Module, again: bool = False) -> Iterator[None]:
        """All FP32 weights but those of batch norms; `again`: the copies of the last forward."""
        if self.level != "O2" or net in self._lent_to:
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
        self._lent_to.append(net)
        try:
            yield
        finally:
            self._lent_to.remove(net)
            for module, name, param in places:
                if module._parameters.get(name) is copies.get(id(param)):
                    self._put(module, name, param)
            for key, param in weights.items():
                self._take(param, copies.get(key, param), before.get(key, param))

    def _rounded(self, weights: dict[int, Tensor]) -> dict[int, Tensor]:
        with torch.inference_mode(False):
            graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            with torch.set_grad_enabled(graph):
                return {key: Rounded.apply(param, self.half) for key, param in weights.items()}

    def _put(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        module._parameters[name] = tensor
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [module._parameters[one] for one in module._flat_weights_names]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, param: Tensor, copy: Tensor, before: Tensor) -> None:
        """What the forward wrote into a copy goes to the parameter."""
        written = differ(copy, before)
        if written.any():
            param.copy_(torch.where(written, copy.to(param.dtype), param))

    @contextmanager
    def scaled(self, loss: Tensor, optimizers: Any) -> Iterator[Tensor]:
        with super().scaled(loss, optimizers) as scaled, ExitStack() as recomputing:
            for net in self._copies:  # checkpoints run parts of the forward again
                recomputing.enter_context(self.half_weights(net, again=True))
            yield scaled


def by_hand(level: str, half: torch.dtype) -> ByHand:
    """The oracle of what O2 is now: lent weights, or half parameters with masters."""
    return (LentByHand if LENDING[0] else ByHand)(level, half)


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
        one and (one if isinstance(one, Optimizer) else one(model.parameters()))
        for model, one in zip(owners, makes, strict=True)
    ]
    return nets, optimizers


def _calling(oracle: ByHand, kind: type) -> type:
    """The model's class with the oracle's forward and state dict; copies of the model are plain."""

    class Calling(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            oracle.masters_to_half()
            if not oracle.is_half_model:
                with oracle.casts():
                    return super().__call__(*args, **kwargs)
            args, kwargs = to(oracle.half, (args, kwargs))
            with oracle.half_weights(self):
                result = super().__call__(*args, **kwargs)
            return to(torch.float32, result)

        def state_dict(self, *args: Any, **kwargs: Any) -> dict:
            oracle.take_over()
            with oracle.masters_in_place():
                found = super().state_dict(*args, **kwargs)
            for key, value in found.items():
                found[key] = value.float() if value.dtype is oracle.half else value
            return found

        def load_state_dict(self, state_dict: dict, *args: Any, **kwargs: Any) -> Any:
            oracle.take_over()
            with oracle.masters_in_place():
                result = super().load_state_dict(state_dict, *args, **kwargs)
            oracle.masters_to_half()
            return result

        def __deepcopy__(self, memo: dict) -> nn.Module:
            plain = copy.copy(self)
            plain.__class__ = kind
            state = self.state_dict()
            found = copy.deepcopy(plain, memo)
            for name, value in (*found.named_parameters(), *found.named_buffers()):
                if name in state:
                    value.data = state[name].float() if value.dtype is oracle.half else state[name]
                    value.data = value.data.clone()
                    value.__class__ = nn.Parameter if isinstance(value, nn.Parameter) else Tensor
            return found

    Calling.__name__ = Calling.__qualname__ = kind.__name__
    return Calling


def _with_master(oracle: ByHand) -> type:
    """A half parameter whose `grad` is its master's; within a backward pass, its own."""
    own = torch._C.TensorBase.grad

    class HalfParameter(nn.Parameter):
        @property
        def grad(self) -> Tensor | None:
            return own.__get__(self) if oracle.in_pass else oracle.pairs[self].grad

        @grad.setter
        def grad(self, grad: Tensor | None) -> None:
            if oracle.in_pass:
                own.__set__(self, grad)
            else:
                oracle.pairs[self].grad = None if grad is None else grad.float()

    return HalfParameter


def _stepping(oracle: ByHand, kind: type) -> type:
    """The optimizer's class; a step first takes over what was written, and may be skipped."""

    class Stepping(kind):
        def step(self, closure: Callable | None = None) -> Any:
            oracle.take_over()
            if closure is None and oracle.step_is_skipped(self):
                return None
            result = super().step(*([] if closure is None else [closure]))
            oracle.masters_to_half()
            return result

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
