"""tercet.State: generation."""

import numpy as np
import pytest
from conftest import INFO, close, layer

import tercet


def one(call, token):
    """Token `token` of a layer, as State.step takes it."""
    per_token = {"q", "k", "v", "beta", "remove", "write"} | ({"log_decay"} if call["rule"] != "retention" else set())
    return {name: value[:, token] if name in per_token else value for name, value in call.items() if name != "rule"}


def piece(call, tokens):
    per_token = {"q", "k", "v", "beta", "remove", "write"} | ({"log_decay"} if call["rule"] != "retention" else set())
    return {name: value[:, tokens] if name in per_token else value for name, value in call.items() if name != "rule"}


def test_prefill_and_steps_are_the_layer(rule):
    call = layer(rule, tokens=40)
    want, want_state = tercet.attend(**call, return_state=True)
    state = tercet.State(rule, streams=2, heads=2, key_dim=8, value_dim=5)
    size = state.nbytes
    outs = [state.prefill(**piece(call, slice(0, 33)), chunk=16)]
    outs += [state.step(**one(call, token))[:, None] for token in range(33, 40)]
    close(np.concatenate(outs, axis=1), want)
    close(state.state, want_state)
    assert state.tokens.tolist() == [40, 40] and state.nbytes == size


def test_streams_stop_fork_and_start_again():
    call = layer("gated_delta", tokens=6)
    state = tercet.State("gated_delta", streams=2, heads=2, key_dim=8, value_dim=5)
    state.prefill(**piece(call, slice(0, 4)))
    before = state.state.copy()
    state.step(**one(call, 4), valid=np.array([True, False]))
    assert np.array_equal(state.state[1], before[1]) and not np.array_equal(state.state[0], before[0])
    assert state.tokens.tolist() == [5, 4]
    forked = state.fork([1, 1, 0])
    assert np.array_equal(forked.state, state.state[[1, 1, 0]]) and forked.tokens.tolist() == [4, 4, 5]
    forked.reset(0)
    assert not forked.state[0].any() and forked.state[1].any() and state.state[1].any() and forked.tokens.tolist() == [0, 4, 5]
    twin = state.fork()
    assert np.array_equal(twin.step(**one(call, 5)), state.step(**one(call, 5)))
    state.reset()
    assert not state.state.any() and state.tokens.tolist() == [0, 0]
    for streams in (2, -1, [0, 5]):
        with pytest.raises(ValueError, match="must be one from 0 to 1"):
            state.reset(streams)


def test_saved_and_loaded(tmp_path):
    call = layer("linear", tokens=5)
    options = {"normalize": True, "feature_map": "elu_plus_one", "scale": 0.5}
    state = tercet.State("linear", streams=2, heads=2, key_dim=8, value_dim=5, **options)
    state.prefill(**piece(call, slice(0, 4)))
    state.save(tmp_path / "state.npz")
    loaded = tercet.State.load(tmp_path / "state.npz")
    assert np.array_equal(loaded.state, state.state) and np.array_equal(loaded.key_sum, state.key_sum) and loaded.tokens.tolist() == [4, 4]
    assert np.array_equal(loaded.step(**one(call, 4)), state.step(**one(call, 4)))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="State.save"):
        tercet.State.load(tmp_path / "other.npz")


def test_packed_prefill():
    call = layer("kda", batch=1, tokens=12)
    state = tercet.State("kda", streams=3, heads=2, key_dim=8, value_dim=5)
    offsets = np.array([0, 5, 5, 12])
    out = state.prefill(**piece(call, slice(None)), offsets=offsets)
    want, want_state = tercet.attend(**call, offsets=offsets, return_state=True)
    assert np.array_equal(out, want) and np.array_equal(state.state, want_state) and state.tokens.tolist() == [5, 0, 7]


def test_torch_states():
    torch = pytest.importorskip("torch")
    call = layer("gated_delta", tokens=3)
    state = tercet.State("gated_delta", streams=2, heads=2, key_dim=8, value_dim=5, library="torch")
    out = state.prefill(**{name: torch.from_numpy(value) for name, value in piece(call, slice(None)).items()})
    assert isinstance(out, torch.Tensor) and isinstance(state.state, torch.Tensor)
    assert np.array_equal(out.numpy(), tercet.attend(**call))
    half = tercet.State("gated_delta", streams=2, heads=2, key_dim=8, value_dim=5, library="torch")
    assert half.step(**{name: torch.from_numpy(value).bfloat16() for name, value in one(call, 0).items()}).dtype == torch.bfloat16


def test_bad_states():
    for arguments, sentence in (
        ({"rule": "nothing"}, "rule is 'nothing'"),
        ({"rule": "delta", "heads": -1}, "heads is -1"),
        ({"rule": "delta", "dtype": "int8"}, "dtype is 'int8'"),
        ({"rule": "delta", "library": "jax"}, "library is 'jax'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            tercet.State(**{"heads": 1, "key_dim": 2, "value_dim": 2, **arguments})
    state = tercet.State("linear", heads=2, key_dim=8, value_dim=5)
    with pytest.raises(ValueError, match="initial_state"):
        state.step(**one(layer("linear", batch=2), 0))
    assert state.tokens.tolist() == [0]
    assert "2" in repr(state) and INFO
