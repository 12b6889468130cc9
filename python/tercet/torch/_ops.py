"""The operators torch.ops.tercet.attend and .gradient, and `attend` over them.

Both are pure functions that return a list of tensors: `attend` gives out[, final_state[, final_key_sum]][, saved], `gradient` the gradients that
are wanted, in the order of the inputs. torch.compile and everything else that traces sees the operators; an eager call of plain tensors goes
straight to the library, because the dispatcher's way through Python costs more than the whole of a decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

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


def _compute_list(*args: Any) -> list[Tensor]:
    results = _core.attend(args[:_COUNT], (*args[_COUNT:-2], None), args[-2], args[-1], None, None, None)
    return list(results) if isinstance(results, tuple) else [results]


def _compute_gradient(*args: Any) -> list[Tensor]:
    gradients = _core.gradient(args[:_COUNT], (*args[_COUNT:-5], None), *args[-5:])
    return [gradient for gradient in gradients[:-1] if gradient is not None]


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
    return [torch.empty_like(inputs[name], memory_format=torch.contiguous_format) for name in _DIFFERENTIABLE if name in args[-1]]


# ---- Autograd -------------------------------------------------------------------------------------------------------------------------------


def _gradients(direct: bool, args: Sequence[Any]) -> list[Tensor]:
    if direct:
        return _compute_gradient(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _gradient_op(*args)


class _Gradient(torch.autograd.Function):
    """The gradients where they are to be differentiated again: they can't be, and say so."""

    @staticmethod
    def forward(ctx: Any, direct: bool, *args: Any) -> tuple[Tensor, ...]:
        return tuple(_gradients(direct, args))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("tercet has no second derivatives: the gradients of attend can't be differentiated again (create_graph=True)")


class _Attend(torch.autograd.Function):
    # Not split into forward and setup_context: torch then binds the signature anew in each call, 30 us.
    @staticmethod
    def forward(
        ctx: Any, direct: bool, options: tuple[Any, ...], return_state: bool, return_saved: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        saved = None
        if direct:
            results = _core.attend(tensors, (*options, None), return_state, return_saved, None, None, None)
            results = results if isinstance(results, tuple) else (results,)
            if return_saved:
                *results, saved = results  # for the backward pass alone
                results = tuple(results)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                results = tuple(_attend_op(*tensors, *options, return_state, return_saved))
            if return_saved:
                saved = results[-1]
                ctx.mark_non_differentiable(saved)
        ctx.save_for_backward(*tensors, saved)
        ctx.set_materialize_grads(False)
        ctx.direct = direct
        ctx.options = options
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        grads = (*grads, None, None)[:3]  # that of the saved states is None, too
        if all(grad is None for grad in grads):
            return (None,) * (4 + _COUNT)
        options = ctx.options
        if options[1] == "parallel":
            options = (options[0], "automatic", *options[2:])
        tensors = ctx.saved_tensors
        wanted = [name for name, need in zip(_DIFFERENTIABLE, needed) if need]
        direct = ctx.direct and _eager()
        args = (*tensors[:-1], *options, *grads, tensors[-1], wanted)
        found = iter(_Gradient.apply(direct, *args) if torch.is_grad_enabled() else _gradients(direct, args))
        return (None, None, None, None, *(next(found) if need else None for need in needed))


def _requires_grad(tensors: Sequence[Any]) -> bool:
    """Whether autograd has to know. In forward mode tensors do not say that they carry a derivative; autograd refuses those that do."""
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


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

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _eager() -> bool:
    """Whether nobody is watching: no tracing, no dispatch mode, no functorch transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _autocast(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
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
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    remove: Tensor | None = None,
    write: Tensor | None = None,
    bonus: Tensor | None = None,
    form: str = "automatic",
    chunk: int | None = None,
    scale: float | None = None,
    feature_map: str = "identity",
    eps: float = 1e-6,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    initial_key_sum: Tensor | None = None,
    offsets: Tensor | None = None,
    valid: Tensor | None = None,
    return_state: bool = False,
    check_values: bool = True,
    threads: int = 0,
) -> Tensor | tuple[Tensor, ...]:
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
    plain = _eager() and _PLAIN.issuperset(map(type, tensors))
    if not plain:
        for name, tensor in zip(_TENSORS, tensors):
            if not isinstance(tensor, (Tensor, type(None))):
                raise TypeError(f"{name} is a {type(tensor).__name__} and must be a torch.Tensor")
    differentiate = _requires_grad(tensors)
    # The parallel form keeps no states, and nor do fake tensors outside of a compiler: how many there are is not known without the library.
    keep = differentiate and form != "parallel" and (plain or torch.compiler.is_compiling())
    if plain:
        if not differentiate:
            return _core.attend(tensors, (*options, None), return_state, False, None, None, None)
        results = _Attend.apply(True, options, return_state, keep, *tensors)
        return results if return_state else results[0]
    results = _attend_op(*tensors, *options, return_state, keep)
    if not return_state:
        return results[0]
    return tuple(results[:-1] if keep else results)


def attend_states(
    in_place: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: str,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    form: str = "automatic",
    chunk: int | None = None,
    feature_map: str = "identity",
    eps: float = 1e-6,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    initial_key_sum: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """`attend` with return_state, for the layers. If `in_place`, the final state is written over the initial one, and there are no gradients."""
    if in_place and not torch.compiler.is_compiling():
        tensors = (q, k, v, log_decay, beta, None, None, None, initial_state, initial_key_sum, None, valid)
        if torch.is_autocast_enabled("cpu"):
            tensors = _autocast(tensors)
        options = (rule, form, chunk, None, feature_map, eps, normalize, True, 0, None)
        return _core.attend(tensors, options, True, False, None, initial_state, initial_key_sum)
    results = attend(
        q,
        k,
        v,
        rule=rule,
        log_decay=log_decay,
        beta=beta,
        form=form,
        chunk=chunk,
        feature_map=feature_map,
        eps=eps,
        normalize=normalize,
        initial_state=initial_state,
        initial_key_sum=initial_key_sum,
        valid=valid,
        return_state=True,
    )
    if in_place:
        for old, new in zip((initial_state, initial_key_sum), results[1:]):
            old.copy_(new)
    return results
