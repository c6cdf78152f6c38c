"""A script for transformers as one writes it, with apex and without a word of ampatch.

    ampatch run finetune.py FOLDER OPT_LEVEL
    torchrun --nproc-per-node 2 -m ampatch run finetune.py FOLDER OPT_LEVEL

Ends with FOLDER/RANK.json: the losses, the process's number among how many, the dtypes of the
pooler's results and of the weights, and a sum of the weights, which has to be every process's.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

folder, opt_level = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)

tokens = torch.randint(2, 20, (64, 8))
labels = torch.randint(2, (64,))
tokens[:, 0] = labels  # the first word says it
data = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=12,
    )
)
computed: set[torch.dtype] = set()
model.bert.pooler.dense.register_forward_hook(lambda part, args, made: computed.add(made.dtype))
arguments = TrainingArguments(
    output_dir=str(folder),
    use_cpu=True,
    fp16=True,
    half_precision_backend="apex",
    fp16_opt_level=opt_level,
    per_device_train_batch_size=8,
    num_train_epochs=6,
    learning_rate=3e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()

result = {
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "rank": arguments.process_index,
    "world": arguments.world_size,
    "computed": sorted(map(str, computed)),
    "dtypes": sorted({str(param.dtype) for param in model.parameters()}),
    "weights": sum(value.double().sum().item() for value in model.state_dict().values()),
}
(folder / f"{arguments.process_index}.json").write_text(json.dumps(result))
trainer.accelerator.end_training()  # gloo's threads must end before the interpreter does
