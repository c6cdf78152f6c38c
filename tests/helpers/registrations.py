"""Registered functions outlive sessions: a test that registers some takes them back."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import ampatch

_NAMES = ("register_half_function", "register_float_function", "register_promote_function")


@contextlib.contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Context manager: what `ampatch.register_*_function` registers inside ends with it."""
    places: list[tuple] = []

    def noting(register: Any) -> Any:
        def registered(*place: Any) -> None:
            register(*place)
            places.append(place)

        return registered

    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            patch.setattr(ampatch, name, noting(getattr(ampatch, name)))
        try:
            yield
        finally:
            for place in places:
                with contextlib.suppress(ValueError):  # the test may have taken it back itself
                    ampatch.unregister_function(*place)
