"""transformers' Trainer with ampatch: what the law of frameworks does not ask."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from transformers import Seq2SeqTrainer, Trainer

import ampatch
from ampatch.integrations.transformers import AmpatchTrainerMixin

WORDS = 20


class Ours(AmpatchTrainerMixin, Seq2SeqTrainer):
    """With ampatch."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """accelerate's state is the process's, and transformers 4 writes bf16=True into a variable."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)


def sentences() -> list[dict[str, torch.Tensor]]:
    """The first word says the label."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS, (32, 8), generator=generator)
    labels = torch.randint(2, (32,), generator=generator)
    words[:, 0] = labels + 3
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def texts() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in sentences()]


def bert() -> transformers.BertForSequenceClassification:
    """One layer, no dropout, in evaluation mode as `from_pretrained` gives it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rest = {"intermediate_size": 32, "max_position_embeddings": 8}
    config = transformers.BertConfig(vocab_size=WORDS, **sizes, **drops, **rest)
    return transformers.BertForSequenceClassification(config).eval()


def gpt2() -> transformers.GPT2LMHeadModel:
    """One layer, no dropout; the embedding is the output layer's weight too."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, **ends))


def t5() -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, num_heads=2, dropout_rate=0.0, **ends)
    )


def trainer_of(folder: Path, opt_level: str | None, model: Any = None, **options: Any) -> Trainer:
    """A trainer for eight steps; without an opt level a plain one.

    `options` are arguments of TrainingArguments, or settings of ampatch under `settings`.
    """
    model = bert() if model is None else model
    settings = {"init_scale": 1024.0, **options.pop("settings", {})}
    data = sentences() if isinstance(model, transformers.BertForSequenceClassification) else texts()
    more = options.pop("more", {})
    usual = {"per_device_train_batch_size": 8, "max_steps": 8, "learning_rate": 3e-3}
    usual |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    usual |= {"use_cpu": True, "dataloader_pin_memory": False}
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder), **{**usual, **options}
    )
    data = {"train_dataset": data, "eval_dataset": data}
    if opt_level is None:
        return Seq2SeqTrainer(model, arguments, **data, **more)
    return Ours(model, arguments, **data, **more, opt_level=opt_level, **settings)


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def trained(*args: Any, **options: Any) -> Trainer:
    trainer = trainer_of(*args, **options)
    trainer.train()
    return trainer


bert()  # transformers gives torch.nn.Module a method of its own at the first model: let it

VARIANTS = {
    "clipped": (bert, {"max_grad_norm": 0.1}),
    "items counted": (gpt2, {"gradient_accumulation_steps": 2, "max_steps": 4}),
    "label smoothing": (bert, {"label_smoothing_factor": 0.1}),
    "fused": (bert, {"optim": "adamw_torch_fused"}),
    "adafactor": (t5, {"optim": "adafactor"}),
    "NEFTune": (gpt2, {"neftune_noise_alpha": 5.0}),
    "compiled": (bert, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "checkpointing": (gpt2, {"gradient_checkpointing": True}),
    "reentrant": (
        gpt2,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
}
QUICK = ("clipped", "items counted")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in QUICK]
BOUNDS = {"O1": 0.002, "O2": 0.01}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("variant", [*QUICK, *SLOW])
@pytest.mark.parametrize("level", BOUNDS)
def test_losses_and_norms_are_those_of_float32(variant, level, tmp_path):
    make, options = VARIANTS[variant]
    expected = trained(tmp_path, None, make(), **options)
    actual = trained(tmp_path, level, make(), **options)
    for name in ("loss", "grad_norm") if variant in QUICK else ("loss",):
        assert logged(actual, name) == pytest.approx(logged(expected, name), rel=BOUNDS[level])


def test_a_skipped_step_counts_and_the_learning_rate_waits(tmp_path):
    """The first scale overflows float16 at once, the third does not."""
    skips, rates = [], []

    class Watched(transformers.TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer, **kwargs) -> None:
            skips.append(optimizer.step_was_skipped)
            rates.append(optimizer.param_groups[0]["lr"])

    settings = {"init_scale": 2.0**20, "backoff_factor": 2.0**-6}
    trainer = trained(tmp_path, "O2", settings=settings, more={"callbacks": [Watched()]})
    count = sum(skips)
    assert skips == [True] * count + [False] * (8 - count) and 0 < count < 4
    assert rates[: count + 1] == [3e-3] * (count + 1) and rates[count + 1] < 3e-3
    assert trainer.state.global_step == 8
    assert ampatch.step_counts(trainer.optimizer).taken == 8 - count
    assert not math.isfinite(logged(trainer, "grad_norm")[0])


def test_the_scale_of_a_run_with_fp16_is_taken_and_a_missing_one_is_said(tmp_path, caplog):
    trained(tmp_path, "O1", save_strategy="steps", save_steps=4)
    ampatch.deactivate()
    checkpoint = tmp_path / "checkpoint-4"
    (checkpoint / "ampatch.json").unlink()
    trainer = trainer_of(tmp_path, "O1", max_steps=4)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert "this checkpoint has no loss scale (ampatch.json)" in caplog.text
    assert ampatch.loss_scale() == 1024
    ampatch.deactivate()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))  # it has a scale from now on
    torch.save(scaler.state_dict(), checkpoint / "scaler.pt")
    trainer_of(tmp_path, "O1", max_steps=4).train(resume_from_checkpoint=str(checkpoint))
    assert ampatch.loss_scale() == 256


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("make", [gpt2, t5])
def test_saved_models_have_the_weights_as_they_are(make, level, tmp_path):
    """Tied embeddings stay tied.  transformers 5 loads in the dtype that config.json names."""
    kind = torch.float32 if level == "O2" else torch.float16
    trainer = trained(tmp_path, level, make(), max_steps=2)
    trainer.save_model(str(tmp_path / "trainer"))
    trainer.model.save_pretrained(tmp_path / "model")
    for name in ("trainer", "model"):
        loaded = type(trainer.model).from_pretrained(tmp_path / name, dtype="auto")
        assert loaded.dtype is kind
        for key, value in trainer.model.state_dict().items():
            assert value.dtype is kind  # T5 is loaded with some layers in FP32
            assert torch.equal(loaded.state_dict()[key].to(kind), value), key


def test_evaluation_is_cast_and_leaves_the_weights_to_the_training_after_it(tmp_path):
    """Nothing trains them yet."""
    expected = logged(trained(tmp_path, "O2"))
    ampatch.deactivate()
    untouched = bert().state_dict()  # it seeds the generator, which gives the order of the rows
    trainer = trainer_of(tmp_path, "O2")
    logits = trainer.predict(trainer.eval_dataset).predictions
    assert logits.dtype == "float32"
    assert torch.equal(torch.tensor(logits).half().float(), torch.tensor(logits)), "not cast"
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, untouched[name]), name
    trainer.train()
    assert logged(trainer) == expected
    assert next(trainer.model.parameters()).dtype is torch.float32
    trained_loss = trainer.evaluate()["eval_loss"]
    ampatch.deactivate()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trained_loss, rel=0.01)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_training_goes_on_in_a_second_train_also_after_deactivate(opt_level, tmp_path):
    trainer = trained(tmp_path, opt_level, adam_epsilon=1e-4)  # 1e-8 is 0 in the weights of O3
    scale = ampatch.loss_scale()
    trainer.train()
    assert ampatch.loss_scale() == scale
    ampatch.deactivate()
    assert next(trainer.model.parameters()).dtype is torch.float32
    trainer.train()
    assert (next(trainer.model.parameters()).dtype is torch.float16) is (opt_level == "O3")
    losses = logged(trainer)
    assert len(losses) == 8 and max(losses) < 0.7


def test_generation_while_evaluating_and_after(tmp_path):
    trainer = trained(tmp_path, "O2", t5(), max_steps=2, predict_with_generate=True)
    results = trainer.predict(trainer.eval_dataset, max_new_tokens=4).predictions
    words = trainer.eval_dataset[0]["input_ids"][None]
    tokens = trainer.model.generate(words, max_new_tokens=4, do_sample=False)
    assert tokens[0].tolist() == results[0].tolist()[: tokens.shape[1]]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"bf16": True}, "bf16=True"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"settings": {"opt_level": "fast"}}, "unknown opt level"),
        ({"settings": {"los_scale": 1.0}}, "los_scale"),
        ({"variable": "bf16"}, "mixed_precision='bf16'"),
    ],
)
def test_other_mixed_precision_and_wrong_settings_are_refused_by_name(
    options, said, tmp_path, monkeypatch
):
    if "variable" in options:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", options.pop("variable"))
    level = options.get("settings", {}).pop("opt_level", "O1")
    with pytest.raises((ValueError, TypeError, ampatch.AmpatchError), match=said):
        trainer_of(tmp_path, level, **options)


def test_the_mixin_behind_the_trainer_is_refused():
    with pytest.raises(TypeError, match="comes after the Trainer"):
        type("Wrong", (Trainer, AmpatchTrainerMixin), {})


def _trained_twice(rank: int, folder: str) -> tuple[list[float], bool]:
    from runs_with_transformers import ranks_in_the_environment

    with ranks_in_the_environment():
        trainer = trained(Path(folder), "O2", max_steps=2, ddp_backend="gloo")
        first = logged(trainer)
        ampatch.deactivate()
        trainer.train()
        weights = [value.double().sum().item() for value in trainer.model.state_dict().values()]
        return [*first, *logged(trainer), *weights], trainer.model_wrapped is not trainer.model


@pytest.mark.slow
def test_two_ranks_train_again_after_deactivate(ranks, tmp_path):
    """O2 refuses a model in DDP, so the trainer wraps it anew."""
    (first, one_wrapped), (other, other_wrapped) = ranks(_trained_twice, str(tmp_path))
    assert first == other and one_wrapped and other_wrapped
