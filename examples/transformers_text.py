"""Train a small GPT-2 with transformers' Trainer: a mixin turns ampatch on.

    python examples/transformers_text.py --opt-level O2 --dtype bfloat16

The text is that of a module of the standard library, and the model is made here: nothing is
downloaded.
"""

import inspect
import statistics
import tempfile

import torch
from common import ADAM_EPS, options, settings
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ampatch as amp
from ampatch.integrations.transformers import AmpatchTrainerMixin

LENGTH = 64
ASCII = 128


class MixedPrecisionTrainer(AmpatchTrainerMixin, Trainer):
    """The Trainer, with `opt_level`, `dtype` and the other settings of `ampatch.initialize`."""


def rows():
    """Windows of characters; a language model's labels are its inputs."""
    codes = bytearray(inspect.getsource(statistics).encode("ascii", errors="replace"))
    tokens = torch.frombuffer(codes, dtype=torch.uint8).long()
    windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


def main():
    args = options("transformers with mixed precision", epochs=2, lr=3e-3, batch_size=16)
    dataset = rows()
    cut = len(dataset) * 9 // 10
    config = GPT2Config(vocab_size=ASCII, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            adam_epsilon=ADAM_EPS,
            max_grad_norm=1.0,
            use_cpu=args.device == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **({} if args.seed is None else {"seed": args.seed}),
        )
        trainer = MixedPrecisionTrainer(
            GPT2LMHeadModel(config),
            arguments,
            train_dataset=dataset[:cut],
            eval_dataset=dataset[cut:],
            **settings(args),
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    amp.log_metrics(heldout_loss=loss)
    print(f"held-out loss {loss:.4f} nats a character")


if __name__ == "__main__":
    main()
