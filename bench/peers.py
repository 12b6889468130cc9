"""What else computes these layers on a CPU, timed beside `tercet bench`: the peers that PyPI offers, f32, one thread, pinned to one core.

Set up once, then run with the command built (make verify leaves it in build/release/cli):

    python3 -m venv build/peers
    build/peers/bin/pip install -r bench/requirements.txt
    build/peers/bin/python bench/peers.py

PyPI's torch for Linux brings CUDA along, several gigabytes of it; a CPU build of the same version does as well. Python 3.11 or later.

Every peer's result is first compared with that of `tercet run` on the same random tensors (softmax attention, which is another function, with NumPy), then
all are timed in rounds: each peer once and `tercet bench` once, so that a busy neighbour falls on all alike. Times are CPU time of the process, in
nanoseconds for each token and head; a ratio is the median over the rounds of the peer's time over ours in the same round. The peers get every help: one
thread without a pool, outputs bound beforehand where they can be, heads before tokens where they like that, no gradients, and malloc keeps freed memory
so that temporaries do not fault page by page. Ours runs with malloc as it is.

With --gradient also forward and backward by torch's autograd, of its chunked linear attention and of the fallback of transformers, beside the same of
`tercet bench --gradient`. Their gradients are first compared with those of the recurrence, token by token in f64.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 28)}
SETTINGS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error"}
CHUNK = 64

if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in {**KEEP_MEMORY, **SETTINGS}.items()):
    # malloc reads its settings when a process begins, so this one begins again.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY, **SETTINGS})

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as qwen


class Layer:
    """Random tensors of one size, [B, T, H, D] as ours are, with the gates of every rule compared here. A state to begin with at T = 1 alone."""

    def __init__(self, tokens, heads, key_dim, value_dim, seed=1):
        random = np.random.default_rng(seed)
        self.T, self.H, self.K, self.V = tokens, heads, key_dim, value_dim
        self.scale = 1 / math.sqrt(key_dim)

        def normal(*shape):
            return random.standard_normal(shape, dtype=np.float32)

        def log_decay(*shape):
            return -np.exp2(random.uniform(-10, 0, shape)).astype(np.float32)

        self.q, self.v = normal(1, tokens, heads, key_dim), normal(1, tokens, heads, value_dim)
        self.k = normal(1, tokens, heads, key_dim)
        self.k /= np.linalg.norm(self.k, axis=-1, keepdims=True)
        self.beta = random.uniform(0, 1, (1, tokens, heads)).astype(np.float32)
        self.step, self.channel = log_decay(1, tokens, heads), log_decay(1, tokens, heads, key_dim)
        self.state = normal(1, heads, key_dim, value_dim) if tokens == 1 else None
        self.given = normal(1, tokens, heads, value_dim)  # the gradient of out


class Onnxruntime:
    """com.microsoft LinearAttention. Heads are packed in the last axis; the state is [B, H, K, V]."""

    def __init__(self, layer, rule, update_rule):
        T, H, K, V = layer.T, layer.H, layer.K, layer.V
        feeds = {"query": layer.q.reshape(1, T, H * K), "key": layer.k.reshape(1, T, H * K), "value": layer.v.reshape(1, T, H * V),
                 "past_state": layer.state, "decay": {"gated_delta": layer.step, "gla": layer.channel.reshape(1, T, H * K)}.get(rule),
                 "beta": layer.beta if rule == "gated_delta" else None}
        names = [name if feeds[name] is not None else "" for name in feeds]
        while not names[-1]:
            names.pop()
        feeds = {name: np.ascontiguousarray(feeds[name]) for name in names if name}
        node = onnx.helper.make_node("LinearAttention", names, ["output", "present_state"], domain="com.microsoft", q_num_heads=H, kv_num_heads=H,
                                     update_rule=update_rule, scale=layer.scale, chunk_size=CHUNK)
        shapes = {"output": (1, T, H * V), "present_state": (1, H, K, V)}
        info = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph([node], "layer", [info(name, onnx.TensorProto.FLOAT, feed.shape) for name, feed in feeds.items()],
                                       [info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()])
        opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        self.outputs = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for name, shape in shapes.items()}
        self.inputs = {name: onnxruntime.OrtValue.ortvalue_from_numpy(feed) for name, feed in feeds.items()}
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)
        self.shape = (1, T, H, V)

    def __call__(self):
        self.session.run_with_iobinding(self.binding)

    def result(self):
        self()
        return self.outputs["output"].numpy().reshape(self.shape), self.outputs["present_state"].numpy()


def heads_first(array):
    """[1, T, H, D] as [H, T, D], contiguous."""
    return torch.from_numpy(array)[0].transpose(0, 1).contiguous()


class Torch:
    """What the torch peers share: tensors with the heads before the tokens, [H, T, D] and contiguous. A call keeps its result in `out` and `state`."""

    def __init__(self, layer):
        self.q, self.k, self.v = heads_first(layer.q), heads_first(layer.k), heads_first(layer.v)
        self.scale, self.T = layer.scale, layer.T
        self.start = None if layer.state is None else torch.from_numpy(layer.state[0].copy())
        self.zeros = torch.zeros(layer.H, layer.K, layer.V)
        self.out = torch.empty_like(self.v)
        self.state = None

    def result(self):
        self()
        return self.out.transpose(0, 1)[None].numpy(), None if self.state is None else self.state[None].numpy().copy()


class TorchChunkLoop(Torch):
    """Linear attention chunk by chunk: three products with the state and one with a masked table."""

    def __call__(self):
        self.state = self.zeros.clone()
        for at in range(0, self.T, CHUNK):
            q, k, v = self.q[:, at:at + CHUNK], self.k[:, at:at + CHUNK], self.v[:, at:at + CHUNK]
            table = torch.bmm(q, k.transpose(1, 2)).tril_()
            out = torch.bmm(q, self.state).baddbmm_(table, v)
            torch.mul(out, self.scale, out=self.out[:, at:at + CHUNK])
            self.state.baddbmm_(k.transpose(1, 2), v)


class TorchChunkBatch(Torch):
    """The same for all chunks at once, the states a cumulative sum."""

    def __call__(self):
        H, T = self.q.shape[:2]
        q, k, v = (x.view(H, T // CHUNK, CHUNK, -1) for x in (self.q, self.k, self.v))
        states = torch.matmul(k.transpose(2, 3), v).cumsum_(1)
        self.state = states[:, -1]
        out = torch.matmul(torch.matmul(q, k.transpose(2, 3)).tril_(), v)
        out[:, 1:] += torch.matmul(q[:, 1:], states[:, :-1])
        self.out = out.mul_(self.scale).view(H, T, -1)


class TorchStep(Torch):
    """One token of linear attention: the state is updated in place."""

    def result(self):
        self.state = self.start.clone()
        return super().result()

    def __call__(self):
        if self.state is None:
            self.state = self.start.clone()
        self.state.baddbmm_(self.k.transpose(1, 2), self.v)
        torch.bmm(self.q, self.state, out=self.out)
        self.out.mul_(self.scale)


class TorchSoftmax(Torch):
    """Causal softmax attention, another function: what linear attention stands in for."""

    def __call__(self):
        self.out = torch.nn.functional.scaled_dot_product_attention(self.q[None], self.k[None], self.v[None], is_causal=True, scale=self.scale)[0]


class Transformers:
    """The functions in torch that a model of transformers falls back to on a CPU: by chunks of 64, and token by token for one token."""

    def __init__(self, layer):
        self.tensors = [torch.from_numpy(array) for array in (layer.q, layer.k, layer.v, layer.step, layer.beta)]
        self.keywords = {"initial_state": None if layer.state is None else torch.from_numpy(layer.state), "output_final_state": True}
        self.rule = qwen.torch_recurrent_gated_delta_rule if layer.T == 1 else qwen.torch_chunk_gated_delta_rule

    def __call__(self):
        return self.rule(*self.tensors, **self.keywords)

    def result(self):
        out, state = self()
        return out.numpy(), state.numpy()


class TorchGradient(Torch):
    """What the torch peers with autograd share: a call is `forward`, and backward from the gradient given of its result."""

    def __init__(self, layer):
        super().__init__(layer)
        self.given = heads_first(layer.given)
        self.inputs = [x.requires_grad_() for x in (self.q, self.k, self.v)]

    def __call__(self):
        return torch.autograd.grad(self.forward(), self.inputs, self.given)

    def result(self):
        return {name: gradient.transpose(0, 1)[None].numpy() for name, gradient in zip("qkv", self())}


class TorchChunkLoopGradient(TorchGradient):
    """Chunk by chunk. Split, and not sliced: the gradient of a slice is as long as the whole."""

    def forward(self):
        state, out = self.zeros, []
        for q, k, v in zip(*(x.split(CHUNK, 1) for x in (self.q * self.scale, self.k, self.v))):
            table = torch.bmm(q, k.transpose(1, 2)).tril_()
            out.append(torch.bmm(q, state).baddbmm(table, v))
            state = state.baddbmm(k.transpose(1, 2), v)
        return torch.cat(out, 1)


class TorchChunkBatchGradient(TorchGradient):
    """All chunks at once."""

    def forward(self):
        H, T = self.q.shape[:2]
        q, k, v = (x.view(H, T // CHUNK, CHUNK, -1) for x in (self.q * self.scale, self.k, self.v))
        states = torch.matmul(k[:, :-1].transpose(2, 3), v[:, :-1]).cumsum(1)
        out = torch.matmul(torch.matmul(q, k.transpose(2, 3)).tril_(), v)
        out[:, 1:] += torch.matmul(q[:, 1:], states)
        return out.view(H, T, -1)


class TransformersGradient:
    """The fallback of transformers by chunks of 64, and backward."""
    NAMES = "q", "k", "v", "log_decay", "beta"

    def __init__(self, layer):
        self.tensors = [torch.from_numpy(array).clone().requires_grad_() for array in (layer.q, layer.k, layer.v, layer.step, layer.beta)]
        self.given = torch.from_numpy(layer.given)

    def __call__(self):
        out, _ = qwen.torch_chunk_gated_delta_rule(*self.tensors, initial_state=None, output_final_state=True)
        return torch.autograd.grad(out, self.tensors, self.given)

    def result(self):
        return {name: gradient.numpy() for name, gradient in zip(self.NAMES, self())}


def gradient_peers_of(layer):
    found = [("torch loop over chunks", "linear", TorchChunkLoopGradient(layer))]
    if layer.T % CHUNK == 0:
        found.append(("torch all chunks at once", "linear", TorchChunkBatchGradient(layer)))
    return found + [("transformers gated delta fallback", "gated_delta", TransformersGradient(layer))]


def peers_of(layer):
    """(name, our rule, the peer) of each that does this size."""
    found = [("onnxruntime linear", "linear", Onnxruntime(layer, "linear", "linear")),
             ("onnxruntime gated by channel", "gla", Onnxruntime(layer, "gla", "gated")),
             ("onnxruntime gated_delta", "gated_delta", Onnxruntime(layer, "gated_delta", "gated_delta")),
             ("transformers gated delta fallback", "gated_delta", Transformers(layer))]
    if layer.T == 1:
        found.append(("torch step", "linear", TorchStep(layer)))
    else:
        found.append(("torch loop over chunks", "linear", TorchChunkLoop(layer)))
        if layer.T % CHUNK == 0:
            found.append(("torch all chunks at once", "linear", TorchChunkBatch(layer)))
        found.append(("torch softmax attention", "linear", TorchSoftmax(layer)))
    return found


def ours(tercet, rule, layer, folder):
    """What `tercet run` gives: out and the state."""
    tensors = {"q": layer.q, "k": layer.k, "v": layer.v}
    if rule != "linear":
        tensors["log_decay"] = layer.channel if rule == "gla" else layer.step
    if rule == "gated_delta":
        tensors["beta"] = layer.beta
    if layer.state is not None:
        tensors["initial_state"] = layer.state
    given, out, state = (os.path.join(folder, name + ".npz") for name in ("in", "out", "state"))
    np.savez(given, **tensors)
    subprocess.run([tercet, "run", "--rule", rule, "--input", given, "--output", out, "--final-state", state], check=True, stdout=subprocess.DEVNULL)
    return np.load(out)["out"], np.load(state)["final_state"]


def softmax(layer):
    score = np.einsum("bihk,bjhk->bhij", layer.q.astype(float), layer.k.astype(float)) * layer.scale
    weight = np.tril(np.exp(score - score.max(axis=-1, keepdims=True)))
    return np.einsum("bhij,bjhv->bihv", weight / weight.sum(axis=-1, keepdims=True), layer.v.astype(float))


def check(tercet, tokens, heads, dim):
    """Every peer computes the function that it is compared with: else this ends with a sentence."""
    layer = Layer(tokens, heads, dim, dim, seed=2)
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rule, peer in peers_of(layer):
            out, state = peer.result()
            if name == "torch softmax attention":
                wanted = softmax(layer), None
            else:
                if rule not in answers:
                    answers[rule] = ours(tercet, rule, layer, folder)
                wanted = answers[rule]
            for what, one, other in (("out", out, wanted[0]), ("state", state, wanted[1])):
                if other is None:
                    continue
                distance = np.abs(one - other).max() / np.abs(other).max()
                # f32 over a few hundred tokens: rounding stays below 1e-5, another function does not.
                if one.shape != other.shape or not distance < 2e-5:
                    sys.exit("peers: %s of %s at T %d, K = V = %d is %.2g of the largest away from the answer" % (what, name, tokens, dim, distance))


def gradients_of_recurrence(layer, rule):
    """{input: gradient}, by autograd through the recurrence in f64."""
    arrays = {"q": layer.q, "k": layer.k, "v": layer.v}
    if rule == "gated_delta":
        arrays.update(log_decay=layer.step, beta=layer.beta)
    inputs = {name: torch.from_numpy(array.astype(float)).requires_grad_() for name, array in arrays.items()}
    steps = {name: tensor[0].unbind() for name, tensor in inputs.items()}  # each [H, D]
    state, rows = torch.zeros(layer.H, layer.K, layer.V, dtype=torch.float64), []
    for t in range(layer.T):
        q, k, u = steps["q"][t], steps["k"][t], steps["v"][t]
        if rule == "gated_delta":
            state = state * steps["log_decay"][t].exp()[:, None, None]
            u = steps["beta"][t][:, None] * (u - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * u[:, None, :]
        rows.append(layer.scale * torch.einsum("hkv,hk->hv", state, q))
    gradients = torch.autograd.grad(torch.stack(rows)[None], list(inputs.values()), torch.from_numpy(layer.given.astype(float)))
    return {name: gradient.numpy() for name, gradient in zip(inputs, gradients)}


def check_gradients(tokens, heads, dim):
    """Every peer with autograd has the gradients of the function that it is compared with: else this ends with a sentence."""
    layer = Layer(tokens, heads, dim, dim, seed=2)
    for name, rule, peer in gradient_peers_of(layer):
        got, wanted = peer.result(), gradients_of_recurrence(layer, rule)
        for what in wanted:
            distance = np.abs(got[what] - wanted[what]).max() / np.abs(wanted[what]).max()
            if got[what].shape != wanted[what].shape or not distance < 2e-5:
                sys.exit("peers: the gradient of %s by %s at T %d, K = V = %d is %.2g of the largest away from the recurrence's" % (
                    what, name, tokens, dim, distance))


class Peer:
    """A peer at one size, with its times."""

    def __init__(self, name, rule, layer, call):
        self.name, self.rule, self.layer, self.call = name, rule, layer, call
        self.ns, self.ratios, self.calls = [], [], 1

    def warm_up(self, seconds):
        self.call()
        each = self.time()
        while each * self.calls < seconds / 4:
            self.calls *= 4
            each = self.time()
        self.calls = max(1, math.ceil(seconds / each))

    def time(self):
        begin = time.process_time()
        for _ in range(self.calls):
            self.call()
        return (time.process_time() - begin) / self.calls

    def sample(self):
        return self.time() * 1e9 / (self.layer.T * self.layer.H)


def bench(arguments, layer, rules, gradient):
    """{rule: ns} by `tercet bench`, and what it says of the machine."""
    environment = {name: value for name, value in os.environ.items() if name not in KEEP_MEMORY}
    command = [arguments.tercet, "bench", "--json", "--rule", ",".join(rules), "--form", arguments.form, "--tokens", str(layer.T), "--heads",
               str(layer.H), "--key-dim", str(layer.K), "--repeat", "5", "--seconds", str(arguments.seconds)] + ["--gradient"] * gradient
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    return {row["rule"]: row["ns_per_token_head"] for row in said["rows"]}, said["machine"]


def numbers(text):
    return [int(word) for word in text.split(",")]


def measure(arguments, tokens, dim, gradient):
    """The rows of one size, and what `tercet bench` says of the machine."""
    layer = Layer(tokens, arguments.heads, dim, dim)
    if gradient:
        check_gradients(min(tokens, 4 * CHUNK), 4, dim)
    else:
        check(arguments.tercet, min(tokens, 4 * CHUNK), 4, dim)
    peers = [Peer(name, rule, layer, call) for name, rule, call in (gradient_peers_of if gradient else peers_of)(layer)]
    rules = sorted({peer.rule for peer in peers})
    our_ns = {rule: [] for rule in rules}
    machine = None
    for peer in peers:
        peer.warm_up(arguments.seconds)
    for round_number in range(arguments.rounds):
        print("peers%s: K = V = %d, T %d, round %d of %d" % (" with gradients" * gradient, dim, tokens, round_number + 1, arguments.rounds), file=sys.stderr)
        now, machine = bench(arguments, layer, rules, gradient)
        for rule in rules:
            our_ns[rule].append(now[rule])
        for peer in peers:
            ns = peer.sample()
            peer.ns.append(ns)
            peer.ratios.append(ns / now[peer.rule])
    return [{"peer": peer.name, "rule": peer.rule, "gradient": gradient, "dtype": "f32", "tokens": tokens, "heads": arguments.heads, "key_dim": dim,
             "value_dim": dim, "threads": 1, "peer_ns_per_token_head": statistics.median(peer.ns),
             "ns_per_token_head": statistics.median(our_ns[peer.rule]), "ratio": statistics.median(peer.ratios)} for peer in peers], machine


def main():
    parser = argparse.ArgumentParser(description="Times what PyPI offers beside `tercet bench`; the head of this file says how to set it up.")
    parser.add_argument("--tercet", default="build/release/cli/tercet", help="the command (default: %(default)s)")
    parser.add_argument("--form", default="automatic", help="ours (default: %(default)s)")
    parser.add_argument("--core", type=int, default=0, help="to be pinned to (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="at least 7, the default")
    parser.add_argument("--tokens", type=numbers, default=[1, 512, 2048], help="default: 1,512,2048")
    parser.add_argument("--dims", type=numbers, default=[64, 128], help="key_dim = value_dim (default: 64,128)")
    parser.add_argument("--heads", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.02, help="that a sample lasts at least (default: %(default)s)")
    parser.add_argument("--gradient", action="store_true", help="forward and backward too")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    arguments = parser.parse_args()
    if arguments.rounds < 7:
        parser.error("--rounds must be at least 7")
    os.sched_setaffinity(0, {arguments.core})
    torch.set_num_threads(1)

    rows, machine = [], None
    for gradient in [False, True] if arguments.gradient else [False]:
        with torch.inference_mode(not gradient):
            for dim in arguments.dims:
                for tokens in arguments.tokens:
                    if gradient and tokens == 1:
                        continue
                    now, machine = measure(arguments, tokens, dim, gradient)
                    rows += now

    versions = {"python": platform.python_version(), "numpy": np.__version__, "onnxruntime": onnxruntime.__version__, "torch": torch.__version__,
                "transformers": transformers.__version__}
    if arguments.json:
        print(json.dumps({"machine": machine, "versions": versions, "core": arguments.core, "rounds": arguments.rounds, "rows": rows}, indent=2))
        return
    peaks = machine["peaks"]
    print("cpu %s, core %d, f32 multiply-add peak %.0f GFLOP/s; tercet %s, target %s, %s" % (
        machine["cpu"], arguments.core, peaks["fma_f32_gflops"], machine["version"], machine["target"], machine["compiler"]))
    print(", ".join("%s %s" % pair for pair in versions.items()))
    print("f32, one thread, B = 1, H = %d, ns a token and head, medians of %d\n" % (arguments.heads, arguments.rounds))
    print("%-34s %-12s %-8s %5s %6s  %9s  %9s  %6s" % ("peer", "our rule", "gradient", "K = V", "T", "peer ns", "our ns", "ratio"))
    for row in rows:
        print("%-34s %-12s %-8s %5d %6d  %9.0f  %9.0f  %6.2f" % (row["peer"], row["rule"], "with" if row["gradient"] else "without", row["key_dim"],
                                                                 row["tokens"], row["peer_ns_per_token_head"], row["ns_per_token_head"], row["ratio"]))


if __name__ == "__main__":
    main()
