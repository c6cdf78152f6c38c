"""`torch.distributed.fsdp.fully_shard` of parts of managed models: the opt level goes along.

Parameters that `initialize` has converted get their FP32 values back before they are sharded, and
FSDP2 gets the policy that the level means.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import wrapt
from torch import Tensor, nn

from ..casting.patches import Replacement
from ..torch_private.sharding import MODULE

_NAME = "fully_shard"


def is_imported() -> bool:
    """Whether there is anything to replace yet."""
    return hasattr(sys.modules.get(MODULE), _NAME)


def when_imported(call: Callable[[], None]) -> None:
    """Have `call()` run once the module is imported."""
    wrapt.register_post_import_hook(lambda module: call(), MODULE)


def replacements(
    being_sharded: Callable[[list[nn.Module], Any, set[Tensor]], AbstractContextManager[Any]],
) -> list[Replacement]:
    """What to replace.

    `being_sharded(modules, policy, ignored)` is a context manager around torch's own call, which
    gives the policy that is to be used in the place of the user's.
    """
    owner = sys.modules[MODULE]

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            modules = [module] if isinstance(module, nn.Module) else list(module)
            given = kwargs.pop("mp_policy", None) or owner.MixedPrecisionPolicy()
            ignored = set(kwargs.get("ignored_params") or ())
            with being_sharded(modules, given, ignored) as policy:
                return original(module, *args, mp_policy=policy, **kwargs)

        return fully_shard

    return [(owner, _NAME, make)]
