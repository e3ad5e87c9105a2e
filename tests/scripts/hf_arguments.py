"""The Trainer with its ds_config as a dict with "auto" in it, tuned by the call or the process around it."""

import json
import os
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

import autotune_offload

WAY = sys.argv[1]
CONFIG = Path(autotune_offload.__file__).parents[1] / "examples" / "ds_config_auto.json"

config = json.loads(CONFIG.read_text())
config["steps_per_print"] = float("inf")
if WAY == "tune_config":
    given = autotune_offload.tune_config(config)
elif WAY == "install":
    autotune_offload.install()
    given = config
else:
    given = config
deepspeed.init_distributed()
set_seed(0)
llama = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2
)
tokens = (torch.arange(40)[:, None] * 5 + 3 * torch.arange(16)) % 96
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=given,
        bf16=True,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="constant",
    )
    model = AutoModelForCausalLM.from_config(llama)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens]
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"rank {os.environ['RANK']} step {entry['step']} loss {entry['loss']:.9g}")
    try:
        trainer.train()
    except AttributeError as error:
        print(f"second train: {type(error).__name__}: {error}")
    else:
        print("second train: done")
