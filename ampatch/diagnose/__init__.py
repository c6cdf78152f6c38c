"""Where a NaN comes from: `debug(model)` names module, direction and parameters."""

from .finding import Report
from .nonfinite import Debugger, debug

__all__ = ["Debugger", "Report", "debug"]
