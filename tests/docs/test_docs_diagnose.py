"""The examples in docs/diagnose.md, and the outputs shown for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ampatch

PAGE = (Path(ampatch.__file__).parents[1] / "docs" / "diagnose.md").read_text()


def example(name: str) -> str:
    found = re.search(rf"`{name}`[^`]*```python\n(.*?)```", PAGE, re.DOTALL)
    return found.group(1)


def run(name: str, folder: Path) -> None:
    path = folder / name
    path.write_text(example(name))
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})


def test_the_overflow(tmp_path, capsys):
    run("overflow.py", tmp_path)
    told = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    shown = re.search(r"```\n(First non-finite.*?)```", PAGE, re.DOTALL).group(1)
    end = "Largest finite input"  # the number after it depends on torch's generator
    assert told.split(end)[0].split() == shown.split(end)[0].split()


def test_the_casts(tmp_path):
    with ampatch.report() as found:
        run("attention.py", tmp_path)  # 100 steps; the page shows 10
    for name in ("torch.nn.functional.linear", "torch.Tensor.__matmul__", "torch.Tensor.softmax"):
        shown = re.search(rf"^{re.escape(name)} +(\d+) +(\d+) +(\d+) ", PAGE, re.MULTILINE)
        calls = found.functions[name]
        told = [calls.calls, calls.casts, calls.cached]
        first = 6 if name.endswith("linear") else 0  # weights and biases, in the first forward
        assert [told[0], told[1] - first, told[2] + first] == [
            10 * int(shown[1]), 10 * (int(shown[2]) - first), 10 * (int(shown[3]) + first)
        ]  # fmt: skip


@pytest.mark.parametrize("opt_level", ["O0", "O1"])
def test_the_tiny_gradients(opt_level, tmp_path, monkeypatch):
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", opt_level)
    with ampatch.gradient_range() as gradients:
        run("small.py", tmp_path)
    report = gradients.report()
    assert report.steps == 50 and report.scale == 128
    assert report.total.share("flushed") > 0.999
    if opt_level == "O0":
        assert report.suggestion.scale in (8192, 16384, 32768)
        assert 0.05 < report.total.share("flushed now") < 0.12
    else:
        assert report.floor == 2.0**-31 and min(report.total.bins) >= -31
