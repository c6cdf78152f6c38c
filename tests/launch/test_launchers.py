"""Launchers of several processes: given as the script, and in front of ampatch."""

import shlex
import subprocess
import sys

import pytest
from run_command import write
from warm_python import environment

from ampatch.cli import main
from ampatch.cli.main import _split

TRAINING = """
    import os, sys
    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open(f"rank{os.environ['RANK']}", "w") as file:
        print(model(torch.ones(1, 4)).dtype, *sys.argv[1:], file=file)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "typed, expected",
    [
        (
            "--auto --dtype bfloat16 -m torch.distributed.run --nproc-per-node 2 train.py --lr 1",
            "python -m torch.distributed.run --nproc-per-node 2 -m ampatch run --auto "
            "--dtype bfloat16 train.py --lr 1",
        ),
        (
            "--opt-level O1 -m torch.distributed.launch --nproc_per_node=2 train.py",
            "python -m torch.distributed.launch --nproc_per_node=2 -m ampatch run --opt-level O1 "
            "train.py",
        ),
        (
            "--auto bin/torchrun --standalone -m package.train 'a b'",
            "bin/torchrun --standalone -m ampatch run --auto -m package.train 'a b'",
        ),
        ("torchrun train.py -m x", "torchrun -m ampatch run train.py -m x"),
        (
            "lib/torch/distributed/run.py --nproc-per-node 2 train.py",
            "python -m torch.distributed.run --nproc-per-node 2 -m ampatch run train.py",
        ),
        (
            "--auto accelerate launch --num_processes 2 train.py --lr 1",
            "accelerate launch --num_processes 2 -m ampatch run --auto train.py --lr 1",
        ),
        (
            "-m accelerate.commands.launch --cpu train.py",
            "python -m accelerate.commands.launch --cpu -m ampatch run train.py",
        ),
        (
            "deepspeed --num_gpus 2 --module package.train --lr 1",
            "deepspeed --num_gpus 2 --module ampatch run -m package.train --lr 1",
        ),
        (
            "accelerate-launch --cpu -m package.train",
            "accelerate-launch --cpu -m ampatch run -m package.train",
        ),
        ("fabric run --devices 2 train.py", "torchrun [OPTIONS] -m ampatch run SCRIPT [ARGUMENTS]"),
        ("link --standalone train.py", "link --standalone -m ampatch run train.py"),
        (
            "distributed/run.py --standalone train.py",
            "python -m torch.distributed.run --standalone -m ampatch run train.py",
        ),
        *(  # the script is not certain
            (
                f"--auto torchrun {words}",
                "torchrun [OPTIONS] -m ampatch run --auto SCRIPT [ARGUMENTS]",
            )
            for words in (
                "",
                "--standalone tool",
                "--standalone tool data.py",
                "tool data.py",
                "-m --standalone package.train",
                "-m --standalone package.train data.py",
                "--standalone --no-python tool data.py",
                "--standalone -- train.py",
                "--help",
            )
        ),
    ],
)
def test_a_launcher_given_as_the_script(typed, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tool", "")
    (tmp_path / "link").symlink_to(tmp_path / "bin" / "torchrun")
    write(tmp_path / "torch" / "distributed" / "run.py", "")
    (tmp_path / "distributed").symlink_to(tmp_path / "torch" / "distributed")
    with pytest.raises(SystemExit) as stop:
        main.main(["run", *shlex.split(typed)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.rstrip().endswith(f"Expected the launcher first: {expected}")


def test_other_commands_of_a_launchers_program_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main.main(["run", "accelerate", "config"])
    assert "there is no such script" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("explain torchrun --nproc-per-node 2 train.py", "ampatch explain train.py"),
        ("gradients -m torch.distributed.run train.py", "ampatch gradients train.py"),
        ("explain torchrun -m package.train --lr 1", "ampatch explain -m package.train"),
        ("gradients accelerate-launch tool data.py", "ampatch gradients SCRIPT"),
        ("explain accelerate launch --cpu train.py", "ampatch explain train.py"),
        ("sweep torchrun -- train.py --lr 1", "ampatch sweep train.py --nproc-per-node N"),
    ],
)
def test_commands_that_watch_one_process_want_the_script(typed, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(shlex.split(typed))
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err.rstrip().endswith(f"Expected the script that it starts: {expected}")
    )


@pytest.mark.parametrize("rank", ["--local-rank=1", "--local_rank=1"])
@pytest.mark.parametrize(
    "line, own",
    [
        ("RANK run --auto train.py --lr 1", "run --auto train.py"),
        ("run RANK --auto train.py --lr 1", "run --auto train.py"),
        ("run --auto RANK -m train --lr 1", "run --auto -m train"),
        ("RANK explain train.py --lr 1", "explain train.py"),
    ],
)
def test_the_rank_that_a_launcher_hands_over_is_the_scripts(line, own, rank):
    assert _split(line.replace("RANK", rank).split()) == (own.split(), [rank, "--lr", "1"])


def test_under_torchs_old_launcher(tmp_path):
    """It hands the script its rank as an argument; under torchrun: `test_run.py`."""
    write(tmp_path / "train.py", TRAINING)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "1", "--standalone"]
        + ["-m", "ampatch", "run", "--auto", "--dtype", "bfloat16", "train.py", "--lr", "1"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").read_text() == "torch.bfloat16 --local-rank=0 --lr 1\n"
