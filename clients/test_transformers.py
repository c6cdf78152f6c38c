"""transformers' Trainer with `half_precision_backend="apex"`, on a model made from a config.

Trainer calls `amp.initialize`, `scale_loss` and `master_params` (for clipping) itself. It runs as
it is on a CPU: `use_cpu=True` is all that is set.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from apex import amp
from matrix_kernels import Kernels
from small_task import assert_close, assert_falls, half_parameters
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ampatch


def bert() -> BertForSequenceClassification:
    """Two layers, no dropout."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
        )
    )


def _sentences(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 20, (rows, 8), generator=generator)
    labels = torch.randint(2, (rows,), generator=generator)
    tokens[:, 0] = labels  # the first word says it
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(tokens, labels, strict=True)
    ]


SENTENCES = _sentences()


class Losses(TrainerCallback):
    """Every step's loss, as Trainer logs it, and the loss scale to begin with."""

    def __init__(self, scale: float | None) -> None:
        self.scale = scale
        self.seen: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.scale is not None:
            amp._amp_state.loss_scalers[0]._loss_scale = self.scale

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self.seen.append(logs["loss"])


class Run:
    """A Trainer, and the losses it logged."""

    def __init__(
        self,
        folder: Path,
        opt_level: str | None,
        steps: int = 24,
        scale: float | None = 1024.0,  # does not overflow
        **options,
    ) -> None:
        backend = {"fp16": True, "half_precision_backend": "apex", "fp16_opt_level": opt_level}
        self.arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=16,
            max_steps=steps,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            **{"save_strategy": "no", "max_grad_norm": 1.0, **options},
            **(backend if opt_level else {}),
        )
        self.log = Losses(scale if opt_level else None)
        data = {"train_dataset": SENTENCES, "eval_dataset": SENTENCES}
        self.trainer = Trainer(bert(), self.arguments, **data, callbacks=[self.log])

    def train(self, **options) -> list[float]:
        self.trainer.train(**options)
        return self.log.seen


@pytest.fixture(params=["float16", "bfloat16"])
def half(request, monkeypatch) -> torch.dtype:
    monkeypatch.setenv("AMPATCH_DTYPE", request.param)
    return getattr(torch, request.param)


def test_training(opt_level, half, tmp_path):
    expected = Run(tmp_path, None).train()
    run = Run(tmp_path, opt_level)
    with Kernels() as kernels:
        losses = run.train()
    assert_falls(losses)
    assert_close(losses, expected, half)
    assert kernels.dtypes() == {half}
    assert half_parameters(run.trainer.model, half) == []


def test_the_first_scale_overflows_at_O2(tmp_path):
    """65536 is too much for this model: that one step is skipped."""
    run = Run(tmp_path, "O2", scale=None)
    assert_falls(run.train())
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 23}


def test_an_optimizer_from_apex_and_accumulation(opt_level, tmp_path):
    """Trainer passes the sum of the micro-batches' losses to `scale_loss`, one at a time."""
    options = {"optim": "adamw_apex_fused", "gradient_accumulation_steps": 2}
    run = Run(tmp_path, opt_level, steps=20, **options)
    assert_falls(run.train())
    assert type(run.trainer.optimizer).__module__.startswith("ampatch.compat.apex")


def test_evaluation_and_what_is_saved(opt_level, tmp_path):
    """Metrics come out as in FP32, and the saved weights are FP32's."""
    run = Run(tmp_path, opt_level)
    run.train()
    found = run.trainer.predict(SENTENCES)
    run.trainer.save_model(str(tmp_path))
    plain = BertForSequenceClassification.from_pretrained(tmp_path)
    assert {param.dtype for param in plain.parameters()} == {torch.float32}
    ampatch.deactivate()
    tokens = torch.stack([row["input_ids"] for row in SENTENCES])
    with torch.no_grad():
        logits = plain.eval()(tokens).logits
    torch.testing.assert_close(torch.tensor(found.predictions), logits, rtol=0.02, atol=0.02)
    labels = torch.stack([row["labels"] for row in SENTENCES])
    assert (logits.argmax(1) == labels).float().mean() > 0.9


def test_resuming(opt_level, tmp_path):
    """Trainer does not save the loss scale; what it saves goes on as if never stopped."""
    saving = {"save_strategy": "steps", "save_steps": 8}
    whole = Run(tmp_path, opt_level, steps=16, **saving).train()
    ampatch.deactivate()
    again = Run(tmp_path, opt_level, steps=16, **saving)
    assert again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8")) == whole[8:]


def test_evaluation_while_training_and_the_best_model(opt_level, tmp_path):
    """Trainer evaluates between steps, and ends with the best checkpoint's weights loaded."""
    run = Run(
        tmp_path,
        opt_level,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst, which is not the last
    )
    run.train()
    best = BertForSequenceClassification.from_pretrained(run.trainer.state.best_model_checkpoint)
    assert run.trainer.state.best_global_step == 4
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(
        run.trainer.state.best_metric, rel=1e-2
    )
    for name, value in run.trainer.model.state_dict().items():
        assert torch.equal(value, best.state_dict()[name]), name


def test_training_twice(opt_level, tmp_path):
    """The second `train` initializes the same model again."""
    run = Run(tmp_path, opt_level)
    run.train()
    first = len(run.log.seen)
    run.train()
    second = run.log.seen[first:]
    assert len(second) == first and max(second) < 0.5 * run.log.seen[0]


SCRIPT = str(Path(__file__).parent / "scripts" / "finetune.py")


def script(*command: str, succeeds: bool = True) -> str:
    """Run `python COMMAND` in a process of its own; what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode == 0) is succeeds, done.stderr
    return done.stderr


def results(folder: Path) -> list[dict]:
    """What each process of scripts/finetune.py left."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_ampatch_run(opt_level, tmp_path):
    script("-m", "ampatch", "run", SCRIPT, str(tmp_path), opt_level)
    (found,) = results(tmp_path)
    assert_falls(found["losses"])
    assert (found["computed"], found["dtypes"]) == (["torch.float16"], ["torch.float32"])


def test_two_processes_under_torchrun(opt_level, tmp_path):
    """Trainer wraps the model in DistributedDataParallel after `amp.initialize`."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script(*torchrun, "-m", "ampatch", "run", SCRIPT, str(tmp_path), opt_level)
    first, second = results(tmp_path)
    assert (first["rank"], second["rank"], first["world"]) == (0, 1, 2)
    assert_falls(first["losses"])
    assert first["weights"] == second["weights"]


def test_without_ampatch_the_script_stops(tmp_path):
    assert "APEX is not installed" in script(SCRIPT, str(tmp_path), "O1", succeeds=False)
