"""What models of transformers spend inside their linear attention on one core, by torch's profiler: their own fallback beside Tercet.

    taskset -c 0 python bench/models.py [--model qwen3_next] [--heads 8] [--tokens 2048] [--decoded 16] [--repeat 5]

Models of random weights, four layers, alternating between the two; the medians of a prefill of one prompt and of a token decoded after it.
Inside means what stands in a function of the modeling file, and in versions that have none for Mamba-2, what stands in its `torch_forward`
between the split of x, B and C and the norm: gates and states, without projections and convolutions.
"""

import argparse
import contextlib
import importlib
import os
import platform
import statistics

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch._C._profiler import _RecordFunctionFast as record_function  # a range of torch.profiler's own costs 40 us of a cold decode step
from torch.profiler import ProfilerActivity, profile

import tercet
import tercet.transformers as served

TOKENS = dict(vocab_size=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=256, num_hidden_layers=4)
BODY = dict(TOKENS, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=1, moe_intermediate_size=64)
LAYERS = dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
MODELS = {  # by the number of value heads
    "qwen3_next": lambda heads: dict(BODY, **LAYERS, head_dim=64, linear_num_key_heads=heads // 2, linear_num_value_heads=heads, num_experts=2,
                                     linear_key_head_dim=128, linear_value_head_dim=128, shared_expert_intermediate_size=64),
    "kimi_linear": lambda heads: dict(BODY, **LAYERS, linear_head_dim=128, linear_num_heads=heads, num_local_experts=2, kv_lora_rank=64,
                                      q_lora_rank=None, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    "mamba2": lambda heads: dict(TOKENS, num_heads=heads, head_dim=64, state_size=128, n_groups=1, expand=heads * 64 // 256),
}
FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention",
             "mamba2_chunk_scan", "mamba2_selective_state_update")
ATTRIBUTES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")


def build(family, heads):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = next(getattr(module, name) for name in vars(module) if name.endswith("ForCausalLM"))
    torch.manual_seed(0)
    return module, kind(kind.config_class(**MODELS[family](heads))).eval()


def marked(function):
    def call(*args, **kwargs):
        with record_function("inside"):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def marks(module, model):
    """The profiler sees a range `inside` around whatever computes the rule just now."""
    with contextlib.ExitStack() as undo:

        def put(owner, name, value):
            had = vars(owner).get(name)
            setattr(owner, name, value)
            undo.callback(lambda: delattr(owner, name) if had is None else setattr(owner, name, had))

        for name in FUNCTIONS:
            if name in vars(module) and not any(hasattr(layer, name.removeprefix("torch_")) for layer in model.modules()):
                put(module, name, marked(vars(module)[name]))
        for layer in model.modules():
            for name in ATTRIBUTES:
                if hasattr(layer, name) and not getattr(type(layer), f"_marked_{name}", False):
                    put(type(layer), f"_marked_{name}", True)
                    function = marked(getattr(layer, name))
                    put(type(layer), name, property(lambda _, function=function: function))
            if hasattr(layer, "torch_forward"):
                mark_branches(layer, put, undo)
        yield


def mark_branches(layer, put, undo):
    """Mamba-2 up to 5.14: from where Tercet is asked, or would be, to the norm behind the two branches."""
    kind, ranges = type(layer), []
    if not hasattr(kind, "_marked_scan"):
        method = kind.torch_forward
        original = getattr(method, "__wrapped__", method)
        scan = served._layer_scan if method is not original else lambda *args: None

        def begin(layer, *args):
            ranges.append(record_function("inside"))
            ranges[-1].__enter__()
            return scan(layer, *args)

        put(kind, "torch_forward", served._with_scan(original, begin))
        put(kind, "_marked_scan", ranges)
    undo.callback(layer.norm.register_forward_pre_hook(lambda *_: kind._marked_scan.pop().__exit__(None, None, None)).remove)


def inside(module, model, call):
    """Milliseconds inside the rule during a call, and what the call gives."""
    with marks(module, model), profile(activities=[ProfilerActivity.CPU]) as found, torch.no_grad():
        out = call()
    spent = sum(event.cpu_time_total for event in found.key_averages() if event.key == "inside")
    assert spent > 0, "nothing was marked"
    return spent / 1e3, out


def measure(module, model, ids, decoded):
    """(prefill, a decoded token) in milliseconds inside the rule."""
    prefill, out = inside(module, model, lambda: model(ids, use_cache=True))
    key = next(key for key in ("cache", "cache_params", "past_key_values") if out.get(key) is not None)
    positions = int(transformers.__version__.partition(".")[0]) < 5

    def steps():
        token = ids[:, -1:]
        for index in range(decoded):
            place = dict(cache_position=torch.tensor([ids.shape[1] + index])) if positions else {}
            token = model(token, **{key: out[key]}, use_cache=True, **place).logits[:, -1:].argmax(-1)

    return prefill, inside(module, model, steps)[0] / decoded


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--heads", type=int, default=8, help="a multiple of 4; of 128 channels, in mamba2 of 64 with states of 128")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--decoded", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    machine = f"{platform.machine()} {tercet.targets()[0]}, one thread"
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {machine}, {options.heads} heads")
    print(f"{'model':12} {'call':22} {'fallback ms':>12} {'tercet ms':>10} {'ratio':>7}")
    for family in options.model or MODELS:
        try:
            module, model = build(family, options.heads)
        except ImportError:
            print(f"{family:12} not in this version")
            continue
        ids = torch.randint(3, 512, (1, options.tokens))
        rows = []
        for _ in range(options.repeat + 1):
            plain = measure(module, model, ids, options.decoded)
            with served.enable(model) as report:
                ours = measure(module, model, ids, options.decoded)
                assert report.served and not report.left, report
            rows.append((plain, ours))
        for index, call in enumerate((f"prefill of {options.tokens}", "a decoded token")):
            plain, ours = (statistics.median(row[which][index] for row in rows[1:]) for which in (0, 1))
            print(f"{family:12} {call:22} {plain:12.3f} {ours:10.3f} {plain / ours:7.1f}", flush=True)


if __name__ == "__main__":
    main()
