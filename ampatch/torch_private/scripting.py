"""torch.jit's table of builtin functions, which it does not compile."""

from __future__ import annotations

from .lookup import of_torch

builtin_table = of_torch("torch.jit._builtins._get_builtin_table", dict)
"""Without it, scripting a patched function fails as for any closure."""
