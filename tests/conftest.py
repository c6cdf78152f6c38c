"""Every test leaves torch as it found it; what is checked is identity, attribute by attribute."""

import os
import sys

# Frameworks would train on a GPU that they see, and sweeps have more rows.  `-m gpu` sees it.
# Workers of xdist inherit what the first process sees.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in arg for arg in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Tiny tensors on shared cores: threads that wait for each other cost far more than they save.
os.environ["OMP_NUM_THREADS"] = "1"

import own_cache  # before ampatch, which looks into it
import pytest
import torch
from few_modules import search_no_other_packages
from torch_snapshot import changes, snapshot

import ampatch
from ampatch.casting import calls
from ampatch.log import set_verbosity
from ampatch.scaling import loss_scaler

# Without the device torch keeps each seed until the device is started, and formats the stack of
# the call, three times: a tenth of the time of the tests.
for _devices in (torch.cuda, torch.xpu, torch.mtia):
    if not _devices.is_available():
        _devices.manual_seed_all = lambda seed: None

# torch rewraps these at the first instance of each optimizer class; let it, once.
for _optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS):
    _optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.fixture(autouse=True)
def torch_is_as_we_found_it():
    """After `deactivate` nothing of ours is left in torch; without it, nothing leaks either."""
    assert not ampatch.session.session.registry.sessions, "an earlier test left a session open"
    before = snapshot()
    set_verbosity(1)  # an earlier test may have silenced the log
    hook = sys.excepthook
    yield
    sys.excepthook = hook  # init_process_group replaces it for good
    ours = set(ampatch.session.session.registry.installation.replacements.pairs)
    ampatch.deactivate()
    assert changes(before, snapshot()) == []
    assert not ours & torch.jit._builtins._get_builtin_table().keys(), "left in torch.jit's table"
    state = ampatch.session.session.registry.state
    assert state.process_policy is None and not state.has_thread_policies
    assert not calls.thread_calls.stack


def pytest_unconfigure() -> None:
    """The cache of the tests ends with them."""
    own_cache.remove()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, each worker takes half of the files, and then what the other has left.

    Otherwise each of them runs tests of each file, and makes what a file's tests share.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collections and sessions are many, and torch, its like and thousands of tests are much."""
    search_no_other_packages()


@pytest.fixture(params=["O0", "O1", "O2", "O3"])
def opt_level(request) -> str:
    """Each of the opt levels."""
    return request.param


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def half(request) -> torch.dtype:
    """Each of the half dtypes."""
    return request.param


@pytest.fixture(scope="module")
def warm_trials():
    """The trials of sweeps are forked from a process that has imported torch."""
    from warm_python import popen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", popen)
        # The trials are warm already.
        patch.setattr("ampatch.sweep.execution.warm_starts.IS_POSSIBLE", False)
        yield


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes with a gloo group between them; see `ranks.Ranks`."""
    from ranks import Ranks

    ranks = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """As `ranks`, four of them."""
    from ranks import Ranks

    ranks = Ranks(str(tmp_path_factory.mktemp("ranks")), 4)
    yield ranks
    ranks.stop()


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Commands of ampatch in this process, in `tmp_path`; see `run_command.commands_here`."""
    from run_command import commands_here

    yield from commands_here(tmp_path, monkeypatch, capfd)


@pytest.fixture(scope="session")
def native_cache(tmp_path_factory, request):
    """A folder for `AMPATCH_CACHE` with a build of the native part; see `native_runs`.

    The default tests compile nothing: they take what the caller has built, as CI has.
    """
    from native_runs import cache_with_build

    return cache_with_build(tmp_path_factory, "not slow" not in request.config.option.markexpr)


@pytest.fixture(scope="session")
def accelerator(request):
    """The fake accelerator is known to torch, from now on: other tests may not run beside these."""
    import fake_accelerator

    others = [item for item in request.session.items if not item.get_closest_marker("accelerator")]
    if others:
        pytest.skip("changes torch for the whole process: run `pytest -m accelerator`")
    files = {item.path.name for item in request.session.items}
    elsewhere = [name for name in files if not name.startswith("test_accelerator")]
    assert not elsewhere, f"{elsewhere}: CI runs tests/laws/test_accelerator*.py for this mark"
    if not fake_accelerator.has_compiler():
        pytest.skip("no C++ compiler")
    fake_accelerator.load()
    return torch.device(fake_accelerator.NAME)


@pytest.fixture
def same_bits_with_native(native_cache):
    """`same_bits_with_native(program)`: see `native_runs.same_bits`."""
    from native_runs import same_bits

    return lambda program: same_bits(program, native_cache)


@pytest.fixture(params=["host", "device"])
def scale_lives_on(request, monkeypatch):
    """Loss scales as numbers of the host, and as tensors, as with losses on an accelerator."""
    if request.param == "device":
        monkeypatch.setattr(loss_scaler, "can_read_without_sync", lambda device: False)
    return request.param
