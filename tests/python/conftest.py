"""What the tests share: layers of random numbers, and the layer as nine lines of NumPy, token by token."""

from __future__ import annotations

import numpy as np
import pytest

import tercet

RULES = [info.name for info in tercet.rules()]
INFO = {info.name: info for info in tercet.rules()}


def layer(rule, batch=2, tokens=13, heads=2, key_dim=8, value_dim=5, dtype=np.float32, seed=0, k_heads=None):
    """Random inputs of a layer as keyword arguments of attend: decays near one, keys of length one, gates that keep the state bounded."""
    rng = np.random.default_rng(seed)
    info = INFO[rule]
    k_heads = k_heads or heads

    def normal(*shape):
        return rng.standard_normal(shape)

    def unit(*shape):
        x = normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays = {"q": normal(batch, tokens, heads, key_dim), "k": unit(batch, tokens, k_heads, key_dim), "v": normal(batch, tokens, heads, value_dim)}
    shape = {"": None, "[H]": (heads,), "[B, T, H]": (batch, tokens, heads), "[B, T, H, K]": (batch, tokens, heads, key_dim)}[info.log_decay_layout]
    if shape is not None:
        arrays["log_decay"] = -0.3 * rng.random(shape)
    if info.takes_beta:
        arrays["beta"] = rng.random((batch, tokens, heads))
    if info.takes_remove_and_write:
        remove = unit(batch, tokens, heads, key_dim)
        arrays["remove"], arrays["write"] = remove, -remove * rng.random((batch, tokens, heads, 1))
    if info.takes_bonus:
        arrays["bonus"] = normal(heads, key_dim)
    return {"rule": rule, **{name: array.astype(dtype) for name, array in arrays.items()}}


def reference(rule, q, k, v, log_decay=None, beta=None, remove=None, write=None, bonus=None, scale=None, initial_state=None):
    """The recurrence in float64, for as many heads of q, k and v: (out, final state)."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    batch, tokens, heads, key_dim = q.shape
    scale = scale if scale is not None else 1.0 if INFO[rule].default_scale_is_one else key_dim**-0.5
    out, states = np.zeros(v.shape), np.zeros((batch, heads, key_dim, v.shape[-1]))
    if initial_state is not None:
        states[...] = initial_state
    for b in range(batch):
        for h in range(heads):
            state = states[b, h]
            for t in range(tokens):
                qt, kt, vt = q[b, t, h], k[b, t, h], v[b, t, h]
                decay = 1.0
                if log_decay is not None:
                    decay = np.exp(np.asarray(log_decay, np.float64)[h] if rule == "retention" else np.asarray(log_decay, np.float64)[b, t, h])
                    decay = np.broadcast_to(decay, (key_dim,))[:, None]
                if rule == "rwkv6":
                    out[b, t, h] = scale * (state + np.outer(bonus[h] * kt, vt)).T @ qt
                    state = decay * state + np.outer(kt, vt)
                    continue
                if rule == "rwkv7":
                    state = decay * state + np.outer(write[b, t, h], remove[b, t, h] @ state) + np.outer(kt, vt)
                elif beta is not None:
                    state = decay * state
                    state = state + beta[b, t, h] * np.outer(kt, vt - kt @ state)
                else:
                    state = decay * state + np.outer(kt, vt)
                out[b, t, h] = scale * state.T @ qt
            states[b, h] = state
    return out, states


def close(got, want, epsilon=2e-6):
    """The same to some roundings of float32, relative to the largest number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max(initial=0) <= epsilon * max(1.0, np.abs(want).max(initial=0))


@pytest.fixture(params=RULES)
def rule(request):
    return request.param
