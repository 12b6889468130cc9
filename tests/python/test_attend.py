"""tercet.attend on NumPy's arrays."""

import inspect

import numpy as np
import pytest
from conftest import INFO, close, layer, reference

import tercet


@pytest.mark.parametrize("form", ["automatic", "parallel", "recurrent", "chunkwise"])
def test_every_rule_and_form_is_the_recurrence(rule, form):
    call = layer(rule)
    initial = np.random.default_rng(1).standard_normal((2, 2, 8, 5)).astype(np.float32)
    out, state = tercet.attend(**call, form=form, chunk=4 if form == "chunkwise" else None, initial_state=initial, return_state=True)
    want_out, want_state = reference(**call, initial_state=initial)
    assert out.dtype == state.dtype == np.float32
    close(out, want_out)
    close(state, want_state)


def test_float64(rule):
    call = layer(rule, dtype=np.float64)
    close(tercet.attend(**call), reference(**call)[0], 1e-14)


def test_results_are_what_was_asked_for():
    call = layer("linear")
    assert isinstance(tercet.attend(**call), np.ndarray)
    assert [array.shape for array in tercet.attend(**call, return_state=True)] == [(2, 13, 2, 5), (2, 2, 8, 5)]
    normalised = tercet.attend(**call, return_state=True, normalize=True, feature_map="elu_plus_one")
    assert [array.shape for array in normalised] == [(2, 13, 2, 5), (2, 2, 8, 5), (2, 2, 8)]
    *_, saved = tercet.attend(**call, return_state=True, return_saved=True)
    assert saved.dtype == np.uint8 and saved.ndim == 1


def test_heads_are_grouped_without_copies():
    call = layer("gated_delta", heads=4, k_heads=2)
    q, k = call.pop("q")[:, :, ::2], call.pop("k")
    repeated = tercet.attend(q=np.repeat(q, 2, axis=2), k=np.repeat(k, 2, axis=2), **call)
    assert np.array_equal(tercet.attend(q=q, k=k, **call), repeated)


def test_any_strides(rule):
    call = layer(rule)
    want = tercet.attend(**call)
    turned = {}
    for name, value in call.items():
        if isinstance(value, np.ndarray):
            wide = np.zeros((*value.shape[:-1], 2 * value.shape[-1] + 1), value.dtype)
            view = wide[..., ::-2][..., : value.shape[-1]]
            view[...] = value
            assert view.strides[-1] < 0
            value = view
        turned[name] = value
    assert np.array_equal(tercet.attend(**turned), want)


def test_repeated_rows_of_stride_zero():
    call = layer("simple_gla")
    call["q"] = np.broadcast_to(call["q"][:, :1], call["q"].shape)
    assert np.array_equal(tercet.attend(**call), tercet.attend(**{**call, "q": call["q"].copy()}))


def test_packed_sequences_and_valid_tokens():
    call = layer("gla", batch=1, tokens=12)
    offsets = np.array([0, 5, 5, 12])
    out, state = tercet.attend(**call, offsets=offsets, return_state=True)
    assert state.shape == (3, 2, 8, 5) and not state[1].any()
    rest = {name: value[:, 5:] if name != "rule" else value for name, value in call.items()}
    assert np.array_equal(out[:, 5:], tercet.attend(**rest))
    valid = np.ones((1, 12), bool)
    valid[0, 3] = False
    masked, state = tercet.attend(**call, valid=valid, return_state=True)
    kept = {name: np.delete(value, 3, axis=1) if name != "rule" else value for name, value in call.items()}
    want, want_state = tercet.attend(**kept, return_state=True)
    assert not masked[0, 3].any()
    assert np.array_equal(np.delete(masked, 3, axis=1), want) and np.array_equal(state, want_state)


def test_arrays_to_write_to():
    call = layer("delta")
    want, want_state = tercet.attend(**call, return_state=True)
    out, state = np.empty((2, 13, 2, 10), np.float32)[..., ::2], np.zeros((2, 2, 8, 5), np.float32)
    got, got_state = tercet.attend(**call, return_state=True, out=out, initial_state=state, final_state=state)
    assert got is out and got_state is state
    assert np.array_equal(out, want) and np.array_equal(state, want_state)


def test_a_state_in_place_is_a_long_sequence_in_pieces(rule):
    call = layer(rule, tokens=20)
    want = tercet.attend(**call, form="recurrent")
    state = np.zeros((2, 2, 8, 5), np.float32)
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        piece = {
            name: value[:, start:stop] if isinstance(value, np.ndarray) and value.ndim > 2 and value.shape[1] == 20 else value
            for name, value in call.items()
        }
        out = tercet.attend(**piece, form="recurrent", initial_state=state, final_state=state)
        assert np.array_equal(out, want[:, start:stop])


def test_no_tokens_and_no_sequences():
    assert tercet.attend(**layer("kda", tokens=0)).shape == (2, 0, 2, 5)
    out, state = tercet.attend(**layer("linear", batch=0), return_state=True)
    assert out.shape == (0, 13, 2, 5) and state.shape == (0, 2, 8, 5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    call = layer("gated_delta", tokens=200, heads=4, key_dim=32, value_dim=32)
    assert np.array_equal(tercet.attend(**call), tercet.attend(**call, threads=threads))


def test_half_precision():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype, epsilon in ((np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)):
        call = layer("kda")
        narrow = {name: value if name in ("rule", "log_decay") else value.astype(dtype) for name, value in call.items()}
        out, state = tercet.attend(**narrow, return_state=True)
        assert out.dtype == dtype and state.dtype == np.float32
        wide = {name: value if name == "rule" else value.astype(np.float32) for name, value in narrow.items()}
        want, want_state = tercet.attend(**wide, return_state=True)
        assert np.array_equal(state, want_state)
        close(out.astype(np.float32), want, 2 * epsilon)
        written = np.zeros(out.shape, dtype)
        assert tercet.attend(**narrow, out=written) is written and np.array_equal(written, out)


def test_other_things_with_a_buffer():
    call = layer("linear")
    want = tercet.attend(**call)
    assert np.array_equal(tercet.attend(**{**call, "q": memoryview(call["q"]), "k": memoryview(call["k"])}), want)


def test_signatures_tell_all():
    parameters = inspect.signature(tercet.attend).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in list(parameters.values())[3:])
    for name in parameters:
        assert name in tercet.attend.__doc__, name


def test_rules_and_targets():
    assert len(INFO) == 9 and INFO["gated_delta"].takes_beta and INFO["rwkv7"].default_scale_is_one
    assert tercet.targets() and tercet.threads() >= 1
    call = layer("linear")
    for target in tercet.targets():
        close(tercet.attend(**call, target=target), reference(**call)[0])


def test_calls_after_a_fork():
    """A worker that the process forked after its first call has no threads of the pool, and still gets its answer."""
    import os
    import signal

    call = layer("gated_delta", tokens=300, heads=8, key_dim=32, value_dim=32)
    want = tercet.attend(**call)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if np.array_equal(tercet.attend(**call), want) else 1)
    assert os.waitpid(child, 0)[1] == 0
