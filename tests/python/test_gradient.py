"""tercet.gradient."""

import numpy as np
import pytest
from conftest import close, layer

import tercet


@pytest.mark.parametrize("form", ["recurrent", "chunkwise", "automatic"])
def test_gradients_are_the_differences(rule, form):
    """A step along a random direction of all inputs changes a random weighing of the results by what the gradients say."""
    call = layer(rule, dtype=np.float64, tokens=9)
    rng = np.random.default_rng(3)
    call["initial_state"] = rng.standard_normal((2, 2, 8, 5))
    grad_out, grad_state = rng.standard_normal((2, 9, 2, 5)), rng.standard_normal((2, 2, 8, 5))

    def weighed(step):
        moved = {name: value if name == "rule" else value + step * direction[name] for name, value in call.items()}
        out, state = tercet.attend(**moved, return_state=True)
        return (out * grad_out).sum() + (state * grad_state).sum()

    direction = {name: rng.standard_normal(value.shape) for name, value in call.items() if name != "rule"}
    if "log_decay" in direction:
        direction["log_decay"] *= 0.1
    found = tercet.gradient(**call, form=form, grad_out=grad_out, grad_final_state=grad_state)
    step = 1e-6
    difference = (weighed(step) - weighed(-step)) / (2 * step)
    derivative = sum((getattr(found, name) * value).sum() for name, value in direction.items())
    assert abs(difference - derivative) <= 1e-6 * sum(np.abs(getattr(found, name) * value).sum() for name, value in direction.items())
    assert isinstance(found.scale, float)


def test_scale_and_what_is_wanted(rule):
    call = layer(rule, dtype=np.float64)
    grad_out = np.random.default_rng(4).standard_normal((2, 13, 2, 5))
    found = tercet.gradient(**call, grad_out=grad_out, scale=0.7, wanted=["scale", "v", "initial_state"])
    one = tercet.attend(**call, scale=1.0)
    assert abs(found.scale - (grad_out * one).sum()) <= 1e-12 * np.abs(grad_out * one).sum()
    assert found.v.shape == call["v"].shape and found.initial_state.shape == (2, 2, 8, 5)
    assert found.q is None and found.log_decay is None
    everything = tercet.gradient(**call, grad_out=grad_out, scale=0.7)
    assert np.array_equal(everything.v, found.v)
    assert {name for name, value in everything._asdict().items() if value is not None} == set(call) - {"rule"} | {"scale"}


def test_saved_states_give_the_same_gradients(rule):
    call = layer(rule, tokens=70)
    out, saved = tercet.attend(**call, return_saved=True)
    grad_out = np.ones_like(out)
    kept, again = tercet.gradient(**call, grad_out=grad_out, saved=saved), tercet.gradient(**call, grad_out=grad_out)
    for one, other in zip(kept, again, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            close(one, other)
    with pytest.raises(ValueError, match="saved"):
        tercet.gradient(**call, grad_out=grad_out, saved=saved[:-1])
    with pytest.raises(ValueError, match="saved"):
        tercet.gradient(**call, grad_out=grad_out, saved=saved, chunk=16)
    with pytest.raises(ValueError, match="saved"):
        tercet.gradient(**call, grad_out=grad_out, saved=np.zeros((2, len(saved)), np.uint8))


def test_normalised_layers():
    call = layer("linear", dtype=np.float64)
    options = {"normalize": True, "feature_map": "elu_plus_one", "initial_key_sum": np.full((2, 2, 8), 0.5)}
    grad = np.random.default_rng(5).standard_normal((2, 2, 8))
    found = tercet.gradient(**call, **options, grad_out=np.ones((2, 13, 2, 5)), grad_final_key_sum=grad)
    assert found.initial_key_sum.shape == (2, 2, 8) and found.scale == 0
    step = 1e-6
    moved = [call["k"] + sign * step for sign in (1, -1)]
    results = [tercet.attend(**{**call, "k": k}, **options, return_state=True) for k in moved]
    weighed = [out.sum() + (key_sum * grad).sum() for out, _, key_sum in results]
    assert abs((weighed[0] - weighed[1]) / (2 * step) - found.k.sum()) <= 1e-6 * np.abs(found.k).sum()


def test_half_precision_gradients_have_the_dtypes_of_their_inputs():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call = layer("gated_delta")
    narrow = {name: value if name in ("rule", "log_decay") else value.astype(ml_dtypes.bfloat16) for name, value in call.items()}
    found = tercet.gradient(**narrow, grad_out=np.ones((2, 13, 2, 5), ml_dtypes.bfloat16))
    assert found.q.dtype == ml_dtypes.bfloat16 and found.log_decay.dtype == np.float32
    wide = {name: value if name == "rule" else value.astype(np.float32) for name, value in narrow.items()}
    want = tercet.gradient(**wide, grad_out=np.ones((2, 13, 2, 5), np.float32))
    close(found.q.astype(np.float32), want.q, 2**-7)
    close(found.log_decay, want.log_decay, 2**-7)


def test_refusals():
    call = layer("linear")
    out = tercet.attend(**call)
    with pytest.raises(ValueError, match="'valid', and there is no gradient of that"):
        tercet.gradient(**call, grad_out=out, wanted=["valid"])
    with pytest.raises(ValueError, match="'beta', which was not given"):
        tercet.gradient(**call, grad_out=out, wanted=["beta"])
    with pytest.raises(TypeError, match="wanted is a string"):
        tercet.gradient(**call, grad_out=out, wanted="q")
    with pytest.raises(ValueError, match="form"):
        tercet.gradient(**call, grad_out=out, form="parallel")
