"""Trains a byte model of two gated_delta layers on a megabyte of text on a CPU, then lets it write with a state that does not grow.

    python examples/train_bytes.py               # 300 steps through Tercet
    python examples/train_bytes.py --compare     # and 300 through the fallback of transformers: both losses, and the rule's time in both

The model is plain PyTorch: an embedding, two blocks of gated delta mixing and an MLP, each after an RMSNorm, and a linear head. The rule is
tercet.torch.attend, whose gradients autograd knows, or transformers' torch_chunk_gated_delta_rule, which is PyTorch code too and what such models
run on a CPU. Both start from the same weights and see the same bytes in the same order.

How the times are measured: both rules run inside `Timed`, an autograd function that computes the rule's own backward pass within its backward. So
the spans "rule forward" and "rule backward" of torch's profiler are all of the rule and nothing else. How many times less Tercet takes depends on
how many bytes are read at once, for the fallback's backward pass grows with their square.

The text is what every Python brings along: pydoc_data/topics.py and other files of the standard library (PSF licence).
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import tercet
import tercet.torch

WIDTH, HEADS, HEAD_DIM, LAYERS = 128, 2, 64, 2
TOKENS = 4096

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, T, H, D], log_decay and beta [B, T, H] to [B, T, H, D]


def rule_of_tercet(threads: int) -> Rule:
    def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return tercet.torch.attend(q, k, v, rule="gated_delta", log_decay=log_decay, beta=beta, feature_map="l2_norm", threads=threads)

    return rule


def rule_of_transformers() -> Rule:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, use_qk_l2norm_in_kernel=True)[0]

    return rule


class Timed(torch.autograd.Function):
    """A rule, its forward and its backward pass each a span of the profiler."""

    @staticmethod
    def forward(ctx, rule: Rule, *inputs: Tensor) -> Tensor:
        with record_function("rule forward"), torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_() for x in inputs]
            ctx.out = rule(*ctx.inputs)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        with record_function("rule backward"):
            gradients = torch.autograd.grad(ctx.out, ctx.inputs, grad)
        ctx.inputs = ctx.out = None
        return (None, *gradients)


class Memory:
    """What a layer remembers of one text: the state, and the convolution's last three inputs. Its size is the same after every token."""

    def __init__(self) -> None:
        self.state = tercet.State("gated_delta", heads=HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, feature_map="l2_norm", library="torch")
        self.conv = torch.zeros(1, 3 * WIDTH, 3)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.conv.nbytes


class GatedDelta(nn.Module):
    """Gated delta mixing: a short causal convolution, the rule, a gated norm."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.qkv, self.gate, self.out = (nn.Linear(WIDTH, width, bias=False) for width in (3 * WIDTH, WIDTH, WIDTH))
        self.decay_and_beta = nn.Linear(WIDTH, 2 * HEADS)
        self.conv = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 4, groups=3 * WIDTH)
        self.log_rate = nn.Parameter(torch.linspace(-4, 0, HEADS))  # the first head forgets slowly, the last one fast
        self.norm = nn.RMSNorm(HEAD_DIM, eps=1e-6)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        qkv = self.qkv(x).mT
        before = qkv.new_zeros(x.shape[0], 3 * WIDTH, 3) if memory is None else memory.conv
        qkv = torch.cat([before, qkv], dim=-1)
        q, k, v = F.silu(self.conv(qkv)).mT.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        decay, beta = self.decay_and_beta(x).chunk(2, dim=-1)
        log_decay, beta = -self.log_rate.exp() * F.softplus(decay), beta.sigmoid()
        if memory is None:
            out = self.rule(q, k, v, log_decay, beta)
        else:
            memory.conv = qkv[..., -3:].clone()
            if x.shape[1] == 1:
                out = memory.state.step(q[:, 0], k[:, 0], v[:, 0], log_decay=log_decay[:, 0], beta=beta[:, 0])[:, None]
            else:
                out = memory.state.prefill(q, k, v, log_decay=log_decay, beta=beta)
        return self.out((self.norm(out) * F.silu(self.gate(x).unflatten(-1, (HEADS, HEAD_DIM)))).flatten(-2))


class ByteModel(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.mixing = nn.ModuleList(GatedDelta(rule) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, memories: list[Memory] | None = None) -> Tensor:
        """Logits [B, T, 256] of the next byte after each of tokens [B, T]; with memories, which B = 1 needs, the text goes on from there."""
        x = self.embedding(tokens)
        for i in range(LAYERS):
            x = x + self.mixing[i](self.norms[2 * i](x), memories and memories[i])
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def text(size: int = 1_000_000) -> bytes:
    """The standard library's topics of help, then its modules by name, up to `size` bytes."""
    library = pathlib.Path(os.__file__).parent
    found = bytearray()
    for path in (library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))):
        found += path.read_bytes()
        if len(found) >= size:
            break
    return bytes(found[:size])


def pieces(data: bytes, steps: int, tokens: int, seed: int = 0) -> Iterator[Tensor]:
    """Pieces of the text at random places, [1, tokens + 1]."""
    rng, array = np.random.default_rng(seed), np.frombuffer(data, np.uint8)
    for _ in range(steps):
        start = rng.integers(0, len(array) - tokens)
        yield torch.from_numpy(array[None, start : start + tokens + 1].astype(np.int64))


def train(rule: Rule, data: bytes, steps: int, tokens: int = TOKENS, progress: bool = False) -> tuple[ByteModel, list[float]]:
    """A trained model and its loss at every step."""
    torch.manual_seed(0)
    model, losses, start = ByteModel(rule), [], time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2)
    for step, piece in enumerate(pieces(data, steps, tokens)):
        loss = F.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if progress and (step % 25 == 0 or step == steps - 1):
            print(f"  step {step:3}  loss {losses[-1]:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model, losses


def rule_seconds(rule: Rule, data: bytes, tokens: int = TOKENS, steps: int = 3) -> tuple[float, float]:
    """Seconds of a training step that the rule takes, forward and backward, by torch's profiler: means over `steps` steps, after one not counted."""

    def timed(*inputs: Tensor) -> Tensor:
        return Timed.apply(rule, *inputs)

    train(timed, data, 1, tokens)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(timed, data, steps, tokens)
    spans = {event.key: event.cpu_time_total / 1e6 / steps for event in found.key_averages()}
    return spans["rule forward"], spans["rule backward"]


@torch.inference_mode()
def write(model: ByteModel, prompt: bytes, count: int, temperature: float = 0.7, seed: int = 0) -> tuple[bytes, int, int]:
    """What the model writes after `prompt`, which is read at once, byte by byte; and the memories' size after the prompt and at the end."""
    memories, random = [Memory() for _ in range(LAYERS)], torch.Generator().manual_seed(seed)
    logits = model(torch.tensor([list(prompt)]), memories)[:, -1]
    size, written = sum(memory.nbytes for memory in memories), bytearray()
    for _ in range(count):
        token = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=random)
        written.append(int(token))
        logits = model(token, memories)[:, -1]
    return bytes(written), size, sum(memory.nbytes for memory in memories)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte model of two gated_delta layers and lets it write.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compare", action="store_true", help="train through the fallback of transformers too, and measure both")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = text()

    print(f"{len(data)} bytes of text, {options.steps} steps of {TOKENS} bytes through Tercet")
    rule = rule_of_tercet(options.threads)
    model, losses = train(rule, data, options.steps, progress=True)
    if options.compare:
        print("through torch_chunk_gated_delta_rule of transformers")
        fallback = rule_of_transformers()
        _, others = train(fallback, data, options.steps, progress=True)
        apart = max(abs(one - other) / other for one, other in zip(losses, others, strict=True))
        print(f"the losses differ by at most {100 * apart:.3f} % in any step")
        print("the rule in one step, forward + backward, ms")
        for tokens in (TOKENS // 8, TOKENS // 4, TOKENS // 2, TOKENS):
            ours, theirs = rule_seconds(rule, data, tokens), rule_seconds(fallback, data, tokens)
            times = f"Tercet {1e3 * ours[0]:.1f} + {1e3 * ours[1]:.1f}, transformers {1e3 * theirs[0]:.1f} + {1e3 * theirs[1]:.1f}"
            print(f"  {tokens} bytes at once: {times}, {sum(theirs) / sum(ours):.1f} times as long")

    prompt = b'The "for" statement is used to'
    written, first, last = write(model, prompt, 300)
    print(f"{prompt.decode()}{written.decode(errors='replace')}")
    print(f"({first} bytes of memory after the prompt, {last} after {len(written)} bytes more)")


if __name__ == "__main__":
    main()
