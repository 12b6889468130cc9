"""tercet.fla against flash-linear-attention: its naive references, forward and gradients, and its signatures.

The references are loaded file by file: `import fla` would ask for triton. Without fla-core only what needs no answer of others is tested.
"""

import ast
import importlib.util
import inspect
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from tercet import fla  # noqa: E402
from tercet.torch import attend  # noqa: E402

torch.set_num_threads(1)
B, T, H, K, V = 2, 64, 3, 8, 5

SPEC = importlib.util.find_spec("fla")
OPS = pathlib.Path(next(iter(SPEC.submodule_search_locations))) / "ops" if SPEC else None
needs_fla = pytest.mark.skipif(SPEC is None or importlib.util.find_spec("einops") is None, reason="fla-core and einops are not installed")

FILES = {
    "linear_attn": ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"],
    "retention": ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"],
    "simple_gla": ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"],
    "gla": ["chunk_gla", "fused_recurrent_gla"],
    "rwkv6": ["chunk_rwkv6", "fused_recurrent_rwkv6"],
    "delta_rule": ["chunk_delta_rule", "fused_recurrent_delta_rule"],
    "gated_delta_rule": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"],
    "kda": ["chunk_kda", "fused_recurrent_kda"],
    "rwkv7": ["chunk_rwkv7", "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7"],
    "generalized_delta_rule/dplr": ["chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"],
}
PAIRS = [(folder, name) for folder, names in FILES.items() for name in names]


def naive(path):
    spec = importlib.util.spec_from_file_location("fla_naive_" + path.replace("/", "_"), OPS / (path + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gate(path):
    """fla's own gate formulas: a file that imports triton, so they are taken out of it."""
    tree = ast.parse((OPS / (path + ".py")).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("naive_")]
    space = {"torch": torch, "F": F}
    exec(compile(tree, path, "exec"), space)
    return types.SimpleNamespace(**space)


class Inputs:
    """Random tensors that require gradients, remembered in the order in which they are made."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.made = []

    def keep(self, tensor):
        self.made.append(tensor.requires_grad_())
        return tensor

    def normal(self, *shape):
        return self.keep(torch.randn(*shape, generator=self.generator))

    def uniform(self, *shape, low=0.0, high=1.0):
        return self.keep(low + (high - low) * torch.rand(*shape, generator=self.generator))

    def unit(self, *shape):
        return self.keep(F.normalize(torch.randn(*shape, generator=self.generator), dim=-1))

    def decay(self, *shape):
        return self.uniform(*shape, low=-0.5, high=-0.01)

    def qkv(self, heads=H, value_heads=H, tokens=T, batch=B):
        return self.normal(batch, tokens, heads, K), self.unit(batch, tokens, heads, K), self.normal(batch, tokens, value_heads, V)


def flat(results):
    out = []
    for result in results if isinstance(results, (tuple, list)) else [results]:
        out += flat(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
    return out


# Two computations in f32 whose sums run over at most T K terms each: each is off by a random walk of roundings, a few eps times the root of their
# number, and the two are apart by both.
EPSILON = 2 * torch.finfo(torch.float32).eps * (T * K) ** 0.5


def same(one, other, epsilon=EPSILON):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= epsilon * max(1.0, other.abs().max().item())


def agree(got, want, inputs, epsilon=EPSILON, retain_graph=True):
    """Results and the gradients of a random weighing of them."""
    got, want = flat(got), flat(want)
    assert len(got) == len(want)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(result.shape, generator=generator) for result in got]
    for one, other in zip(got, want, strict=True):
        same(one, other, epsilon)
    gradients = [
        torch.autograd.grad(results, inputs.made, weights, retain_graph=retain_graph, allow_unused=True) for results in (got, want)
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            same(one, other, 4 * epsilon)  # a gradient goes through the sequence there and back


def head_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


# ---- Against the references -----------------------------------------------------------------------------------------------------------------


@needs_fla
@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attn(normalize):
    reference = naive("linear_attn/naive")
    inputs = Inputs()
    q, k, v = (inputs.uniform(B, T, H, K, low=0.1), inputs.uniform(B, T, H, K, low=0.1), inputs.normal(B, T, H, V)) if normalize else inputs.qkv()
    state = inputs.normal(B, H, K, V)
    if normalize:
        state = (state, inputs.uniform(B, 1, H, K))
    want = reference.naive_recurrent_linear_attn(q, k, v, initial_state=state, output_final_state=True, normalize=normalize)
    for function in (fla.chunk_linear_attn, fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn):
        agree(function(q, k, v, initial_state=state, output_final_state=True, normalize=normalize), want, inputs)
    inputs.made = [q, k, v]
    agree(fla.chunk_linear_attn(q, k, v, scale=0.3, normalize=normalize)[0], reference.naive_chunk_linear_attn(q, k, v, 0.3, normalize), inputs)


@needs_fla
def test_linear_attn_where_the_denominator_vanishes():
    """fla adds 1e-10 to it: so does tercet.fla, though the library's own normaliser gives zeros."""
    q, k, v = torch.zeros(1, 3, 1, 2), torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1, 2)
    q[:, 1:] = 1e-11
    want, _ = naive("linear_attn/naive").naive_recurrent_linear_attn(q, k, v, normalize=True)
    got, _ = fla.chunk_linear_attn(q, k, v)
    torch.testing.assert_close(got, want)
    assert 0 < got[0, 1, 0, 0] < 0.5


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_retention, fla.fused_chunk_retention, fla.fused_recurrent_retention])
def test_retention(function):
    inputs = Inputs()
    q, k, v = inputs.qkv()
    want = naive("retention/naive").naive_retention(*head_first(q, k, v)).transpose(1, 2)
    agree(function(q, k, v), want, inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_simple_gla, fla.fused_chunk_simple_gla, fla.fused_recurrent_simple_gla])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_simple_gla(function, scale):
    reference = naive("simple_gla/naive")
    inputs = Inputs()
    q, k, v = inputs.qkv()
    g, state = inputs.decay(B, T, H), inputs.normal(B, H, K, V)
    want = reference.naive_recurrent_simple_gla(q, k, v, g, scale, state, True)
    agree(function(q, k, v, g, scale=scale, initial_state=state, output_final_state=True), want, inputs)
    agree(function(q, k, v, g, scale=scale), (reference.naive_parallel_simple_gla(q, k, v, g, scale)[0], None), inputs)
    gamma = inputs.decay(H)
    agree(function(q, k, v, g_gamma=gamma)[0], reference.naive_recurrent_simple_gla(q, k, v, gamma.expand(B, T, H))[0], inputs)
    agree(function(q, k, v, g, gamma)[0], reference.naive_recurrent_simple_gla(q, k, v, g + gamma)[0], inputs)
    agree(function(q, k, v)[0], reference.naive_recurrent_simple_gla(q, k, v, torch.zeros(B, T, H))[0], inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_gla, fla.fused_recurrent_gla])
def test_gla(function):
    inputs = Inputs()
    q, k, v = inputs.qkv()
    g, state = inputs.decay(B, T, H, K), inputs.normal(B, H, K, V)
    want = naive("gla/naive").naive_recurrent_gla(q, k, v, g, state, True)
    agree(function(q, k, v, g, initial_state=state, output_final_state=True), want, inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_rwkv6, fla.fused_recurrent_rwkv6])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_rwkv6(function, scale):
    inputs = Inputs()
    q, k, v = inputs.qkv()
    w, u, state = inputs.decay(B, T, H, K), inputs.normal(H, K), inputs.normal(B, H, K, V)
    out, end = naive("rwkv6/recurrent_naive").naive_recurrent_rwkv6(*head_first(q, k, v, w), u, scale, state, True)
    agree(function(q, k, v, w, u, scale=scale, initial_state=state, output_final_state=True), (out.transpose(1, 2), end), inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_delta_rule, fla.fused_recurrent_delta_rule])
def test_delta_rule(function):
    reference = naive("delta_rule/naive")
    inputs = Inputs()
    q, k, v = inputs.qkv()
    beta, state = inputs.uniform(B, T, H), inputs.normal(B, H, K, V)
    out, end = reference.delta_rule_recurrence(*head_first(q, k, v, beta), state)
    agree(function(q, k, v, beta, initial_state=state, output_final_state=True), (out.transpose(1, 2), end), inputs)
    long = k * 3  # is made a unit vector inside, up to the epsilon of the norm
    unit_q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
    unit_k = long * torch.rsqrt(long.square().sum(-1, keepdim=True) + 1e-6)
    out, _ = reference.delta_rule_recurrence(*head_first(unit_q, unit_k, v, beta))
    agree(function(q, long, v, beta, use_qk_l2norm_in_kernel=True)[0], out.transpose(1, 2), inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gated_delta_rule(function, scale):
    reference = naive("gated_delta_rule/naive")
    inputs = Inputs()
    q, k, v = inputs.qkv()
    g, beta, state = inputs.decay(B, T, H), inputs.uniform(B, T, H), inputs.normal(B, H, K, V)
    want = reference.naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, state, True)
    agree(function(q, k, v, g, beta=beta, scale=scale, initial_state=state, output_final_state=True), want, inputs)
    want = reference.naive_chunk_gated_delta_rule(q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True)
    agree(function(q, k, v, g, beta=beta, scale=scale, initial_state=state, output_final_state=True), want, inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
def test_gated_delta_rule_makes_its_gates(function):
    inputs = Inputs()
    q, k, v = inputs.qkv()
    raw, logits, A_log, dt_bias = inputs.normal(B, T, H), inputs.normal(B, T, H), inputs.normal(H), inputs.normal(H)
    g = gate("gated_delta_rule/gate").naive_gdn_gate(raw, A_log, dt_bias)
    for allow in (False, True):
        want, _ = naive("gated_delta_rule/naive").naive_recurrent_gated_delta_rule(q, k, v, logits.sigmoid() * (2 if allow else 1), g)
        options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": allow}
        agree(function(q, k, v, g=raw, beta=logits, **options)[0], want, inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda])
@pytest.mark.parametrize("heads", [(3, 3), (2, 4)])
def test_kda(function, heads):
    reference = naive("kda/naive")
    inputs = Inputs()
    q, k, v = inputs.qkv(*heads)
    g, beta, state = inputs.decay(B, T, heads[1], K), inputs.uniform(B, T, heads[1]), inputs.normal(B, heads[1], K, V)
    want = reference.naive_recurrent_kda(q, k, v, g, beta, None, state, True)
    agree(function(q, k, v, g, beta, initial_state=state, output_final_state=True), want, inputs)
    want = reference.naive_chunk_kda(q, k, v, g, beta, 0.3, state, True)
    agree(function(q, k, v, g, beta, scale=0.3, initial_state=state, output_final_state=True), want, inputs)


@needs_fla
@pytest.mark.parametrize("function", [fla.chunk_kda, fla.fused_recurrent_kda])
def test_kda_makes_its_gates(function):
    reference, gates = naive("kda/naive"), gate("kda/gate")
    inputs = Inputs()
    q, k, v = inputs.qkv()
    raw, logits, A_log, dt_bias = inputs.normal(B, T, H, K), inputs.normal(B, T, H), inputs.normal(H), inputs.normal(H * K)
    for options, g in (
        ({"A_log": A_log, "dt_bias": dt_bias}, gates.naive_kda_gate(raw, A_log, dt_bias)),
        ({"A_log": A_log}, gates.naive_kda_gate(raw, A_log)),
        ({"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}, gates.naive_kda_lowerbound_gate(raw, A_log, dt_bias, -5.0)),
        ({"dt_bias": dt_bias, "lower_bound": -2.0}, gates.naive_kda_lowerbound_gate(raw, None, dt_bias, -2.0)),
    ):
        want, _ = reference.naive_recurrent_kda(q, k, v, g, logits.sigmoid())
        agree(function(q, k, v, raw, logits, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **options)[0], want, inputs)


@needs_fla
def test_fused_recurrent_gated_delta_rule_with_decays_of_channels():
    inputs = Inputs()
    q, k, v = inputs.qkv()
    g, gk, beta = inputs.decay(B, T, H), inputs.decay(B, T, H, K), inputs.uniform(B, T, H)
    reference = naive("kda/naive")
    for gates, decay in (({"gk": gk}, gk), ({"g": g, "gk": gk}, g[..., None] + gk)):
        want, _ = reference.naive_recurrent_kda(q, k, v, decay, beta)
        agree(fla.fused_recurrent_gated_delta_rule(q, k, v, beta=beta, **gates)[0], want, inputs)
    want, _ = naive("delta_rule/naive").delta_rule_recurrence(*head_first(q, k, v, torch.ones(B, T, H)))
    agree(fla.fused_recurrent_gated_delta_rule(q, k, v)[0], want.transpose(1, 2), inputs)
    agree(fla.fused_recurrent_delta_rule(q, k, v)[0], want.transpose(1, 2), inputs)


@needs_fla
def test_dplr_and_rwkv7():
    reference = naive("generalized_delta_rule/dplr/naive")
    inputs = Inputs()
    q, k, v = inputs.qkv()
    a, w, state = inputs.unit(B, T, H, K), inputs.decay(B, T, H, K), inputs.normal(B, H, K, V)
    strength = inputs.uniform(B, T, H, K)
    b = -a * strength

    def want(scale):
        # The reference's scale is fixed at 1 / sqrt(K).
        out, end = reference.dplr_recurrence(*head_first(q * scale * K**0.5, k, v, a, b, w), state)
        return out.transpose(1, 2), end

    common = {"initial_state": state, "output_final_state": True}
    agree(fla.chunk_dplr_delta_rule(q, k, v, a, b, w, **common), want(K**-0.5), inputs)
    agree(fla.fused_recurrent_dplr_delta_rule(q, k, v, a, b, w, scale=0.3, **common), want(0.3), inputs)
    agree(fla.chunk_rwkv7(q, w, k, v, a, b, **common), want(1), inputs)
    agree(fla.chunk_rwkv7(q, w, k, v, a, b, scale=None, **common), want(K**-0.5), inputs)
    agree(fla.fused_recurrent_rwkv7(q, w, k, v, a, b, initial_state=state), want(K**-0.5), inputs)
    agree(fla.fused_mul_recurrent_rwkv7(q, w, k, v, -a, strength, **common), want(1), inputs)
    out, end = reference.dplr_chunkwise(*head_first(q, k, v, a, b, w), state)
    agree(fla.chunk_dplr_delta_rule(q, k, v, a, b, w, **common), (out.transpose(1, 2), end), inputs)


@needs_fla
@pytest.mark.parametrize("folder, name", PAIRS, ids=[name for _, name in PAIRS])
def test_signatures(folder, name):
    """The names of the parameters, their order and their defaults are fla's."""
    (function,) = (
        node
        for path in sorted((OPS / folder).glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    theirs, ours = function.args, inspect.signature(getattr(fla, name)).parameters
    names = [argument.arg for argument in theirs.args] + ([theirs.kwarg.arg] if theirs.kwarg else [])
    assert list(ours) == names and not theirs.kwonlyargs and not theirs.vararg
    for argument, default in zip(reversed(theirs.args), reversed(theirs.defaults)):
        assert ours[argument.arg].default == ast.literal_eval(default), argument.arg
    assert sum(parameter.default is not inspect.Parameter.empty for parameter in ours.values()) == len(theirs.defaults)


@needs_fla
def test_every_function_is_there():
    """All of chunk_*, fused_chunk_* and fused_recurrent_* that fla exports for these rules and that does not only refuse."""
    exported = set()
    for folder in FILES:
        tree = ast.parse((OPS / folder / "__init__.py").read_text())
        exported |= {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    wanted = {name for name in exported if name.startswith(("chunk_", "fused_chunk_", "fused_recurrent_", "fused_mul_recurrent_"))}
    assert wanted - set(fla.__all__) == {"fused_chunk_gla", "fused_chunk_delta_rule"}  # fla's own raise NotImplementedError
    assert set(fla.__all__) <= wanted
    assert "triton" not in sys.modules


# ---- Conventions, against the library ---------------------------------------------------------------------------------------------------------

# Each function as a call of q, k, v and gates from `Inputs`: (function, the gates by name).
GATES = {
    "chunk_simple_gla": {"g": lambda i, n: i.decay(1, n, H)},
    "chunk_gla": {"g": lambda i, n: i.decay(1, n, H, K)},
    "chunk_delta_rule": {"beta": lambda i, n: i.uniform(1, n, H)},
    "chunk_gated_delta_rule": {"g": lambda i, n: i.decay(1, n, H), "beta": lambda i, n: i.uniform(1, n, H)},
    "chunk_kda": {"g": lambda i, n: i.decay(1, n, H, K), "beta": lambda i, n: i.uniform(1, n, H)},
    "chunk_linear_attn": {},
    "chunk_retention": {},
    "fused_recurrent_retention": {},
    "fused_recurrent_simple_gla": {"g": lambda i, n: i.decay(1, n, H)},
    "fused_recurrent_gla": {"gk": lambda i, n: i.decay(1, n, H, K)},
    "fused_recurrent_gated_delta_rule": {"g": lambda i, n: i.decay(1, n, H), "beta": lambda i, n: i.uniform(1, n, H)},
    "fused_recurrent_kda": {"g": lambda i, n: i.decay(1, n, H, K), "beta": lambda i, n: i.uniform(1, n, H)},
}


def packed(name):
    """(function, inputs, q, k, v, gates) of one row of 20 tokens."""
    inputs = Inputs()
    q, k, v = inputs.qkv(tokens=20, batch=1)
    return getattr(fla, name), inputs, q, k, v, {gate: make(inputs, 20) for gate, make in GATES[name].items()}


def cut(gates, start, stop):
    return {name: gate[:, start:stop] for name, gate in gates.items()}


@pytest.mark.parametrize("name", GATES)
def test_packed_sequences(name):
    function, inputs, q, k, v, gates = packed(name)
    more = {"normalize": False} if "linear_attn" in name else {}
    states = inputs.normal(3, H, K, V)
    got = function(q, k, v, **gates, cu_seqlens=torch.tensor([0, 7, 7, 20]), initial_state=states, output_final_state=True, **more)
    pieces = [
        function(q[:, a:b], k[:, a:b], v[:, a:b], **cut(gates, a, b), initial_state=states[n : n + 1], output_final_state=True, **more)
        for n, (a, b) in enumerate(((0, 7), (7, 7), (7, 20)))
    ]
    agree(got, (torch.cat([out for out, _ in pieces], 1), torch.cat([end for _, end in pieces])), inputs)


@pytest.mark.parametrize("name", ["fused_recurrent_retention", "fused_recurrent_simple_gla", "fused_recurrent_gla"])
def test_reverse(name):
    function, inputs, q, k, v, gates = packed(name)
    states = inputs.normal(3, H, K, V)
    common = {"initial_state": states, "output_final_state": True}
    got = function(q, k, v, **gates, reverse=True, cu_seqlens=torch.tensor([0, 7, 7, 20]), **common)
    pieces = []
    for n, (a, b) in enumerate(((0, 7), (7, 7), (7, 20))):
        turned = {name: gate.flip(1) for name, gate in cut(gates, a, b).items()}
        common["initial_state"] = states[n : n + 1]
        pieces.append(function(q[:, a:b].flip(1), k[:, a:b].flip(1), v[:, a:b].flip(1), **turned, **common))
    agree(got, (torch.cat([out.flip(1) for out, _ in pieces], 1), torch.cat([end for _, end in pieces])), inputs)


def test_reverse_of_the_other_rules():
    inputs = Inputs()
    q, k, v = inputs.qkv()
    a, w, u = inputs.unit(B, T, H, K), inputs.decay(B, T, H, K), inputs.normal(H, K)
    turn = [tensor.flip(1) for tensor in (q, k, v, a, w)]
    for got, want in (
        (fla.fused_recurrent_rwkv6(q, k, v, w, u, reverse=True), fla.fused_recurrent_rwkv6(*turn[:3], turn[4], u)),
        (fla.fused_recurrent_dplr_delta_rule(q, k, v, a, -a, w, reverse=True), fla.fused_recurrent_dplr_delta_rule(*turn[:4], -turn[3], turn[4])),
        (fla.fused_recurrent_linear_attn(q.abs(), k.abs(), v, reverse=True, normalize=True)[0],
         fla.fused_recurrent_linear_attn(turn[0].abs(), turn[1].abs(), turn[2], normalize=True)[0]),
    ):  # fmt: skip
        agree(flat(got)[0], flat(want)[0].flip(1), inputs, 1e-6)


@pytest.mark.parametrize("name", [name for name in GATES if "state_v_first" in inspect.signature(getattr(fla, name)).parameters])
def test_state_v_first(name):
    function, inputs, q, k, v, gates = packed(name)
    state = inputs.normal(1, H, K, V)
    out, end = function(q, k, v, **gates, initial_state=state, output_final_state=True)
    got = function(q, k, v, **gates, initial_state=state.mT.contiguous(), output_final_state=True, state_v_first=True)
    agree(got, (out, end.mT), inputs, 0)
    if "kwargs" in inspect.signature(function).parameters:
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            agree(function(q, k, v, **gates, initial_state=state.mT, output_final_state=True, transpose_state_layout=True), (out, end.mT), inputs, 0)
        with pytest.raises(ValueError, match="transpose_state_layout"):
            function(q, k, v, **gates, state_v_first=True, transpose_state_layout=True)


def test_packed_normalised_linear_attention():
    inputs = Inputs()
    q, k, v = inputs.uniform(1, 20, H, K, low=0.1), inputs.uniform(1, 20, H, K, low=0.1), inputs.normal(1, 20, H, V)
    state, key_sum = inputs.normal(3, H, K, V), inputs.uniform(3, 1, H, K)
    got = fla.chunk_linear_attn(q, k, v, cu_seqlens=torch.tensor([0, 7, 7, 20]), initial_state=(state, key_sum), output_final_state=True)
    pieces = [
        fla.chunk_linear_attn(q[:, a:b], k[:, a:b], v[:, a:b], initial_state=(state[n : n + 1], key_sum[n : n + 1]), output_final_state=True)
        for n, (a, b) in enumerate(((0, 7), (7, 7), (7, 20)))
    ]
    want = [torch.cat([out for out, _ in pieces], 1)] + [torch.cat([ends[i] for _, ends in pieces]) for i in (0, 1)]
    agree(got, want, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    """Any dtype of gates and states beside one of q, k and v."""
    inputs = Inputs()
    q, k, v = (tensor.detach().to(dtype) for tensor in inputs.qkv())
    g, beta, state = inputs.decay(B, T, H).detach(), inputs.uniform(B, T, H).detach(), inputs.normal(B, H, K, V).detach()
    for other in (dtype, torch.float32, torch.bfloat16):
        out, end = fla.chunk_gated_delta_rule(q, k, v, g.to(other), beta.to(other), initial_state=state.to(other), output_final_state=True)
        assert out.dtype == dtype and end.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        wide = [tensor.to(other).double() for tensor in (g, beta, state)]
        want = attend(q.double(), k.double(), v.double(), rule="gated_delta", log_decay=wide[0], beta=wide[1], initial_state=wide[2])
        same(out.double(), want, torch.finfo(dtype).eps / 2 + EPSILON)
    out, _ = fla.chunk_retention(q, k, v)
    assert out.dtype == dtype


def test_compile():
    inputs = Inputs()
    q, k, v = inputs.qkv()
    raw, logits, A_log = inputs.normal(B, T, H, K), inputs.normal(B, T, H), inputs.normal(H)

    def function(q, k, v, raw, logits, A_log):
        return fla.chunk_kda(
            q, k, v, raw, logits, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, A_log=A_log,
            output_final_state=True, chunk_size=32,
        )  # fmt: skip

    agree(torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs.made), function(*inputs.made), inputs, retain_graph=False)


# ---- Refusals -------------------------------------------------------------------------------------------------------------------------------


def arguments(name):
    """Small inputs for every parameter without a default."""
    sizes = {"g": (1, 4, H) if "gated_delta" in name or "gdn" in name else (1, 4, H, K), "beta": (1, 4, H), "u": (H, K), "v": (1, 4, H, V)}
    parameters = inspect.signature(getattr(fla, name)).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    return {parameter: -torch.rand(sizes.get(parameter, (1, 4, H, K))) for parameter in names}


@pytest.mark.parametrize("name", fla.__all__)
def test_unknown_arguments_are_refused(name):
    call = arguments(name)
    function = getattr(fla, name)
    function(**call)
    for unknown in ("nonsense", "head_first", "ssm_state_indices"):
        with pytest.raises(TypeError, match=unknown):
            function(**call, **{unknown: False})


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("fused_recurrent_gla", "gv", torch.zeros(1, 4, H, V)),
        ("fused_recurrent_gated_delta_rule", "gv", torch.zeros(1, 4, H, V)),
        ("chunk_gated_delta_rule", "chunk_indices", torch.zeros(1, 2)),
        ("chunk_gated_delta_rule", "cp_context", object()),
        ("chunk_kda", "cp_context", object()),
        ("chunk_kda", "return_intermediate_states", True),
        ("chunk_kda", "use_graph", True),
        ("chunk_kda", "max_num_seqs", 4),
        ("chunk_dplr_delta_rule", "cp_context", object()),
        ("chunk_rwkv7", "cp_context", object()),
    ],
)
def test_what_the_cpu_has_not(name, argument, value):
    with pytest.raises(NotImplementedError, match=f"{argument} is not supported"):
        getattr(fla, name)(**arguments(name), **{argument: value})


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("chunk_kda", {"A_log": torch.zeros(H)}, "A_log is given, but only use_gate_in_kernel"),
        ("chunk_kda", {"lower_bound": -5.0}, "lower_bound is given, but only use_gate_in_kernel"),
        ("fused_recurrent_kda", {"dt_bias": torch.zeros(H * K)}, "dt_bias is given, but only use_gate_in_kernel"),
        ("chunk_kda", {"use_gate_in_kernel": True}, "needs A_log or lower_bound"),
        ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True, "A_log": torch.zeros(H)}, "lower_bound is None"),
        ("chunk_kda", {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -6.0}, "lower_bound is -6.0"),
        ("chunk_kda", {"allow_neg_eigval": True}, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
        ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, "needs A_log"),
        ("fused_recurrent_gated_delta_rule", {"use_gate_in_kernel": True, "A_log": torch.zeros(H)}, "needs g"),
        ("chunk_gated_delta_rule", {"dt_bias": torch.zeros(H)}, "dt_bias is given"),
        ("chunk_gla", {"cu_seqlens_cpu": torch.tensor([0, 4])}, "cu_seqlens_cpu is a copy of cu_seqlens"),
        ("chunk_dplr_delta_rule", {"lower_bound": 0.0}, "lower_bound is 0.0"),
        ("chunk_gla", {"cu_seqlens": torch.tensor([0, 3])}, "offsets"),
        ("chunk_delta_rule", {"initial_state": torch.zeros(2, H, K, V)}, "initial_state"),
        ("fused_recurrent_delta_rule", {"beta": torch.ones(1, 4, H, V)}, "beta"),
    ],
)
def test_refusals_name_the_argument(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        getattr(fla, name)(**{**arguments(name), **options})
