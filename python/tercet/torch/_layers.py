"""Layers: the plain linear-attention block and the gated delta block, and the short causal convolution that the latter needs.

Each layer runs over a sequence (`forward`) and token by token (`step`), from a state of fixed size that either hands on to the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.torch._ops import attend_states


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, activation: str = "none"
) -> tuple[Tensor, Tensor]:
    """A short causal convolution, each channel by itself: y[b, c, t] = bias[c] + sum_j weight[c, 0, j] x[b, c, t - W + 1 + j].

    x [B, C, T]; weight [C, 1, W]; bias [C]; state [B, C, W - 1], the inputs before the first one, zeros if it is not given; activation "none", or
    "silu" (also "swish"). All of one floating dtype. It is CausalConvWithState of ONNX.

    Returns y [B, C, T] and the state to go on from, [B, C, W - 1], a tensor of its own.
    """
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"activation is {activation!r}; it must be 'none', 'silu' or 'swish'")
    channels, _, width = weight.shape
    tokens = x.shape[-1]
    if state is None:
        state = x.new_zeros(x.shape[0], channels, width - 1)
    # A sum over the taps, tokens before channels: as fast as torch's own convolution, and what comes from and goes to [B, T, C] is not transposed.
    window = torch.cat([state.mT, x.mT], dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs, taps = window.to(wide), weight.to(wide)
    y = inputs[:, :tokens] * taps[:, 0, 0]
    for j in range(1, width):
        y = torch.addcmul(y, inputs[:, j : j + tokens], taps[:, 0, j])
    if bias is not None:
        y = y + bias.to(wide)
    if activation != "none":
        y = F.silu(y)
    return y.to(x.dtype).mT, window[:, tokens:].mT.contiguous()


class LinearAttentionState(NamedTuple):
    """Where a LinearAttention stands: state [B, Hs, K, V] and, if it normalises, key_sum [B, Hs, K]."""

    state: Tensor
    key_sum: Tensor | None

    def clone(self) -> "LinearAttentionState":
        return LinearAttentionState(self.state.clone(), None if self.key_sum is None else self.key_sum.clone())


class GatedDeltaNetState(NamedTuple):
    """Where a GatedDeltaNet stands: conv [B, C, W - 1], the last inputs of the convolution, and state [B, Hv, K, V]."""

    conv: Tensor
    state: Tensor

    def clone(self) -> "GatedDeltaNetState":
        return GatedDeltaNetState(self.conv.clone(), self.state.clone())


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Layer(nn.Module):
    def forward(self, x: Tensor, state: tuple | None = None, *, valid: Tensor | None = None, return_state: bool = False) -> Tensor | tuple:
        """x [B, T, hidden_size]; `state` where an earlier call left off; valid [B, T] bool, false where a token is padding.

        Returns y [B, T, hidden_size], or (y, state) with return_state. The state given is left as it is.
        """
        out, new_state = self._run(x, state, valid, in_place=False)
        return (out, new_state) if return_state else out

    @torch.no_grad()
    def step(self, x: Tensor, state: tuple) -> Tensor:
        """One token for each sequence: x [B, hidden_size]. Returns y [B, hidden_size]. `state` is updated in place. Keeps no gradients."""
        return self._run(x[:, None], state, None, in_place=True)[0][:, 0]


class LinearAttention(_Layer):
    """The plain linear-attention block: q, k and v by projections, a feature map, the normaliser, and a projection out.

        y = o_proj(attend(q_proj(x), k_proj(x), v_proj(x), rule="linear", feature_map, normalize))

    hidden_size: width of x and y. heads: heads of q; kv_heads: of k and v, a divisor of heads, by default as many. key_dim and value_dim: width of a
    head, by default hidden_size / heads. feature_map: "elu_plus_one", "relu", "l2_norm" or "identity"; eps that of "l2_norm". normalize: divide by
    the key sum, else scale by 1 / sqrt(key_dim). bias: of the projections. form and chunk: as in `attend`.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        feature_map: str = "elu_plus_one",
        eps: float = 1e-6,
        normalize: bool = True,
        bias: bool = False,
        form: str = "automatic",
        chunk: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.key_dim = hidden_size // heads if key_dim is None else key_dim
        self.value_dim = hidden_size // heads if value_dim is None else value_dim
        self.options = {"feature_map": feature_map, "eps": eps, "normalize": normalize, "form": form, "chunk": chunk}
        kind = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, self.heads * self.key_dim, **kind)
        self.k_proj = nn.Linear(hidden_size, self.kv_heads * self.key_dim, **kind)
        self.v_proj = nn.Linear(hidden_size, self.kv_heads * self.value_dim, **kind)
        self.o_proj = nn.Linear(self.heads * self.value_dim, hidden_size, **kind)

    def initial_state(self, batch: int) -> LinearAttentionState:
        """The state before the first token, zeros, for `batch` sequences."""
        kind = {"device": self.q_proj.weight.device, "dtype": _state_dtype(self.q_proj.weight.dtype)}
        shape = (batch, self.kv_heads, self.key_dim)
        return LinearAttentionState(torch.zeros(*shape, self.value_dim, **kind), torch.zeros(shape, **kind) if self.options["normalize"] else None)

    def _run(self, x: Tensor, state: tuple | None, valid: Tensor | None, in_place: bool) -> tuple[Tensor, LinearAttentionState]:
        initial_state, initial_key_sum = (None, None) if state is None else state
        out, *states = attend_states(
            in_place,
            self.q_proj(x).unflatten(-1, (self.heads, self.key_dim)),
            self.k_proj(x).unflatten(-1, (self.kv_heads, self.key_dim)),
            self.v_proj(x).unflatten(-1, (self.kv_heads, self.value_dim)),
            rule="linear",
            initial_state=initial_state,
            initial_key_sum=initial_key_sum,
            valid=valid,
            **self.options,
        )
        return self.o_proj(out.flatten(-2)), LinearAttentionState(states[0], states[1] if len(states) > 1 else None)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"heads={self.heads}, kv_heads={self.kv_heads}, key_dim={self.key_dim}, value_dim={self.value_dim}, {options}"


class GatedDeltaNet(_Layer):
    """The gated delta block of Gated DeltaNet and Qwen3-Next.

        q, k, v   = silu(causal_conv(qkv_proj(x)))         q and k divided by sqrt(sum of squares + 1e-6), per head
        log_decay = -exp(A_log) softplus(a_proj(x) + dt_bias)         beta = sigmoid(b_proj(x))
        y         = o_proj(rms_norm(attend(q, k, v, log_decay, beta)) norm_weight silu(z_proj(x)))

    hidden_size: width of x and y. key_heads: heads of q and k; value_heads: of v, the gates and the state, a multiple of key_heads, by default as
    many. key_dim and value_dim: width of a head, by default hidden_size / key_heads and hidden_size / value_heads. conv_width: tokens that the
    convolution sees, itself among them. norm_eps: of the RMS norm. form and chunk: as in `attend`.

    `valid` may leave out tokens only before the first valid one of a sequence (padding on the left): the convolution takes them for zeros.
    """

    def __init__(
        self,
        hidden_size: int,
        key_heads: int,
        value_heads: int | None = None,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        norm_eps: float = 1e-6,
        form: str = "automatic",
        chunk: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.key_heads = key_heads
        self.value_heads = key_heads if value_heads is None else value_heads
        self.key_dim = hidden_size // key_heads if key_dim is None else key_dim
        self.value_dim = hidden_size // self.value_heads if value_dim is None else value_dim
        self.conv_width = conv_width
        self.norm_eps = norm_eps
        self.options = {"form": form, "chunk": chunk}
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        kind = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(hidden_size, 2 * keys + values, bias=False, **kind)
        self.z_proj = nn.Linear(hidden_size, values, bias=False, **kind)
        self.b_proj = nn.Linear(hidden_size, self.value_heads, bias=False, **kind)
        self.a_proj = nn.Linear(hidden_size, self.value_heads, bias=False, **kind)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **kind)
        self.conv_weight = nn.Parameter(torch.empty(2 * keys + values, 1, conv_width, **kind))
        self.A_log = nn.Parameter(torch.empty(self.value_heads, **kind))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, **kind))
        self.norm_weight = nn.Parameter(torch.empty(self.value_dim, **kind))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The convolution as torch's own starts; decays of exp(-A dt) with A uniform in [1, 16] and dt log-uniform in [0.001, 0.1]."""
        bound = 1 / math.sqrt(self.conv_width)
        self.conv_weight.uniform_(-bound, bound)
        self.A_log.uniform_(1, 16).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.norm_weight.fill_(1)

    def initial_state(self, batch: int) -> GatedDeltaNetState:
        """The state before the first token, zeros, for `batch` sequences."""
        weight = self.conv_weight
        state = weight.new_zeros(batch, self.value_heads, self.key_dim, self.value_dim, dtype=_state_dtype(weight.dtype))
        return GatedDeltaNetState(weight.new_zeros(batch, weight.shape[0], self.conv_width - 1), state)

    def _run(self, x: Tensor, state: tuple | None, valid: Tensor | None, in_place: bool) -> tuple[Tensor, GatedDeltaNetState]:
        conv, initial_state = (None, None) if state is None else state
        mixed = self.qkv_proj(x)
        if valid is not None:
            mixed = mixed * valid[..., None]
        # Under autocast the projection's dtype is not the weight's.
        past = None if conv is None else conv.to(mixed.dtype)
        mixed, new_conv = causal_conv(mixed.mT, self.conv_weight.to(mixed.dtype), state=past, activation="silu")
        conv = conv.copy_(new_conv) if in_place else new_conv
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.mT.split([keys, keys, self.value_heads * self.value_dim], dim=-1)
        wide = _state_dtype(self.A_log.dtype)
        out, final_state = attend_states(
            in_place,
            q.unflatten(-1, (self.key_heads, self.key_dim)),
            k.unflatten(-1, (self.key_heads, self.key_dim)),
            v.unflatten(-1, (self.value_heads, self.value_dim)),
            rule="gated_delta",
            log_decay=-self.A_log.to(wide).exp() * F.softplus(self.a_proj(x).to(wide) + self.dt_bias.to(wide)),
            beta=self.b_proj(x).to(wide).sigmoid(),
            feature_map="l2_norm",
            initial_state=initial_state,
            valid=valid,
            **self.options,
        )
        out = F.rms_norm(out.to(wide), (self.value_dim,), self.norm_weight.to(wide), self.norm_eps)
        out = out * F.silu(self.z_proj(x).to(wide).unflatten(-1, (self.value_heads, self.value_dim)))
        return self.o_proj(out.flatten(-2).to(x.dtype)), GatedDeltaNetState(conv, final_state)

    def extra_repr(self) -> str:
        heads = f"key_heads={self.key_heads}, value_heads={self.value_heads}, key_dim={self.key_dim}, value_dim={self.value_dim}"
        return f"{heads}, conv_width={self.conv_width}, form={self.options['form']!r}, chunk={self.options['chunk']!r}"
