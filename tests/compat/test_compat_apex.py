"""The `apex` package: its names, what it gives way to, and what it says of missing parts."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types

import pytest
import torch
from torch import nn
from warm_python import python

import ampatch
from ampatch.compat import apex as compat
from ampatch.compat.apex.packages import REPLACEMENTS


def test_the_signature_is_that_of_apex(amp):
    parameters = inspect.signature(amp.initialize).parameters
    assert {name: p.default for name, p in list(parameters.items())[1:]} == {
        "optimizers": None,
        "enabled": True,
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }
    assert next(iter(parameters)) == "models"
    ours = {"init", "initialize", "load_state_dict", "scale_loss", "state_dict"}
    for name in set(amp.__all__) - ours:
        assert getattr(amp, name) is getattr(ampatch, name)
    scale_loss = inspect.signature(ampatch.scale_loss).parameters
    assert inspect.signature(amp.scale_loss).parameters == scale_loss


def test_amp_state_is_an_object_as_an_attribute_and_a_module_by_import():
    import apex.amp._amp_state
    from apex.amp._amp_state import _amp_state

    assert apex.amp._amp_state is _amp_state
    assert isinstance(sys.modules["apex.amp._amp_state"], types.ModuleType)
    assert not hasattr(_amp_state, "loss_scalers")
    model = nn.Linear(2, 2)
    apex.amp.initialize(model, opt_level="O2", loss_scale=64, verbosity=0)
    scaler = _amp_state.loss_scalers[0]
    assert (scaler.loss_scale(), scaler._unskipped) == (64.0, 0)
    assert _amp_state.opt_properties.loss_scale == 64.0
    assert _amp_state.opt_properties.options["opt_level"] == "O2"
    assert _amp_state.handle.is_active()
    ampatch.deactivate()
    assert not hasattr(_amp_state, "opt_properties") and model.weight.dtype is torch.float32


def test_the_stash_on_the_optimizer(amp):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", enabled=False, verbosity=0)
    loss = model(torch.ones(2, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == loss.item()
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert optimizer._amp_stash.lazy_init_called is False
    optimizer._lazy_init_maybe_master_weights()
    stash = optimizer._amp_stash
    assert stash.lazy_init_called is True
    assert stash.all_fp16_params == stash.all_fp32_from_fp16_params == []
    ours = zip(stash.all_fp32_from_fp32_params, model.parameters(), strict=True)
    assert all(stashed is parameter for stashed, parameter in ours)  # FP32 in the model
    ampatch.deactivate()
    assert not hasattr(optimizer, "_amp_stash")


def test_what_apex_refuses_is_refused(amp):
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    half = torch.full((2,), 0.5, dtype=torch.float16)
    with pytest.raises(NotImplementedError):
        nn.functional.binary_cross_entropy(half, half)
    with pytest.raises(NotImplementedError):
        half.exp_()
    assert half.cpu().dtype is torch.float32
    assert (half.float() @ half.float()).dtype is torch.float16  # outside of models too


def test_specs_and_version():
    assert importlib.util.find_spec("apex").name == "apex"
    assert importlib.util.find_spec("apex.amp").name == "apex.amp"
    for name in ("apex.contrib.xentropy", "apex.contrib.no_such_module"):
        assert importlib.util.find_spec(name) is None
    assert importlib.metadata.version("apex").startswith("0.1")
    assert "apex" in importlib.metadata.packages_distributions()
    compat.uninstall()
    assert importlib.util.find_spec("apex") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_what_is_missing_names_a_replacement():
    import apex

    for name, says in REPLACEMENTS.items():
        if name.partition(".")[0] != "apex":  # kernels: in test_compat_kernels.py
            continue
        module, _, attribute = name.rpartition(".")
        if name in sys.modules:  # we have other parts of it
            module, attribute = name, "unheard_of"
        with pytest.raises(ImportError, match=re.escape(says)):
            exec(f"from {module} import {attribute}")
        if attribute[:1].islower() and name not in sys.modules:
            with pytest.raises(ImportError, match=re.escape(says)):
                importlib.import_module(name)
            assert name not in sys.modules
    with pytest.raises(AttributeError, match="clip=False"):
        _ = apex.optimizers.FusedLARS
    assert not hasattr(apex.amp, "nonsense")
    with pytest.raises(ModuleNotFoundError):
        import apex.nonsense


def installed_apex(tmp_path, monkeypatch, **files):
    """A package apex in front of all others; `ours` takes its place, or does not."""
    for name, text in files.items():
        path = tmp_path / "apex" / (name.replace("__in__", "/__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    compat.uninstall()
    compat.install()


TODAYS = {
    "__init__": "from . import optimizers\ndef check_cudnn(): return 'behind'\nRANKS = 'amp'\n",
    "optimizers__in__": "from .fused_adam import FusedAdam\nfrom .fused_lars import FusedLARS\n",
    "optimizers/fused_adam": "raise ImportError('no kernels')\n",
    "optimizers/fused_lars": "class FusedLARS: place = 'behind'\n",
    "contrib__in__": "",
    "contrib/xentropy__in__": "from apex import check_cudnn\nkernel = check_cudnn()\n",
    "transformer__in__": "import no_such_kernels\n",
}


def test_an_apex_without_amp_gives_way_and_its_kernels_stay(tmp_path, monkeypatch, caplog):
    installed_apex(tmp_path, monkeypatch, **TODAYS)
    import apex
    from apex import amp
    from apex.contrib import xentropy
    from apex.contrib.xentropy import kernel
    from apex.optimizers import FusedAdam, FusedLARS

    assert amp.initialize is ampatch.compat.apex.amp.initialize
    assert FusedAdam is ampatch.compat.apex.optimizers.FusedAdam
    assert (kernel, xentropy.kernel, FusedLARS.place) == ("behind",) * 3
    assert apex.check_cudnn() == "behind" and not hasattr(apex, "nonsense")
    with pytest.raises(ModuleNotFoundError, match="no_such_kernels"):
        import apex.transformer
    with pytest.raises(ImportError, match="scaled_dot_product_attention"):
        importlib.import_module("apex.contrib.fmha")
    [said] = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "apex") in said and "no amp" in said and "kernels" in said


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"__init__": "", "auth": ""}, "no amp"),  # PyPI's of this name, installed by mistake
        ({}, "__init__.py"),  # an empty git submodule
        ({"apex__in__": "", "apex/amp__in__": "", "setup": "raise OSError"}, "__init__.py"),
    ],
    ids=["another", "empty", "a checkout of apex"],
)
def test_what_is_no_apex_with_amp_gives_way(files, told, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "site-packages"
    (folder / "apex").mkdir(parents=True)
    installed_apex(folder, monkeypatch, **files)
    from apex import amp

    assert amp.initialize is ampatch.compat.apex.amp.initialize
    [said] = [record.getMessage() for record in caplog.records]
    assert str(folder / "apex") in said and told in said


@pytest.mark.parametrize(
    "files",
    [
        {"__init__": "", "amp__in__": ""},
        {"__init__": "from . import amp\n", "amp": ""},
        {"__init__": "class amp: pass\n"},
        {"__init__": "import torch.cuda.amp as amp\n"},
        {"amp__in__": ""},  # a namespace with an amp
        {"__init__": "", "core": ""},  # the user's own
    ],
)
def test_an_apex_with_amp_or_of_the_users_own_stays_unless_forced(files, tmp_path, monkeypatch):
    with pytest.raises(ampatch.AmpatchError, match="force=True"):
        installed_apex(tmp_path, monkeypatch, **files)
    compat.install_unless_real()
    assert not compat.is_installed()
    real = importlib.import_module("apex")
    compat.install(force=True)
    assert importlib.import_module("apex") is not real
    compat.uninstall()
    assert sys.modules.pop("apex") is real
    sys.modules.pop("apex.amp", None)


def test_importing_ampatch_registers_nothing():
    code = "import sys, ampatch, ampatch.compat; assert 'apex' not in sys.modules"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
