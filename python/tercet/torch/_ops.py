"""The operators torch.ops.tercet.attend and .gradient, and `attend` over them.

Both are pure functions that return a list of tensors: `attend` gives out[, final_state[, final_key_sum]][, saved], `gradient` the gradients that
are wanted, in the order of the inputs. torch.compile and everything else that traces sees the operators; an eager call of plain tensors goes
straight to the library, because the dispatcher's way through Python costs more than the whole of a decoding step.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from tercet import _core

_DIFFERENTIABLE = ("q", "k", "v", "log_decay", "beta", "remove", "write", "bonus", "initial_state", "initial_key_sum")
_TENSORS = _DIFFERENTIABLE + ("offsets", "valid")
_OPTIONS = ("rule", "form", "chunk", "scale", "feature_map", "eps", "normalize", "check_values", "threads")
_COUNT = len(_TENSORS)

_TENSOR_SCHEMA = "Tensor q, Tensor k, Tensor v, " + "".join(f"Tensor? {name}, " for name in _TENSORS[3:])
_OPTION_SCHEMA = "str rule, str form, int? chunk, float? scale, str feature_map, float eps, bool normalize, bool check_values, int threads"

_library = torch.library.Library("tercet", "DEF")
_library.define(f"attend({_TENSOR_SCHEMA}{_OPTION_SCHEMA}, bool return_state, bool return_saved) -> Tensor[]")
_library.define(
    f"gradient({_TENSOR_SCHEMA}{_OPTION_SCHEMA}, Tensor? grad_out, Tensor? grad_final_state, Tensor? grad_final_key_sum, Tensor? saved, "
    "str[] wanted) -> Tensor[]"
)
_attend_op = torch.ops.tercet.attend.default
_gradient_op = torch.ops.tercet.gradient.default


# ---- What the library computes --------------------------------------------------------------------------------------------------------------


def _compute(tensors: Sequence[Optional[Tensor]], options: Sequence[Any], return_state: bool, return_saved: bool) -> Any:
    q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid = tensors
    rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads = options
    return _core.attend(
        q, k, v, rule=rule, log_decay=log_decay, beta=beta, remove=remove, write=write, bonus=bonus, form=form, chunk=chunk, scale=scale,
        feature_map=feature_map, eps=eps, normalize=normalize, initial_state=initial_state, initial_key_sum=initial_key_sum, offsets=offsets,
        valid=valid, return_state=return_state, return_saved=return_saved, check_values=check_values, threads=threads,
    )  # fmt: skip


def _compute_list(*args: Any) -> list[Tensor]:
    results = _compute(args[:_COUNT], args[_COUNT:-2], args[-2], args[-1])
    return list(results) if isinstance(results, tuple) else [results]


def _compute_gradient(*args: Any) -> list[Tensor]:
    q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid = args[:_COUNT]
    rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads = args[_COUNT:-5]
    grad_out, grad_final_state, grad_final_key_sum, saved, wanted = args[-5:]
    gradients = _core.gradient(
        q, k, v, rule=rule, log_decay=log_decay, beta=beta, remove=remove, write=write, bonus=bonus, form=form, chunk=chunk, scale=scale,
        feature_map=feature_map, eps=eps, normalize=normalize, initial_state=initial_state, initial_key_sum=initial_key_sum, offsets=offsets,
        valid=valid, grad_out=grad_out, grad_final_state=grad_final_state, grad_final_key_sum=grad_final_key_sum, saved=saved, wanted=wanted,
        check_values=check_values, threads=threads,
    )  # fmt: skip
    return [getattr(gradients, name) for name in wanted]


# CompositeExplicitAutograd, not CPU: a tensor of another device then reaches the library and is refused with its sentence.
_library.impl("attend", _compute_list, "CompositeExplicitAutograd")
_library.impl("gradient", _compute_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("tercet::attend", lib=_library)
def _attend_fake(*args: Any) -> list[Tensor]:
    q, k, v, offsets = args[0], args[1], args[2], args[_COUNT - 2]
    normalize = args[_COUNT + _OPTIONS.index("normalize")]
    return_state, return_saved = args[-2:]
    batch, tokens, query_heads, key_dim = q.shape
    value_dim = v.shape[3]
    state_heads = max(k.shape[2], v.shape[2])
    results = [q.new_empty(batch, tokens, max(query_heads, state_heads), value_dim)]
    if return_state:
        sequences = batch if offsets is None else offsets.shape[0] - 1
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        results.append(q.new_empty(sequences, state_heads, key_dim, value_dim, dtype=dtype))
        if normalize:
            results.append(q.new_empty(sequences, state_heads, key_dim, dtype=dtype))
    if return_saved:
        # Only the library knows how many states it keeps, and with offsets it depends on their values.
        results.append(q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.uint8))
    return results


@torch.library.register_fake("tercet::gradient", lib=_library)
def _gradient_fake(*args: Any) -> list[Tensor]:
    inputs = dict(zip(_TENSORS, args))
    return [torch.empty_like(inputs[name], memory_format=torch.contiguous_format) for name in args[-1]]


# ---- Autograd -------------------------------------------------------------------------------------------------------------------------------


def _gradients(direct: bool, args: Sequence[Any]) -> list[Tensor]:
    if direct:
        return _compute_gradient(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _gradient_op(*args)


class _Gradient(torch.autograd.Function):
    """The gradients where they are to be differentiated again: they can't be, and say so."""

    @staticmethod
    def forward(ctx: Any, direct: bool, *args: Any) -> Tuple[Tensor, ...]:
        return tuple(_gradients(direct, args))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("tercet has no second derivatives: the gradients of attend can't be differentiated again (create_graph=True)")


class _Attend(torch.autograd.Function):
    # Not split into forward and setup_context: torch then binds the signature anew in each call, 30 us.
    @staticmethod
    def forward(
        ctx: Any, direct: bool, options: Tuple[Any, ...], return_state: bool, return_saved: bool, *tensors: Optional[Tensor]
    ) -> Tuple[Tensor, ...]:
        if direct:
            results = _compute(tensors, options, return_state, return_saved)
            if not isinstance(results, tuple):
                results = (results,)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                results = tuple(_attend_op(*tensors, *options, return_state, return_saved))
        if return_saved:
            ctx.mark_non_differentiable(results[-1])
        ctx.save_for_backward(*tensors, results[-1] if return_saved else None)
        ctx.set_materialize_grads(False)
        ctx.direct = direct
        ctx.options = options
        ctx.outputs = len(results) - return_saved
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        needed = ctx.needs_input_grad[4:]
        grads = grads[: ctx.outputs]
        if all(grad is None for grad in grads):
            return (None,) * (4 + _COUNT)
        options = ctx.options
        if options[1] == "parallel":
            options = (options[0], "automatic", *options[2:])
        tensors = ctx.saved_tensors
        wanted = [name for name, need in zip(_DIFFERENTIABLE, needed) if need]
        direct = ctx.direct and _eager()
        args = (*tensors[:-1], *options, *grads, *((None,) * (3 - len(grads))), tensors[-1], wanted)
        found = iter(_Gradient.apply(direct, *args) if torch.is_grad_enabled() else _gradients(direct, args))
        return (None, None, None, None, *(next(found) if need else None for need in needed))


def _requires_grad(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _attend_autograd(*args: Any) -> list[Tensor]:
    tensors = args[:_COUNT]
    if not _requires_grad(tensors):
        with torch._C._AutoDispatchBelowAutograd():
            return _attend_op(*args)
    return list(_Attend.apply(False, args[_COUNT:-2], args[-2], args[-1], *tensors))


def _gradient_autograd(*args: Any) -> list[Tensor]:
    if not _requires_grad(args[:_COUNT] + args[-5:-2]):
        return _gradients(False, args)
    return list(_Gradient.apply(False, *args))


_library.impl("attend", _attend_autograd, "Autograd")
_library.impl("gradient", _gradient_autograd, "Autograd")


# ---- The call -------------------------------------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)


def _eager() -> bool:
    """Whether nobody is watching: no tracing, no dispatch mode, no functorch transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _autocast(tensors: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """What autocast makes of the inputs: q, k and v of its dtype, gates of that or f32, states of f32. f64 is left alone, as torch does."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    qkv = tuple(tensor.to(dtype) for tensor in tensors[:3])
    gates = tuple(tensor if tensor is None or tensor.dtype in (dtype, torch.float32) else tensor.float() for tensor in tensors[3:8])
    states = tuple(tensor if tensor is None else tensor.float() for tensor in tensors[8:10])
    return (*qkv, *gates, *states, *tensors[10:])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: str,
    log_decay: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    remove: Optional[Tensor] = None,
    write: Optional[Tensor] = None,
    bonus: Optional[Tensor] = None,
    form: str = "automatic",
    chunk: Optional[int] = None,
    scale: Optional[float] = None,
    feature_map: str = "identity",
    eps: float = 1e-6,
    normalize: bool = False,
    initial_state: Optional[Tensor] = None,
    initial_key_sum: Optional[Tensor] = None,
    offsets: Optional[Tensor] = None,
    valid: Optional[Tensor] = None,
    return_state: bool = False,
    check_values: bool = True,
    threads: int = 0,
) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Computes the layer of `tercet.attend`, differentiably.

    The inputs are those of `tercet.attend`, as CPU tensors: q [B, T, Hq, K], k [B, T, Hk, K], v [B, T, Hv, V], of f32, f64, bf16 or f16; gates and
    states as the rule takes them. Gradients flow to every floating tensor that requires them, once: a second derivative raises
    NotImplementedError. `scale` is a number and gets no gradient. The backward pass starts from states that the forward pass keeps, one for
    every chunk of tokens; form="parallel" keeps none and computes them again.

    Under autocast q, k and v are taken in autocast's dtype; gates may stay f32 and states are f32.

    Returns out [B, T, Ho, V], or with return_state a tuple (out, final_state [N, Hs, K, V]) and, with normalize, final_key_sum [N, Hs, K] after it.
    Raises ValueError with the library's sentence for what can't be, TypeError for what is not a CPU tensor.
    """
    tensors = (q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid)
    if torch.is_autocast_enabled("cpu"):
        tensors = _autocast(tensors)
    options = (rule, form, chunk, scale, feature_map, eps, normalize, check_values, threads)
    differentiate = plain = False
    if torch.is_grad_enabled():
        differentiate = any([tensor is not None and tensor.requires_grad for tensor in tensors])
    keep = differentiate and form != "parallel"  # the parallel form keeps no states
    if not torch.compiler.is_compiling() and _eager():
        plain = all([tensor is None or type(tensor) in _PLAIN for tensor in tensors])
    if plain and not differentiate:
        return _compute(tensors, options, return_state, False)
    if plain:
        results = _Attend.apply(True, options, return_state, keep, *tensors)
    else:
        results = _attend_op(*tensors, *options, return_state, keep)
    if not return_state:
        return results[0]
    return tuple(results[:-1] if keep else results)


def attend_in_place(q: Tensor, k: Tensor, v: Tensor, *, initial_state: Tensor, initial_key_sum: Optional[Tensor] = None, **options: Any) -> Any:
    """`attend` without gradients, with the final state written over the initial one."""
    if torch.compiler.is_compiling():
        results = attend(q, k, v, initial_state=initial_state, initial_key_sum=initial_key_sum, **options)
        for old, new in zip((initial_state, initial_key_sum), results[1:]):
            old.copy_(new)
        return results
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast((q, k, v))
    states = {"final_state": initial_state}
    if initial_key_sum is not None:
        states["final_key_sum"] = initial_key_sum
    return _core.attend(q, k, v, initial_state=initial_state, initial_key_sum=initial_key_sum, **states, **options)
