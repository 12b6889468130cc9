"""Generation: a batch of streams, each with a state whose size never grows."""

from __future__ import annotations

import json
import os

from collections.abc import Sequence
from typing import Any

import numpy as np

from tercet import _core

Array = Any

_GATES = ("log_decay", "beta", "remove", "write", "bonus")
_OPTIONS = ("rule", "scale", "feature_map", "eps", "normalize")


class State:
    """The states of `streams` sequences that are read and continued together: `prefill` with what is there, then `step` token by token.

        state = tercet.State("gated_delta", streams=2, heads=4, key_dim=64, value_dim=64)
        out = state.prefill(q, k, v, log_decay=log_decay, beta=beta)      # [2, T, 4, 64]
        out = state.step(q1, k1, v1, log_decay=g1, beta=b1)               # [2, 4, 64]

    Arguments:
        rule, scale, feature_map, eps, normalize: as for `attend`, and the same in every call.
        streams: N, how many sequences.
        heads: Hs, state heads: the larger of k's and v's.
        key_dim, value_dim: K and V.
        dtype: "float32", the states of float32, bfloat16 and float16 layers, or "float64".
        library: "numpy" or "torch", whose arrays the states are; inputs may be either's.
        threads, target, check_values: as for `attend`.

    Attributes:
        state: [N, Hs, K, V].
        key_sum: [N, Hs, K] with `normalize`, else None.
        tokens: how many tokens each stream has read, [N], int64, NumPy's.
    """

    def __init__(
        self,
        rule: str,
        *,
        streams: int = 1,
        heads: int,
        key_dim: int,
        value_dim: int,
        scale: float | None = None,
        feature_map: str = "identity",
        eps: float = 1e-6,
        normalize: bool = False,
        dtype: str = "float32",
        library: str = "numpy",
        threads: int = 0,
        target: str | None = None,
        check_values: bool = True,
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise ValueError(f"dtype is '{dtype}' and must be float32 (for float32, bfloat16 and float16 layers) or float64")
        if library not in ("numpy", "torch"):
            raise ValueError(f"library is '{library}' and must be numpy or torch")
        if rule not in (known := [name for name, *_ in _core.rules()]):
            raise ValueError(f"rule is '{rule}' and must be one of {', '.join(known)}")
        for name, size in (("streams", streams), ("heads", heads), ("key_dim", key_dim), ("value_dim", value_dim)):
            if not isinstance(size, int) or size < 0:
                raise ValueError(f"{name} is {size!r} and must be a count")
        self.rule, self.scale, self.feature_map, self.eps, self.normalize = rule, scale, feature_map, eps, normalize
        self.threads, self.target, self.check_values = threads, target, check_values
        self.state = _zeros(library, (streams, heads, key_dim, value_dim), dtype)
        self.key_sum = _zeros(library, (streams, heads, key_dim), dtype) if normalize else None
        self.tokens = np.zeros(streams, np.int64)

    def __repr__(self) -> str:
        streams, heads, key_dim, value_dim = self.state.shape
        sizes = f"streams={streams}, heads={heads}, key_dim={key_dim}, value_dim={value_dim}"
        return f"<State {self.rule}: {sizes}, {self.nbytes} bytes, tokens={self.tokens.tolist()}>"

    @property
    def nbytes(self) -> int:
        """The size of the states, which no token changes."""
        return self.state.nbytes + (self.key_sum.nbytes if self.key_sum is not None else 0)

    def prefill(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        log_decay: Array | None = None,
        beta: Array | None = None,
        remove: Array | None = None,
        write: Array | None = None,
        bonus: Array | None = None,
        offsets: Array | None = None,
        valid: Array | None = None,
        form: str = "automatic",
        chunk: int | None = None,
    ) -> Array:
        """Reads tokens, [N, T, H, .] or packed by `offsets`, [1, T, H, .], as `attend` takes them, and returns the output. The states go on."""
        gates = (log_decay, beta, remove, write, bonus)
        out = self._attend(q, k, v, gates, offsets, valid, form, chunk)
        if offsets is not None:
            self.tokens += np.diff(np.asarray(offsets))
        elif valid is not None:
            self.tokens += np.asarray(valid).astype(bool).sum(axis=1)
        else:
            self.tokens += q.shape[1]
        return out

    def step(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        log_decay: Array | None = None,
        beta: Array | None = None,
        remove: Array | None = None,
        write: Array | None = None,
        bonus: Array | None = None,
        valid: Array | None = None,
    ) -> Array:
        """Reads one token a stream and returns its output, [N, Ho, V].

        q, k, v: [N, H, K] and [N, H, V]. Gates are one token's too: [N, H] or [N, H, K]; retention's log_decay [H] and rwkv6's bonus [H, K] are what
        they always are. valid: [N], bool: a stream that is False is left as it is.
        """
        if self.rule != "retention" and log_decay is not None:
            log_decay = log_decay[:, None]
        gates = (log_decay, *(gate if gate is None else gate[:, None] for gate in (beta, remove, write)), bonus)
        out = self._attend(q[:, None], k[:, None], v[:, None], gates, None, None if valid is None else valid[:, None], "recurrent", None)
        self.tokens += 1 if valid is None else np.asarray(valid).astype(bool)
        return out[:, 0]

    def _attend(self, q: Array, k: Array, v: Array, gates: tuple, offsets: Any, valid: Any, form: str, chunk: int | None) -> Array:
        inputs = (q, k, v, *gates, self.state, self.key_sum, offsets, valid)
        options = (
            self.rule, form, chunk, self.scale, self.feature_map, self.eps, self.normalize, self.check_values, self.threads, self.target,
        )  # fmt: skip
        return _core.attend(inputs, options, False, False, None, self.state, self.key_sum)

    def reset(self, streams: int | Sequence[int] | None = None) -> None:
        """Sets streams back to no tokens: one, some, or all."""
        which = slice(None) if streams is None else self._indices(streams)
        for array in (self.state, self.key_sum, self.tokens):
            if array is not None:
                array[which] = 0

    def fork(self, streams: Sequence[int] | None = None) -> State:
        """A state of its own with a copy of each stream, or of those listed, in their order and as often as they are: fork([0, 0, 2])."""
        which = list(range(len(self.tokens))) if streams is None else self._indices(streams)
        other = object.__new__(State)
        other.__dict__.update(self.__dict__)
        other.state = self.state[which]
        other.key_sum = None if self.key_sum is None else self.key_sum[which]
        other.tokens = self.tokens[which]
        return other

    def _indices(self, streams: int | Sequence[int]) -> list[int]:
        which = [streams] if isinstance(streams, int) else [int(stream) for stream in streams]
        for stream in which:
            if not 0 <= stream < len(self.tokens):
                raise ValueError(f"stream {stream} was named and must be one from 0 to {len(self.tokens) - 1}")
        return which

    def save(self, path: str | os.PathLike) -> None:
        """Writes the states and what they are states of to a .npz file."""
        arrays = {"state": np.asarray(self.state), "tokens": self.tokens}
        if self.key_sum is not None:
            arrays["key_sum"] = np.asarray(self.key_sum)
        options = json.dumps({name: getattr(self, name) for name in _OPTIONS})
        with open(path, "wb") as file:
            np.savez(file, options=np.frombuffer(options.encode(), np.uint8), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike, *, library: str = "numpy", threads: int = 0, target: str | None = None, check_values: bool = True) -> State:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            if not {"options", "state", "tokens"} <= set(file.files):
                raise ValueError(f"{os.fspath(path)!r} is not a file that State.save wrote: it holds {', '.join(file.files) or 'nothing'}")
            options = json.loads(file["options"].tobytes())
            kept = {name: file[name] for name in file.files}
        streams, heads, key_dim, value_dim = kept["state"].shape
        state = cls(
            **options, streams=streams, heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=str(kept["state"].dtype),
            library=library, threads=threads, target=target, check_values=check_values,
        )  # fmt: skip
        for name in ("state", "key_sum"):
            if name in kept:
                np.asarray(getattr(state, name))[...] = kept[name]
        state.tokens[...] = kept["tokens"]
        return state


def _zeros(library: str, shape: tuple[int, ...], dtype: str) -> Array:
    if library == "numpy":
        return np.zeros(shape, dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype))
