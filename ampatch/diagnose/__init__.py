"""Where a NaN comes from: `debug(model)` names module, direction and parameters."""

from .nonfinite import Debugger, Report, debug

__all__ = ["Debugger", "Report", "debug"]
