"""`ampatch run --auto`, as a user runs it: one script by Python, in float16 and in bfloat16."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from run_command import write
from warm_python import environment, python

PLAIN = """
    import json, sys, torch
    from torch.nn.functional import cross_entropy

    class Images(torch.utils.data.Dataset):
        def __init__(self):
            torch.manual_seed(0)
            self.x = torch.randn(96, 1, 8, 8)
            self.y = (self.x[:, 0, 0, 0] > 0).long()
            self.x += self.y[:, None, None, None]

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            same = self.x[index] @ torch.eye(8)
            assert same.dtype is torch.float32, "data are prepared as ever"
            return same, self.y[index]

    def main(epochs=4, start=None):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(288, 2),
        )
        seen = set()
        model[0].register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        workers = {"num_workers": 1, "multiprocessing_context": start} if start else {}
        loader = torch.utils.data.DataLoader(Images(), batch_size=16, **workers)
        losses = []
        for epoch in range(int(epochs)):
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        print(json.dumps({"losses": losses, "seen": sorted(seen)}))

    if __name__ == "__main__":
        main(*sys.argv[1:])
"""

DDP = """
    import json, os, torch
    from torch.nn.parallel import DistributedDataParallel

    def train(rank, world):
        store = "file://" + os.path.abspath("store")
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        seen = set()
        model.register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.arange(32.0).reshape(8, 4)[rank::world] / 32
        for step in range(4):
            with model.no_sync():
                (model(x) - 1).pow(2).mean().backward()
            (model(x) - 1).pow(2).mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        both = [torch.empty(4) for _ in range(world)]
        torch.distributed.all_gather(both, model.module.weight.detach().flatten())
        if rank == 0:
            print(json.dumps([[weight.tolist() for weight in both], norm.item(), sorted(seen)]))
        torch.distributed.destroy_process_group()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(train, args=(2,), nprocs=2)
"""


AUTO = ("-m", "ampatch", "run", "--auto")


def run(folder, *arguments):
    done = python(*arguments, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Each way to run the script, some at a time."""
    folder = tmp_path_factory.mktemp("auto")
    write(folder / "plain.py", PLAIN)
    calls = {
        "python": ["plain.py"],
        "float16": [*AUTO, "--opt-level", "O1", "plain.py"],
        "bfloat16": [*AUTO, "--dtype", "bfloat16", "-m", "plain"],
        "spawn": [*AUTO, "plain.py", "1", "spawn"],
        "fork": [*AUTO, "plain.py", "1", "fork"],
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        done = {name: pool.submit(run, folder, *words) for name, words in calls.items()}
        return {name: future.result() for name, future in done.items()}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_plain_script_trains_in_half(results, half):
    in_half, expected = results[half], results["python"]
    assert in_half["seen"] == [f"torch.{half}"]
    assert expected["losses"][-1] < 0.5 * expected["losses"][0]
    assert in_half["losses"][-1] == pytest.approx(expected["losses"][-1], abs=0.1)
    if half == "bfloat16":
        assert in_half["losses"] == pytest.approx(expected["losses"], abs=0.05)


@pytest.mark.parametrize("way", ["spawn", "fork"])
def test_workers(results, way):
    assert results[way]["seen"] == ["torch.float16"]
    assert results[way]["losses"] == results["float16"]["losses"][:6]


@pytest.mark.slow
def test_ranks_that_the_script_spawns(tmp_path):
    """Two backward passes a step, the first under no_sync, against the mean loss of both ranks."""
    write(tmp_path / "ranks.py", DDP)
    (both, norm, seen) = run(tmp_path, *AUTO, "--loss-scale", "1024", "ranks.py")

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.arange(32.0).reshape(8, 4) / 32
    for _ in range(4):
        optimizer.zero_grad()
        (2 * (model(x) - 1).pow(2).mean()).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    assert seen == ["torch.float16"]
    assert both[0] == both[1] == pytest.approx(model.weight.flatten().tolist(), rel=2e-3, abs=2e-3)
    assert norm == pytest.approx(expected.item(), rel=1e-2)
