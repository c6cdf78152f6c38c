"""Every situation of the table on a fake accelerator, against the oracle on the same device; some
random programs.
"""

from collections.abc import Iterator
from typing import Any

import drivers
import on_device
import programs
import pytest
import situations
import test_situations
from fake_accelerator import NAME, Counts, counted
from situations_lookups import READERS
from test_situations import MODULES, ROWS, UNSCALED, check, everything

pytestmark = pytest.mark.accelerator
SPARSE, OVERFLOWING = "with_a_hook_and_asked_for_alone", "sparse_gradients_that_overflow_or_wait"

NOT_THERE = {
    "two_threads_that_meet_in_backward": "torch has one thread for all backward passes of a device",
    "writes_while_a_graph_waits_by_numpy": "NumPy has memory of the host alone",
    "averaged_models": "torch's own mean divides by an integer there, which its kernel refuses",
    **dict.fromkeys(("packed_lstm", "packed_gru"), "the fake accelerator has no fused cells"),
    **dict.fromkeys(
        (*(f"sparse_embedding_gradients_{name}" for name in ("", SPARSE)), OVERFLOWING),
        "the fake accelerator has no sparse tensors",
    ),
    "an_embedding_of_two_models": "which copy a lookup gets does not depend on the device",
    **dict.fromkeys((f"an_embedding_is_read_by_{name}" for name in READERS), "so these"),
}
MOVES_ITSELF = {
    "averaged_submodule": "torch copies the average's counter to the device",
    "a_pair_trains_saved": "torch.save and torch.load go through the host",
    "a_pair_trains_pickled_optimizer_first": "pickle goes through the host",
}
UPLOADS, DOWNLOADS = 2, 6
"""For each loss: its scale and counter; for each `initialize`: least and greatest of inputs."""
LOOKS = 3
"""For each model: after forwards 1 and 10 with a graph, and 1 without: what was written unseen."""


def there() -> Iterator[Any]:
    """The rows that the device can run.  It has no part in half dtypes: the second one is slow."""
    for param in ROWS:
        row, level, half = param.values
        if row.name not in NOT_THERE:
            unscaled = level in UNSCALED and row.against == "by hand"
            first = unscaled or half == row.halves.split()[0]
            marks = () if first else pytest.mark.slow
            yield pytest.param(*param.values, id=param.id, marks=marks)


@pytest.fixture(autouse=True)
def on_the_accelerator(accelerator, monkeypatch):
    """What situations and programs make is made there."""
    monkeypatch.setattr(drivers.Driver, "device", NAME)
    on_device.move(monkeypatch, [situations, programs, *MODULES], NAME)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_program(level, seed):
    programs.replay(level, "fp16", programs.program(seed))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("row", "level", "half"), list(there()))
def test_situation(row, level, half, caplog, monkeypatch) -> None:
    runs: list[Counts] = []
    models: list[int] = []  # how many each `initialize` got
    losses: list[int] = []
    initialize = drivers.ampatch.initialize

    def watched_initialize(nets, *args, **kwargs):
        models.append(len(nets) if isinstance(nets, list) else 1)
        losses.append(kwargs.get("num_losses", 1))
        return initialize(nets, *args, **kwargs)

    def watched(row, driver):
        with counted() as counts:
            results = everything(row, driver)
        runs.append(counts)
        return results

    monkeypatch.setattr(test_situations, "everything", watched)
    monkeypatch.setattr(drivers.ampatch, "initialize", watched_initialize)
    check(row, level, half, caplog)
    if len(runs) == 2 and row.name not in MOVES_ITSELF:
        oracle, ours = runs
        assert ours.uploads - oracle.uploads <= UPLOADS * sum(losses)
        waits = DOWNLOADS * len(models) + LOOKS * sum(models)
        assert waited_for(ours) - waited_for(oracle) <= waits


def waited_for(counts: Counts) -> int:
    """Copies to the host that it waits for."""
    return counts.downloads - counts["launch copy to the host, not waited for"]


def test_what_is_left_out_exists():
    assert NOT_THERE.keys() | MOVES_ITSELF.keys() <= {row.values[0].name for row in ROWS}
