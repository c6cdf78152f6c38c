"""`ampatch compare` of sweeps made by hand."""

import dataclasses
import json

import pytest
from sweep_made import CASES, made_run, made_sweep

from ampatch.cli import main
from ampatch.sweep import read_sweep, side_by_side
from ampatch.sweep.measure.record import Series

ACCURACIES = {"a": (0.90, 0.91, 0.92), "b": (0.80, 0.815, 0.82)}


def stored(tmp_path, name, cases=CASES[:3], **fields):
    """A sweep of three seeds; its accuracy is that of `ACCURACIES`."""
    runs = [
        made_run(case, seed, metrics={"accuracy": Series([120], [value])}, **fields)
        for case in cases
        for seed, value in enumerate(ACCURACIES[name])
    ]
    made_sweep(tmp_path / name, runs)
    return str(tmp_path / name)


def set_summary(directory, **changed):
    path = f"{directory}/summary.json"
    with open(path) as file:
        data = json.load(file)
    for name, values in changed.items():
        data[name].update(values)
    with open(path, "w") as file:
        json.dump(data, file)


def compared(capsys, *arguments):
    code = main.main(["compare", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_two_sweeps_beside_each_other(tmp_path, capsys):
    first = stored(tmp_path, "a", CASES[:3])
    second = stored(tmp_path, "b", CASES[1:4], device="Some GPU")
    set_summary(second, versions={"torch": "3.1"}, settings={"steps": 7})
    code, out, err = compared(capsys, first, second)
    assert (code, err) == (0, "")
    differing, table, verdicts, _method = out.partition("\n\n")[2].split("\n\n")
    found = {line.split()[0]: line.split()[1:] for line in differing.splitlines()[2:]}
    assert found == {
        "torch": ["2.9", "3.1"],
        "device": ["cpu", "Some", "GPU"],
        "steps": ["none", "7"],
    }
    assert out.index("torch") < out.index("step ms")  # said first
    heads, _, *rows = table.splitlines()
    assert "A accuracy" in heads and "B - A" in heads
    assert [row.split()[:2] for row in rows] == [["O1", "float16"], ["O1", "bfloat16"]]
    assert all(row.count("0.91 ± 0.01") == 1 for row in rows)
    lines = verdicts.splitlines()
    assert lines[0].startswith("O1 float16: speed not told apart from A's: 1.00x; worse than A: ")
    assert lines[2:] == ["Only in A: O0 float32", "Only in B: O2-loss_scale=<b>$1$</b> float16"]


def test_the_tests_are_paired_and_corrected_over_the_rows(tmp_path):
    """Differences -0.1, -0.095, -0.1: t = -59, p = 0.00029 with two degrees of freedom."""
    both = side_by_side(read_sweep(stored(tmp_path, "a")), read_sweep(stored(tmp_path, "b")))
    ones = [pair.comparisons[0] for pair in both.pairs]
    assert len(ones) == 3
    for one in ones:
        t = 0.0983333 / (one.scatter / 3**0.5)
        assert one.p == pytest.approx(1 - t / (t * t + 2) ** 0.5, rel=1e-3)
        assert one.corrected_p == pytest.approx(3 * one.p)
        assert (one.n, one.outcome) == (3, "worse")


def test_a_row_that_failed_in_one_of_them_says_where(tmp_path, capsys):
    first, second = stored(tmp_path, "a"), stored(tmp_path, "b", error="RuntimeError: no")
    code, out, _ = compared(capsys, first, second)
    assert code == 0 and "O1 float16: in B crashed: RuntimeError: no" in out


def test_sweeps_without_a_common_row(tmp_path, capsys):
    first, second = stored(tmp_path, "a", CASES[:1]), stored(tmp_path, "b", CASES[1:2])
    code, out, err = compared(capsys, first, second)
    assert code == 1 and "no row in common" in err and "Only in A: O0 float32" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "gone"), "gone: there is no such directory"),
        (("a", "empty"), "empty: there are no results of a sweep in this directory"),
        (("a", "a/."), "A and B are the same directory"),
        (("a", "old"), "in format 1."),
        (
            ("a", "b", "--judge", "f1"),
            "--judge f1: no row has it in both sweeps. Expected one of: ",
        ),
        (("a",), "the following arguments are required: B"),
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stored(tmp_path, "a"), stored(tmp_path, "b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old/summary.json").write_text('{"format": 1}')
    with pytest.raises(SystemExit) as stop:
        main.main(["compare", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_quantity_of_the_verdicts_can_be_chosen(tmp_path, capsys):
    first, second = stored(tmp_path, "a"), stored(tmp_path, "b")
    assert "A accuracy" in compared(capsys, first, second)[1]
    assert "A last loss" in compared(capsys, first, second, "--judge", "last loss")[1]


def test_the_seeds_have_to_reach_the_script_in_both(tmp_path):
    same = [made_run(CASES[0], 0), made_run(CASES[0], 0)]
    same[1] = dataclasses.replace(same[1], trial=dataclasses.replace(same[1].trial, seed=1))
    made_sweep(tmp_path / "same", same)
    made_sweep(tmp_path / "other", [made_run(CASES[0], seed) for seed in (0, 1)])
    for names in (("same", "other"), ("other", "same")):
        [pair] = side_by_side(*(read_sweep(tmp_path / name) for name in names)).pairs
        assert pair.comparisons[0].untested == "O0 is the same with each seed"


def test_where_they_differ_a_says_which_way_is_better(tmp_path):
    first, second = read_sweep(stored(tmp_path, "a")), read_sweep(stored(tmp_path, "b"))
    rows = second.results.rows
    rows[1] = dataclasses.replace(
        rows[1], comparisons=[dataclasses.replace(rows[1].comparisons[0], better="lower")]
    )
    pairs = side_by_side(first, second).pairs
    assert {pair.comparisons[0].better for pair in pairs} == {"higher"}


@pytest.mark.parametrize(
    ("pace", "noise", "said"),
    [
        (0.008, 0.0100, "1.25x the speed of A"),
        (0.008, 0.0108, "1.25x the speed of A"),  # O0 against O0 is off by 8 %: less than that
        (0.008, 0.0130, "2.00x the speed of A by CPU time, as wall time is too noisy: 1.25x"),
        (0.010, 0.0100, "not told apart"),  # the quartiles overlap
        (0.008, None, "not told apart"),  # O0 ran once
    ],
)
def test_speeds_are_told_apart_beyond_the_noise_of_o0(tmp_path, pace, noise, said):
    again = {"short": True, "again": True}
    for name, second, seconds in (("a", 0.010, 0.010), ("b", noise, pace)):
        runs = [made_run(CASES[0], seed) for seed in (0, 1)]
        cpu = {"a": 0.020, "b": 0.010 if noise == 0.013 else 0.020}[name]
        times = {"step_seconds": [None, *[seconds] * 119], "cpu_seconds": [None, *[cpu] * 119]}
        runs += [made_run(CASES[1], seed, **times) for seed in (0, 1)]
        if second is not None:
            times = [None, *[second] * 119]
            runs += [made_run(CASES[0], seed, kind=again, step_seconds=times) for seed in (0, 1)]
        made_sweep(tmp_path / name, runs)
    pairs = side_by_side(read_sweep(tmp_path / "a"), read_sweep(tmp_path / "b")).pairs
    assert said in pairs[1].verdict
