"""Every situation of the table on CUDA, against the oracle on the same device; random programs."""

import drivers
import on_device
import programs
import pytest
import situations
import torch
from test_random_programs import CELLS
from test_situations import MODULES, ROWS, check

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

pytestmark = pytest.mark.gpu

NOT_THERE = {
    "two_threads_that_meet_in_backward": "torch has one thread for all backward passes of a device",
    "writes_while_a_graph_waits_by_numpy": "NumPy has memory of the host alone",
    "averaged_models": "torch's own mean divides a counter by an integer, which CUDA refuses",
}
PROGRAMS = 25
THERE = [param for param in ROWS if param.values[0].name not in NOT_THERE]


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    """What situations and programs make is made on CUDA."""
    monkeypatch.setattr(drivers.Driver, "device", "cuda")
    on_device.move(monkeypatch, [situations, programs, *MODULES], "cuda")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of:UserWarning")  # the oracle's
@pytest.mark.parametrize(("row", "level", "half"), THERE)
def test_situation(row, level, half, caplog):
    check(row, level, half, caplog)


@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.parametrize(("level", "half"), CELLS)
def test_program(level, half, seed):
    programs.replay(level, half, programs.program(seed))


def test_what_is_left_out_exists():
    assert NOT_THERE.keys() <= {param.values[0].name for param in ROWS}
