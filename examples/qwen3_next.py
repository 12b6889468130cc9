"""A model of Qwen3-Next's shape, with random weights, generates on a CPU: as transformers does it, and with Tercet in the place of its slow fallback.

    python examples/qwen3_next.py [--layers 4] [--prompt 1024] [--tokens 64] [--threads N]

Prints the time of reading the prompt and of each token after it, without Tercet and with it, and whether the tokens are the same. Of four layers
three are gated delta layers, with 16 heads of q and k and 32 of v, of 128 channels, as the real model has them; the fourth is attention. All else is
small.
`tercet.transformers.enable()` is all that a program of your own needs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import tercet.transformers


def model(layers: int = 4, width: int = 256, seed: int = 0) -> Qwen3NextForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
        initializer_range=0.1,
    )
    return Qwen3NextForCausalLM(config).eval()


class Clock:
    """What `generate` shows the prompt and each token to: notes when."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def generate(model: Qwen3NextForCausalLM, prompt: torch.Tensor, count: int) -> tuple[torch.Tensor, float, float]:
    """`count` tokens [B, count] after prompt [B, T], each the one of the largest logit; milliseconds until the first, and between two (median)."""
    clock, lengths = Clock(), {"max_new_tokens": count, "min_new_tokens": count}
    mask = torch.ones_like(prompt)
    tokens = model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, streamer=clock, **lengths)
    spans = [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:])]
    return tokens[:, prompt.shape[1] :], spans[0], statistics.median(spans[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="A model of Qwen3-Next's shape generates with and without Tercet.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate, at least 2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    qwen = model(options.layers)
    prompt = torch.randint(0, 1024, (1, options.prompt), generator=torch.Generator().manual_seed(1))
    generate(qwen, prompt[:, :64], 2)  # what happens once happens here
    plain, plain_first, plain_next = generate(qwen, prompt, options.tokens)
    with tercet.transformers.enable(qwen) as report:
        generate(qwen, prompt[:, :64], 2)
        ours, our_first, our_next = generate(qwen, prompt, options.tokens)
        print(report)

    print(f"{'':22}{'without':>12}{'with Tercet':>14}")
    print(f"{f'prompt of {options.prompt} tokens':22}{plain_first:9.1f} ms{our_first:11.1f} ms")
    print(f"{'each token after it':22}{plain_next:9.2f} ms{our_next:11.2f} ms")
    print("the tokens are the same:", torch.equal(plain, ours))


if __name__ == "__main__":
    main()
