"""Models of Hugging Face transformers on a CPU, their linear attention computed by Tercet.

    import tercet.transformers
    print(tercet.transformers.enable())      # what is served, and what was found and is not
    ...
    tercet.transformers.disable()            # everything is as it was

or `with tercet.transformers.enable(): ...`. The families are those of gated delta, KDA and Mamba-2; models built before and after are served alike.

Where transformers keeps a rule in a function of the modeling file, the file's name for it is replaced. Where a layer binds the function to an
attribute of its own, its class gets a property that is read before the attribute. Where Mamba-2 writes the rule out in `torch_forward`, the
method gets one statement more, before the two branches that it would choose from. A call that Tercet can't serve goes to the original, whole.

Not handled: Mamba-1, RWKV-4, RG-LRU and MiniMax's lightning attention, which the report names where it finds them.
"""

from __future__ import annotations

import ast
import collections
import dis
import functools
import importlib
import importlib.util
import inspect
import textwrap
import threading
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.compiler import is_compiling

from tercet import _core

__all__ = ["enable", "disable", "Report"]

FAMILIES = {
    "gated delta": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini"),
    "KDA": ("kimi_linear", "glm5_next", "bailing_hybrid"),
    "Mamba-2": ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "zamba2", "nemotron_h"),
}

# Recurrent layers of other kinds, so that the report can say why they stay as they are.
OTHERS = {
    "mamba": "Mamba-1 decays each channel and state by itself, which is none of the rules",
    "falcon_mamba": "Mamba-1 decays each channel and state by itself, which is none of the rules",
    "jamba": "Mamba-1 decays each channel and state by itself, which is none of the rules",
    "zamba": "Mamba-1 decays each channel and state by itself, which is none of the rules",
    "rwkv": "RWKV-4 has no state of keys and values",
    "recurrent_gemma": "RG-LRU has no state of keys and values",
    "minimax": "lightning attention is written out in the layer",
}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Arguments of flash-linear-attention's and mamba_ssm's functions that change the result and that the fallbacks do not know.
_FOREIGN = frozenset({
    "scale", "head_first", "z", "A_log", "dt_bias", "lower_bound", "safe_gate", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval", "state_v_first", "transpose_state_layout", "cp_context", "return_varlen_states", "return_intermediate_states",
    "state_batch_indices",
})

_TELLING = _FOREIGN | {"cu_seqlens", "seq_idx"}  # with those that say where sequences begin

_calls = collections.Counter()  # served calls under None, the others under why not


# ---- Which calls are served -------------------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """Why a call goes to the original."""


# How a call is computed: at once, at once with autograd, or by the operator that torch.compile sees.
_PLAIN, _RECORDED, _COMPILED = range(3)


def _check(*tensors: torch.Tensor | None) -> int:
    """How to compute a call of these tensors, or Nones, the first of them on the CPU; _Refused where it can't be. The library refuses the rest."""
    if not is_compiling() and _core.only_computes(tensors):  # most calls, and each step of a decode
        return _PLAIN
    if not tensors[0].is_cpu:
        raise _Refused(f"a tensor is on {tensors[0].device.type}")
    if is_compiling():
        if torch.compiler.is_exporting():
            raise _Refused("the call is exported")
        return _COMPILED
    if torch.jit.is_tracing():
        raise _Refused("the call is traced")
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        raise _Refused("forward mode is not there")
    recording = torch.is_grad_enabled()
    way = _PLAIN
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            raise _Refused(f"a {type(tensor).__name__} is not a plain tensor")
        if recording and tensor.requires_grad:
            way = _RECORDED
    if way is _RECORDED and torch._C._functorch.peek_interpreter_stack() is not None:
        raise _Refused("the call is transformed by torch.func")
    return way


def _check_options(options: dict) -> None:
    if not _FOREIGN.isdisjoint(options):
        for name in sorted(_FOREIGN.intersection(options)):
            if options[name] is not None and options[name] is not False:
                raise _Refused(f"{name} is an argument that only GPU kernels take")


def _attend(way, q, k, v, rule, log_decay, beta, scale, feature_map, state, offsets, return_state, final_state=None):
    """`tercet.attend`. Values are not checked: to the fallbacks, too, NaN is data. `final_state` is for the plain way."""
    if way is _PLAIN:
        inputs = (q, k, v, log_decay, beta, None, None, None, state, None, offsets, None)
        options = (rule, "automatic", None, scale, feature_map, 1e-6, False, False, torch.get_num_threads(), None)
        out = _core.attend(inputs, options, return_state, False, None, final_state, None)
        _calls[None] += 1
        return out
    try:
        from tercet.torch import attend
    except ImportError:
        raise _Refused("tercet.torch, which has the gradients, is not there") from None
    with torch.autocast("cpu", enabled=False):  # the fallbacks, too, cast by themselves
        out = attend(q, k, v, rule=rule, log_decay=log_decay, beta=beta, scale=scale, feature_map=feature_map, initial_state=state,
                     offsets=offsets, return_state=return_state, check_values=False)
    if way is _RECORDED:
        _calls[None] += 1
    return out


def _offsets(options: dict, names: tuple[str, ...] = ("cu_seqlens",)) -> torch.Tensor | None:
    """Where packed sequences begin, [N + 1], or None: cu_seqlens, or seq_idx [B, T], which numbers the sequence of each token."""
    for name in names:
        if options.get(name) is not None:
            return torch.as_tensor(options[name], device="cpu")
    seq_idx = options.get("seq_idx")
    if seq_idx is None:
        return None
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    ends = torch.tensor([seq_idx.numel()])
    return torch.cat([starts.flatten().nonzero().flatten(), ends])


def _one_row(tensor: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] as [1, B T, ...]: packed rows of a batch are packed sequences of one row."""
    return tensor if tensor.shape[0] == 1 else tensor.flatten(0, 1).unsqueeze(0)


# ---- Gated delta and KDA ----------------------------------------------------------------------------------------------------------------------


def _delta(rule, l2norm, query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, options):
    """The two delta rules with a decay, as the fallbacks take and give them.

    query, key: [B, T, Hk, K]; value: [B, T, Hv, V]; beta: [B, T, Hv]; g: [B, T, Hv], for kda [B, T, Hv, K]; initial_state: [B, Hv, K, V] or None.
    Returns (out [B, T, Hv, V] of query's dtype, the final state in f32 or None). `l2norm` is the file's own function where it is applied in the
    dtype of query, and None where that is done in f32.
    """
    if not is_compiling():
        tensors = (query, key, value, g, beta, initial_state)
        done = _core.attend_delta(rule, tensors, bool(output_final_state), bool(use_qk_l2norm_in_kernel), l2norm, options, _TELLING)
        if done is not None:  # what follows, for a call that has nothing to it
            _calls[None] += 1
            return done
    _check_options(options)
    way = _check(query, key, value, g, beta, initial_state)
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        raise _Refused(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    if query.shape != key.shape or query.numel() == 0:
        raise _Refused("query and key differ in shape or are empty")
    offsets = _offsets(options)
    if offsets is not None and query.shape[0] > 1:
        if options.get("cu_seqlens") is not None or initial_state is not None or output_final_state:
            raise _Refused("a batch of more than one row is packed and has states")
        batch = query.shape[0]
        query, key, value, g, beta = map(_one_row, (query, key, value, g, beta))
    else:
        batch = None
    feature_map = "identity"
    if use_qk_l2norm_in_kernel:
        if l2norm is None or query.dtype == torch.float32:
            feature_map = "l2_norm"
        else:
            query, key = l2norm(query, dim=-1, eps=1e-6), l2norm(key, dim=-1, eps=1e-6)
    if g.dtype != query.dtype:
        g = g.float()
    if beta.dtype != query.dtype:
        beta = beta.float()
    place = None
    if initial_state is not None:
        # The buffer of a cache, which would copy the new state into it as soon as it gets it; caches mark theirs for torch.compile.
        if output_final_state and way is _PLAIN and initial_state.dtype == torch.float32 and hasattr(initial_state, "_dynamo_static_input_type"):
            place = initial_state
        initial_state = initial_state.float()
    out = _attend(way, query, key, value, rule, g, beta, None, feature_map, initial_state, offsets, output_final_state, place)
    out, state = out if output_final_state else (out, None)
    return (out if batch is None else out.view(batch, -1, *out.shape[2:])), state


def _delta_chunk(rule, l2norm):
    def serve(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **options):
        return _delta(rule, l2norm, query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, options)

    return serve


def _delta_recurrent(rule, l2norm):
    def serve(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **options):
        return _delta(rule, l2norm, query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, options)

    return serve


# ---- Mamba-2 ----------------------------------------------------------------------------------------------------------------------------------


def _ssd(way, x, dt, A, B, C, D, state, return_state, offsets):
    """Mamba-2 over a sequence: simple_gla of q = C, k = B, v = dt x, log_decay = dt A and scale 1, in f32.

    x: [B, T, H, P]; dt: [B, T, H], after softplus; A, D: [H], D may be None; B, C: [B, T, G, N]; state: [B, H, P, N] or None. Returns out
    [B, T, H, P] and the final state [B, H, P, N] or None. That lies in memory as [B, H, N, P], and so does a cache made like it.
    """
    x, dt = x.float(), dt.float()
    if state is not None:
        state = state.float().transpose(-1, -2)
    out = _attend(way, C.float(), B.float(), x * dt.unsqueeze(-1), "simple_gla", dt * A.float(), None, 1.0, "identity", state, offsets,
                  return_state)
    out, state = (out[0], out[1].transpose(-1, -2)) if return_state else (out, None)
    if D is not None:
        D = D.float().unsqueeze(-1)
        out = out.addcmul_(x, D) if way is _PLAIN else out + x * D
    return out, state


def _ssd_step(way, state, x, dt, A, B, C, D):
    """One token of it: out [B, H, P] in f32, and state [B, H, P, N] updated in place. x: [B, H, P]; dt: [B, H]; A, D: [H]; B, C: [B, G, N]."""
    if way is not _PLAIN or not (state.dtype == x.dtype == dt.dtype == A.dtype == B.dtype == C.dtype == torch.float32):
        out, new = _ssd(way, x.unsqueeze(1), dt.unsqueeze(1), A, B.unsqueeze(1), C.unsqueeze(1), D, state, True, None)
        state.copy_(new)
        return out.squeeze(1)
    state, v, decay = state.transpose(-1, -2), (x * dt.unsqueeze(-1)).unsqueeze(1), (dt * A).unsqueeze(1)
    out = _attend(way, C.unsqueeze(1), B.unsqueeze(1), v, "simple_gla", decay, None, 1.0, "identity", state, None, True, state)[0].squeeze(1)
    return out if D is None else out.addcmul_(x, D.float().unsqueeze(-1))


def _scan(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
          return_final_states=False, **options):
    """`mamba2_chunk_scan`: out [B, T, H, P] in f32, and the final state where it is asked for."""
    _check_options(options)
    way = _check(hidden_states, dt, A, B, C, D, dt_bias, initial_states)
    if hidden_states.dtype not in _DTYPES:
        raise _Refused(f"the hidden states are {hidden_states.dtype}")
    if A.dim() != 1 or (D is not None and D.dim() != 1) or hidden_states.numel() == 0:
        raise _Refused("A or D is not one number a head, or there is nothing to compute")
    offsets = _offsets(options)
    if offsets is not None and (return_final_states or initial_states is not None):
        raise _Refused("a packed call has states")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    batch = hidden_states.shape[0]
    if offsets is not None:
        hidden_states, dt, B, C = map(_one_row, (hidden_states, dt, B, C))
    out, state = _ssd(way, hidden_states, dt, A, B, C, D, initial_states, return_final_states, offsets)
    out = out.view(batch, -1, *out.shape[2:])
    return (out, state) if return_final_states else out


def _one_a_head(x):
    """What is repeated along the last axis, by a stride of zero, once; numbers of their own for each channel would be another rule."""
    if x.stride(-1) != 0 and x.shape[-1] > 1:
        raise _Refused("dt, A or D is not one number a head")
    return x.select(-1, 0)


def _state_update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **options):
    """`mamba2_selective_state_update`: out [B, H, P]; state [B, H, P, N] is updated in place."""
    _check_options(options)
    way = _check(hidden_states, state, dt, A, B, C, D, dt_bias, z)
    if hidden_states.dtype not in _DTYPES or state.dtype not in _DTYPES:
        raise _Refused(f"the hidden states and the state are {hidden_states.dtype} and {state.dtype}")
    A, dt = _one_a_head(_one_a_head(A)), _one_a_head(dt)
    D = None if D is None else _one_a_head(D)
    if dt_bias is not None:
        dt = dt + _one_a_head(dt_bias).to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    out = _ssd_step(way, state, hidden_states, dt, A, B, C, D)
    if z is not None:
        out = out * F.silu(z)
    return out.to(hidden_states.dtype)


def _fused_scan(zxbcdt, *args, **options):
    """`mamba2_split_conv1d_scan_combined` has no fallback: None sends the layer to its other functions, which keep packed sequences apart."""
    if _offsets(options) is None:
        raise _Refused("the fused scan has nothing to compute")
    _check(zxbcdt)
    return None


def _served_scan(patch):
    return lambda *args: _layer_scan(*args) if patch.active else None


def _layer_scan(layer, hidden_states, B, C, dt, A, cache, decoding, continuing, bounds):
    """Both branches of `torch_forward`: out [B, T, H P], the state in the cache brought up to date; None where the original has to do it.

    `decoding`: the original takes its branch of one token; `continuing`: it starts from the cached state; `bounds`: of dt after softplus.
    """
    try:
        state = _cached_state(cache, layer.layer_idx) if decoding or continuing else None
        way = _check(hidden_states, dt, A, B, C, layer.D, layer.dt_bias, state)
        if hidden_states.dtype not in _DTYPES or hidden_states.numel() == 0:
            raise _Refused(f"the hidden states are {hidden_states.dtype}, or there are none")
        batch = hidden_states.shape[0]
        x = hidden_states.reshape(batch, -1, layer.num_heads, layer.head_dim)
        B, C = (m.reshape(batch, -1, layer.n_groups, layer.ssm_state_size) for m in (B, C))
        if decoding:
            dt = dt if dt.dim() == 2 else dt[:, 0]
            dt = torch.clamp(F.softplus(dt + layer.dt_bias.to(dt.dtype)), *bounds)
            out = _ssd_step(way, state, x[:, 0], dt, A, B[:, 0], C[:, 0], layer.D).to(C.dtype)
        else:
            dt = torch.clamp(F.softplus(dt + layer.dt_bias), *bounds)
            out, state = _ssd(way, x, dt, A, B, C, layer.D, state, cache is not None, None)
            if cache is not None:
                _cache_state(cache, layer.layer_idx, state)
    except (_Refused, TypeError, ValueError) as reason:
        _leave(reason)
        return None
    return out.reshape(batch, x.shape[1], -1)


def _cached_state(cache, index):
    """The state [B, H, P, N] of a layer, first laid out in the cache as [B, H, N, P] is in memory: a step over it is 18 times as fast (AVX-512)."""
    stacked = hasattr(cache, "ssm_states")
    held, at = (vars(cache), "ssm_states") if stacked else (vars(cache.layers[index]), "recurrent_states")
    if not isinstance(held[at], torch.Tensor):
        held, at = held[at], index if stacked else 0
    if held[at].stride(-2) != 1:
        held[at] = held[at].transpose(-1, -2).contiguous().transpose(-1, -2)
    return held[at][index] if stacked and held is vars(cache) else held[at]


def _cache_state(cache, index, state):
    if hasattr(cache, "ssm_states"):
        _cached_state(cache, index).copy_(state)
    else:
        cache.update_recurrent_state(state, index)


def _with_scan(method: Callable, scan: Callable) -> Callable:
    """The method `torch_forward`, with `scan` asked before its two branches. Raises _Refused where it is not written as we know it.

    Its own text is compiled again, in its own module, so that its projections, convolution, cache and norm stay its own, in any version.
    """
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    except (OSError, TypeError, SyntaxError):
        raise _Refused("the text of torch_forward is not there to read") from None
    at = next((i + 1 for i, line in enumerate(function.body) if ast.unparse(line) == "A = -torch.exp(self.A_log.float())"), len(function.body))
    branch = function.body[at] if at < len(function.body) else None
    names = {"self", "hidden_states", "B", "C", "dt", "cache_params", "y"}
    if not isinstance(branch, ast.If) or not names.issubset(method.__code__.co_varnames) or method.__closure__ or function.decorator_list:
        raise _Refused("torch_forward is not written in the way that is known")
    clamps = {ast.unparse(node) for node in ast.walk(branch) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.clamp"}
    continuing = [test for line in branch.orelse if (test := _previous_states(line))]
    if len(clamps) != 1 or len(continuing) != 1:
        raise _Refused("torch_forward is not written in the way that is known")
    bounds = ast.unparse(ast.Tuple(ast.parse(clamps.pop(), mode="eval").body.args[1:], ast.Load()))
    text = f"y = _scan(self, hidden_states, B, C, dt, A, cache_params, {ast.unparse(branch.test)}, {continuing[0]}, {bounds})\nif y is None: pass"
    asked = ast.parse(text).body
    for node in (node for line in asked for node in ast.walk(line)):
        ast.copy_location(node, branch)
    asked[1].body = [branch]
    function.body[at : at + 1] = asked
    for argument in function.args.args:
        argument.annotation = None
    outer = ast.parse(f"def bind(_scan):\n    pass\n    return {function.name}")
    outer.body[0].body[0] = function
    made = {}
    exec(compile(ast.increment_lineno(outer, method.__code__.co_firstlineno - 1), method.__code__.co_filename, "exec"), method.__globals__, made)
    return functools.update_wrapper(made["bind"](scan), method)


def _previous_states(line: ast.stmt) -> str | None:
    """The text of the condition under which a statement takes the cached state as the one to start from; None where it is not about that."""
    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "previous_states":
        return ast.unparse(line.value.test) if isinstance(line.value, ast.IfExp) else "False"
    if isinstance(line, ast.If) and any(_previous_states(inner) for inner in line.body):
        return ast.unparse(line.test)
    return None


# ---- The convolution before them, where sequences are packed ----------------------------------------------------------------------------------


def _convolution(names: tuple[str, ...]) -> Callable:
    """`causal_conv1d_fn` of packed sequences, which the fallback refuses or mixes; `names` are the arguments that may say where they begin."""

    def serve(hidden_states, weight, bias=None, activation=None, **options):
        offsets = _offsets(options, names)
        if offsets is None:
            raise _Refused("the convolution is left to torch")
        _check(hidden_states, weight, bias)
        if activation not in (None, "silu", "swish"):
            raise _Refused(f"the activation is {activation}")
        batch, _, tokens = hidden_states.shape
        before = batch * tokens - int(offsets[-1])
        if before < 0 or (before and batch > 1):
            raise _Refused("the offsets are of another number of tokens")
        # Columns of a cache before the tokens belong to the first sequence.
        lengths = offsets.diff()
        lengths[0] += before
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(batch, 1, tokens)
        x, taps = hidden_states.to(weight.dtype), weight.shape[-1]
        out = x * weight[:, -1:]
        for shift in range(1, min(taps, tokens)):
            same = sequence[..., shift:] == sequence[..., :-shift]
            out = out + F.pad(x[..., :-shift] * weight[:, taps - 1 - shift, None] * same, (shift, 0))
        if bias is not None:
            out = out + bias[:, None]
        return (out if activation is None else F.silu(out)).to(hidden_states.dtype)

    return serve


# ---- Putting them in place --------------------------------------------------------------------------------------------------------------------


def _leave(reason: Exception) -> None:
    if not is_compiling():
        _calls[str(reason).partition("\n")[0]] += 1


def _or_original(serve: Callable, original: Callable, patch: _Patch, counted: bool = True) -> Callable:
    """`original`, but served where that can be. It is only `original` as soon as the patch is undone, whoever has kept it."""

    @functools.wraps(original)
    def served(*args, **kwargs):
        if patch.active:
            try:
                return serve(*args, **kwargs)
            except (_Refused, TypeError, ValueError) as reason:  # the last two are the library's own refusals
                if counted:
                    _leave(reason)
        return original(*args, **kwargs)

    return served


_lock = threading.RLock()
_patches = {}  # (owner, name): _Patch
_ALWAYS = object()  # holds what enable() was called for outside of a `with`


class _Patch:
    """One name of a module or a class, which has another value while anyone holds the patch."""

    def __init__(self, owner: object, name: str, make: Callable[[object, _Patch], object]):
        self.owner, self.name, self.make = owner, name, make
        self.holders = set()
        self.active = False

    def __str__(self) -> str:
        return self.name if inspect.ismodule(self.owner) else f"{self.owner.__name__}.{self.name}"

    def hold(self, holder: object) -> None:
        if not self.active:
            self.had = vars(self.owner).get(self.name)  # None: the class has no such name, only its instances do
            self.has = self.make(self.had, self)
            setattr(self.owner, self.name, self.has)
            self.active = True
        self.holders.add(holder)

    def release(self, holder: object) -> None:
        self.holders.discard(holder)
        if self.active and not self.holders:
            self.active = False
            if vars(self.owner).get(self.name) is not self.has:
                return  # someone's patch lies over ours, and calls the original through it
            if self.had is None:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.had)


def _attribute(name, serve_for):
    """Makes a property that reads its instance's own attribute of that name, which stays as it is, and serves the function that it holds."""

    def make(_, patch):
        made = {}

        def get(layer):
            if name not in vars(layer):
                raise AttributeError(name)
            original = vars(layer)[name]
            if original is None:
                return None
            if original not in made:
                made[original] = _or_original(serve_for(original), original, patch)
            return made[original]

        def put(layer, value):
            vars(layer)[name] = value

        def drop(layer):
            if name not in vars(layer):
                raise AttributeError(name)
            del vars(layer)[name]

        return property(get, put, drop)

    return make


def _own_l2norm(function: Callable) -> Callable | None:
    """The file's l2norm where the function applies it before it casts to f32; None where it does so after."""
    function = inspect.unwrap(function)
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return function.__globals__.get("l2norm") if 0 <= text.find("l2norm(") < text.find("torch.float32") else None


_DELTA = ("query", "key", "value", "g", "beta")

# The functions that Tercet serves: the arguments they must take first, and what serves them in place of an original.
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": ((*_DELTA, "chunk_size", "initial_state"), lambda f: _delta_chunk("gated_delta", _own_l2norm(f))),
    "torch_recurrent_gated_delta_rule": ((*_DELTA, "initial_state"), lambda f: _delta_recurrent("gated_delta", _own_l2norm(f))),
    "chunk_kimi_delta_attention": ((*_DELTA, "chunk_size", "initial_state"), lambda f: _delta_chunk("kda", _own_l2norm(f))),
    "recurrent_kimi_delta_attention": ((*_DELTA, "initial_state"), lambda f: _delta_recurrent("kda", _own_l2norm(f))),
    "mamba2_chunk_scan": (("hidden_states", "dt", "A", "B", "C", "chunk_size", "D"), lambda f: _scan),
    "mamba2_selective_state_update": (("state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias"), lambda f: _state_update),
}

# Attributes that layers bind them to.
_ATTRIBUTES = {"chunk_gated_delta_rule": "torch_chunk_gated_delta_rule", "recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule"}


def _layers(module: types.ModuleType) -> list[type]:
    return [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, torch.nn.Module) and x.__module__ == module.__name__]


def _binds(layer: type, name: str) -> bool:
    """Whether the class's own __init__ sets the attribute."""
    begin = vars(layer).get("__init__")
    return begin is not None and any(i.opname == "STORE_ATTR" and i.argval == name for i in dis.get_instructions(inspect.unwrap(begin)))


def _find(module: types.ModuleType) -> tuple[list[_Patch], dict[str, str]]:
    """What can be patched in a modeling file, and what is found there and can't: ([_Patch], {name: why not})."""
    patches, skipped, bound = [], {}, set()

    def add(owner, name, make):
        patches.append(_patches.setdefault((owner, name), _Patch(owner, name, make)))

    def function(name, serve_for, counted=True):
        add(module, name, lambda original, patch: _or_original(serve_for(original), original, patch, counted))

    for layer in _layers(module):
        for name, fallback in _ATTRIBUTES.items():
            if _binds(layer, name):
                bound.add(fallback)
                add(layer, name, _attribute(name, _FUNCTIONS[fallback][1]))
        if "torch_forward" in vars(layer):
            try:
                if (layer, "torch_forward") not in _patches:
                    _with_scan(layer.torch_forward, _layer_scan)
                add(layer, "torch_forward", lambda method, patch: _with_scan(method, _served_scan(patch)))
            except _Refused as reason:
                skipped[f"{layer.__name__}.torch_forward"] = str(reason)
    for name, (arguments, serve_for) in _FUNCTIONS.items():
        # A file whose layers bind the function is served through them: patched, it would stay bound to those that are built meanwhile.
        if name not in vars(module) or name in bound:
            continue
        found = tuple(inspect.signature(vars(module)[name]).parameters)
        if found[: len(arguments)] == arguments:
            function(name, serve_for)
        else:
            skipped[name] = f"its arguments are ({', '.join(found)})"
    if patches and not bound:
        if "causal_conv1d_fn" in vars(module) and module.causal_conv1d_fn is not None:
            begins = ("cu_seqlens", "cu_seq_lens_q") if "torch_chunk_gated_delta_rule" in vars(module) else ("cu_seqlens",)
            function("causal_conv1d_fn", lambda original: _convolution(begins), counted=False)
        if "mamba2_split_conv1d_scan_combined" in vars(module):
            function("mamba2_split_conv1d_scan_combined", lambda original: _fused_scan, counted=False)
    return patches, skipped


class Report:
    """What `enable` did, and a context manager that takes it back at its end.

    version: of transformers. patched: {family: names}, what is served. skipped: {family: why not}, what was found and is not.
    served, left: how many calls were served since, and {reason: calls} those that went to the original.
    """

    def __init__(self, version: str, patches: dict[str, list[_Patch]], skipped: dict[str, str]):
        self.version, self.skipped = version, skipped
        self._patches = [patch for found in patches.values() for patch in found]
        self.patched = {family: tuple(str(patch) for patch in found) for family, found in patches.items() if found}
        self._before = collections.Counter(_calls)
        self._first = [patch for patch in self._patches if _ALWAYS not in patch.holders]
        for patch in self._patches:
            patch.hold(_ALWAYS)

    @property
    def served(self) -> int:
        return _calls[None] - self._before[None]

    @property
    def left(self) -> dict[str, int]:
        return {reason: count for reason, count in (_calls - self._before).items() if reason is not None}

    def __enter__(self) -> Report:
        with _lock:
            for patch in self._patches:
                patch.hold(self)
            for patch in self._first:
                patch.release(_ALWAYS)
            self._first = []
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            for patch in self._patches:
                patch.release(self)

    def __repr__(self) -> str:
        state = "on" if any(patch.active for patch in self._patches) else "off"
        rows = [(family, ", ".join(names)) for family, names in self.patched.items()]
        rows += [(family, f"not served: {why}") for family, why in self.skipped.items()]
        width = max((len(family) for family, _ in rows), default=0)
        calls = [f"{self.served} calls served", *(f"{count} left to transformers: {reason}" for reason, count in self.left.items())]
        return "\n  ".join([f"Tercet in transformers {self.version}, {state}", *(f"{family:{width}}  {row}" for family, row in rows), *calls])


def _family(module: str) -> str:
    return module.rpartition(".")[2].removeprefix("modeling_")


def enable(model: torch.nn.Module | None = None) -> Report:
    """Has Tercet compute the linear attention of models of transformers on the CPU, those that exist and those built later.

    model: without one, all families of this version of transformers, whose files are imported for it. With one, the files its layers come from, so
    that other models built from these are served too, and files that are not part of transformers are looked at as well.

    Served are calls on the CPU in float32, bfloat16 and float16, with or without gradients; others go to the original function. Nothing is printed:
    the Report that comes back says what is served, and later how many calls were. Called again it changes nothing; as a context manager it takes
    back at its end what nothing else asks for.
    """
    version = importlib.import_module("transformers").__version__
    patches, skipped = {}, {}
    with _lock:
        if model is None:
            names = [f"transformers.models.{family}.modeling_{family}" for families in (*FAMILIES.values(), OTHERS) for family in families]
            names = [name for name in names if importlib.util.find_spec(name.rpartition(".")[0])]
        else:
            names = sorted({type(layer).__module__ for layer in model.modules()})
        for name in names:
            family = _family(name)
            if family in OTHERS:
                skipped[family] = OTHERS[family]
                continue
            try:
                found, why = _find(importlib.import_module(name))
            except ImportError as error:
                skipped[family] = str(error)
                continue
            patches[family] = found
            if model is None and not found and not why:
                why = {"modeling file": "nothing in it is known"}
            if why:
                skipped[family] = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        if model is not None and not any(patches.values()) and not skipped:
            skipped[type(model).__name__] = "no layer of it is of a family that Tercet serves"
        return Report(version, patches, skipped)


def disable() -> None:
    """Takes back all that `enable` did, whoever asked for it: functions, methods and classes are the objects they were, models need nothing."""
    with _lock:
        for patch in _patches.values():
            for holder in list(patch.holders):
                patch.release(holder)
