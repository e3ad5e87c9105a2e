"""The Hugging Face Trainer, which calls DeepSpeed itself: one line before the model is built.

    deepspeed examples/hf_trainer.py

`install` tunes both calls of DeepSpeed that the Trainer makes, `zero.Init` in `from_config` or
`from_pretrained` and `initialize` in `train`. The model is a Llama of 0.1M parameters with random weights.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

import autotune_offload

LLAMA = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)


def rows(count: int) -> list[dict[str, Any]]:
    """Sequences in which each token is the one before plus three."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(LLAMA.vocab_size, (count, 1), generator=draw)
    tokens = (starts + 3 * torch.arange(32)) % LLAMA.vocab_size
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    os.chdir(Path(__file__).parent)  # where ds_config_auto.json is
    set_seed(0)

    autotune_offload.install()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed="ds_config_auto.json",
            bf16=True,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            per_device_train_batch_size=2,
            max_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        )
        model = AutoModelForCausalLM.from_config(LLAMA)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows(40))
        trainer.train()
        if trainer.is_world_process_zero():
            print(autotune_offload.report(trainer.model_wrapped).text())
            for entry in trainer.state.log_history:
                if "loss" in entry:
                    print(f"step {entry['step']:2d}   loss {entry['loss']:.9g}")


if __name__ == "__main__":
    main()
