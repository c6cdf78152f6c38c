"""Diagnostics: the origin of a NaN, the size of gradients, what is cast, what is installed."""

from .debug_report import Report
from .explain import CastReport, report
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
