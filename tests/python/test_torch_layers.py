"""The layers of tercet.torch: their formulas, forward against steps and pieces, and the causal convolution against ONNX's numbers."""

import json
import pathlib
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from tercet.torch import GatedDeltaNet, LinearAttention, causal_conv  # noqa: E402

torch.set_num_threads(1)
GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "data" / "onnx_causal_conv").glob("*.safetensors"))
LAYERS = {
    "normalised": lambda **kind: LinearAttention(12, 3, **kind),
    "scaled": lambda **kind: LinearAttention(12, 4, kv_heads=2, key_dim=3, value_dim=5, feature_map="relu", normalize=False, bias=True, **kind),
    "gated_delta": lambda **kind: GatedDeltaNet(12, 2, **kind),
    "gated_delta_grouped": lambda **kind: GatedDeltaNet(12, 2, 4, key_dim=5, value_dim=3, conv_width=3, **kind),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param](dtype=torch.float64)


def tokens(count, batch=2, dtype=torch.float64, width=12):
    return torch.randn(batch, count, width, dtype=dtype, generator=torch.Generator().manual_seed(1))


def same(one, other, epsilon=1e-12):
    torch.testing.assert_close(one, other, rtol=epsilon, atol=epsilon)


def same_states(one, other, epsilon=1e-12):
    for mine, yours in zip(one, other, strict=True):
        if mine is None:
            assert yours is None
        else:
            same(mine, yours, epsilon)


# ---- The convolution ------------------------------------------------------------------------------------------------------------------------


def read(path):
    """A safetensors file as (arrays, metadata)."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__")
    dtypes = {"F32": np.float32, "F16": np.float16}
    arrays = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        arrays[name] = torch.from_numpy(np.frombuffer(data[end + start : end + stop], dtypes[entry["dtype"]]).reshape(entry["shape"]).copy())
    return arrays, metadata


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_convolution_gives_onnx_numbers(path):
    arrays, metadata = read(path)
    activation = json.loads(metadata["attributes"]).get("activation", "none")
    y, state = causal_conv(arrays["input"], arrays["weight"], arrays.get("bias"), arrays.get("past_state"), activation)
    tolerance = 1e-3 if arrays["input"].dtype == torch.float16 else 1e-5
    assert y.dtype == arrays["input"].dtype
    same(y, arrays["expected.output"], tolerance)
    same(state, arrays["expected.present_state"], 0)


def test_all_golden_files_are_there():
    assert len(GOLDEN) == 11


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_is_torchs(bias):
    x, weight = tokens(9, width=6).mT.contiguous().requires_grad_(), tokens(4, batch=6, width=1).mT.contiguous().requires_grad_()
    bias = torch.randn(6, dtype=torch.float64) if bias else None
    want = F.conv1d(F.pad(x, (3, 0)), weight, bias, groups=6)
    got, _ = causal_conv(x, weight, bias)
    same(got, want)
    for one, other in zip(torch.autograd.grad(got.sin().sum(), (x, weight)), torch.autograd.grad(want.sin().sum(), (x, weight)), strict=True):
        same(one, other)


def test_convolution_in_pieces_and_refusal():
    x, weight = tokens(9, width=6).mT, tokens(4, batch=6, width=1).mT
    whole, state = causal_conv(x, weight, activation="silu")
    first, middle = causal_conv(x[..., :2], weight, activation="silu")
    second, end = causal_conv(x[..., 2:], weight, state=middle, activation="swish")
    same(torch.cat([first, second], -1), whole)
    same(end, state, 0)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        causal_conv(x, weight, activation="relu")


# ---- Formulas -------------------------------------------------------------------------------------------------------------------------------


def test_linear_attention_is_its_formula():
    torch.manual_seed(0)
    for normalize in (True, False):
        layer = LinearAttention(12, 4, kv_heads=2, key_dim=3, value_dim=5, normalize=normalize, dtype=torch.float64)
        x = tokens(8)
        q, k, v = layer.q_proj(x).view(2, 8, 4, 3), layer.k_proj(x).view(2, 8, 2, 3), layer.v_proj(x).view(2, 8, 2, 5)
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        scores = torch.einsum("bihk,bjhk->bhij", F.elu(q) + 1, F.elu(k) + 1).tril()
        scores = scores / scores.sum(-1, keepdim=True) if normalize else scores * 3**-0.5
        same(layer(x), layer.o_proj(torch.einsum("bhij,bjhv->bihv", scores, v).flatten(2)))


def test_gated_delta_net_is_its_formula():
    torch.manual_seed(0)
    layer = GatedDeltaNet(12, 2, 4, key_dim=5, value_dim=3, dtype=torch.float64)
    x = tokens(8)
    mixed = F.silu(F.conv1d(F.pad(layer.qkv_proj(x).mT, (3, 0)), layer.conv_weight, groups=32).mT)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part, heads in zip(mixed.split([10, 10, 12], -1), (2, 2, 4), strict=True))
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    decay = torch.exp(-layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias))
    beta = layer.b_proj(x).sigmoid()
    state, rows = x.new_zeros(2, 4, 5, 3), []
    for t in range(8):
        state = state * decay[:, t, :, None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], error)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * 5**-0.5)
    out = torch.stack(rows, 1)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + layer.norm_eps) * layer.norm_weight * F.silu(layer.z_proj(x)).unflatten(-1, (4, 3))
    same(layer(x), layer.o_proj(out.flatten(2)))


# ---- Forward, steps and pieces --------------------------------------------------------------------------------------------------------------


def test_forward_and_steps_agree(layer):
    x = tokens(11)
    y, end = layer(x, return_state=True)
    state = layer.initial_state(2)
    same(torch.stack([layer.step(x[:, t], state) for t in range(11)], 1), y)
    same_states(state, end)


def test_pieces_and_the_whole_agree(layer):
    x = tokens(70)
    y, end = layer(x, return_state=True)
    first, middle = layer(x[:, :37], return_state=True)
    kept = middle.clone()
    second, last = layer(x[:, 37:], middle, return_state=True)
    same(torch.cat([first, second], 1), y)
    same_states(last, end)
    same_states(middle, kept, 0)  # it is left as it is
    steps = [layer.step(x[:, t], kept) for t in range(37, 40)]
    same(torch.stack(steps, 1), y[:, 37:40])


def test_steps_keep_the_states_memory(layer):
    state = layer.initial_state(3)
    before = [part.data_ptr() for part in state if part is not None]
    y = layer.step(tokens(1, batch=3)[:, 0].requires_grad_(), state)
    assert not y.requires_grad
    assert [part.data_ptr() for part in state if part is not None] == before
    assert all(part.abs().sum() > 0 for part in state if part is not None)


def test_padding_on_the_left_changes_nothing(layer):
    x = tokens(9)
    padded = torch.cat([torch.full((2, 4, 12), 7.0, dtype=torch.float64), x], 1)
    valid = torch.arange(13).expand(2, 13) >= 4
    want, end = layer(x, return_state=True)
    got, state = layer(padded, valid=valid, return_state=True)
    same(got[:, 4:], want)
    same_states(state, end)


def test_gradients_reach_every_parameter(layer):
    x = tokens(6).requires_grad_()
    y, state = layer(x, return_state=True)
    (y.square().sum() + sum(part.sum() for part in state if part is not None)).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    assert x.grad.abs().sum() > 0
    start = layer.initial_state(2)
    for part in start:
        if part is not None:
            part.uniform_(0.1, 1).requires_grad_()
    layer(x, start).square().sum().backward()
    assert all(part.grad.abs().sum() > 0 for part in start if part is not None)


def test_a_layer_trains(layer):
    x, target = tokens(20), tokens(20).roll(1, 1)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_saved_and_loaded(layer, request):
    copy = LAYERS[request.node.callspec.params["layer"]](dtype=torch.float64)
    copy.load_state_dict(layer.state_dict())
    x = tokens(5)
    same(copy(x), layer(x), 0)
    same(pickle.loads(pickle.dumps(layer))(x), layer(x), 0)
    assert repr(layer).startswith(type(layer).__name__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(layer, dtype):
    want = layer(tokens(6))
    narrow = layer.to(dtype)
    y, state = narrow(tokens(6).to(dtype), return_state=True)
    assert y.dtype == dtype and state.state.dtype == torch.float32
    # A handful of roundings to the dtype on the way, none of which a later one makes much larger.
    epsilon = 30 * torch.finfo(dtype).eps
    assert (y.double() - want).abs().max() <= epsilon * max(1, want.abs().max())
    start = narrow.initial_state(2)
    steps = torch.stack([narrow.step(tokens(6)[:, t].to(dtype), start) for t in range(6)], 1)
    assert steps.dtype == dtype
    assert (steps.double() - want).abs().max() <= epsilon * max(1, want.abs().max())


def test_autocast(layer):
    layer = layer.float()
    x = tokens(6, dtype=torch.float32)
    want = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(x, return_state=True)
        start = layer.initial_state(2)
        steps = torch.stack([layer.step(x[:, t], start) for t in range(6)], 1)
    assert y.dtype == torch.bfloat16
    for got in (y, steps):
        assert (got.float() - want).abs().max() <= 30 * torch.finfo(torch.bfloat16).eps * max(1, want.abs().max())
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


def test_compile(layer):
    torch.compiler.reset()
    x = tokens(20)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, state = compiled(x, return_state=True)
    want, end = layer(x, return_state=True)
    same(y, want)
    same_states(state, end)
    parameters = list(layer.parameters())
    for one, other in zip(torch.autograd.grad(y.sum(), parameters), torch.autograd.grad(want.sum(), parameters), strict=True):
        same(one, other)
    start, step = layer.initial_state(2), torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    same(torch.stack([step(x[:, t], start) for t in range(20)], 1), want)
    same_states(start, end)
