"""torch.jit's table of builtin functions, which it does not compile."""

from __future__ import annotations

try:
    from torch.jit._builtins import _get_builtin_table as builtin_table
except ImportError:

    def builtin_table() -> dict:  # type: ignore[misc]
        """Without torch.jit's table, scripting a patched function fails as for any closure."""
        return {}
