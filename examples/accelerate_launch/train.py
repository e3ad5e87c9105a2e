"""A training script for accelerate that knows nothing of autotune-offload.

    cd examples/accelerate_launch
    autotune-offload run -- accelerate launch --config_file accelerate.yaml train.py

`accelerate launch` takes the ds_config from its own file, so there is no place for it in the script; `run` tunes
it from the outside.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, set_seed
from transformers import AutoModelForCausalLM, LlamaConfig


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    llama = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(llama)
    tokens = (torch.arange(40)[:, None] * 7 + 3 * torch.arange(32)) % llama.vocab_size
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2)
    model, _, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    for step, (batch,) in enumerate(loader, start=1):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.print(f"step {step:2d}   loss {loss.item():.9g}")
        if step == 10:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
