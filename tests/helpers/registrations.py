"""Registered functions outlive sessions: a test that registers some takes them back."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import ampatch

_NAMES = ("register_half_function", "register_float_function", "register_promote_function")


@contextlib.contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Context manager: what `ampatch.register_*_function` registers inside ends with it."""
    spies = {name: mock.Mock(wraps=getattr(ampatch, name)) for name in _NAMES}
    try:
        with mock.patch.multiple(ampatch, **spies):
            yield
    finally:
        for call in (call for spy in spies.values() for call in spy.call_args_list):
            with contextlib.suppress(ValueError):  # the test may have taken it back itself
                ampatch.unregister_function(*call.args)
