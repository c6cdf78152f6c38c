"""A module's `forward` of ours: the Python frame that its calls have while a session is open.

It stands in the instance, as a bound method of the module, and calls the `forward` of the class.
`model(x)` and `model.forward(x)` both come by, and its `try` ends the call, whatever exception
passes.  What the call does is the business of a `Scope`: `ManagedModel`, `ModuleOverride` or
`SubmoduleCalls`.  No other file knows the attribute `forward`.

A module may have several frames, one around the other.  A pickle, a scripted module and a copy of
the attributes, deep or not, have none.  `copy.copy(module)` has frames of its own, and a replica of
`nn.DataParallel` its module's.  A `forward` that the script puts in later stays there; if it calls
the earlier one, as accelerate's does, it has the casts.

torch.compile runs this function as it is, and compiles what it calls.  The `forward` of torch's own
modules is compiled only within a frame that is not torch's.  There this one is traced, and has a
code of its own, since Dynamo compiles one code a few times only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import repeat
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling

from ..casting.calls import Call
from ..casting.patches import Replacement
from ..errors import AmpatchError
from ..torch_private.modules import REPLICATE

_FORWARD = "forward"
_FRAMES = "_ampatch_frames"
"""In `vars` of a module: its frames, the outermost last.  The list keeps alive what they need."""
_NOTHING = object()


class _Attributes(dict[str, Any]):
    """`vars` of a module with frames.  Looking up a name finds them; going through all does not.

    So whoever copies the attributes gets those of a plain module: `clone.__dict__ =
    module.__dict__.copy()` of MAML libraries, a `__deepcopy__` of a class.  There the bound method
    would call the original, and lead a deep copy back to it.
    """

    __slots__ = ()

    def copy(self) -> dict[str, Any]:
        plain = dict(dict.items(self))
        forward = plain.get(_FORWARD, _NOTHING)
        for frame in reversed(plain.pop(_FRAMES, ())):
            if forward is frame.method:
                forward = frame.covered
        _put(plain, forward)
        return plain

    def __iter__(self) -> Iterator[str]:  # without it `dict(attributes)` does not ask for keys
        return iter(self.copy())

    def keys(self) -> Any:
        return self.copy().keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (), None, None, iter(self.items())


class Scope(Protocol):
    """What is done around the calls of modules."""

    def begin(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A call begins.  Returns the forward's arguments; None: nothing is done around it."""

    def end(self, call: Call) -> None:
        """It has ended, or `begin` has failed.  May be called again."""

    def results(self, output: Any) -> Any:
        """What the call returns where the forward has returned `output`."""

    def failed(self, error: BaseException) -> None:
        """An exception passes."""

    def traced(self, forward: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """The call where Dynamo traces it; `forward` takes the module and the arguments."""


class OwnFrame:
    """The `forward` of one module, from `put` to `take_out`."""

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        self.module: nn.Module | None = module
        self.scope: Scope | None = scope
        self.covered: Any = _NOTHING
        self.beneath: Callable | None = None
        self.method: Any = _NOTHING
        self.of_copies: weakref.WeakSet[OwnFrame] = weakref.WeakSet()

    def put(self) -> None:
        """Put it over what the module has."""
        module: Any = self.module
        own = _attributes_of(module)
        frames = own[_FRAMES] = own.get(_FRAMES) or []
        self.covered = own.get(_FORWARD, _NOTHING)
        if frames and frames[-1].method is self.covered:
            self.beneath = self.covered.__func__
        else:
            self.beneath = _beneath(module, self.covered)
        self.method = _method(self, module)
        frames.append(self)  # first: Ctrl-C may strike at any moment
        own[_FORWARD] = self.method

    def put_on_model(self, level: str) -> None:
        """As `put`.  Raises `AmpatchError` where Python would not call it."""
        self.put()
        kind = type(self.module)
        if isinstance(inspect.getattr_static(kind, _FORWARD, None), property):
            raise AmpatchError(
                f"ampatch.initialize(opt_level={level!r}): {kind.__name__} has a property for its "
                "forward, which hides the one that casts. Nothing was changed. Make forward a "
                "method that calls what the property gives."
            )

    def is_in_place(self) -> bool:
        """Whether `module.forward` is this one."""
        return self.module is not None and vars(self.module).get(_FORWARD) is self.method

    def take_out(self) -> None:
        """The module has the `forward` from before.  What the script has put over it stays.

        Whoever has kept this one calls what was there before.
        """
        self.scope = None
        for frame in list(self.of_copies):
            frame.take_out()
        if (module := self.module) is None:
            return
        own = vars(module)
        frames = own.get(_FRAMES)
        while frames and frames[-1].scope is None:  # some were taken out beneath another one
            last = frames[-1]
            if last.is_in_place():
                _put(own, last.covered)
            frames.pop()
            last.module = last.method = None  # else a cycle would keep the weights alive
        if not frames and isinstance(own, _Attributes):
            object.__setattr__(module, "__dict__", own.copy())


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    if not isinstance(vars(module), _Attributes):
        object.__setattr__(module, "__dict__", _Attributes(vars(module)))
    return vars(module)


def _method(frame: OwnFrame, module: nn.Module) -> MethodType:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope, beneath = frame.scope, frame.beneath or type(self).forward
        if scope is None:  # the script has kept it
            return beneath(self, *args, **kwargs)
        if is_dynamo_compiling():
            return scope.traced(beneath, self, args, kwargs)
        if self.__dict__.get(_FRAMES) is None:  # a copy, with what a library has put over it
            return beneath(self, *args, **kwargs)
        call = Call()
        try:
            try:
                taken = scope.begin(call, self, args, kwargs)
                if taken is None:
                    return beneath(self, *args, **kwargs)
                args, kwargs = taken
                output = beneath(self, *args, **kwargs)
            finally:
                scope.end(call)
        except BaseException as error:
            scope.end(call)  # again: Ctrl-C may have struck in the first
            scope.failed(error)
            raise
        return scope.results(output)

    before = module.forward
    functools.update_wrapper(forward, before)
    forward.__name__ = _FORWARD
    with contextlib.suppress(TypeError, ValueError):  # builtins may have no signature
        signature = inspect.signature(before)
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[me, *signature.parameters.values()]
        )
    if str(getattr(before, "__module__", "")).partition(".")[0] == "torch":
        forward.__code__ = forward.__code__.replace()
    # accelerate unwraps what it finds, and makes a method of it: the same once more
    same = FunctionType(forward.__code__, globals(), _FORWARD, None, forward.__closure__)
    forward.__wrapped__ = same  # type: ignore[attr-defined]
    return MethodType(forward, module)


def _beneath(module: nn.Module, covered: Any) -> Callable | None:
    """What to call with the module and the arguments; None: the `forward` that its class has then.

    It is looked up at each call, since that of `nn.Embedding` is replaced later.
    """
    if covered is not _NOTHING:
        return lambda self, *args, **kwargs: covered(*args, **kwargs)
    found = inspect.getattr_static(type(module), _FORWARD, None)
    return None if isinstance(found, FunctionType) else _of_class


def _of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call what `module.forward` is without a frame, where that is no plain function."""
    kind: Any = type(module)
    try:
        forward = inspect.getattr_static(kind, _FORWARD).__get__(module, kind)
    except AttributeError:  # TorchScript's is found in this way
        forward = kind.__getattr__(module, _FORWARD)
    return forward(*args, **kwargs)


def _put(own: dict[str, Any], forward: Any) -> None:
    if forward is _NOTHING:
        own.pop(_FORWARD, None)
    else:
        own[_FORWARD] = forward


class FramesOfSubmodules:
    """The frames of many modules, which are out while the model's own forward runs.

    In it they would cost each module's call, hide the modules from Dynamo, and have submodules
    that are computed in other threads begin calls of their own.
    """

    def __init__(self) -> None:
        self._frames: list[OwnFrame] = []
        self._tables: list[dict[str, Any]] = []
        self._methods: list[Any] = []

    def put(self, module: nn.Module, scope: Scope) -> None:
        """Give one more module a frame."""
        frame = OwnFrame(module, scope)
        self._frames.append(frame)
        frame.put()

    def keep(self, modules: Collection[int]) -> None:
        """Those of other modules than these (ids) are out for good, and their modules may go."""
        for frame in self._frames:
            if id(frame.module) not in modules:
                frame.take_out()
        self._frames = [frame for frame in self._frames if frame.scope is not None]
        alone = [frame for frame in self._frames if frame.covered is _NOTHING]
        self._tables = [vars(frame.module) for frame in alone]
        self._methods = [frame.method for frame in alone]

    def take_out(self) -> None:
        """For good."""
        for frame in reversed(self._frames):
            frame.take_out()
        self.__init__()  # type: ignore[misc]

    def step_aside(self) -> None:
        """Out of the modules; those over which the script or another session has put one stay."""
        found = list(map(dict.get, self._tables, repeat(_FORWARD)))
        if len(self._tables) < len(self._frames) or self._methods != found:
            for frame in self._frames:
                if frame.is_in_place():
                    _put(vars(frame.module), frame.covered)
        else:
            deque(map(dict.pop, self._tables, repeat(_FORWARD), repeat(None)), maxlen=0)

    def end(self) -> None:
        """Into the modules again.  May be called again."""
        if len(self._tables) == len(self._frames):
            deque(map(dict.setdefault, self._tables, repeat(_FORWARD), self._methods), maxlen=0)
            return
        for frame in self._frames:
            own = vars(frame.module)
            if own.get(_FORWARD, _NOTHING) is frame.covered:
                own[_FORWARD] = frame.method


# Copies


def _plain(state: Any) -> Any:
    """What a module gives for a copy or a pickle, without its frames."""
    if isinstance(state, tuple):
        return tuple(map(_plain, state))
    return state.copy() if isinstance(state, _Attributes) else state


def _outermost(module: nn.Module) -> OwnFrame | None:
    """The outermost frame of a module, where it is in place."""
    frames = vars(module).get(_FRAMES)
    return frames[-1] if frames and frames[-1].is_in_place() else None


def _of_replica(function: Any, replica: weakref.ref[nn.Module]) -> Callable:
    """A bound method is a cycle: each step's copies of the weights would wait for Python's search.

    Only a call that the replica makes runs it, so the replica is there.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(replica(), *args, **kwargs)

    return forward


def copies() -> list[Replacement]:
    """What to replace, so that a copy has the frames that it is to have."""

    def reduce(original: Callable) -> Callable:
        @functools.wraps(original)
        def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
            return _plain(original(self, protocol))

        return __reduce_ex__

    def shallow(original: Any) -> Callable:
        def __copy__(self: nn.Module) -> Any:
            reduced: Any = self.__reduce_ex__(4)
            if isinstance(reduced, str):
                return self
            make, args, *state = reduced
            twin = make(*args)
            if state and state[0] is not None:
                twin.__setstate__(state[0])
            if _outermost(self) is not None:
                for frame in vars(self)[_FRAMES]:
                    own = OwnFrame(twin, frame.scope)
                    frame.of_copies.add(own)
                    own.put()
            return twin

        return __copy__

    def replicate(original: Callable) -> Callable:
        @functools.wraps(original)
        def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
            replica: nn.Module = original(self)
            if (frame := _outermost(self)) is not None:
                own = _attributes_of(replica)
                own[_FRAMES] = vars(self)[_FRAMES]
                own[_FORWARD] = _of_replica(frame.method.__func__, weakref.ref(replica))
            return replica

        return _replicate_for_data_parallel

    found: list[Replacement]
    found = [(nn.Module, "__reduce_ex__", reduce), (nn.Module, "__copy__", shallow)]
    return [*found, (nn.Module, REPLICATE, replicate)] if hasattr(nn.Module, REPLICATE) else found


@contextlib.contextmanager
def aside(root: nn.Module) -> Iterator[None]:
    """Context manager: a module and those in it have no frames, for what compiles their source."""
    owns = [vars(module) for module in root.modules() if vars(module).get(_FRAMES)]
    forwards = [own.get(_FORWARD, _NOTHING) for own in owns]
    try:
        for own in owns:
            _put(own, own.copy().get(_FORWARD, _NOTHING))
        yield
    finally:
        for own, forward in zip(owns, forwards, strict=True):
            _put(own, forward)
