"""The `forward` that ampatch puts in a module's instance while a session is open: its own frame.

It is a bound method of the module and calls the `forward` of the class.  `model(x)` and
`model.forward(x)` both run it.  So each call has a Python frame of ampatch, whose `try` exits the
call whatever exception is raised.  A `CallScope` does the work around the call: `ManagedModel`,
`ModuleOverride` or `SubmoduleCalls`.  No other file reads or sets the attribute `forward` of
modules.

A module may have several frames, one around the other.  Deep copies, pickles, scripted modules and
copies of the attributes have no frames.  `copy.copy(module)` has its own frames with the same
scopes, and a replica of `nn.DataParallel` has the frames of its module.  If the script sets another
`forward` later, ampatch keeps it.  Its calls are cast if it calls the frame, as accelerate's
wrapper does.

torch.compile runs the frame eagerly, and compiles the `forward` inside it.  Modules of torch itself
are an exception: Dynamo compiles their `forward` only as part of a caller that is not torch's, so
their frames are traced too.  Each such frame has its own code object, because Dynamo compiles a
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
from ..torch_private.modules import REPLICATE_METHOD

_FORWARD = "forward"
_FRAMES_ATTRIBUTE = "_ampatch_frames"
"""In `vars` of a module: its frames, the outermost last.  The list keeps them alive."""
_MISSING = object()


class _Attributes(dict[str, Any]):
    """The `__dict__` of a module that has frames.

    A lookup by name returns the frames, but iteration and copies return the attributes of a plain
    module.  So code that copies attributes makes plain modules, such as `clone.__dict__ =
    module.__dict__.copy()` in MAML libraries, or the `__deepcopy__` of a class.  A copied frame
    would call the original module, and a deep copy of a frame would copy that module too.
    """

    __slots__ = ()

    def copy(self) -> dict[str, Any]:
        plain = dict(dict.items(self))
        forward = plain.get(_FORWARD, _MISSING)
        for frame in reversed(plain.pop(_FRAMES_ATTRIBUTE, ())):
            if forward is frame.method:
                forward = frame.previous_forward
        _set_forward(plain, forward)
        return plain

    __copy__ = copy

    def __iter__(self) -> Iterator[str]:  # makes `dict(attributes)` call `keys`
        return iter(self.copy())

    keys = property(lambda self: self.copy().keys)
    values = property(lambda self: self.copy().values)
    items = property(lambda self: self.copy().items)

    def __deepcopy__(self, memo: dict) -> dict[str, Any]:
        return deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # OrderedDict is allowed by torch.load(weights_only=True).
        return OrderedDict, (), None, None, iter(self.items())


class CallScope(Protocol):
    """What a frame runs before and after the `forward` of its module."""

    def enter(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Enter a call.  Returns the forward's arguments, or None to run the forward alone."""

    def exit(self, call: Call) -> None:
        """Exit a call, also after an `enter` that has raised.  May be called again."""

    def convert_output(self, output: Any) -> Any:
        """The result of the call, for the `output` of the forward."""

    def on_error(self, error: BaseException) -> None:
        """Called before the call raises `error`."""

    def run_traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run the whole call while Dynamo traces; `forward` takes the module and the arguments."""


class OwnFrame:
    """The `forward` that ampatch sets in one module, from `install` to `uninstall`."""

    def __init__(self, module: nn.Module, scope: CallScope) -> None:
        self.module: nn.Module | None = module
        self.scope: CallScope | None = scope
        self.previous_forward: Any = _MISSING  # the instance's `forward` before this frame
        self.inner_forward: Callable | None = None  # the function that the frame calls
        self.method: Any = _MISSING  # the frame as a bound method, the instance's `forward`
        # The frames of copies that `copy.copy` made of the module, and of its copies.
        self.frames_of_copies: weakref.WeakSet[OwnFrame] = weakref.WeakSet()

    def install(self) -> None:
        """Set the module's `forward` to the frame, around the present `forward`."""
        module: Any = self.module
        attributes = _install_attributes(module)
        frames = attributes[_FRAMES_ATTRIBUTE] = attributes.get(_FRAMES_ATTRIBUTE) or []
        self.previous_forward = attributes.get(_FORWARD, _MISSING)
        if frames and frames[-1].method is self.previous_forward:
            self.inner_forward = self.previous_forward.__func__
        else:
            self.inner_forward = _inner_forward(module, self.previous_forward)
        self.method = _frame_method(self, module)
        frames.append(self)  # before the next line: KeyboardInterrupt may be raised anywhere
        attributes[_FORWARD] = self.method

    def install_on_model(self, level: str) -> None:
        """Like `install`, but raises `AmpatchError` if Python would not call the frame."""
        self.install()
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

    def uninstall(self) -> None:
        """Take the frame out for good: restore the previous `forward`, if the script set no other.

        Other code that still calls the frame's method then runs the previous `forward`.
        """
        self.scope = None
        for frame in (*self.frames_of_copies, self):
            frame._remove()

    def _remove(self) -> None:
        self.scope = None
        if (module := self.module) is None:
            return
        attributes = vars(module)
        frames = attributes.get(_FRAMES_ATTRIBUTE)
        # Also removes frames that were taken out while they were inside another frame.
        while frames and frames[-1].scope is None:
            last = frames[-1]
            if last.is_installed():
                _set_forward(attributes, last.previous_forward)
            frames.pop()
            # Break the cycle module -> frame -> module, which would keep the weights alive.
            last.module = last.method = None
        if not frames and isinstance(attributes, _Attributes):
            object.__setattr__(module, "__dict__", attributes.copy())


def _install_attributes(module: nn.Module) -> dict[str, Any]:
    """Give the module an `_Attributes` as its `__dict__`, if it has none, and return it."""
    if not isinstance(vars(module), _Attributes):
        object.__setattr__(module, "__dict__", _Attributes(vars(module)))
    return vars(module)


def _frame_method(frame: OwnFrame, module: nn.Module) -> MethodType:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope, inner = frame.scope, frame.inner_forward or type(self).forward
        if scope is None:  # the frame was taken out, but the script still has its method
            return inner(self, *args, **kwargs)
        if is_dynamo_compiling():
            return scope.run_traced(inner, self, args, kwargs)
        # `self` is a copy without frames: a library has copied and wrapped this forward.
        if self.__dict__.get(_FRAMES_ATTRIBUTE) is None:
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
            scope.exit(call)  # exit again: KeyboardInterrupt may have interrupted the first exit
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
        forward.__code__ = forward.__code__.replace()  # so that Dynamo's limit counts it alone
    # accelerate binds `forward.__wrapped__` as a method.  A second function with this code object
    # keeps the casts there.
    wrapped = FunctionType(forward.__code__, globals(), _FORWARD, None, forward.__closure__)
    forward.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return MethodType(forward, module)


def _inner_forward(module: nn.Module, previous: Any) -> Callable | None:
    """The function that the frame calls with the module and the arguments.

    Returns None for the `forward` of the class.  The frame looks up the class's `forward` at each
    call, because ampatch replaces `nn.Embedding.forward` later.
    """
    if previous is not _MISSING:
        return lambda self, *args, **kwargs: previous(*args, **kwargs)
    static = inspect.getattr_static(type(module), _FORWARD, None)
    return None if isinstance(static, FunctionType) else _call_forward_of_class


def _call_forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` of a class in which it is not a plain function."""
    cls: Any = type(module)
    try:
        forward = inspect.getattr_static(cls, _FORWARD).__get__(module, cls)
    except AttributeError:  # a TorchScript module has `forward` only through `__getattr__`
        forward = cls.__getattr__(module, _FORWARD)
    return forward(*args, **kwargs)


def _set_forward(attributes: dict[str, Any], forward: Any) -> None:
    if forward is _MISSING:
        attributes.pop(_FORWARD, None)
    else:
        attributes[_FORWARD] = forward


class SubmoduleFrames:
    """The frames of a model's submodules, which are suspended while the model's own forward runs.

    Otherwise they would slow each submodule's call and hide submodules from Dynamo, and submodules
    that other threads compute would enter calls of their own.
    """

    def __init__(self) -> None:
        self._frames: list[OwnFrame] = []
        # For modules whose instance had no `forward` before the frame: their `__dict__`s, and the
        # frames' methods.
        self._attributes: list[dict[str, Any]] = []
        self._methods: list[Any] = []

    def set_modules(self, modules: Collection[nn.Module], scope: CallScope) -> None:
        """Give frames to exactly these modules; all others lose theirs."""
        for frame in self._frames:
            if frame.module not in modules:
                frame.uninstall()
        self._frames = [frame for frame in self._frames if frame.scope is not None]
        for module in set(modules) - {frame.module for frame in self._frames}:
            frame = OwnFrame(module, scope)
            self._frames.append(frame)
            frame.install()
        plain = [frame for frame in self._frames if frame.previous_forward is _MISSING]
        self._attributes = [vars(frame.module) for frame in plain]
        self._methods = [frame.method for frame in plain]

    def suspend(self) -> None:
        """Take the frames out until `resume`.  A frame that another `forward` wraps stays."""
        present = list(map(dict.get, self._attributes, repeat(_FORWARD)))
        if len(self._attributes) < len(self._frames) or self._methods != present:
            for frame in self._frames:
                if frame.is_installed():
                    _set_forward(vars(frame.module), frame.previous_forward)
        else:
            deque(map(dict.pop, self._attributes, repeat(_FORWARD), repeat(None)), maxlen=0)

    def resume(self) -> None:
        """Put the frames back when the model's forward ends.  May be called again."""
        if len(self._attributes) == len(self._frames):
            deque(map(dict.setdefault, self._attributes, repeat(_FORWARD), self._methods), maxlen=0)
            return
        for frame in self._frames:
            attributes = vars(frame.module)
            if attributes.get(_FORWARD, _MISSING) is frame.previous_forward:
                attributes[_FORWARD] = frame.method


# Copies of modules


def _installed_frame(module: nn.Module) -> OwnFrame | None:
    """The outermost frame of a module, or None if the module's `forward` is not that frame."""
    frames = vars(module).get(_FRAMES_ATTRIBUTE)
    return frames[-1] if frames and frames[-1].is_installed() else None


def copy_patches() -> list[Patch]:
    """The patches of `nn.Module`'s methods that copy: shallow copies and replicas get frames."""

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
                for frame in vars(self)[_FRAMES_ATTRIBUTE]:
                    new_frame = OwnFrame(copied, frame.scope)
                    new_frame.frames_of_copies = frame.frames_of_copies
                    new_frame.frames_of_copies.add(new_frame)
                    new_frame.install()
            return copied

        return __copy__

    def replicate(original: Callable) -> Callable:
        @functools.wraps(original)
        def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
            replica: nn.Module = original(self)
            if (frame := _installed_frame(self)) is not None:
                attributes = _install_attributes(replica)
                attributes[_FRAMES_ATTRIBUTE] = vars(self)[_FRAMES_ATTRIBUTE]
                # A bound method would make a reference cycle, which keeps the weights in memory.
                forward, ref = frame.method.__func__, weakref.ref(replica)
                attributes[_FORWARD] = lambda *args, **kwargs: forward(ref(), *args, **kwargs)
            return replica

        return _replicate_for_data_parallel

    methods: list[Patch] = [(nn.Module, "__copy__", shallow)]
    more: list[Patch] = [(nn.Module, REPLICATE_METHOD, replicate)]
    return methods + more if hasattr(nn.Module, REPLICATE_METHOD) else methods


@contextlib.contextmanager
def without_frames(root: nn.Module) -> Iterator[None]:
    """Context manager that takes the frames of `root` and its submodules out, for `jit.script`."""
    framed = [vars(module) for module in root.modules() if vars(module).get(_FRAMES_ATTRIBUTE)]
    forwards = [attributes.get(_FORWARD, _MISSING) for attributes in framed]
    try:
        for attributes in framed:
            _set_forward(attributes, attributes.copy().get(_FORWARD, _MISSING))
        yield
    finally:
        for attributes, forward in zip(framed, forwards, strict=True):
            _set_forward(attributes, forward)
