"""QLoRA: adapters on a Hugging Face model whose weights are NVFP4, trained with noise (AQN).

    python examples/qlora_nvfp4_aqn.py                           # a tiny model, seconds
    python examples/qlora_nvfp4_aqn.py --model .cache/smollm2    # SmolLM2-135M-Instruct

Trains on seven plays, evaluates on The Tempest, saves the adapter as PEFT does, and merges it.
"""

from __future__ import annotations

import argparse

import torch
from shakespeare import windows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tilewright.integrations.transformers import accelerate
from tilewright.nn import add_lora, merge_and_unload, quantize_model, save_adapter, set_noise
from tilewright.ops import AQN

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.1,
)
ADAPTER = "outputs/qlora_nvfp4_aqn/adapter"


def mib(model: torch.nn.Module) -> float:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors) / 2**20


@torch.no_grad()
def loss_on(model: torch.nn.Module, rows: torch.Tensor) -> float:
    model.eval()  # in evaluation weights have no noise
    loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hub id; default: a tiny random Llama")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = AutoModelForCausalLM.from_config(TINY), None
    train = windows("train", 128, tokenizer)
    heldout = windows("heldout", 128, tokenizer)[::50]

    dense = mib(model)
    names = quantize_model(model, "nvfp4")  # in place: 4-bit codes, a scale for 16 of them
    print(f"{len(names)} projections in NVFP4: {dense:.2f} MiB -> {mib(model):.2f} MiB")
    add_lora(model, rank=16, alpha=32)  # and freezes everything else
    accelerate(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    print(f"trained: {sum(p.numel() for p in parameters)} parameters of the adapters")

    optimizer = torch.optim.AdamW(parameters, 5e-4 if args.model else 1e-2)
    before = loss_on(model, heldout)
    for step in range(args.steps):
        alpha = 0.5 * (1 - step / args.steps)  # in units of the local quantization step
        set_noise(model, AQN(alpha, seed=0, step=step))  # other values in each step, none stored
        rows = train[torch.randint(len(train), (4,))]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    set_noise(model, None)
    after = loss_on(model, heldout)
    print(f"held-out loss {before:.4f} -> {after:.4f} in {args.steps} steps")

    save_adapter(model, ADAPTER)  # what `peft` and vLLM load
    merge_and_unload(model)  # plain layers, for `model.save_pretrained`
    merged = loss_on(model, heldout)
    print(f"adapter in {ADAPTER}; held-out loss of the merged model {merged:.4f}")
    if not (after < before and abs(merged - after) < 1e-3 * after):
        raise SystemExit("the loss did not fall, or merging changed it")


if __name__ == "__main__":
    main()
