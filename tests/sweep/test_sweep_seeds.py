"""Seeds that a script sets itself: noticed in the first run, and replaced on request."""

import json
import random

import pytest
import torch
from sweep_runs import Said, planned

from ampatch.sweep.execution.seeding import ScriptSeeds

pytestmark = pytest.mark.usefixtures("warm_trials")
numpy = pytest.importorskip("numpy")

CONSTANT = """
    import json, os, pickle, random, sys
    import numpy as np
    import torch
    import ampatch as amp

    def set_seed(seed):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    set_seed(42)
    first = [random.random(), np.random.rand(), torch.rand(()).item()]
    kept = [
        np.random.default_rng(0).random(),
        torch.rand((), generator=torch.Generator().manual_seed(7)).item(),
    ]
    epochs = []
    for epoch in [43, 44, 43]:
        torch.manual_seed(seed=epoch)
        epochs.append(torch.initial_seed())

    class Seeds(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.tensor([torch.initial_seed(), index])

    workers = torch.utils.data.DataLoader(Seeds(), num_workers=2, multiprocessing_context="fork")
    workers = [batch.tolist()[0][0] for batch in workers]
    set_seed(42)
    model = torch.nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(9):
        with amp.scale_loss(model(torch.ones(8, 4)).pow(2).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    print(json.dumps({"first": first, "kept": kept, "epochs": epochs, "workers": workers}))
"""


def swept(folder, script, *arguments, **options):
    """A sweep over two seeds, and what happened in it."""
    chosen = {"levels": ["O0"], "seeds": 2, "autocast": False, **options}
    plan, said = planned(folder, script, *arguments, **chosen), Said()
    plan.run(said)
    return plan, said.events


def printed(plan):
    logs = (plan.directory / "runs" / f"{run.trial.file_stem}.log" for run in plan.runs)
    return [json.loads(log.read_text()) for log in logs]


def test_a_constant_seed_is_said_after_the_first_run(tmp_path):
    plan, (_, note, _) = swept(tmp_path, CONSTANT)
    assert "train.py seeds itself: random.seed(42) at train.py:8. " in note
    for remedy in ("--override-seeds", "-- --seed {seed}", "AMPATCH_SEED"):
        assert remedy in note
    [unreached] = plan.results.notes
    assert unreached.startswith("The seed does not reach the script (random.seed(42) at train.py")
    once, twice = printed(plan)
    assert once == twice  # the note is right


UNREACHED = """
    import torch
    import ampatch as amp
    model = torch.nn.utils.skip_init(torch.nn.Linear, 4, 2)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    data = torch.Generator().manual_seed(7)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(9):
        with amp.scale_loss(model(torch.randn(8, 4, generator=data)).mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
"""


def test_a_seed_that_does_not_reach_the_script_is_said_after_two_runs(tmp_path):
    """Where no global seed is set, the first run shows nothing."""
    _plan, events = swept(tmp_path, UNREACHED, levels=["O0", "O1"])
    events = [event for event in events if not event.startswith("Planned")]
    assert events[:2] == ["O0 seed 0", "O0 seed 1"]
    assert events[2].startswith("The seed does not reach the script: O0 gives the same results")


def passing_on(seed):
    """The script with what it gets from the sweep in the place of its constant."""
    return CONSTANT.replace("(42)", f"({seed})").replace("[43, 44, 43]", "[]")


def test_a_constant_beside_a_seed_that_is_passed_on_is_said(tmp_path):
    """Also where it is the seed of the first trial."""
    constant = "random.seed(0)"
    script = passing_on("int(sys.argv[2])").replace("epochs =", f"{constant}\n    epochs =")
    plan, _events = swept(tmp_path, script, "--seed", "{seed}")
    [said] = [note for note in plan.results.notes if "seeds itself" in note]
    assert constant in said


def test_overridden_seeds_follow_the_trials(tmp_path):
    plan, _events = swept(tmp_path, CONSTANT, levels=["O0", "O1"], override_seeds=True)
    by_seed = {0: [], 1: []}
    for run, values in zip(plan.runs, printed(plan)):
        by_seed[run.trial.seed].append(values)
    for seed, (base, row) in by_seed.items():
        assert base == row  # both rows draw the same
        own = ScriptSeeds(seed, override=True).seed_for_trial(42)
        random.seed(own)
        generator = torch.Generator().manual_seed(own)
        drawn = [random.random(), numpy.random.RandomState(own).rand()]
        assert base["first"] == [*drawn, torch.rand((), generator=generator).item()]
        first, second, again = base["epochs"]
        assert first == again != second
        assert base["workers"][1] == base["workers"][0] + 1  # as a DataLoader seeds them
    (first_seed, _), (second_seed, _) = by_seed.values()
    assert first_seed["kept"] == second_seed["kept"]
    assert not set(first_seed["epochs"]) & set(second_seed["epochs"])
    assert plan.results.notes == []


def test_a_seed_may_be_an_array_and_a_number_of_any_kind():
    seed_for_trial = ScriptSeeds(5, override=True).seed_for_trial
    assert seed_for_trial(numpy.array([1, 2])) == seed_for_trial([1, 2]) != seed_for_trial([1, 3])
    assert seed_for_trial(numpy.int64(7)) == seed_for_trial(torch.tensor(7)) == seed_for_trial(7)
    of_another = ScriptSeeds(6, override=True).seed_for_trial(7)
    assert seed_for_trial(7) not in (seed_for_trial(8), of_another)


@pytest.mark.parametrize(
    ("seed", "arguments", "said"),
    [
        ("int(os.environ['AMPATCH_SEED'])", (), 0),
        ("7 + int(os.environ['AMPATCH_SEED'])", (), 1),  # taken back after the second seed
        pytest.param("7 + int(sys.argv[1])", ("{seed}",), 0, marks=pytest.mark.slow),
    ],
)
def test_a_seed_that_is_passed_on_is_no_constant(seed, arguments, said, tmp_path):
    plan, events = swept(tmp_path, passing_on(seed), *arguments)
    assert sum("seeds itself" in event for event in events) == said
    assert plan.results.notes == []
