"""The same bits from NumPy, PyTorch and JAX, as arrays of their own."""

import numpy as np
import pytest
from conftest import layer

import tercet


def arrays(call, convert):
    return {name: value if name == "rule" else convert(value) for name, value in call.items()}


def test_torch(rule):
    torch = pytest.importorskip("torch")
    call = layer(rule)
    want, want_state = tercet.attend(**call, return_state=True)
    out, state = tercet.attend(**arrays(call, torch.from_numpy), return_state=True)
    assert type(out) is torch.Tensor and out.is_contiguous()
    assert np.array_equal(out.numpy(), want) and np.array_equal(state.numpy(), want_state)
    found = tercet.gradient(**arrays(call, torch.from_numpy), grad_out=torch.ones_like(out))
    want = tercet.gradient(**call, grad_out=np.ones_like(want))
    for one, other in zip(found, want, strict=True):
        assert (one is None and other is None) or (isinstance(one, float) and one == other) or np.array_equal(one.numpy(), other)


def test_torch_half_precision():
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call = layer("kda")
    want = tercet.attend(**arrays(call, lambda value: value.astype(ml_dtypes.bfloat16)))
    out = tercet.attend(**arrays(call, lambda value: torch.from_numpy(value).bfloat16()))
    assert out.dtype == torch.bfloat16 and np.array_equal(out.view(torch.uint16).numpy(), want.view(np.uint16))
    assert tercet.attend(**arrays(call, lambda value: torch.from_numpy(value).half())).dtype == torch.float16


def test_torch_views():
    torch = pytest.importorskip("torch")
    call = arrays(layer("gla"), torch.from_numpy)
    want = tercet.attend(**call)
    turned = {**call, "q": call["q"].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)}
    assert not turned["q"].is_contiguous()
    assert torch.equal(tercet.attend(**turned), want)
    # A view that negates without having done it: its memory holds the negatives.
    negated = torch.complex(torch.zeros_like(call["q"]), -call["q"]).conj().imag
    assert negated.is_neg() and torch.equal(negated, call["q"])
    assert torch.equal(tercet.attend(**{**call, "q": negated}), want)
    into = torch.empty_like(want)
    assert tercet.attend(**call, out=into) is into and torch.equal(into, want)


def test_torch_parameters_and_no_grad():
    torch = pytest.importorskip("torch")
    call = arrays(layer("linear"), torch.from_numpy)
    want = tercet.attend(**call)
    call["q"] = torch.nn.Parameter(call["q"])
    with torch.no_grad():
        out = tercet.attend(**call)
    assert torch.equal(out, want) and not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(tercet.attend(**call), want)


def test_torch_records_gradients():
    torch = pytest.importorskip("torch")
    pytest.importorskip("tercet.torch")
    call = arrays(layer("linear"), torch.from_numpy)
    call["q"].requires_grad_()
    out = tercet.attend(**call)
    assert out.requires_grad
    out.sum().backward()
    plain = {**call, "q": call["q"].detach()}
    assert torch.equal(call["q"].grad, tercet.gradient(**plain, grad_out=torch.ones_like(out)).q)
    with pytest.raises(ValueError, match="out was given"):
        tercet.attend(**call, out=torch.empty_like(out))


def test_jax(rule):
    jax = pytest.importorskip("jax")
    call = layer(rule)
    want, want_state = tercet.attend(**call, return_state=True)
    out, state = tercet.attend(**arrays(call, jax.numpy.asarray), return_state=True)
    assert isinstance(out, jax.Array)
    assert np.array_equal(out, want) and np.array_equal(state, want_state)


def test_jax_half_precision_and_refusals():
    jax = pytest.importorskip("jax")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call = layer("kda")
    want = tercet.attend(**arrays(call, lambda value: value.astype(ml_dtypes.bfloat16)))
    call = arrays(call, lambda value: jax.numpy.asarray(value, jax.numpy.bfloat16))
    out = tercet.attend(**call)
    assert out.dtype == jax.numpy.bfloat16 and np.array_equal(np.asarray(out).view(np.uint16), want.view(np.uint16))
    with pytest.raises(TypeError, match="can't be written to"):
        tercet.attend(**call, out=out)
    with pytest.raises(TypeError):
        jax.jit(lambda q: tercet.attend(**{**call, "q": q}))(call["q"])


def test_mixed():
    torch = pytest.importorskip("torch")
    call = layer("gated_delta")
    out = tercet.attend(**{**call, "q": torch.from_numpy(call["q"])})
    assert isinstance(out, torch.Tensor) and np.array_equal(out.numpy(), tercet.attend(**call))
