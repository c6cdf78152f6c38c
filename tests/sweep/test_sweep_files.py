"""Files that trials write, and copies of the folder in which they run."""

import os
from pathlib import Path

import pytest
from sweep_runs import INITIALIZE, TRAINING, log_of, planned, written

from ampatch.sweep import Sweep
from ampatch.sweep.execution import user_files

pytestmark = pytest.mark.usefixtures("warm_trials")

SAVES = f"""
    {TRAINING}
    {INITIALIZE}
    print("found", sorted(os.listdir(".")), open("data/input.txt").read())
    step(), step()
    torch.save(model.state_dict(), "best.pt")
    os.makedirs("runs/a", exist_ok=True)
    for name in ("runs/log.txt", "runs/a/log.txt"):
        open(name, "w").write(level)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder, with weights of the user's own and something to read."""
    monkeypatch.chdir(tmp_path)
    Path("best.pt").write_text("the user's own")
    Path("data").mkdir()
    Path("data/input.txt").write_text("input")
    Path(".git").mkdir()
    Path(".git/HEAD").write_text("main")
    return tmp_path


def test_files_that_o0_has_written_are_named_once(folder):
    sweep = planned(folder, SAVES, levels=["O0", "O1"], autocast=False).run()
    [note] = [note for note in sweep.results.notes if "has written" in note]
    assert note.startswith("O0 has written best.pt, runs/...: trials overwrite one another's ")
    assert "(-- --out {trial_dir}/best.pt), or run each trial in a copy" in note
    assert sweep.runs[0].wrote == ["best.pt", "runs/..."] and not sweep.runs[1].wrote


def test_a_script_elsewhere_and_one_that_writes_nothing(folder, tmp_path_factory):
    quiet = planned(folder, TRAINING + INITIALIZE + "    step()", levels=["O0"]).run()
    assert quiet.runs[0].wrote == [] and not any("written" in note for note in quiet.results.notes)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    beside = "open(os.path.join(os.path.dirname(__file__), 'beside.txt'), 'w')"
    script = written(elsewhere, TRAINING, INITIALIZE, "step()\n", beside)
    sweep = Sweep(script, levels=["O0"], rounds=1, out=folder / "other").run()
    assert sweep.runs[0].wrote == [os.path.relpath(elsewhere / "beside.txt")]


def test_in_a_copy_the_folder_stays_as_it_is(folder):
    options = {"levels": ["O0", "O1"], "autocast": False, "in_copy": True}
    sweep = planned(folder, SAVES, **options).run()
    assert [run.exit_code for run in sweep.runs] == [0, 0]
    assert "found ['.git', 'best.pt', 'data', 'train.py'] input" in log_of(sweep)
    assert sorted(os.listdir()) == [".git", "best.pt", "data", "out", "train.py"]
    assert Path("best.pt").read_text() == "the user's own"
    for label, level in (("O0", "O0"), ("O1-bfloat16", "O1")):
        copy = sweep.directory / f"runs/{label}.seed0.repeat0.copy"
        names = sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())
        assert names == ["best.pt", "runs/a/log.txt", "runs/log.txt"]
        assert (copy / "runs/log.txt").read_text() == level
    [note] = [note for note in sweep.results.notes if "in a copy" in note]
    assert note.endswith(
        "stays in runs/*.copy. Hidden folders, links and large entries are linked, not copied: "
        ".git."
    )


def test_trials_beside_each_other_run_in_copies(folder):
    """A script that saves its best weights and loads them at its end gets its own."""
    script = f"""
    {TRAINING}
    {INITIALIZE}
    own = level + os.environ["AMPATCH_SEED"]
    step()
    open("best.txt", "w").write(own)
    time.sleep(0.5)
    assert open("best.txt").read() == own
    step()
    """
    options = {"levels": ["O0", "O1"], "autocast": False, "seeds": 2, "jobs": 2}
    sweep = planned(folder, script, **options).run()
    assert [run.exit_code for run in sweep.runs] == [0] * 4 and not Path("best.txt").exists()
    shared = {**options, "in_copy": False, "overwrite": True, "levels": ["O0"], "seeds": 1}
    planned(folder, script, **shared).run()
    assert Path("best.txt").read_text() == "O00"


def test_what_is_large_or_hidden_is_linked_and_a_copy_leaves_what_is_new(folder, monkeypatch):
    monkeypatch.setattr(user_files, "LARGE", 5)
    Path("small").mkdir()
    Path("small/a").write_text("1234")
    Path("link").symlink_to("data")
    assert user_files.linked_entries(folder, folder / "out") == [".git", "best.pt", "data", "link"]
    with user_files.copy_of(folder, folder / "copy", folder / "copy"):
        assert Path("copy/data/input.txt").read_text() == "input"
        assert Path("copy/small/a").read_text() == "1234" and not Path("copy/small").is_symlink()
        Path("copy/small/b").write_text("new")
    assert [*Path("copy").rglob("*")] == [Path("copy/small"), Path("copy/small/b")]
    assert Path("data/input.txt").exists() and Path("small/a").exists()


def test_only_this_machine_copies(folder):
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="--in-copy: has no meaning with --engine ray"):
        planned(folder, TRAINING, in_copy=True, engine="ray")
