"""Every situation of the table on a fake accelerator, against the oracle on the same device."""

from __future__ import annotations

import drivers
import on_device
import pytest
import situations
from fake_accelerator import NAME
from test_situations import MODULES, ROWS, check

pytestmark = pytest.mark.accelerator

NOT_THERE = {
    "two_threads_that_meet_in_backward": "torch has one thread for all backward passes of a device",
    "sparse_embedding_gradients": "the fake accelerator has no sparse tensors",
    "sparse_embedding_gradients_of_half_weights": "the fake accelerator has no sparse tensors",
}
THERE = [row for row in ROWS if row.values[0].name not in NOT_THERE]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("row", "level", "half"), THERE)
def test_situation(row, level, half, caplog, accelerator, monkeypatch) -> None:
    monkeypatch.setattr(drivers.Driver, "device", NAME)
    on_device.move(monkeypatch, [situations, *MODULES], NAME)
    check(row, level, half, caplog)


def test_what_is_left_out_exists():
    assert NOT_THERE.keys() <= {row.values[0].name for row in ROWS}
