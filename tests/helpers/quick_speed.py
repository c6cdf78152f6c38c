"""Operations that take no time, for tests of what is said about their speed."""

from typing import Any

from ampatch.diagnose import speed


def measure_quickly(monkeypatch: Any) -> None:
    """Three rounds of operations that do nothing, instead of a second of real ones."""
    monkeypatch.setattr(speed, "MIN_ROUNDS", 3)
    monkeypatch.setattr(speed, "MAX_SECONDS", 0)
    nothing = dict.fromkeys(("matmul", "conv2d"), lambda: None)
    monkeypatch.setattr(speed, "operations", lambda device, dtype: nothing)
