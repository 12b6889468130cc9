"""The operators of flash-linear-attention (fla-core 0.6.0), by their names, signatures and conventions, on the CPU.

    from tercet.fla import chunk_gated_delta_rule          # was: from fla.ops.gated_delta_rule import chunk_gated_delta_rule

Layouts are [B, T, H, D], states [N, H, K, V] in f32, gates natural logarithms. Every function is differentiable in all of its floating inputs, the
initial state among them, in f32, f64, bf16 and f16; chunk_*, fused_chunk_* and fused_recurrent_* of a rule compute the same. An argument that
can't be served is refused by name. docs/fla.md lists where this differs from the original.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.torch import attend

__all__ = [
    "chunk_delta_rule", "chunk_dplr_delta_rule", "chunk_gated_delta_rule", "chunk_gdn", "chunk_gla", "chunk_kda", "chunk_linear_attn",
    "chunk_retention", "chunk_rwkv6", "chunk_rwkv7", "chunk_simple_gla", "fused_chunk_linear_attn", "fused_chunk_retention",
    "fused_chunk_simple_gla", "fused_mul_recurrent_rwkv7", "fused_recurrent_delta_rule", "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "fused_recurrent_gla", "fused_recurrent_kda", "fused_recurrent_linear_attn",
    "fused_recurrent_retention", "fused_recurrent_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_simple_gla",
]

_Result = tuple[Tensor, Tensor | None]


# ---- What all have in common ----------------------------------------------------------------------------------------------------------------


def _refuse(function: str, **arguments: Any) -> None:
    """Refuses each of these arguments that is set: to something else than None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{function}: {name} is not supported on the CPU")


def _rest(function: str, kwargs: dict) -> None:
    """Refuses what is left of **kwargs."""
    if "head_first" in kwargs:
        raise TypeError(f"{function}: head_first is no longer an argument; inputs are [B, T, H, ...]")
    for name in kwargs:
        raise TypeError(f"{function} got an unexpected argument {name!r}")


def _v_first(function: str, state_v_first: bool, kwargs: dict) -> bool:
    """state_v_first, or what its old name says."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError(f"{function}: state_v_first and transpose_state_layout, its old name, are both given")
    warnings.warn("transpose_state_layout is called state_v_first now", DeprecationWarning, stacklevel=3)
    return kwargs.pop("transpose_state_layout")


def _lengths(function: str, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError(f"{function}: cu_seqlens_cpu is a copy of cu_seqlens, which is not given")
    return cu_seqlens


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _run(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    remove: Tensor | None = None,
    write: Tensor | None = None,
    bonus: Tensor | None = None,
    l2norm: bool = False,
    reverse: bool = False,
    v_first: bool = False,
    chunk: int | None = None,
) -> _Result:
    """Calls `attend` with dtypes as it takes them, and from the last token to the first if `reverse`."""
    gates = {"log_decay": log_decay, "beta": beta, "remove": remove, "write": write, "bonus": bonus}
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    gates = {name: gate if gate is None or gate.dtype == q.dtype else gate.to(wide) for name, gate in gates.items()}
    if initial_state is not None:
        initial_state = initial_state.to(wide)
        if v_first:
            initial_state = initial_state.transpose(-1, -2)
    if reverse:
        q, k, v = q.flip(1), k.flip(1), v.flip(1)
        gates = {name: gate if gate is None or gate.dim() < 3 else gate.flip(1) for name, gate in gates.items()}
        if cu_seqlens is not None:
            cu_seqlens = q.shape[1] - cu_seqlens.flip(0)
            initial_state = None if initial_state is None else initial_state.flip(0)
    results = attend(
        q, k, v, rule=rule, scale=_scale(scale, q), chunk=chunk, feature_map="l2_norm" if l2norm else "identity", initial_state=initial_state,
        offsets=cu_seqlens, return_state=output_final_state, **gates,
    )
    out, state = results if output_final_state else (results, None)
    if reverse:
        out = out.flip(1)
        if state is not None and cu_seqlens is not None:
            state = state.flip(0)
    if state is not None and v_first:
        state = state.transpose(-1, -2)
    return out, state


# ---- Rules that add -------------------------------------------------------------------------------------------------------------------------


def _linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | tuple | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Any]:
    state, key_sum = initial_state if normalize and isinstance(initial_state, tuple) else (initial_state, None)
    common = {"scale": scale, "cu_seqlens": cu_seqlens, "reverse": reverse}
    out, state = _run("linear", q, k, v, initial_state=state, output_final_state=output_final_state, **common)
    if not normalize:
        return out, state
    # fla divides by the denominator plus 1e-10, so the denominator is needed itself: it is what values that are all ones give.
    if key_sum is not None:
        key_sum = key_sum.transpose(1, 2).transpose(2, 3)  # [N, 1, H, K] to [N, H, K, 1]
    ones = v.new_ones(()).expand(*k.shape[:3], 1)
    denominator, key_sum = _run("linear", q, k, ones, initial_state=key_sum, output_final_state=True, **common)
    return out / (denominator + 1e-10), (state, key_sum.transpose(2, 3).transpose(1, 2))


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Linear attention. With `normalize` states are pairs (state [N, H, K, V], key sum [N, 1, H, K]), and the pair is always returned."""
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """As `chunk_linear_attn`."""
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """As `chunk_linear_attn`; `reverse` goes from the last token to the first."""
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, reverse)


def _retention_decay(q: Tensor) -> Tensor:
    return (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))).log()


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """Retention with RetNet's decays, 1 - 2^(-5 - h) for head h. Also takes chunk_size."""
    chunk = kwargs.pop("chunk_size", None)
    _rest("chunk_retention", kwargs)
    return _run(
        "retention", q, k, v, log_decay=_retention_decay(q), scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, chunk=chunk,
    )


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """As `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """As `chunk_retention`; `reverse` goes from the last token to the first, `state_v_first` means states [N, H, V, K]."""
    v_first = _v_first("fused_recurrent_retention", state_v_first, kwargs)
    _rest("fused_recurrent_retention", kwargs)
    return _run(
        "retention", q, k, v, log_decay=_retention_decay(q), scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, reverse=reverse, v_first=v_first,
    )


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, **call: Any) -> _Result:
    if g is None and g_gamma is None:
        return _run("linear", q, k, v, **call)
    if g is None:
        return _run("retention", q, k, v, log_decay=g_gamma, **call)
    return _run("simple_gla", q, k, v, log_decay=g if g_gamma is None else _wide(g) + g_gamma, **call)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """Decay per token and head, g [B, T, H], or per head, g_gamma [H], or both added. Also takes chunk_size."""
    v_first = _v_first("chunk_simple_gla", state_v_first, kwargs)
    chunk = kwargs.pop("chunk_size", None)
    _rest("chunk_simple_gla", kwargs)
    return _simple_gla(
        q, k, v, g, g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=_lengths("chunk_simple_gla", cu_seqlens, cu_seqlens_cpu), v_first=v_first, chunk=chunk,
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """As `chunk_simple_gla`."""
    return _simple_gla(
        q, k, v, g, g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """As `chunk_simple_gla`; `reverse` goes from the last token to the first."""
    v_first = _v_first("fused_recurrent_simple_gla", state_v_first, kwargs)
    _rest("fused_recurrent_simple_gla", kwargs)
    return _simple_gla(
        q, k, v, g, g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        reverse=reverse, v_first=v_first,
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> _Result:
    """Decay per token, head and key channel, g [B, T, H, K]."""
    return _run(
        "gla", q, k, v, log_decay=g, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=_lengths("chunk_gla", cu_seqlens, cu_seqlens_cpu), v_first=state_v_first,
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """As `chunk_gla`, without gk as linear attention; a decay of value channels, gv, is refused."""
    v_first = _v_first("fused_recurrent_gla", state_v_first, kwargs)
    _rest("fused_recurrent_gla", kwargs)
    _refuse("fused_recurrent_gla", gv=gv)
    return _run(
        "linear" if gk is None else "gla", q, k, v, log_decay=gk, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, reverse=reverse, v_first=v_first,
    )


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """RWKV-6: log decay w [B, T, H, K], bonus u [H, K]. Also takes chunk_size."""
    chunk = kwargs.pop("chunk_size", None)
    _rest("chunk_rwkv6", kwargs)
    return _run(
        "rwkv6", r, k, v, log_decay=w, bonus=u, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=_lengths("chunk_rwkv6", cu_seqlens, cu_seqlens_cpu), chunk=chunk,
    )


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """As `chunk_rwkv6`; `reverse` goes from the last token to the first."""
    return _run(
        "rwkv6", r, k, v, log_decay=w, bonus=u, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, reverse=reverse,
    )


# ---- Delta rules ----------------------------------------------------------------------------------------------------------------------------


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """The delta rule, beta [B, T, H]. Also takes chunk_size."""
    chunk = kwargs.pop("chunk_size", None)
    _rest("chunk_delta_rule", kwargs)
    return _run(
        "delta", q, k, v, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=_lengths("chunk_delta_rule", cu_seqlens, cu_seqlens_cpu), l2norm=use_qk_l2norm_in_kernel, chunk=chunk,
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """As `chunk_delta_rule`; without beta it is 1."""
    return _run(
        "delta", q, k, v, beta=torch.ones_like(q[..., 0]) if beta is None else beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, l2norm=use_qk_l2norm_in_kernel,
    )


def _beta(function: str, beta: Tensor, sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    if allow_neg_eigval and not sigmoid:
        raise ValueError(f"{function}: allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if not sigmoid:
        return beta
    return _wide(beta).sigmoid() * 2 if allow_neg_eigval else _wide(beta).sigmoid()


def _gate(
    function: str,
    g: Tensor | None,
    in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    channels: bool = False,
) -> Tensor | None:
    """The log decay: g as it is, or -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)). g is [B, T, H] or, with
    `channels`, [B, T, H, K]; A_log has H elements, dt_bias H or H K."""
    if not in_kernel:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if value is not None:
                raise ValueError(f"{function}: {name} is given, but only use_gate_in_kernel=True makes use of it")
        return g
    if g is None:
        raise ValueError(f"{function}: use_gate_in_kernel needs g")
    if A_log is None and lower_bound is None:
        raise ValueError(f"{function}: use_gate_in_kernel needs A_log" + (" or lower_bound" if channels else ""))
    g = _wide(g)
    if dt_bias is not None:
        g = g + _wide(dt_bias).view(g.shape[2:])
    rate = None if A_log is None else _wide(A_log).view(g.shape[2:3] + (1,) * channels).exp()
    if lower_bound is None:
        return -rate * F.softplus(g)
    return lower_bound * torch.sigmoid(g if rate is None else rate * g)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> _Result:
    """The gated delta rule, g and beta [B, T, HV]; q and k may have fewer heads, H, than v.

    Also takes chunk_size, and use_gate_in_kernel with A_log [HV] and dt_bias [HV]: the log decay is then -exp(A_log) softplus(g + dt_bias).
    chunk_indices and cp_context are refused.
    """
    name = "chunk_gated_delta_rule"
    v_first = _v_first(name, state_v_first, kwargs)
    chunk = kwargs.pop("chunk_size", None)
    g = _gate(name, g, kwargs.pop("use_gate_in_kernel", False), kwargs.pop("A_log", None), kwargs.pop("dt_bias", None))
    _rest(name, kwargs)
    _refuse(name, chunk_indices=chunk_indices, cp_context=cp_context)
    return _run(
        "gated_delta", q, k, v, log_decay=g, beta=_beta(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=_lengths(name, cu_seqlens, cu_seqlens_cpu),
        l2norm=use_qk_l2norm_in_kernel, v_first=v_first, chunk=chunk,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """As `chunk_gated_delta_rule`; gk [B, T, HV, K] decays key channels, beside g or alone; without beta it is 1; gv is refused."""
    name = "fused_recurrent_gated_delta_rule"
    v_first = _v_first(name, state_v_first, kwargs)
    _rest(name, kwargs)
    _refuse(name, gv=gv)
    g = _gate(name, g, use_gate_in_kernel, A_log, dt_bias)
    if gk is not None:
        rule, g = "kda", gk if g is None else _wide(gk) + g[..., None]
    else:
        rule = "delta" if g is None else "gated_delta"
    if beta is None:
        beta = torch.ones_like(q[..., 0])
    return _run(
        rule, q, k, v, log_decay=g, beta=_beta(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, l2norm=use_qk_l2norm_in_kernel, v_first=v_first,
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> _Result:
    """Kimi Delta Attention, g [B, T, HV, K] and beta [B, T, HV]; q and k may have fewer heads, H, than v.

    Also takes chunk_size, and for use_gate_in_kernel A_log [HV] and dt_bias [HV K]: the log decay is then -exp(A_log) softplus(g + dt_bias), or with
    lower_bound lower_bound sigmoid(exp(A_log) (g + dt_bias)), without exp(A_log) where there is no A_log. safe_gate and disable_recompute choose
    between GPU kernels of one result and make no difference here. return_intermediate_states, cp_context, use_graph and max_num_seqs are refused.
    """
    v_first = _v_first("chunk_kda", state_v_first, kwargs)
    chunk = kwargs.pop("chunk_size", None)
    if safe_gate and use_gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ValueError(f"chunk_kda: lower_bound is {lower_bound}; with safe_gate it must be at least -5 and below 0")
    g = _gate("chunk_kda", g, use_gate_in_kernel, kwargs.pop("A_log", None), kwargs.pop("dt_bias", None), lower_bound, channels=True)
    _rest("chunk_kda", kwargs)
    _refuse(
        "chunk_kda", return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph, max_num_seqs=max_num_seqs
    )
    return _run(
        "kda", q, k, v, log_decay=g, beta=_beta("chunk_kda", beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=_lengths("chunk_kda", cu_seqlens, cu_seqlens_cpu),
        l2norm=use_qk_l2norm_in_kernel, v_first=v_first, chunk=chunk,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> _Result:
    """As `chunk_kda`."""
    name = "fused_recurrent_kda"
    v_first = _v_first(name, state_v_first, kwargs)
    _rest(name, kwargs)
    return _run(
        "kda", q, k, v, log_decay=_gate(name, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, channels=True),
        beta=_beta(name, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, l2norm=use_qk_l2norm_in_kernel, v_first=v_first,
    )


# ---- Rank one -------------------------------------------------------------------------------------------------------------------------------


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> _Result:
    """Diagonal plus low rank: a, b and the log decay gk [B, T, H, K]; the state is read along a before its decay and written along b.

    safe_gate, lower_bound (a promise that gk is not below it) and disable_recompute choose between GPU kernels of one result and make no
    difference here. cp_context is refused.
    """
    name = "chunk_dplr_delta_rule"
    _rest(name, kwargs)
    _refuse(name, cp_context=cp_context)
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"{name}: lower_bound is {lower_bound}; it must be below 0")
    return _run(
        "rwkv7", q, k, v, log_decay=gk, remove=a, write=b, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=_lengths(name, cu_seqlens, cu_seqlens_cpu), chunk=chunk_size,
    )


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """As `chunk_dplr_delta_rule`; `reverse` goes from the last token to the first."""
    return _run(
        "rwkv7", q, k, v, log_decay=gk, remove=a, write=b, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, reverse=reverse,
    )


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> _Result:
    """RWKV-7: `chunk_dplr_delta_rule` with q = r and gk = w, the log decay. The scale is 1 by default."""
    return chunk_dplr_delta_rule(
        r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, safe_gate, chunk_size, disable_recompute,
        cp_context, lower_bound,
    )


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """As `chunk_rwkv7`, but as in fla the scale is 1 / sqrt(K) by default and the final state is returned."""
    return fused_recurrent_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """RWKV-7 from kk and a: the state is read along -kk and written along kk a."""
    return fused_recurrent_dplr_delta_rule(r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, reverse, cu_seqlens)
