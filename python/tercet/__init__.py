"""Causal linear attention in three forms that are the same function, on CPUs.

    S_t = D_t S_{t-1} + w_t (r_t' S_{t-1}) + k_t u_t'        o_t = scale S_t' q_t

A rule chooses the decay D and the update (w, r, u); `tercet.rules()` lists the nine. `attend` computes the layer, `gradient` its gradients, `State`
generates token by token, `verify` says whether the forms (and numbers of your own) are the same function.

Letters in shapes: B batch, T tokens, K key_dim, V value_dim; q has Hq heads, k has Hk, v has Hv. State heads Hs = max(Hk, Hv), output heads
Ho = max(Hq, Hs); each count divides the one it is grouped under, and groups are contiguous. N is the number of sequences: B, or with `offsets` the
number of packed ones.

Arrays are those of NumPy, PyTorch (CPU) or JAX (CPU), of any strides, and are not copied; results are of q's kind. q, k, v and the output share one
dtype: float32, float64, bfloat16 or float16 (bfloat16 in NumPy is ml_dtypes'). Beside float32 and float64 every other floating array has it too;
beside bfloat16 and float16 each gate has that dtype or float32, and states and key sums are float32.

Errors are ValueError, or TypeError for what is no array, on another device or of a wrong dtype; the sentence names the argument, what it was and what
it must be, and nothing has been written.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as _numpy

from tercet import _core
from tercet.verdict import Verdict, verify

__all__ = ["Gradients", "RuleInfo", "State", "Verdict", "attend", "gradient", "rules", "targets", "threads", "verify"]

__version__ = _core.version()

_ndarray = _numpy.ndarray
Array = Any  # of NumPy, PyTorch or JAX


def _autograd(arrays: tuple[Array | None, ...]) -> bool:
    """Whether PyTorch's autograd has to see these: one requires a gradient that is being recorded, or dispatches by a type of its own."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(arrays[0], torch.Tensor):
        return False
    plain = (torch.Tensor, torch.nn.Parameter)
    recording = torch.is_grad_enabled()
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:  # forward mode: its tensors do not say so of themselves
        return True
    return any(isinstance(array, torch.Tensor) and (type(array) not in plain or (recording and array.requires_grad)) for array in arrays)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    rule: str,
    log_decay: Array | None = None,
    beta: Array | None = None,
    remove: Array | None = None,
    write: Array | None = None,
    bonus: Array | None = None,
    form: str = "automatic",
    chunk: int | None = None,
    scale: float | None = None,
    feature_map: str = "identity",
    eps: float = 1e-6,
    normalize: bool = False,
    initial_state: Array | None = None,
    initial_key_sum: Array | None = None,
    offsets: Array | None = None,
    valid: Array | None = None,
    return_state: bool = False,
    return_saved: bool = False,
    out: Array | None = None,
    final_state: Array | None = None,
    final_key_sum: Array | None = None,
    check_values: bool = True,
    threads: int = 0,
    target: str | None = None,
) -> Any:
    """Computes the layer.

    Arguments:
        q, k: [B, T, Hq, K] and [B, T, Hk, K].
        v: [B, T, Hv, V].
        rule: linear, retention, simple_gla, gla, rwkv6, delta, gated_delta, kda or rwkv7.
        log_decay: natural logarithm of the decay, at most 0; 0 keeps all, -inf forgets all. retention [H]; simple_gla and gated_delta [B, T, H];
            gla, rwkv6, kda and rwkv7 [B, T, H, K]. Here and below H is any count that divides Hs.
        beta: [B, T, H]; delta, gated_delta and kda.
        remove, write: [B, T, H, K]; rwkv7.
        bonus: [H, K]; rwkv6.
        form: parallel, recurrent, chunkwise, or automatic: chunkwise where `chunk` is given, else the one that is measured fastest.
        chunk: tokens a chunk, of the chunkwise form; by default the library chooses.
        scale: multiplies q; by default 1 / sqrt(K), for rwkv7 1. It cancels under `normalize`.
        feature_map: identity, elu_plus_one, relu or l2_norm (x / sqrt(sum x^2 + eps)), applied to q and k before anything else.
        eps: of l2_norm, at least 0.
        normalize: divide by the key sum, o_t = S_t' q_t / (z_t' q_t); for the rules that only add.
        initial_state: [N, Hs, K, V]; by default zeros.
        initial_key_sum: [N, Hs, K], with `normalize`; by default zeros.
        offsets: [N + 1], int32 or int64, of packed sequences (then B is 1): sequence n is the tokens offsets[n] to offsets[n + 1] - 1.
        valid: [B, T], bool: a token that is False leaves the state as it is, and its row of the output is 0.
        return_state: give back the final state too, [N, Hs, K, V], and with `normalize` the final key sum, [N, Hs, K].
        return_saved: give back kept states too, for `gradient`: an opaque array of bytes. Not in the parallel form.
        out, final_state, final_key_sum: arrays to write to, instead of new ones. final_state may be initial_state itself, and final_key_sum
            initial_key_sum: then they are updated in place.
        check_values: look at every log_decay (NaN or above 0) and beta (not finite) before computing.
        threads: at most so many at once; 0: all. The results do not depend on it, not by a bit.
        target: an instruction set of `tercet.targets()`; by default $TERCET_TARGET, else the best.

    Returns:
        The output [B, T, Ho, V]; or a tuple of it, the final state, the final key sum and the kept states, those that were asked for.

    PyTorch tensors that require a gradient go through `tercet.torch.attend`, which takes the same arguments but for out, final_state, final_key_sum,
    return_saved and target.
    """
    inputs = (q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid)
    options = (rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads, target)
    if type(q) is not _ndarray and _autograd(inputs):
        return _differentiable(inputs, options, return_state, return_saved, (out, final_state, final_key_sum))
    return _core.attend(inputs, options, return_state, return_saved, out, final_state, final_key_sum)


def _differentiable(inputs: tuple, options: tuple, return_state: bool, return_saved: bool, outputs: tuple) -> Any:
    import tercet.torch

    q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid = inputs
    rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads, target = options
    refused = dict(zip(("out", "final_state", "final_key_sum"), outputs, strict=True), return_saved=return_saved or None, target=target)
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"{name} was given, and where PyTorch records gradients it can't be; call within torch.no_grad()")
    return tercet.torch.attend(
        q,
        k,
        v,
        rule=rule,
        log_decay=log_decay,
        beta=beta,
        remove=remove,
        write=write,
        bonus=bonus,
        form=form,
        chunk=chunk,
        scale=scale,
        feature_map=feature_map,
        eps=eps,
        normalize=normalize,
        initial_state=initial_state,
        initial_key_sum=initial_key_sum,
        offsets=offsets,
        valid=valid,
        return_state=return_state,
        check_values=check_values,
        threads=threads,
    )


class Gradients(NamedTuple):
    """Gradients with respect to the inputs as they were given, each of its input's shape and dtype; None where there is none or it was not wanted."""

    q: Array | None  # [B, T, Hq, K]
    k: Array | None  # [B, T, Hk, K]
    v: Array | None  # [B, T, Hv, V]
    log_decay: Array | None  # [H], [B, T, H] or [B, T, H, K], as the rule takes it
    beta: Array | None  # [B, T, H]
    remove: Array | None  # [B, T, H, K]
    write: Array | None  # [B, T, H, K]
    bonus: Array | None  # [H, K]
    initial_state: Array | None  # [N, Hs, K, V]
    initial_key_sum: Array | None  # [N, Hs, K]
    scale: float | None


def gradient(
    q: Array,
    k: Array,
    v: Array,
    *,
    rule: str,
    log_decay: Array | None = None,
    beta: Array | None = None,
    remove: Array | None = None,
    write: Array | None = None,
    bonus: Array | None = None,
    form: str = "automatic",
    chunk: int | None = None,
    scale: float | None = None,
    feature_map: str = "identity",
    eps: float = 1e-6,
    normalize: bool = False,
    initial_state: Array | None = None,
    initial_key_sum: Array | None = None,
    offsets: Array | None = None,
    valid: Array | None = None,
    grad_out: Array | None = None,
    grad_final_state: Array | None = None,
    grad_final_key_sum: Array | None = None,
    saved: Array | None = None,
    wanted: Collection[str] | None = None,
    check_values: bool = True,
    threads: int = 0,
    target: str | None = None,
) -> Gradients:
    """The gradients of a number that is computed from the layer's results, given its gradients with respect to these.

    Arguments as for `attend`, of the call that gave the results, and:
        grad_out, grad_final_state, grad_final_key_sum: of the results' shapes and dtypes; one that is not given is zeros.
        saved: what `attend(..., return_saved=True)` kept of this very call; by default the states are computed again.
        wanted: names of `Gradients`; by default those of every input that was given, and scale. initial_state and initial_key_sum may be wanted
            where they were not given, too.
        form: recurrent, chunkwise or automatic; the parallel form has no gradients.

    Returns:
        `Gradients`. Heads that share a head of an input add up in its gradient; what belongs to a token that is not valid is 0.
    """
    inputs = (q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid)
    options = (rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads, target)
    return Gradients(*_core.gradient(inputs, options, grad_out, grad_final_state, grad_final_key_sum, saved, wanted))


class RuleInfo(NamedTuple):
    """What a rule is and needs."""

    name: str
    equation: str
    also_known_as: str
    log_decay_layout: str  # "[B, T, H]" and the like; empty: the rule takes no log_decay
    takes_beta: bool
    takes_remove_and_write: bool
    takes_bonus: bool
    can_normalize: bool
    default_scale_is_one: bool  # else 1 / sqrt(key_dim)


def rules() -> list[RuleInfo]:
    """The nine rules."""
    return [RuleInfo(*rule) for rule in _core.rules()]


def targets() -> list[str]:
    """The instruction sets that this build has code for and this machine can run, best first."""
    return _core.targets()


def threads() -> int:
    """How many threads a call has by default."""
    return _core.concurrency()


from tercet.state import State  # noqa: E402  it calls attend
