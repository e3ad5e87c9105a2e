"""A causal language model from a folder of saved weights, trained by a plain DeepSpeed loop."""

import json
import os
import sys
import tempfile

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

DS = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def save_pretrained(folder):
    torch.manual_seed(0)
    shape = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)


def main(steps=5):
    deepspeed.init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder)
        keep_alive = HfDeepSpeedConfig(DS)  # makes from_pretrained build the model under zero.Init
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = json.dumps(DS)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DS)[0]
    assert json.dumps(DS) == before
    ids = (torch.arange(24)[None] * 5 + int(os.environ["RANK"])) % 96
    for step in range(steps):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        print(f"rank {engine.global_rank} step {step} loss {loss.item():.9g}")
    del keep_alive


if __name__ == "__main__":
    sys.exit(main())
