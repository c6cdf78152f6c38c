"""Makes and finds the `apex` modules, and the error messages for missing ones."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .other_apex import OtherModules

_METADATA = Path(__file__).parents[1] / "apex_path" / "apex.dist-info"
VERSION = importlib.metadata.Distribution.at(_METADATA).version

REPLACEMENTS = {
    "apex.optimizers.FusedLARS": "use LARC(optimizer, clip=False) from apex.parallel.LARC",
    "apex.parallel.multiproc": "use torchrun",
    "apex.contrib.xentropy": "use torch.nn.functional.cross_entropy(label_smoothing=...)",
    "apex.contrib.layer_norm": "use torch.nn.LayerNorm",
    "apex.contrib.focal_loss": "use torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.groupbn": "use apex.parallel.SyncBatchNorm or torch.nn.BatchNorm2d",
    "apex.contrib.sparsity": "use torch.ao.pruning",
    "apex.contrib.multihead_attn": "use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.fmha": "use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.group_norm": "use torch.nn.GroupNorm",
    "apex.contrib.transducer": "use torchaudio.functional.rnnt_loss",
    "apex.contrib.optimizers.distributed_fused_lamb": "use FusedLAMB from apex.optimizers",
    "apex.contrib.optimizers.DistributedFusedLAMB": "use FusedLAMB from apex.optimizers",
    "apex.contrib.optimizers.fused_lamb": "use FusedLAMB from apex.optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "use FP16_Optimizer from apex.fp16_utils",
    "apex.contrib.optimizers": "use torch.optim.AdamW(fused=True), to share its state among ranks "
    "in torch.distributed.optim.ZeroRedundancyOptimizer",
    "apex.contrib": "use modules and functions of torch.nn, fused by torch.compile",
    "apex.transformer": "use torch.distributed.tensor.parallel, or Megatron-LM",
    "apex.mlp": "use apex.mlp.MLP, or torch.nn.Sequential of torch.nn.Linear",
    "apex.fused_dense": "use apex.fused_dense.FusedDense, or torch.nn.Linear",
    "apex.RNN": "use torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
    "apex.reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
    "apex.pyprof": "use torch.profiler",
    "apex.amp._initialize": "use apex.amp.initialize",
    "apex.amp._process_optimizer": "use apex.amp.initialize",
    "apex.amp.compat": "ask torch itself",
    "apex.amp.opt": "use the optimizer that handle.wrap_optimizer returns",
    "apex.amp.scaler": "use _amp_state.loss_scalers",
    "apex.amp.utils": "use torch.Tensor's own methods",
    "apex.amp.wrap": "use amp.register_half_function and its siblings",
    "apex.amp.rnn_compat": "nothing is needed: RNNs are cast as they are",
    "apex.amp.opt_levels": "use amp.initialize(opt_level=...) and _amp_state.opt_properties",
    "apex.multi_tensor_apply": "use torch._foreach_ functions",
    "apex.checkpoint": "use torch.utils.checkpoint",
    "amp_C.multi_tensor_adagrad": "use torch.optim.Adagrad(fused=True)",
    "amp_C.multi_tensor_adam_": "use FusedAdam from apex.optimizers",
    "amp_C.multi_tensor_lamb": "use FusedLAMB from apex.optimizers",
    "amp_C.multi_tensor_lars": "use LARC(optimizer, clip=False) from apex.parallel.LARC",
    "amp_C.multi_tensor_novograd": "use FusedNovoGrad from apex.optimizers",
    "amp_C.multi_tensor_sgd": "use torch.optim.SGD(fused=True)",
    "amp_C.update_scale_hysteresis": "use amp.initialize and amp.scale_loss",
    "amp_C": "use torch._foreach_ functions, or torch.optim with foreach=True",
    "apex_C": "use torch.cat and torch.split",
    "fused_adam_cuda": "use FusedAdam from apex.optimizers",
    "fused_dense_cuda": "use apex.fused_dense.FusedDense, or torch.nn.functional.linear",
    "mlp_cuda": "use apex.mlp.MLP, or torch.nn.functional.linear",
    "syncbn": "use apex.parallel.SyncBatchNorm, or torch.nn.SyncBatchNorm",
}
"""Maps the beginning of a name to what a script should use instead."""


def replacement(name: str) -> str | None:
    """What to use instead of `name` (dotted) or of its package, or None if unknown."""
    prefixes = [prefix for prefix in REPLACEMENTS if name.startswith(prefix)]
    return REPLACEMENTS[max(prefixes, key=len)] if prefixes else None


def build(contents: Mapping[str, Any], others: OtherModules) -> dict[str, ModuleType]:
    """Make a module for each name, with the public names of its source and of the other apex."""
    modules: dict[str, ModuleType] = {}
    for name, source in sorted(contents.items()):  # a package before its modules
        spec = importlib.machinery.ModuleSpec(name, Loader(), origin="ampatch", is_package=True)
        module = ModuleType(name, getattr(source, "__doc__", None) or "apex, provided by ampatch.")
        public = getattr(source, "__all__", ())
        vars(module).update(
            {key: getattr(source, key) for key in public},
            __spec__=spec,
            __loader__=spec.loader,
            __package__=name,
            __path__=others.path(name),
            __all__=[key for key in public if not key.startswith("_")],
            __getattr__=_module_getattr(name, others),
        )
        modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["apex"].__version__ = VERSION
    return modules


def _module_getattr(module: str, others: OtherModules) -> Callable[[str], Any]:
    """The `__getattr__` of a module: asks the other apex, else raises an error with a remedy."""

    def lookup(name: str) -> Any:
        try:
            return others.attribute(module, name)
        except AttributeError as error:
            hint = replacement(f"{module}.{name}")
            tail = f"; {hint}." if hint else "."
            raise AttributeError(
                f"module {module!r}, provided by ampatch, has no attribute {name!r}{tail}",
                name=name,
            ) from error.__cause__

    return lookup


class Loader:
    """A loader that does nothing: the modules are complete before they are imported."""

    def create_module(self, spec: Any) -> None:
        """Return None, for Python's default module."""

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing.  `importlib.reload` calls this."""


def _refuse(name: str) -> None:
    """Raise `ImportError` if there is a replacement, unless `importlib.util` only looks for it."""
    hint, caller = replacement(name), sys._getframe(2).f_back
    only_looks = caller is not None and caller.f_globals.get("__name__") == "importlib.util"
    if hint is not None and not only_looks:
        raise ImportError(f"{name} is not part of ampatch's apex; {hint}.", name=name)


class Refusals:
    """The last finder.  Raises the error for these modules if no other finder has found them."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raises `ImportError` for one of the names."""
        if name in self._names:
            _refuse(name)


class ApexFinder:
    """Finds ampatch's apex modules and version; a missing module is an error with a remedy."""

    def __init__(
        self, modules: dict[str, ModuleType], hidden: dict[str, ModuleType], others: OtherModules,
        refusals: Refusals,
    ) -> None:  # fmt: skip
        self.stop: Callable[[], None] = lambda: None  # run by `uninstall`
        self.modules = modules
        self.hidden = hidden
        self.others = others
        self.refusals = refusals
        self.from_others: set[str] = set()  # names of modules that come from the other apex

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a module.  Raises `ImportError` with a hint for modules that are missing."""
        if name in self.modules:
            return self.modules[name].__spec__
        if name.startswith("apex.") and path and (spec := PathFinder.find_spec(name, path)):
            self.from_others.add(name)
            return spec
        if name.partition(".")[0] in self.modules:
            _refuse(name)
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Yield the distribution of "apex"; called by `importlib.metadata`."""
        if getattr(context, "name", None) in (None, "apex"):
            yield importlib.metadata.Distribution.at(_METADATA)
