"""The `forward` that ampatch puts in a module's instance while a session is open: its own frame.

It is a bound method of the module and calls the `forward` of the class.  `model(x)` and
`model.forward(x)` both run it.  So each call has a Python frame of ampatch, whose `try` exits the
call, whatever exception passes.  A `Scope` says what is done around the call: `ManagedModel`,
`ModuleOverride` or `SubmoduleCalls`.  No other file knows the attribute `forward`.

A module may have several frames, one around the other.  Deep copies, pickles, scripted modules and
copies of the attributes have none.  `copy.copy(module)` has frames of its own with the same scopes,
and a replica of `nn.DataParallel` has those of its module.  If the script sets another `forward`
later, that stays.  Calls of it are cast if it calls the earlier one, as accelerate's does.

torch.compile runs the frame eagerly, and compiles what the frame calls.  The `forward` of torch's
own modules is an exception: Dynamo compiles it only as part of a caller that is not torch's, so the
frame of such a module is traced too.  It has a code object of its own, because Dynamo compiles one
code object only a few times.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call
from ..casting.patches import Patch
from ..errors import AmpatchError
from ..torch_private.modules import REPLICATE

_FORWARD = "forward"
_FRAMES = "_ampatch_frames"
"""In `vars` of a module: its frames, the outermost last.  The list keeps them alive."""
_MISSING = object()


class _Attributes(dict[str, Any]):
    """`vars` of a module with frames.  Looking up a name finds them; iterating over all does not.

    So code that copies the attributes gets those of a plain module: `clone.__dict__ =
    module.__dict__.copy()` of MAML libraries, a `__deepcopy__` of a class.  In a clone the bound
    method would call the original module, and a deep copy would copy that module too.
    """

    __slots__ = ()

    def copy(self) -> dict[str, Any]:
        plain = dict(dict.items(self))
        forward = plain.get(_FORWARD, _MISSING)
        for frame in reversed(plain.pop(_FRAMES, ())):
            if forward is frame.method:
                forward = frame.previous
        _set_forward(plain, forward)
        return plain

    __copy__ = copy

    def __iter__(self) -> Iterator[str]:  # without it `dict(attributes)` does not ask for keys
        return iter(self.copy())

    keys = property(lambda self: self.copy().keys)
    values = property(lambda self: self.copy().values)
    items = property(lambda self: self.copy().items)

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        return deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple:  # a class that `weights_only` knows
        return OrderedDict, (), None, None, iter(self.items())


class Scope(Protocol):
    """What is done around the calls of modules."""

    def enter(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A call begins.  Returns the forward's arguments; None: the forward runs as it is."""

    def exit(self, call: Call) -> None:
        """The call has ended, or `enter` has failed.  May be called again."""

    def convert_output(self, output: Any) -> Any:
        """What the call returns if the forward has returned `output`."""

    def on_error(self, error: BaseException) -> None:
        """The call raises `error`."""

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The whole call where Dynamo traces it; `forward` takes the module and the arguments."""


class OwnFrame:
    """The `forward` of one module, from `put` to `take_out`."""

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        self.module: nn.Module | None = module
        self.scope: Scope | None = scope
        self.previous: Any = _MISSING  # the instance's `forward` before this frame
        self.inner: Callable | None = None  # what the frame calls: see `_inner_forward`
        self.method: Any = _MISSING  # the instance's `forward` now
        # The frames of the module's copies that `copy.copy` made.
        self.frames_of_copies: weakref.WeakSet[OwnFrame] = weakref.WeakSet()

    def put(self) -> None:
        """Set the module's `forward` to the frame, around the present one."""
        module: Any = self.module
        attributes = _attributes_of(module)
        frames = attributes[_FRAMES] = attributes.get(_FRAMES) or []
        self.previous = attributes.get(_FORWARD, _MISSING)
        if frames and frames[-1].method is self.previous:
            self.inner = self.previous.__func__
        else:
            self.inner = _inner_forward(module, self.previous)
        self.method = _frame_method(self, module)
        frames.append(self)  # first: Ctrl-C may strike at any moment
        attributes[_FORWARD] = self.method

    def put_on_model(self, level: str) -> None:
        """As `put`.  Raises `AmpatchError` where Python would not call the frame."""
        self.put()
        cls = type(self.module)
        if isinstance(inspect.getattr_static(cls, _FORWARD, None), property):
            raise AmpatchError(
                f"ampatch.initialize(opt_level={level!r}): {cls.__name__} has a property for its "
                "forward, which hides the one that casts. Nothing was changed. Make forward a "
                "method that calls what the property gives."
            )

    def is_installed(self) -> bool:
        """Whether `module.forward` is this frame."""
        return self.module is not None and vars(self.module).get(_FORWARD) is self.method

    def take_out(self) -> None:
        """Set the module's previous `forward` again.  A `forward` that the script has set stays.

        Code that has kept the frame's method calls the previous `forward` through it.
        """
        self.scope = None
        for frame in list(self.frames_of_copies):
            frame.take_out()
        if (module := self.module) is None:
            return
        attributes = vars(module)
        frames = attributes.get(_FRAMES)
        while frames and frames[-1].scope is None:  # also those taken out while inside another
            last = frames[-1]
            if last.is_installed():
                _set_forward(attributes, last.previous)
            frames.pop()
            last.module = last.method = None  # else a cycle would keep the weights alive
        if not frames and isinstance(attributes, _Attributes):
            object.__setattr__(module, "__dict__", attributes.copy())


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    if not isinstance(vars(module), _Attributes):
        object.__setattr__(module, "__dict__", _Attributes(vars(module)))
    return vars(module)


def _frame_method(frame: OwnFrame, module: nn.Module) -> MethodType:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope, inner = frame.scope, frame.inner or type(self).forward
        if scope is None:  # the frame was taken out, and the script has kept its method
            return inner(self, *args, **kwargs)
        if is_dynamo_compiling():
            return scope.run_traced(inner, self, args, kwargs)
        if self.__dict__.get(_FRAMES) is None:  # a copy, whose `forward` a library has wrapped
            return inner(self, *args, **kwargs)
        call = Call()
        try:
            try:
                entered = scope.enter(call, self, args, kwargs)
                if entered is None:
                    return inner(self, *args, **kwargs)
                args, kwargs = entered
                output = inner(self, *args, **kwargs)
            finally:
                scope.exit(call)
        except BaseException as error:
            scope.exit(call)  # again: Ctrl-C may have struck in the first
            scope.on_error(error)
            raise
        return scope.convert_output(output)

    previous = module.forward
    functools.update_wrapper(forward, previous)
    forward.__name__ = _FORWARD
    with contextlib.suppress(TypeError, ValueError):  # builtins may have no signature
        signature = inspect.signature(previous)
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[self_parameter, *signature.parameters.values()]
        )
    if str(getattr(previous, "__module__", "")).partition(".")[0] == "torch":
        forward.__code__ = forward.__code__.replace()
    # accelerate makes a method of `__wrapped__`: a function with the same code keeps the casts.
    wrapped = FunctionType(forward.__code__, globals(), _FORWARD, None, forward.__closure__)
    forward.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return MethodType(forward, module)


def _inner_forward(module: nn.Module, previous: Any) -> Callable | None:
    """What the frame calls, with the module and the arguments.  None: the `forward` of the class.

    The frame looks up that one at each call, because that of `nn.Embedding` is replaced later.
    """
    if previous is not _MISSING:
        return lambda self, *args, **kwargs: previous(*args, **kwargs)
    static = inspect.getattr_static(type(module), _FORWARD, None)
    return None if isinstance(static, FunctionType) else _call_forward_of_class


def _call_forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` of a class that defines it as something else than a plain function."""
    cls: Any = type(module)
    try:
        forward = inspect.getattr_static(cls, _FORWARD).__get__(module, cls)
    except AttributeError:  # a TorchScript module gives it by `__getattr__`
        forward = cls.__getattr__(module, _FORWARD)
    return forward(*args, **kwargs)


def _set_forward(attributes: dict[str, Any], forward: Any) -> None:
    if forward is _MISSING:
        attributes.pop(_FORWARD, None)
    else:
        attributes[_FORWARD] = forward


class SubmoduleFrames:
    """The frames of a model's submodules, which are out while the model's own forward runs.

    Frames that stayed in would slow each submodule's call and hide submodules from Dynamo, and
    submodules that other threads compute would begin calls of their own.
    """

    def __init__(self) -> None:
        self._frames: list[OwnFrame] = []
        self._attributes: list[dict[str, Any]] = []  # `vars` of modules without another `forward`
        self._methods: list[Any] = []  # the frames' methods in these modules

    def install(self, modules: Collection[nn.Module], scope: Scope) -> None:
        """Give frames to these modules, and take out for good the frames of all others."""
        for frame in self._frames:
            if frame.module not in modules:
                frame.take_out()
        self._frames = [frame for frame in self._frames if frame.scope is not None]
        for module in set(modules) - {frame.module for frame in self._frames}:
            frame = OwnFrame(module, scope)
            self._frames.append(frame)
            frame.put()
        plain = [frame for frame in self._frames if frame.previous is _MISSING]
        self._attributes = [vars(frame.module) for frame in plain]
        self._methods = [frame.method for frame in plain]

    def remove(self) -> None:
        """Take the frames out, until `put_back`.  Those inside a later `forward` or frame stay."""
        present = list(map(dict.get, self._attributes, repeat(_FORWARD)))
        if len(self._attributes) < len(self._frames) or self._methods != present:
            for frame in self._frames:
                if frame.is_installed():
                    _set_forward(vars(frame.module), frame.previous)
        else:
            deque(map(dict.pop, self._attributes, repeat(_FORWARD), repeat(None)), maxlen=0)

    def put_back(self) -> None:
        """The model's forward has ended: put the frames back.  May be called again."""
        if len(self._attributes) == len(self._frames):
            deque(map(dict.setdefault, self._attributes, repeat(_FORWARD), self._methods), maxlen=0)
            return
        for frame in self._frames:
            attributes = vars(frame.module)
            if attributes.get(_FORWARD, _MISSING) is frame.previous:
                attributes[_FORWARD] = frame.method


# Copies


def _installed_frame(module: nn.Module) -> OwnFrame | None:
    """The outermost frame of a module, if `forward` is that frame."""
    frames = vars(module).get(_FRAMES)
    return frames[-1] if frames and frames[-1].is_installed() else None


def copying_methods() -> list[Patch]:
    """The replaced methods of `nn.Module` that copy: shallow copies and replicas get frames."""

    def shallow(original: Any) -> Callable:
        def __copy__(self: nn.Module) -> Any:
            reduced: Any = self.__reduce_ex__(4)
            if isinstance(reduced, str):
                return self
            make, args, *state = reduced
            copied = make(*args)
            if state and state[0] is not None:
                copied.__setstate__(state[0])
            if _installed_frame(self) is not None and vars(copied) is not vars(self):
                for frame in vars(self)[_FRAMES]:
                    new_frame = OwnFrame(copied, frame.scope)
                    frame.frames_of_copies.add(new_frame)
                    new_frame.put()
            return copied

        return __copy__

    def replicate(original: Callable) -> Callable:
        @functools.wraps(original)
        def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
            replica: nn.Module = original(self)
            if (frame := _installed_frame(self)) is not None:
                attributes = _attributes_of(replica)
                attributes[_FRAMES] = vars(self)[_FRAMES]
                # A bound method would be a cycle, and keep the weights until Python collects it.
                forward, ref = frame.method.__func__, weakref.ref(replica)
                attributes[_FORWARD] = lambda *args, **kwargs: forward(ref(), *args, **kwargs)
            return replica

        return _replicate_for_data_parallel

    methods: list[Patch] = [(nn.Module, "__copy__", shallow)]
    more: list[Patch] = [(nn.Module, REPLICATE, replicate)]
    return methods + more if hasattr(nn.Module, REPLICATE) else methods


@contextlib.contextmanager
def without_frames(root: nn.Module) -> Iterator[None]:
    """Context manager: `root` and its submodules have no frames, for code that compiles them."""
    framed = [vars(module) for module in root.modules() if vars(module).get(_FRAMES)]
    forwards = [attributes.get(_FORWARD, _MISSING) for attributes in framed]
    try:
        for attributes in framed:
            _set_forward(attributes, attributes.copy().get(_FORWARD, _MISSING))
        yield
    finally:
        for attributes, forward in zip(framed, forwards, strict=True):
            _set_forward(attributes, forward)
