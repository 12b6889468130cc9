"""What a call from Python costs above the library's own time: one token of one small head, where there is little else to see.

    python bench/overhead.py

Prints microseconds, medians of rounds that take turns: gated_delta, five arrays, K = V = 16, one thread. The library's own time is that of `tercet bench`
for the same call. Set up as bench/requirements.txt says, with Tercet itself installed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import tercet

ROUNDS, CALLS, DIM = 15, 2000, 16


def library_us() -> float:
    sizes = ["--tokens", "1", "--heads", "1", "--key-dim", str(DIM), "--value-dim", str(DIM), "--threads", "1"]
    run = subprocess.run([sys.executable, "-m", "tercet", "bench", "--rule", "gated_delta", *sizes, "--json"], capture_output=True, check=True)
    return json.loads(run.stdout)["rows"][0]["ns_per_token_head"] / 1000


def one_round(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def numpy_calls() -> tuple[dict[str, Callable[[], object]], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 1, DIM)).astype(np.float32) for _ in range(3))
    log_decay, beta = -rng.random((1, 1, 1)).astype(np.float32), rng.random((1, 1, 1)).astype(np.float32)
    call = {"NumPy": lambda: tercet.attend(q, k, v, rule="gated_delta", log_decay=log_decay, beta=beta, threads=1)}
    return call, [q, k, v, log_decay, beta]


def torch_calls(arrays: list[np.ndarray]) -> dict[str, Callable[[], object]]:
    import torch

    import tercet.torch

    q, k, v, log_decay, beta = (torch.from_numpy(array) for array in arrays)
    library = torch.library.Library("tercet_overhead", "DEF")
    library.define("empty(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta) -> Tensor")
    library.impl("empty", lambda q, k, v, log_decay, beta: torch.empty_like(v), "CPU")
    torch.library.register_autograd("tercet_overhead::empty", lambda ctx, grad: (grad,) * 5, setup_context=lambda ctx, inputs, output: None, lib=library)
    learnt = [tensor.clone().requires_grad_() for tensor in (q, k, v, log_decay, beta)]

    def attend(attend, q, k, v, log_decay, beta):
        return attend(q, k, v, rule="gated_delta", log_decay=log_decay, beta=beta, threads=1)

    keep = library  # the operator is gone with it
    return {
        "torch": lambda: attend(tercet.attend, q, k, v, log_decay, beta),
        "torch, tercet.torch": lambda: attend(tercet.torch.attend, q, k, v, log_decay, beta),
        "torch, recording": lambda: attend(tercet.torch.attend, *learnt),
        "an empty operator, recording": lambda: keep and torch.ops.tercet_overhead.empty(*learnt),
    }


def main() -> None:
    calls, arrays = numpy_calls()
    try:
        calls |= torch_calls(arrays)
    except ImportError as error:
        print(f"left out: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in calls}
    own = []
    for _ in range(ROUNDS):
        own.append(library_us())
        for name, call in calls.items():
            times[name].append(one_round(call))
    library = statistics.median(own)
    print(f"{'':<30} {'us a call':>10} {'above the library':>18}")
    print(f"{'the library':<30} {library:>10.2f}")
    for name, rounds in times.items():
        median = statistics.median(rounds)
        print(f"{name:<30} {median:>10.2f} {median - library:>18.2f}")


if __name__ == "__main__":
    main()
