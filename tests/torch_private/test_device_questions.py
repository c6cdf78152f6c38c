"""What is known of an accelerator, where torch or the device cannot tell all of it."""

import types

import torch

from ampatch import device_figures
from ampatch.torch_private import devices


def refuses(*args, **kwargs):
    raise RuntimeError("not here")


def test_a_device_that_cannot_copy_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(torch, "Event", refuses)
    assert devices.AsyncCopy(torch.arange(3.0)).value() == [0.0, 1.0, 2.0]


def test_what_a_device_cannot_tell_is_told_by_the_host(monkeypatch):
    """Without timed events the host waits and looks at its clock; unknown memory is no figure."""
    there, waits = torch.device("xpu"), []
    monkeypatch.setattr(device_figures, "accelerator", lambda: "xpu")
    monkeypatch.setattr(device_figures, "_has_timed_events", lambda kind: False)
    monkeypatch.setattr(device_figures, "synchronize", waits.append)
    first, second = device_figures.seconds_between(
        [device_figures.record_time(there) for _ in range(3)]
    )
    assert first >= 0 <= second and waits == [there] * 3
    silent = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(device_figures, "_module", lambda kind: silent)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", refuses)
    assert device_figures.peak_memory() is None
    assert device_figures.describe_accelerators() == ["xpu:0", "xpu:1"]
    assert device_figures.device_name(there) == "xpu" and device_figures.device_count("xpu") == 2


def test_events_that_cannot_be_timed_are_found_out_once(monkeypatch):
    monkeypatch.setattr(device_figures, "accelerator", lambda: "xpu")
    monkeypatch.setattr(device_figures, "new_event", refuses)
    assert not device_figures._has_timed_events.__wrapped__("xpu")


def test_figures_of_cuda_are_those_of_its_module(monkeypatch):
    """A GPU that was not used has no peak."""
    used, least = [False], [0]
    answers = {
        "is_initialized": lambda: used[0],
        "device_count": lambda: 2,
        "max_memory_allocated": lambda index: least[0] and least[0] + index,
        "get_device_name": lambda device: "A GPU",
        "get_device_capability": lambda device: (9, 0),
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device_figures, "accelerator", lambda: "cuda")
    assert device_figures.peak_memory() is None
    used[0] = True  # but nothing is on it
    assert device_figures.peak_memory() is None
    least[0] = 100
    assert device_figures.peak_memory() == 100 + 101
    assert device_figures.describe_accelerators() == ["cuda:0 A GPU (9.0)", "cuda:1 A GPU (9.0)"]


def test_a_machine_without_accelerators_has_none_to_tell_of(monkeypatch):
    monkeypatch.setattr(device_figures, "accelerator", lambda: None)
    assert device_figures.peak_memory() is None and device_figures.describe_accelerators() == []
    assert device_figures.device_count("npu") == 0  # torch has no such module
    device_figures.synchronize(torch.device("cpu"))
