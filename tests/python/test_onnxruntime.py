"""tercet.attend beside onnxruntime's LinearAttention (com.microsoft), which others wrote: the same numbers for every rule that it has.

Both work in float32 and sum in another order: a number may differ by some roundings of the largest, epsilon 1.2e-7.
"""

import numpy as np
import pytest
from conftest import close, layer

import tercet

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

UPDATES = {"linear": "linear", "simple_gla": "gated", "gla": "gated", "delta": "delta", "gated_delta": "gated_delta", "kda": "gated_delta"}


def packed(array):
    """[B, T, H, D] as [B, T, H D]."""
    return array if array.ndim < 4 else array.reshape(*array.shape[:2], -1)


def run(rule, call, state, q_heads, kv_heads):
    """The operator's (output, present_state) as [B, T, H, V] and [B, H, K, V]."""
    batch, tokens, _, key_dim = call["q"].shape
    value_dim = call["v"].shape[3]
    feeds = {"query": call["q"], "key": call["k"], "value": call["v"], "past_state": state, "decay": call.get("log_decay"), "beta": call.get("beta")}
    names = [name if feeds[name] is not None else "" for name in feeds]
    while not names[-1]:
        names.pop()
    feeds = {name: np.ascontiguousarray(feeds[name] if name == "past_state" else packed(feeds[name])) for name in names if name}
    node = onnx.helper.make_node(
        "LinearAttention", names, ["output", "present_state"], domain="com.microsoft", q_num_heads=q_heads, kv_num_heads=kv_heads,
        update_rule=UPDATES[rule], scale=key_dim**-0.5, chunk_size=64,
    )  # fmt: skip
    info, real = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    shapes = {"output": (batch, tokens, max(q_heads, kv_heads) * value_dim), "present_state": (batch, kv_heads, key_dim, value_dim)}
    graph = onnx.helper.make_graph(
        [node], "layer", [info(name, real, feed.shape) for name, feed in feeds.items()], [info(name, real, shape) for name, shape in shapes.items()]
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    out, present = session.run(list(shapes), feeds)
    return out.reshape(batch, tokens, -1, value_dim), present


@pytest.mark.parametrize("rule", UPDATES)
@pytest.mark.parametrize("tokens", [1, 37, 130])
@pytest.mark.parametrize("initial", [False, True], ids=["from zeros", "from a state"])
def test_the_same_numbers(rule, tokens, initial):
    call = layer(rule, tokens=tokens, heads=4, key_dim=16, value_dim=16, seed=tokens)
    state = np.random.default_rng(8).standard_normal((2, 4, 16, 16)).astype(np.float32) if initial else None
    want_out, want_state = run(rule, call, state, 4, 4)
    for form in ("recurrent", "chunkwise", "parallel"):
        out, final = tercet.attend(**call, form=form, initial_state=state, return_state=True)
        close(out, want_out, 1e-5)
        close(final, want_state, 1e-5)


def test_query_heads_that_share_a_state():
    call = layer("gated_delta", tokens=20, heads=2, key_dim=8, value_dim=8)
    call["q"] = np.random.default_rng(9).standard_normal((2, 20, 4, 8)).astype(np.float32)
    want_out, want_state = run("gated_delta", call, None, 4, 2)
    out, final = tercet.attend(**call, return_state=True)
    close(out, want_out, 1e-5)
    close(final, want_state, 1e-5)
