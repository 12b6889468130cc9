"""Models of transformers through Tercet: the same numbers as through the fallbacks, and everything as it was afterwards."""

import importlib
import importlib.util
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tercet.transformers as served

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# Small models, one of each family: several heads everywhere, groups where the family has them, and head sizes that are not all alike.
TOKENS = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.1)
BODY = dict(TOKENS, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
DELTA = dict(BODY, num_hidden_layers=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=24, layer_types=["linear_attention", "full_attention"])
KDA = dict(DELTA, num_key_value_heads=4, linear_head_dim=16, linear_num_heads=4, num_experts_per_tok=2, moe_intermediate_size=32, kv_lora_rank=16,
           qk_nope_head_dim=16, v_head_dim=16)
QSA = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4, hc_count=2, hc_lowrank=16)
HYBRID = dict(BODY, num_hidden_layers=3, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=24, mamba_chunk_size=16, mamba_expand=2)
CONFIGS = {
    "qwen3_next": dict(DELTA, **EXPERTS),
    "qwen3_5": DELTA,
    "qwen3_5_moe": dict(DELTA, **EXPERTS),
    "qwen4_exp": dict(DELTA, **EXPERTS, **QSA),
    "olmo_hybrid": DELTA,
    "lara_mini": dict(DELTA, **EXPERTS, layer_types=["linear_attention", "sliding_attention"]),
    "kimi_linear": dict(KDA, num_local_experts=4, q_lora_rank=None, qk_rope_head_dim=8),
    "glm5_next": dict(KDA, n_routed_experts=4, q_lora_rank=16, qk_rope_head_dim=0, index_topk=16, index_head_dim=16, index_n_heads=2, hc_mult=2,
                      index_kpool=4),
    "bailing_hybrid": dict(KDA, num_local_experts=4, n_group=2, topk_group=1, q_lora_rank=None, qk_rope_head_dim=8),
    "mamba2": dict(TOKENS, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=24, n_groups=2, chunk_size=16, expand=2),
    "bamba": dict(HYBRID, attn_layer_indices=[1]),
    "falcon_h1": dict(HYBRID, head_dim=16, mamba_d_ssm=128),
    "granitemoehybrid": dict(HYBRID, shared_intermediate_size=64, num_local_experts=2, num_experts_per_tok=1,
                             layer_types=["mamba", "attention", "mamba"]),
    "zamba2": dict(BODY, num_hidden_layers=3, mamba_d_state=24, mamba_expand=2, mamba_ngroups=2, n_mamba_heads=8, chunk_size=16, use_mem_rope=True,
                   layers_block_type=["mamba", "hybrid", "mamba"]),
    "nemotron_h": dict(BODY, num_hidden_layers=3, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=24, chunk_size=16,
                       layers_block_type=["mamba", "attention", "mamba"]),
}

# Before 5.15 the fallbacks of these two add chunks up wrongly where there are more than one; see test_many_chunks.
FAULTY = ("zamba2", "nemotron_h") if VERSION < (5, 15) else ()
for family in FAULTY:
    CONFIGS[family]["chunk_size"] = 64

PAD = 5  # its embedding is no row of zeros, as pad_token_id's is


def modeling(family):
    return pytest.importorskip(f"transformers.models.{family}.modeling_{family}", reason=f"no {family} in this version")


def build(family, seed=0, **options):
    """A model of random weights, with gates and biases that are random too, so that nothing is zero or one by luck."""
    module = modeling(family)
    names = [name for name in vars(module) if name.endswith("ForCausalLM")] or [name for name in vars(module) if name.endswith("TextModel")]
    kind = getattr(module, names[0])
    torch.manual_seed(seed)
    model = kind(kind.config_class(**{**CONFIGS[family], **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", ".D", "conv1d.bias")):
                parameter.normal_()
    return model


def prompt(model, tokens=37, seed=1):
    """Two rows of tokens, the first with nine of padding on its left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 97, (2, tokens), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = PAD, 0
    assert model.get_input_embeddings().weight[PAD].abs().min() > 0
    return dict(input_ids=ids, attention_mask=mask)


def answer(model, **inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out[0]


def recurrent_layers(model):
    return [layer for layer in model.modules() if hasattr(layer, "conv1d") or hasattr(layer, "q_conv1d")]


def close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.fixture(autouse=True)
def tidy():
    torch.set_num_threads(1)
    yield
    served.disable()


@pytest.mark.parametrize("family", CONFIGS)
def test_logits(family):
    model = build(family)
    inputs = prompt(model)
    expected = answer(model, **inputs)
    assert expected.std() > 0.1
    with served.enable() as report:
        found = answer(model, **inputs)
        assert report.served >= len(recurrent_layers(model)) > 0 and not report.left
        after = build(family)
        close(answer(after, **inputs), found, 0)
    close(found, expected)
    close(answer(model, **inputs), expected, 0)
    close(answer(after, **inputs), expected, 0)


@pytest.mark.parametrize("family", CONFIGS)
def test_generation(family):
    model = build(family)
    if not hasattr(model, "generate"):
        pytest.skip("no language model")
    inputs = prompt(model)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=PAD, output_logits=True, return_dict_in_generate=True)
    expected = model.generate(**inputs, **options)
    with served.enable() as report:
        found = model.generate(**inputs, **options)
        assert report.served >= 12 * len(recurrent_layers(model)) and not report.left
    assert torch.equal(found.sequences, expected.sequences)
    close(torch.stack(found.logits), torch.stack(expected.logits))
    assert found.sequences[:, 37:].unique().numel() > 4


@pytest.mark.parametrize("family", FAULTY)
def test_many_chunks(family):
    """Their answer depends on the chunk, where the fallback has more than one; Tercet's is that of the fallback with one."""
    model, chunks = build(family), build(family, chunk_size=16)
    inputs = prompt(model)
    expected = answer(model, **inputs)
    assert (answer(chunks, **inputs) - expected).abs().max() > 1e-3
    with served.enable():
        close(answer(chunks, **inputs), expected)


# The sizes of real layers: 4 layers, heads of 128 channels.
LAYERS = dict(num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"])
WIDE = {
    "qwen3_next": dict(LAYERS, linear_key_head_dim=128, linear_value_head_dim=128),
    "kimi_linear": dict(LAYERS, linear_head_dim=128),
    "mamba2": dict(num_hidden_layers=4, hidden_size=256, num_heads=4, head_dim=128, state_size=128, n_groups=1, chunk_size=64),
}


@pytest.mark.parametrize("family", WIDE)
def test_wide_heads(family):
    model = build(family, **WIDE[family])
    inputs = prompt(model, tokens=150)
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    expected, tokens = answer(model, **inputs), model.generate(**inputs, **options)
    with served.enable():
        close(answer(model, **inputs), expected)
        assert torch.equal(model.generate(**inputs, **options), tokens)


def step(model, inputs):
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", WIDE)
def test_training(family):
    model = build(family, **WIDE[family]).train()
    inputs = prompt(model, tokens=70)
    loss, gradients = step(model, inputs)
    with served.enable() as report:
        found, found_gradients = step(model, inputs)
        if importlib.util.find_spec("tercet.torch"):
            assert report.served >= 3 and not report.left
        else:
            assert report.served == 0 and "tercet.torch" in next(iter(report.left))
    close(found, loss)
    assert gradients.keys() == found_gradients.keys()
    for name, gradient in gradients.items():
        close(found_gradients[name], gradient)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2", "bamba", "zamba2"])
def test_a_cached_prefix(family):
    """A prompt in two pieces, then tokens one by one: what the fallback makes of it, in its version, whatever that is."""
    model = build(family)
    ids = prompt(model)["input_ids"]
    # Layers before 5.14 take one token after a prefix, and those that are faulty add up several wrongly.
    pieces = (0, 20, 21, 22) if VERSION < (5, 14) or family in FAULTY else (0, 20, 30, 31, 32)
    begin = dict(use_cache=True)
    if VERSION < (5, 6) and family in ("bamba", "zamba2"):
        name = "HybridMambaAttentionDynamicCache" if family == "bamba" else "Zamba2HybridDynamicCache"
        cache = getattr(modeling(family), name)
        begin = dict(past_key_values=lambda: cache(model.config, 2, dtype=torch.float32), use_cache=True)

    def run():
        out, logits = None, []
        for first, last in zip(pieces, pieces[1:], strict=False):
            state = {name: value() if callable(value) else value for name, value in begin.items()}
            if out is not None:
                key = next(key for key in ("cache", "cache_params", "past_key_values") if out.get(key) is not None)
                state = {key: out[key], "use_cache": True}
            if VERSION < (5, 6):
                state["cache_position"] = torch.arange(first, last)
            with torch.no_grad():
                out = model(ids[:, first:last], **state)
            logits.append(out.logits)
        return torch.cat(logits, 1)

    expected = run()
    with served.enable() as report:
        close(run(), expected)
        assert report.served > 2 and not report.left


@pytest.mark.skipif(not importlib.util.find_spec("tercet.torch"), reason="no tercet.torch")
def test_compiled_and_autocast():
    current, original = rule()
    (q, k, v), gates = tensors()
    expected, _ = original(q, k, v, **gates, use_qk_l2norm_in_kernel=True)
    with served.enable() as report:
        function = current()
        compiled = torch.compile(lambda q: function(q, k, v, **gates, use_qk_l2norm_in_kernel=True)[0], backend="aot_eager", fullgraph=True)
        close(compiled(q), expected, 2e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, _ = function(q.requires_grad_(), k, v, **gates, use_qk_l2norm_in_kernel=True)
        assert found.requires_grad and found.dtype == torch.float32 and report.served == 1
        close(found.detach(), expected, 2e-5)


def everything(families=CONFIGS):
    """All names of the families' files and of the classes in them."""
    found = {}
    for family in families:
        try:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except ImportError:
            continue
        for owner in [module, *(value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)]:
            found.update({(owner, name): value for name, value in vars(owner).items()})
    return found


def same(one, other):
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


def test_disable_leaves_nothing():
    model = build("qwen3_next")
    before, instance = everything(), [dict(vars(layer)) for layer in model.modules()]
    report = served.enable()
    assert not same(everything(), before)
    inside = build("qwen3_next")
    assert all(same(vars(layer), old) for layer, old in zip(model.modules(), instance, strict=True))
    served.disable()
    assert same(everything(), before)
    for layer, other in zip(model.modules(), inside.modules(), strict=True):
        functions = {name: value for name, value in vars(layer).items() if callable(value) and hasattr(value, "__code__")}
        assert all(vars(other)[name] is value for name, value in functions.items())
    assert "off" in repr(report)
    served.disable()


def test_enable_nests_and_repeats():
    before = everything()
    with served.enable():
        once = everything()
        with served.enable() as inner:
            assert same(everything(), once) and inner.patched
        assert same(everything(), once)
    assert same(everything(), before)
    served.enable()
    again = served.enable()
    with again:
        pass
    assert not same(everything(), before)  # what was asked for outside of the with stays
    served.disable()
    assert same(everything(), before)
    with served.enable():
        served.disable()
        assert same(everything(), before)
    assert same(everything(), before)


def test_threads():
    """Others enter and leave meanwhile; every answer is right, and at the end everything is as it was."""
    model, before = build("qwen3_next"), everything()
    inputs = prompt(model)
    expected = answer(model, **inputs)

    def work(_):
        with served.enable():
            return answer(model, **inputs)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(12)):
            close(found, expected)
    assert same(everything(), before)


def rule(name="chunk"):
    """The served and the original function of gated delta in this version, as its layer would call it."""
    layer = recurrent_layers(build("qwen3_next"))[0]
    attribute = f"{name}_gated_delta_rule"
    module = modeling("qwen3_next")
    original = getattr(module, f"torch_{attribute}")
    return (lambda: getattr(layer, attribute)) if hasattr(layer, attribute) else (lambda: getattr(module, f"torch_{attribute}")), original


def tensors(dtype=torch.float32, batch=2, tokens=50, heads=4, key_dim=16, value_dim=24, seed=3, gates=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    qkv = [normal(batch, tokens, heads, size).to(dtype) for size in (key_dim, key_dim, value_dim)]
    return qkv, dict(g=-normal(batch, tokens, heads).abs().to(gates), beta=normal(batch, tokens, heads).sigmoid().to(dtype))


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("started", [True, False])
def test_the_rule_itself(name, dtype, l2norm, started):
    current, original = rule(name)
    (q, k, v), gates = tensors(dtype)
    if not l2norm:
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
    options = dict(gates, initial_state=torch.randn(2, 4, 16, 24) if started else None, output_final_state=started, use_qk_l2norm_in_kernel=l2norm)
    expected, expected_state = original(q, k, v, **options)
    with served.enable() as report:
        found, state = current()(q, k, v, **options)
    assert report.served == 1 and found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
    if started:
        assert state.dtype == torch.float32 and state is not options["initial_state"]
        close(state, expected_state, 2e-5)
    else:
        assert state is None and expected_state is None


def test_what_goes_to_the_original():
    current, original = rule()
    (q, k, v), gates = tensors()
    with served.enable() as report:
        function = current()
        inputs = [[x.double() for x in (q, k, v)], [x.to("meta") for x in (q, k, v)], [q, k.bfloat16(), v], [q[:, :0], k[:, :0], v[:, :0]]]
        for index, given in enumerate(inputs):
            options = {name: x[:, : given[0].shape[1]].to(given[0].device) for name, x in gates.items()}
            try:
                out = original(*given, **options)[0]
            except Exception as error:
                with pytest.raises(type(error)):
                    function(*given, **options)
            else:
                found = function(*given, **options)[0]
                assert found.dtype == out.dtype and (out.is_meta or torch.equal(found, out))
            assert report.served == 0 and sum(report.left.values()) == index + 1
        torch.func.grad(lambda x: function(x, k, v, **gates)[0].sum())(q)
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            function(torch.autograd.forward_ad.make_dual(q, q), k, v, **gates)
        assert report.served == 0 and all(word in repr(report) for word in ("torch.func", "meta", "forward mode"))
        function(q, k, v, **gates)
        assert report.served == 1
        try:
            function(q, k, v, **gates, scale=2.0)
        except TypeError:  # before 5.10 the fallback takes nothing that it does not know
            pass
        assert report.served == 1 and "scale" in repr(report)
    function(q, k, v, **gates)  # kept beyond its time
    assert report.served == 1


EXCHANGES = pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no quick views of its tensors")


def short_way(q, k, v, g, beta, state=None, l2norm=False, own=None, **options):
    """The extension's whole call of gated delta, or None."""
    return served._core.attend_delta("gated_delta", (q, k, v, g, beta, state), True, l2norm, own, options, served._TELLING)


@EXCHANGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("started", ["", "a state", "a buffer"])
@pytest.mark.parametrize("tokens", [1, 50])
def test_the_short_way(dtype, started, tokens):
    (q, k, v), gates = tensors(dtype, tokens=tokens)
    state = torch.randn(2, 4, 16, 24) if started else None
    kept = state.clone() if started else None
    if started == "a buffer":
        torch._dynamo.mark_static_address(state)
    with torch.no_grad():
        short = short_way(q, k, v, **gates, state=state, l2norm=True, cu_seqlens=None, use_cache=True)
        in_place = started != "" and short[1] is state
        found = served._attend(served._PLAIN, q, k, v, "gated_delta", gates["g"], gates["beta"], None, "l2_norm", kept, None, True)
    assert in_place == (started == "a buffer")
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(short, found, strict=True))
    assert in_place or not started or torch.equal(state, kept)


@EXCHANGES
def test_where_the_short_way_ends():
    (q, k, v), gates = tensors()
    narrow, state = [x.bfloat16() for x in (q, k, v)], torch.randn(2, 4, 16, 24)
    other = torch.Tensor._make_subclass(type("Other", (torch.Tensor,), {}), v)
    assert short_way(q, k, v, **gates) is None  # gradients may be recorded
    with torch.no_grad():
        assert short_way(q, k, v, **gates) is not None and short_way(*narrow, **gates, l2norm=True) is not None
        for given in ([x.double() for x in (q, k, v)], [x.to("meta") for x in (q, k, v)], [q, k.bfloat16(), v], [q, k, v.to("meta")], [q, k, other],
                      [x.cfloat() for x in (q, k, v)], [q[:, :0], k[:, :0], v[:, :0]], [q, k[:, :, :2], v], [q[0], k[0], v]):
            assert short_way(*given, **gates) is None
        for changed in (dict(g=gates["g"].double()), dict(beta=gates["beta"].bfloat16()), dict(state=state.bfloat16()), dict(scale=1.0),
                        dict(cu_seqlens=torch.tensor([0, 100])), dict(seq_idx=torch.zeros(2, 50))):
            assert short_way(q, k, v, **dict(gates, **changed)) is None
        assert short_way(*narrow, **gates, l2norm=True, own=torch.nn.functional.normalize) is None
        with torch.autograd.forward_ad.dual_level():
            assert short_way(q, k, v, **gates) is None
        traced = []
        torch.jit.trace(lambda x: traced.append(short_way(x, k, v, **gates)) or x + 1, q, check_trace=False)
        torch.func.vmap(lambda x: traced.append(short_way(q, k, x, **gates)) or x + 1)(v[None])
        assert traced == [None, None]


def test_grouped_heads_are_not_copied(monkeypatch):
    """q, k and v as the layer cuts them out of one buffer, with fewer heads for q and k: the library gets this very memory."""
    current, original = rule()
    buffer = torch.randn(2, 30, 2 * 2 * 16 + 4 * 24)
    q, k, v = (x.view(2, 30, -1, size) for x, size in zip(buffer.split([32, 32, 96], dim=-1), (16, 16, 24), strict=True))
    _, gates = tensors(tokens=30)
    repeated = [x.repeat_interleave(2, dim=2) for x in (q, k)]
    expected, _ = original(*repeated, v, **gates, use_qk_l2norm_in_kernel=True)
    seen, attend = [], served._attend
    monkeypatch.setattr(served, "_attend", lambda *given: (seen.append(given[1:4]), attend(*given))[1])
    with served.enable():
        found, _ = current()(q, k, v, **gates, use_qk_l2norm_in_kernel=True)
    close(found, expected, 2e-5)
    assert [x.data_ptr() for x in seen[0]] == [x.data_ptr() for x in (q, k, v)] and [x.stride() for x in seen[0]] == [x.stride() for x in (q, k, v)]


CUTS = [0, 7, 8, 30, 50]


def test_packed_rule():
    current, original = rule()
    (q, k, v), gates = tensors(batch=1)
    pieces = [slice(first, last) for first, last in zip(CUTS, CUTS[1:], strict=False)]
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = [original(q[:, at], k[:, at], v[:, at], **{name: x[:, at] for name, x in gates.items()}, **options) for at in pieces]
    with served.enable():
        found, state = current()(q, k, v, **gates, **options, cu_seqlens=torch.tensor(CUTS, dtype=torch.int32))
    close(found, torch.cat([out for out, _ in expected], 1), 2e-5)
    close(state, torch.cat([last for _, last in expected]), 2e-5)


@pytest.mark.skipif(VERSION < (5, 15), reason="before 5.15 the convolution is the layer's own")
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "mamba2"])
@pytest.mark.parametrize("said", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("training", [False, True])
def test_packed_models(family, said, training):
    """Packed sequences answer as each does by itself; the fallback refuses them."""
    if said == "cu_seq_lens_q" and family in ("kimi_linear", "mamba2"):
        pytest.skip("these layers are told by seq_idx")
    if VERSION < (5, 16) and family == "mamba2":
        pytest.skip("the model does not tell its layers")
    model = build(family).train(training).base_model
    ids = torch.randint(6, 97, (1, CUTS[-1]), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor(CUTS).diff()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat([answer(model, input_ids=piece, use_cache=False) for piece in ids.split(lengths.tolist(), dim=1)], 1)
    told = dict(cu_seq_lens_q=torch.tensor(CUTS, dtype=torch.int32), seq_idx=torch.repeat_interleave(torch.arange(4), lengths)[None].int())
    packed = dict(input_ids=ids, use_cache=False, **{said: told[said]}, **({} if family == "mamba2" else dict(position_ids=positions)))
    with served.enable() as report:
        close(answer(model, **packed), expected)
        assert not report.left
    if VERSION >= (5, 24):
        with pytest.raises(ValueError, match="packed"):
            answer(model, **packed)


@pytest.mark.skipif(VERSION < (5, 15), reason="before 5.15 Mamba-2 has no such function")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_updated_in_place(dtype):
    module = modeling("mamba2")
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    state, x, dt = normal(2, 4, 8, 24), normal(2, 4, 8), normal(2, 4, 1).expand(-1, -1, 8)
    D, bias = (normal(4, 1).expand(-1, 8) for _ in range(2))
    A, B, C = (-normal(4).float().abs())[:, None, None].expand(-1, 8, 24), normal(2, 2, 24), normal(2, 2, 24)
    before = state.clone()
    expected = module.mamba2_selective_state_update(state, x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True)
    with served.enable() as report:
        found = module.mamba2_selective_state_update(before, x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True)
        assert report.served == 1
        # Numbers of its own for each channel are another rule.
        module.mamba2_selective_state_update(before.clone(), x, dt.contiguous() + x, A, B, C, D, dt_bias=bias, dt_softplus=True)
        assert report.served == 1
    assert found.dtype == expected.dtype
    close(before, state, 1e-5 if dtype == torch.float32 else 0.1)
    close(found, expected, 1e-5 if dtype == torch.float32 else 0.2)


def test_the_report():
    report = served.enable(build("qwen3_next"))
    assert list(report.patched) == ["qwen3_next"] and not report.skipped and report.version == transformers.__version__
    assert "qwen3_next" in repr(report) and "0 calls served" in repr(report)
    served.disable()
    report = served.enable()
    present = {family for family in CONFIGS if importlib.util.find_spec(f"transformers.models.{family}")}
    assert set(report.patched) == present and "Mamba-1" in report.skipped["mamba"]
    other = served.enable(torch.nn.Linear(2, 2))
    assert not other.patched and "no layer" in other.skipped["Linear"]


def test_a_model_of_another_make(monkeypatch):
    """A file that only looks like ours is found, named and left alone."""
    module = types.ModuleType("modeling_other")

    def torch_chunk_gated_delta_rule(q, k, v, gate):
        return q

    class OtherMixer(torch.nn.Module):
        def torch_forward(self, x):
            return x

    OtherMixer.__module__ = "modeling_other"
    module.torch_chunk_gated_delta_rule, module.OtherMixer = torch_chunk_gated_delta_rule, OtherMixer
    monkeypatch.setitem(sys.modules, "modeling_other", module)
    before, method = dict(vars(module)), OtherMixer.torch_forward
    report = served.enable(OtherMixer())
    assert same(vars(module), before) and OtherMixer.torch_forward is method and not report.patched
    assert "(q, k, v, gate)" in report.skipped["other"] and "torch_forward is not written" in report.skipped["other"]


def test_the_page():
    """docs/transformers.md: its program runs, and in the version it names the report is the one it shows."""
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    modeling("qwen3_next")
    program, report = page.split("```python\n")[1].split("```")[0], page.split("```text\n")[1].split("```")[0]
    names = {}
    exec(compile(program, "docs/transformers.md", "exec"), names)
    if report.startswith(f"Tercet in transformers {transformers.__version__},"):
        assert repr(names["report"]) == report.strip()
