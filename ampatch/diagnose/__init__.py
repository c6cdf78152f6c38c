"""Diagnostics: the origin of a NaN, the size of gradients, what is cast, what is installed."""

from .explain import CastReport, report
from .finding import Report
from .gradient_range import GradientRange, GradientReport, gradient_range
from .nonfinite import Debugger, debug

__all__ = [
    "CastReport",
    "Debugger",
    "GradientRange",
    "GradientReport",
    "Report",
    "debug",
    "gradient_range",
    "report",
]
