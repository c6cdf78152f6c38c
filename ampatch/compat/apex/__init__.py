"""An `apex` package for scripts that import one: `install()` and `uninstall()`.

After `install()`, `from apex import amp` finds ampatch, and `apex.optimizers`,
`apex.normalization` and `apex.parallel` have torch's own classes or short ones of ampatch.  No code
is NVIDIA's.  `import ampatch` does not register the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from torch.nn.utils import clip_grad_norm_

from ampatch import AmpatchError, observe

from ...log import logger, show_without_handlers, shows_without_handlers
from ...session import facade
from . import (
    amp,
    fp16_utils,
    internals,
    kernels,
    layers,
    lists,
    multi_tensor_apply,
    normalization,
    optimizers,
    other_apex,
    parallel,
    reparameterization,
    scaler,
    state,
)
from .fp16_utils import conversion, fp16_optimizer, loss_scaler
from .optimizers import adam, lamb, novograd, sgd
from .packages import ApexFinder, Refusals, build
from .parallel import distributed, larc, sync_batch_norm

__all__ = ["install", "is_installed", "uninstall"]

_CLIPPING = SimpleNamespace(clip_grad_norm_=clip_grad_norm_, __all__=["clip_grad_norm_"])
_SOURCES = (
    ({}, "amp.lists contrib"),
    (amp, "amp amp.amp amp.frontend amp.handle"),
    (state, "amp._amp_state"),
    (internals, "amp._initialize"),
    (scaler, "amp.scaler"),
    (fp16_utils, "fp16_utils"),
    (conversion, "fp16_utils.fp16util"),
    (fp16_optimizer, "fp16_utils.fp16_optimizer"),
    (loss_scaler, "fp16_utils.loss_scaler"),
    (parallel, "parallel"),
    (larc, "parallel.LARC"),
    (distributed, "parallel.distributed"),
    (sync_batch_norm, "parallel.sync_batchnorm parallel.optimized_sync_batchnorm"),
    (optimizers, "optimizers contrib.optimizers"),
    (adam, "optimizers.fused_adam"),
    (lamb, "optimizers.fused_lamb optimizers.fused_mixed_precision_lamb"),
    (novograd, "optimizers.fused_novograd"),
    (sgd, "optimizers.fused_adagrad optimizers.fused_sgd"),
    (normalization, "normalization normalization.fused_layer_norm"),
    (layers, "mlp mlp.mlp fused_dense fused_dense.fused_dense"),
    (reparameterization, "reparameterization"),
    (_CLIPPING, "contrib.clip_grad contrib.clip_grad.clip_grad"),
    (multi_tensor_apply, "multi_tensor_apply multi_tensor_apply.multi_tensor_apply"),
)
CONTENTS = {f"apex.{name}": source for source, names in _SOURCES for name in names.split()}


def install(force: bool = False) -> None:
    """Register `apex` and its modules in `sys.modules`; a second call changes nothing.

    Then `importlib.metadata.version("apex")` works too.

    If Python finds another `apex` that has `apex.amp`, or your own module `apex`, the call raises
    `AmpatchError`.  With `force=True` it hides that module until `uninstall` instead.  An `apex`
    without `apex.amp`, or a folder without `__init__.py`, is always hidden, with a message.  Those
    of its modules that ampatch's package lacks, such as `apex.contrib`, can still be imported.
    """
    if is_installed():
        return
    other = other_apex.find_other_apex()
    if other is None or (other.has_precedence and force):
        install_over(())
    elif other.has_precedence:
        raise AmpatchError(
            f"ampatch.compat.apex.install(): there is an apex at {other.path}, which would be "
            "hidden. Uninstall it (pip uninstall apex), rename it if it is your own, or call "
            "install(force=True)."
        )
    else:
        logger.warning(other.message_of_replacement())
        install_over(other.folders)
    show_without_handlers(True)  # as apex printed


def install_unless_real() -> None:
    """`install()` without messages, unless another apex has an amp or is the user's own."""
    other, were_shown = other_apex.find_other_apex(), shows_without_handlers()
    if other is None or not other.has_precedence:
        install()
        show_without_handlers(were_shown)


def import_apex() -> None:
    """Import ampatch's apex, or the other one.  Called by the package of `ampatch apex-path`."""
    install_unless_real()
    show_without_handlers(True)
    with other_apex.without_folder():
        importlib.import_module("apex")


def hidden_folders() -> list[str] | None:
    """The folders of the other apex that ampatch's hides, or None if ampatch's is not installed."""
    finder = _finder()
    return None if finder is None else finder.others.folders


def install_over(folders: Sequence[str]) -> None:
    """Register ampatch's `apex`.  `folders` of the other apex have further submodules."""
    others = other_apex.OtherModules(folders)
    # apex's compiled modules have names of their own, and installed ones are not hidden.
    missing = {k: v for k, v in kernels.contents().items() if not _is_importable(k)}
    modules = build({"apex": {}, **CONTENTS, **lists.contents(), **missing}, others)
    # As in apex: `apex.amp._amp_state` is the state, also after an import of the module.
    modules["apex.amp"]._amp_state = state._amp_state
    modules["apex.amp.amp"].__class__ = internals.AmpModule
    modules["apex.amp.frontend"].Properties = state.Properties
    # The class and its module have the same name.
    modules["apex.parallel.LARC"].__class__ = _CallableLARC
    finder = ApexFinder(modules, _hide(), others, Refusals(kernels.REFUSED_MODULES))
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(finder.refusals)
    sys.modules.update(modules)
    stash_observer = amp.StashObserver()
    stop_observing = observe(stash_observer)

    def stop() -> None:
        for session in facade.open_sessions():
            stash_observer.on_close(session)
        stop_observing()
        facade.edit_tables([])
        show_without_handlers(False)

    finder.stop = stop


class _CallableLARC(ModuleType):
    """`from apex.parallel import LARC` returns the module, and scripts call it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return larc.LARC(*args, **kwargs)


def uninstall() -> None:
    """Remove `apex`; a hidden real apex is importable again.  A second call does nothing.

    Open sessions stay open; `ampatch.deactivate()` closes them.
    """
    finder = _finder()
    if finder is None:
        return
    finder.stop()
    sys.meta_path.remove(finder)
    sys.meta_path.remove(finder.refusals)
    for name, module in finder.modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    for name in finder.from_others:
        sys.modules.pop(name, None)
    sys.modules.update(finder.hidden)


def is_installed() -> bool:
    """Whether `import apex` finds ampatch's package."""
    return _finder() is not None


def _finder() -> ApexFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, ApexFinder)), None)


def _is_importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _hide() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "apex" or name.startswith("apex.")]
    return {name: sys.modules.pop(name) for name in names}
