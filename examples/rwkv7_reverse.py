"""A trained RWKV-7 of two layers that reverses digits, in NumPy and Tercet: it reads 12345, and goes on 54321#.

    python examples/rwkv7_reverse.py [DIGITS]                # reads the digits in chunks, then writes token by token
    python examples/rwkv7_reverse.py --measure [--strings N]  # 1 to 60 digits, N strings each, in every form and by generation

The layers remember by the rule `rwkv7`: S_t = D_t S_{t-1} + w_t (r_t' S_{t-1}) + k_t v_t', o_t = S_t' q_t. All else is a few lines of NumPy. What is
read at once may go through any of the three forms, for they are the same function; what is written goes through steps of a `tercet.State`, whose size
the number of tokens doesn't change. examples/README.md says where the weights come from.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time

import numpy as np

import tercet

WEIGHTS = pathlib.Path(__file__).parent / "data" / "rwkv7_reverse.safetensors"
LETTERS = "0123456789,#"
WIDTH, HEADS, HEAD_DIM, LAYERS = 32, 2, 16, 2


def read_safetensors(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """A file of float32 tensors: the length of a JSON header, the header, then the numbers it gives the places of."""
    data = pathlib.Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[begin + first : begin + last], "<f4").reshape(entry["shape"])
    return tensors


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def normalized(x: np.ndarray, eps: float) -> np.ndarray:
    """Mean 0 and variance 1 over the last axis."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


class Model:
    """The model and what it remembers of `streams` texts: per layer a state, and each mixing's last token."""

    def __init__(self, weights: dict[str, np.ndarray], streams: int = 1) -> None:
        self.weights = weights
        self.states = [tercet.State("rwkv7", streams=streams, heads=HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM) for _ in range(LAYERS)]
        self.last = {part: np.zeros((streams, 1, WIDTH), np.float32) for i in (1, 2) for part in (f"rwkv{i}", f"ffn{i}")}

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states) + sum(last.nbytes for last in self.last.values())

    def read(self, tokens: np.ndarray, form: str = "automatic", chunk: int | None = None) -> np.ndarray:
        """Goes on with tokens [streams, T] and returns logits [streams, T, 12] of each one's next."""
        w = self.weights
        x, v_first = w["e.weight"][tokens], None
        for i in (1, 2):
            update, v_first = self.time_mix(i, self.layer_norm(f"ln{i}a", x), v_first, form, chunk)
            x = x + update + w[f"rosa{i}.o.bias"]
            x = x + self.channel_mix(f"ffn{i}", self.layer_norm(f"ln{i}b", x))
        return self.layer_norm("lno", x) @ w["o.weight"].T + w["o.bias"]

    def layer_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return normalized(x, 1e-5) * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def shifted(self, part: str, x: np.ndarray) -> np.ndarray:
        """Each token's predecessor."""
        before = np.concatenate([self.last[part], x[:, :-1]], axis=1)
        self.last[part] = x[:, -1:]
        return before

    def time_mix(self, i: int, x: np.ndarray, v_first: np.ndarray | None, form: str, chunk: int | None) -> tuple[np.ndarray, np.ndarray]:
        w = {name.removeprefix(f"rwkv{i}."): tensor for name, tensor in self.weights.items() if name.startswith(f"rwkv{i}.")}
        before = self.shifted(f"rwkv{i}", x)
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * w[f"x_{letter}"] for letter in "rwkvag")
        r, k, v = x_r @ w["receptance.weight"].T, x_k @ w["key.weight"].T, x_v @ w["value.weight"].T
        log_decay = -math.exp(-0.5) * sigmoid(w["w0"] + np.tanh(x_w @ w["w1"]) @ w["w2"])
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * sigmoid(w["v0"] + x_v @ w["v1"] @ w["v2"])
        rate = sigmoid(w["a0"] + x_a @ w["a1"] @ w["a2"])
        gate = sigmoid(x_g @ w["g1"]) @ w["g2"]
        remove = self.heads(k * w["k_k"])
        remove = remove / np.maximum(np.linalg.norm(remove, axis=-1, keepdims=True), 1e-12)
        k = k * (1 + (rate - 1) * w["k_a"])

        r, k, v, log_decay, rate = (self.heads(array) for array in (r, k, v, log_decay, rate))
        state, gates = self.states[i - 1], {"log_decay": log_decay, "remove": -remove, "write": remove * rate}
        if x.shape[1] == 1:
            out = state.step(r[:, 0], k[:, 0], v[:, 0], **{name: array[:, 0] for name, array in gates.items()})[:, None]
        else:
            out = state.prefill(r, k, v, **gates, form=form, chunk=chunk)

        out = normalized(out, 64e-5).reshape(x.shape) * w["ln_x.weight"] + w["ln_x.bias"]
        out = out + ((r * k * w["r_k"]).sum(axis=-1, keepdims=True) * v).reshape(x.shape)
        return (out * gate) @ w["output.weight"].T, v_first

    def channel_mix(self, part: str, x: np.ndarray) -> np.ndarray:
        mixed = x + (self.shifted(part, x) - x) * self.weights[f"{part}.x_k"]
        return np.maximum(mixed @ self.weights[f"{part}.key.weight"].T, 0) ** 2 @ self.weights[f"{part}.value.weight"].T

    @staticmethod
    def heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], HEADS, HEAD_DIM)


def encode(texts: list[str]) -> np.ndarray:
    """Texts of one length as tokens [len(texts), T]."""
    return np.array([[LETTERS.index(letter) for letter in text] for text in texts])


def decode(tokens: np.ndarray) -> list[str]:
    return ["".join(LETTERS[token] for token in row) for row in tokens]


def answers_by_form(weights: dict[str, np.ndarray], strings: list[str], form: str, chunk: int | None = None) -> list[str]:
    """What the model says next at the comma and at each digit of the right answer, all read at once in one form."""
    texts = [string + "," + string[::-1] for string in strings]
    logits = Model(weights, len(texts)).read(encode(texts), form, chunk)
    return decode(logits[:, len(strings[0]) :].argmax(axis=-1))


def answers_by_generation(weights: dict[str, np.ndarray], strings: list[str], chunk: int = 16) -> list[str]:
    """What the model writes on its own: the digits are read in chunks, then each token is a step."""
    model = Model(weights, len(strings))
    size = model.nbytes
    tokens = model.read(encode([string + "," for string in strings]), "chunkwise", chunk)[:, -1:].argmax(axis=-1)
    written = [tokens]
    for _ in strings[0]:
        tokens = model.read(tokens).argmax(axis=-1)
        written.append(tokens)
    assert model.nbytes == size  # however much is read or written
    return decode(np.concatenate(written, axis=1))


WAYS = {
    "parallel": lambda weights, strings: answers_by_form(weights, strings, "parallel"),
    "recurrent": lambda weights, strings: answers_by_form(weights, strings, "recurrent"),
    "chunkwise, chunks of 16": lambda weights, strings: answers_by_form(weights, strings, "chunkwise", 16),
    "chunkwise, chunks of 4": lambda weights, strings: answers_by_form(weights, strings, "chunkwise", 4),
    "prefill in chunks of 16, then steps": answers_by_generation,
}


def measure(lengths: range, strings: int) -> dict[str, tuple[int, int, int]]:
    """For each way: how many digits were right, of how many, and in how many texts something (the closing # too) was wrong."""
    weights, rng = read_safetensors(WEIGHTS), np.random.default_rng(0)
    found = dict.fromkeys(WAYS, (0, 0, 0))
    for length in lengths:
        texts = ["".join(map(str, rng.integers(0, 10, length))) for _ in range(strings)]
        for way, answer in WAYS.items():
            right, total, wrong = found[way]
            for text, said in zip(texts, answer(weights, texts), strict=True):
                right += sum(a == b for a, b in zip(said[:-1], text[::-1], strict=True))
                total += length
                wrong += said != text[::-1] + "#"
            found[way] = (right, total, wrong)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A trained RWKV-7 reverses digits.")
    parser.add_argument("digits", nargs="?", default="31415926535897932384626433832795028841971")
    parser.add_argument("--measure", action="store_true", help="1 to 60 digits, in every form and by generation")
    parser.add_argument("--strings", type=int, default=40, help="strings of each length")
    options = parser.parse_args()
    if not options.digits.isdecimal():
        parser.error(f"digits is {options.digits!r} and must be digits")
    if options.measure:
        start = time.perf_counter()
        for way, (right, total, wrong) in measure(range(1, 61), options.strings).items():
            print(f"{way:36} {right} of {total} digits right, {wrong} texts with a fault")
        print(f"in {time.perf_counter() - start:.0f} s")
        return
    model = Model(read_safetensors(WEIGHTS))
    print(f"{options.digits},{answers_by_generation(model.weights, [options.digits])[0]}")
    print(f"What it remembers takes {model.nbytes} bytes, before the first token and after the last.")


if __name__ == "__main__":
    main()
