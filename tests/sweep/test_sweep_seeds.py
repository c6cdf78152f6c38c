"""Seeds that a script sets itself: noticed in the first run, and replaced on request."""

import json
import textwrap

import pytest
import torch

from ampatch.sweep import Sweep
from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.execution.seeding import OwnSeeds
from ampatch.sweep.measure.record import Measured, Run, SeedCall
from ampatch.sweep.report.seed_check import constant_seeds
from ampatch.sweep.trial import BASE, Trial

pytestmark = pytest.mark.usefixtures("warm_trials")

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
    assert isinstance(torch.default_generator, torch.Generator)
    dict(os.environ), os.environ.copy(), list(os.environ.items())  # no interest in the seed
    made = torch.Generator()  # of torch's own class, the only one that torch.compile takes
    assert type(pickle.loads(pickle.dumps(made))) is type(made) is type(torch.default_generator)
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
    list(torch.utils.data.DataLoader(range(4), shuffle=True))
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


class Said(Progress):
    """What is said, and the runs that have ended by then."""

    def __init__(self):
        self.events = []

    def ended(self, run):
        self.events.append(run.trial.label)

    def said(self, text):
        self.events.append(text)


def swept(tmp_path, script, *arguments, **options):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    plan = Sweep(
        path, arguments, dtypes=["bfloat16"], autocast=False, rounds=1, out=tmp_path / "out",
        **{"levels": ["O0"], "seeds": 2, **options},
    )  # fmt: skip
    said = Said()
    plan.run(said)
    return plan, said.events


def printed(plan):
    logs = (plan.directory / "runs" / f"{run.trial.file_stem}.log" for run in plan.runs)
    return [json.loads(log.read_text()) for log in logs]


def test_a_constant_seed_is_said_after_the_first_run(tmp_path):
    plan, (kind, first, note, second, unreached) = swept(tmp_path, CONSTANT)
    assert "calls initialize" in kind
    assert (first, second) == ("O0 seed 0", "O0 seed 1")
    for part in (
        "random.seed(42), numpy.random.seed(42), torch.manual_seed(42) at train.py:8",
        "torch.manual_seed(43), torch.manual_seed(44) at train.py:22",
        "--override-seeds",
        "-- --seed {seed}",
        "AMPATCH_SEED",
        "numpy.random.default_rng(0) at train.py:13",
        "torch.Generator().manual_seed(7) at train.py:14",
    ):
        assert part in note
    assert note.count("torch.Generator()") == 1  # not those that a DataLoader makes
    assert unreached.startswith("The seed does not reach the script: O0 is the same with each.")
    assert plan.results.notes == [note, unreached]
    once, twice = printed(plan)
    assert once == twice  # the note is right


def test_overridden_seeds_are_the_trials(tmp_path):
    plan, events = swept(tmp_path, CONSTANT, levels=["O0", "O1"], override_seeds=True)
    assert not any("constant" in event for event in events)
    numpy, random = pytest.importorskip("numpy"), pytest.importorskip("random")
    by_seed = {0: [], 1: []}
    for run, found in zip(plan.runs, printed(plan)):
        seed = run.trial.seed
        random.seed(seed)
        generator = torch.Generator().manual_seed(seed)
        drawn = [random.random(), numpy.random.RandomState(seed).rand()]
        assert found["first"] == [*drawn, torch.rand((), generator=generator).item()]
        by_seed[seed].append(found)
    for seed, (base, row) in by_seed.items():
        assert base == row  # both rows draw the same
        first, second, again = base["epochs"]
        assert first == again != second and seed not in (first, second)
        assert base["workers"][1] == base["workers"][0] + 1  # as a DataLoader seeds them
    (zero, _), (one, _) = by_seed.values()
    assert zero["kept"] == one["kept"]
    assert not set(zero["epochs"]) & set(one["epochs"])
    assert plan.results.notes == []


def test_a_seed_may_be_an_array_and_a_number_of_any_kind():
    numpy = pytest.importorskip("numpy")
    of_trial = OwnSeeds(5, override=True)._of_trial
    assert of_trial(numpy.array([1, 2])) == of_trial([1, 2]) == 5
    assert of_trial(numpy.int64(7)) == of_trial(torch.tensor(7)) == of_trial(7) != 5


def test_seeds_of_ranks_differ_where_the_script_has_them_differ():
    ranks = [OwnSeeds(5, override=True, ranked=True)._of_trial for _ in range(2)]
    own = [of_trial(42 + rank) for rank, of_trial in enumerate(ranks)]
    assert own[0] != own[1]
    assert [of_trial(42) for of_trial in ranks] == [own[0]] * 2
    assert OwnSeeds(6, override=True, ranked=True)._of_trial(42) != own[0]


def test_a_seed_that_is_passed_on_is_no_constant(tmp_path):
    script = CONSTANT.replace("(42)", "(int(os.environ['AMPATCH_SEED']))")
    script = script.replace("[43, 44, 43]", "[]")
    plan, (_, *events) = swept(tmp_path, script)
    assert events == ["O0 seed 0", "O0 seed 1"]
    assert plan.results.notes == []  # nor of its generators, which are fixed on purpose


@pytest.mark.parametrize(("read", "argument"), [(False, ""), (True, ""), (False, "{seed}")])
def test_what_two_runs_show(read, argument):
    """Where the seed could have been passed on, the second seed's run decides."""

    def run_of(seed, *calls):
        measured = Measured(opt_level="O0", seed_calls=list(calls), seed_read=read)
        return Run(Trial(BASE, seed), 0, 1.0, measured)

    own = SeedCall("torch.manual_seed", "5", "a.py:1", False)
    mine, other = (SeedCall("random.seed", seed, "a.py:2", False) for seed in "01")
    first, second = run_of(0, own, mine), run_of(1, own, other)
    passed_on = read or bool(argument)
    assert constant_seeds([first], [argument]) == ([] if passed_on else [own, mine])
    assert constant_seeds([first, second], [argument]) == [own]
    assert constant_seeds([], [argument]) == []
