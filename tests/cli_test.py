"""The command, run as a stranger runs it: each test is a sentence of docs/cli.md. Plain Python; TERCET_BIN names the binary.

Every run must exit 0, 1 or 2; a run that exits 2 must have said one line on stderr and nothing on stdout; no run that is piped may colour or draw.
"""

import glob
import json
import math
import os
import pty
import random
import re
import select
import struct
import subprocess
import tempfile
import time
import unittest
import zipfile

BIN = os.environ["TERCET_BIN"]
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "golden")
RULES = ["linear", "retention", "simple_gla", "gla", "rwkv6", "delta", "gated_delta", "kda", "rwkv7"]
NORMALIZED = RULES[:5]
FORMS = ["parallel", "recurrent", "chunkwise", "automatic"]
LETTERS = {"F16": "e", "F32": "f", "F64": "d", "I32": "i", "I64": "q", "U8": "B", "BOOL": "?"}
NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}


class Array:
    """Numbers in row-major order with a dtype as safetensors spells it."""

    def __init__(self, dtype, shape, numbers):
        assert len(numbers) == math.prod(shape)
        self.dtype, self.shape, self.numbers = dtype, list(shape), list(numbers)

    def bytes(self):
        if self.dtype == "BF16":  # the upper halves of floats
            return b"".join(struct.pack("<f", x)[2:] for x in self.numbers)
        return struct.pack("<%d%s" % (len(self.numbers), LETTERS[self.dtype]), *self.numbers)

    @staticmethod
    def of(dtype, shape, data):
        if dtype == "BF16":
            return Array(dtype, shape, [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)])
        return Array(dtype, shape, struct.unpack("<%d%s" % (math.prod(shape), LETTERS[dtype]), data))


def safetensors(arrays, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, array in arrays.items():
        raw = array.bytes()
        header[name] = {"dtype": array.dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def npy(array):
    shape = "(%s)" % "".join("%d," % size for size in array.shape)
    header = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }" % (NUMPY[array.dtype], shape)
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + array.bytes()


def npz(path, arrays, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, array in arrays.items():
            archive.writestr(name + ".npy", npy(array))


def read_npy(raw):
    assert raw[:6] == b"\x93NUMPY"
    wide = raw[6] > 1
    length, = struct.unpack("<I" if wide else "<H", raw[8:12 if wide else 10])
    start = (12 if wide else 10) + length
    header = eval(raw[start - length:start].decode())
    assert not header["fortran_order"] or len(header["shape"]) < 2
    dtype = {text: name for name, text in NUMPY.items()}[header["descr"]]
    return Array.of(dtype, header["shape"], raw[start:])


def read(path):
    """The arrays of a file that the command wrote, and the metadata."""
    if path.endswith(".npz"):
        with zipfile.ZipFile(path) as archive:
            return {name[:-4]: read_npy(archive.read(name)) for name in archive.namelist()}, {}
    with open(path, "rb") as file:
        raw = file.read()
    if path.endswith(".npy"):
        return {"": read_npy(raw)}, {}
    length, = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8:8 + length]), raw[8 + length:]
    metadata = header.pop("__metadata__", {})
    return {name: Array.of(one["dtype"], one["shape"], data[slice(*one["data_offsets"])]) for name, one in header.items()}, metadata


def layer(rule, dtype="F32", B=1, T=12, H=2, K=4, V=3, seed=1, state=True, normalize=False):
    """Random tensors that the rule takes."""
    source = random.Random(seed)

    def fill(shape, number):
        return Array(dtype, shape, [number() for _ in range(math.prod(shape))])

    def normal():
        return source.gauss(0, 1)

    arrays = {"q": fill([B, T, H, K], normal), "k": fill([B, T, H, K], lambda: normal() / K), "v": fill([B, T, H, V], normal)}
    shapes = {"retention": [H], "simple_gla": [B, T, H], "gated_delta": [B, T, H], "gla": [B, T, H, K], "rwkv6": [B, T, H, K],
              "kda": [B, T, H, K], "rwkv7": [B, T, H, K]}
    if rule in shapes:
        arrays["log_decay"] = fill(shapes[rule], lambda: -source.random())
    if rule in ("delta", "gated_delta", "kda"):
        arrays["beta"] = fill([B, T, H], source.random)
    if rule == "rwkv7":
        arrays["remove"] = fill([B, T, H, K], lambda: normal() / K)
        arrays["write"] = fill([B, T, H, K], lambda: normal() / K)
    if rule == "rwkv6":
        arrays["bonus"] = fill([H, K], normal)
    if state:
        arrays["initial_state"] = fill([B, H, K, V], normal)
        if normalize:
            arrays["initial_key_sum"] = fill([B, H, K], lambda: 1 + source.random())
    return arrays


def tokens(array, begin, end):
    """Tokens begin to end - 1 of a [1, T, ...] array."""
    step = math.prod(array.shape[2:])
    return Array(array.dtype, [1, end - begin] + array.shape[2:], array.numbers[begin * step:end * step])


def piece(arrays, begin, end):
    per_token = ("q", "k", "v", "log_decay", "beta", "remove", "write", "valid")
    return {name: tokens(array, begin, end) if name in per_token and len(array.shape) > 1 else array
            for name, array in arrays.items() if not name.startswith("initial_")}


class CommandTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def run_it(self, *arguments, env=None, expect=None):
        """Runs the command, piped; returns exit code, stdout, stderr. What must hold of every run is asserted here."""
        environment = {name: value for name, value in os.environ.items() if name not in ("TERCET_TARGET", "NO_COLOR")}
        environment.update(env or {})
        done = subprocess.run([BIN, *arguments], capture_output=True, env=environment, stdin=subprocess.DEVNULL, timeout=300)
        out, err = done.stdout.decode(), done.stderr.decode()
        said = "%s\n%s\n%s" % (arguments, out, err)
        self.assertIn(done.returncode, (0, 1, 2), said)
        for text in (out, err):
            self.assertIsNone(re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), repr(text))
        if done.returncode == 2 and arguments:
            self.assertEqual(out, "", said)
            self.assertRegex(err, r"\Atercet: [^\n]+\n\Z", said)
        else:
            self.assertEqual(err, "", said)
        if expect is not None:
            self.assertEqual(done.returncode, expect, said)
        return done.returncode, out, err

    def ok(self, *arguments, **keywords):
        return self.run_it(*arguments, expect=0, **keywords)[1]

    def fails(self, *arguments, **keywords):
        return self.run_it(*arguments, expect=1, **keywords)[1]

    def refused(self, *arguments, says=(), **keywords):
        err = self.run_it(*arguments, expect=2, **keywords)[2]
        for word in [says] if isinstance(says, str) else says:
            self.assertIn(word, err)
        return err

    def json(self, *arguments, expect=0, **keywords):
        def no_constant(name):
            raise AssertionError("%s is not JSON" % name)
        return json.loads(self.run_it(*arguments, "--json", expect=expect, **keywords)[1], parse_constant=no_constant)


class SixTokens(CommandTest):
    def setUp(self):
        super().setUp()
        self.golden, _ = read(os.path.join(GOLDEN, "six_tokens", "six_tokens.safetensors"))

    def matrix(self, text, title):
        """The rows of numbers under the line that begins with `title`."""
        lines = text.split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith(title))
        rows = []
        for line in lines[at + 1:]:
            if not line.strip():
                return rows
            rows.append([float(word) for word in line.split() if word != "."])

    def near(self, rows, expected):
        self.assertEqual([len(row) for row in rows], [len(row) for row in expected])
        for row, numbers in zip(rows, expected):
            for x, y in zip(row, numbers):
                self.assertAlmostEqual(x, y, delta=1e-6)

    def test_reads_like_the_answer_to_a_question(self):
        text = self.ok("verify")
        at = -1
        for part in ["are they the same function?", "q (6, 4)", "k (6, 4)", "v (6, 5)", "Attention table (6, 6)", "n^2", "Output (6, 5)",
                     "State (5, 4)", "fixed whatever n is", "parallel and recurrent differ by", "less than 1e-12",
                     "parallel and recurrent are the same", "chunkwise (chunks of 4, the last of 2) = recurrent", "chunkwise = parallel",
                     "largest difference", "below 1e-12", "golden answer", "The same in algebra", "draws, degree at most", "with a chance below 2^-",
                     "parallel = recurrent", "chunkwise = recurrent", "chunkwise = parallel", "The same in floating point", "parallel", "recurrent",
                     "chunkwise", "are the same function"]:
            found = text.find(part, at + 1)
            self.assertGreater(found, at, "%r is missing or too early in\n%s" % (part, text))
            at = found
        decided = [line for line in text.split("\n") if line.endswith(("True", "False"))]
        self.assertEqual(len(decided), 6 + 3 + 4 + 1)
        self.assertTrue(all(line.endswith(" True") for line in decided), text)
        self.assertRegex(text.rstrip("\n").split("\n")[-1], r"^parallel, recurrent and chunkwise are the same function +True$")

    def test_its_numbers_are_those_of_the_definition(self):
        text = self.ok("verify")

        def phi(array, i):
            return [x + 1 if x > 0 else math.exp(x) for x in array.numbers[4 * i:4 * i + 4]]

        q, k = self.golden["q"], self.golden["k"]
        table = [[sum(a * b for a, b in zip(phi(q, i), phi(k, j))) for j in range(i + 1)] for i in range(6)]
        self.near(self.matrix(text, "Attention table"), [[x / sum(row) for x in row] for row in table])
        out, state = self.golden["expected.out"].numbers, self.golden["expected.final_state"].numbers
        self.near(self.matrix(text, "Output"), [out[5 * i:5 * i + 5] for i in range(6)])
        self.near(self.matrix(text, "State"), [state[v::5] for v in range(5)])  # stored [K, V], drawn d_v x d_k

    def test_json(self):
        verdict = self.json("verify")
        self.assertIs(verdict["same"], True)
        self.assertEqual(list(verdict)[0], "same")
        self.assertEqual([len(verdict[name]) for name in ("attention_table", "out", "state")], [6, 6, 5])
        self.assertEqual(verdict["chunk"], 4)
        self.assertTrue(all(line["value"] is True for line in verdict["lines"]))
        self.assertLess(verdict["from_golden"], 1e-12)
        self.assertEqual([one["form"] for one in verdict["judgements"]], ["parallel", "recurrent", "chunkwise", "expected"])

    def test_a_planted_error_fails_it(self):
        text = self.fails("verify", "--plant", "mask")
        self.assertIn("An error is planted", text)
        self.assertRegex(text, r"chunkwise \(chunks of 4, the last of 2\) = recurrent.* False\n")
        self.assertRegex(text, r"parallel and recurrent are the same +True\n")
        self.assertRegex(text, r"all three are within 1e-12 of the golden answer.* False\n")
        self.assertRegex(text, r"are the same function +False\n\Z")
        verdict = self.json("verify", "--plant", "mask", "--plant-in", "algebra", expect=1)
        self.assertTrue(all(line["value"] for line in verdict["lines"]))
        self.assertIs(verdict["same"], False)
        self.refused("verify", "--plant", "scale", says="scale")  # it cancels here
        self.refused("verify", "--plant", "decay", says="decay")

    def test_machine_flags_keep_the_six_tokens(self):
        for name in self.json("info")["targets"]:
            self.assertEqual(self.json("verify", "--target", name, "--threads", "1")["target"], name)
            self.assertEqual(self.json("verify", env={"TERCET_TARGET": name})["target"], name)


class RandomTensors(CommandTest):
    def test_every_rule_in_every_dtype(self):
        for dtype in ("f32", "f64", "bf16", "f16"):
            text = self.ok("verify", "--rule", "all", "--dtype", dtype)
            self.assertIn("The same in algebra", text)
            self.assertIn("The same in floating point", text)
            for rule in RULES:
                self.assertRegex(text, r"(?m)^%s +True +True +True +2\^-\d+( +[\d.e+-]+){3} +True +True$" % rule)
            self.assertRegex(text, r"for 9 rules +True\n\Z")
            verdict = self.json("verify", "--rule", "all", "--dtype", dtype)
            self.assertIs(verdict["same"], True)
            self.assertEqual([one["rule"] for one in verdict["rules"]], RULES)
            for one in verdict["rules"]:
                self.assertEqual(one["dtype"], dtype)
                self.assertIs(one["same"], True)
                self.assertLess(one["algebra"]["log2_failure"], -100)
                for judgement in one["judgements"]:
                    self.assertLessEqual(judgement["ratio"], one["limit"])

    def test_one_rule(self):
        for rule in RULES:
            text = self.ok("verify", "--rule", rule, "--tokens", "33", "--key-dim", "5", "--value-dim", "7", "--heads", "3", "--batch", "2",
                           "--chunk", "8", "--dtype", "f64", "--seed", "9", "--feature-map", "l2_norm", "--eps", "1e-4", "--scale", "-0.3",
                           "--threads", "1", "--table-limit", "100000000")
            for part in ["rule " + rule, "batch 2, tokens 33", "heads 3", "key_dim 5, value_dim 7", "f64, chunk 8", "l2_norm", "scale -0.3",
                         "The same in algebra", "The same in floating point"]:
                self.assertIn(part, text)
            self.assertRegex(text, r"are the same function +True\n\Z")

    def test_the_default_rule_is_linear(self):
        self.assertEqual(self.json("verify", "--tokens", "20")["rule"], "linear")
        self.assertEqual(self.json("verify", "--seed", "20")["dtype"], "f32")

    def test_seeds(self):
        first = self.ok("verify", "--rule", "kda", "--seed", "5")
        self.assertEqual(first, self.ok("verify", "--rule", "kda", "--seed", "5"))
        self.assertNotEqual(first, self.ok("verify", "--rule", "kda", "--seed", "6"))
        self.ok("verify", "--rule", "kda", "--seed", "18446744073709551615")

    def test_grouped_heads(self):
        verdict = self.json("verify", "--rule", "gla", "--q-heads", "4", "--k-heads", "1", "--v-heads", "2")
        self.assertEqual([verdict["q_heads"], verdict["k_heads"], verdict["v_heads"]], [4, 1, 2])
        self.refused("verify", "--rule", "gla", "--q-heads", "4", "--k-heads", "3", says="heads")

    def test_sizes_at_the_edge(self):
        for arguments in (["--tokens", "0"], ["--tokens", "1"], ["--batch", "0"], ["--key-dim", "1", "--value-dim", "1", "--heads", "1"],
                          ["--chunk", "1"], ["--chunk", "9223372036854775807"]):
            for rule in ("linear", "kda", "rwkv7"):
                self.assertIs(self.json("verify", "--rule", rule, "--tokens", "9", *arguments)["same"] if "--tokens" not in arguments
                              else self.json("verify", "--rule", rule, *arguments)["same"], True)

    def test_normalize(self):
        verdict = self.json("verify", "--rule", "all", "--normalize", "--feature-map", "elu_plus_one")
        self.assertIs(verdict["same"], True)
        self.assertEqual([one["rule"] for one in verdict["rules"]], NORMALIZED)
        self.assertEqual([one["rule"] for one in verdict["left_out"]], RULES[5:])
        self.assertRegex(self.ok("verify", "--rule", "all", "--normalize", "--feature-map", "elu_plus_one"), r"delta +left out: ")
        self.refused("verify", "--rule", "delta", "--normalize", says="normalize")
        self.assertIs(self.json("verify", "--rule", "all", "--feature-map", "elu_plus_one")["same"], True)

    def test_planted_errors_in_each_half_alone(self):
        left_out = {"decay": ["linear", "delta"], "scale": ["rwkv7"], "mask": []}
        for plant, without in left_out.items():
            for half in ("algebra", "floating-point"):
                with self.subTest(plant=plant, half=half):
                    verdict = self.json("verify", "--rule", "all", "--plant", plant, "--plant-in", half, expect=1)
                    self.assertIs(verdict["same"], False)
                    self.assertEqual([one["rule"] for one in verdict["left_out"]], without)
                    self.assertEqual([one["rule"] for one in verdict["rules"]], [rule for rule in RULES if rule not in without])
                    for one in verdict["rules"]:
                        floats = {judgement["form"]: judgement["same"] for judgement in one["judgements"]}
                        self.assertIs(one["same"], False)
                        self.assertEqual(one["plant"], plant)
                        self.assertIs(one["algebra"]["same"], half != "algebra")
                        self.assertIs(one["algebra"]["recurrent_is_parallel"], True)
                        self.assertEqual(floats, {"parallel": True, "recurrent": True, "chunkwise": half == "algebra"})
            text = self.fails("verify", "--rule", "all", "--plant", plant)
            self.assertIn("An error is planted", text)
            for rule in without:
                self.assertRegex(text, r"(?m)^%s +left out: " % rule)

    def test_nothing_left_to_judge(self):
        self.refused("verify", "--rule", "all", "--plant", "scale", "--scale", "1", says="no rule is left")
        self.refused("verify", "--rule", "linear", "--plant", "decay", says="decay")
        self.refused("verify", "--rule", "all", "--plant", "decay", "--scale", "nan", says="scale is nan")

    def test_the_table_limit(self):
        self.refused("verify", "--rule", "linear", "--table-limit", "10", says=["table_limit", "chunkwise"])


class Gradients(CommandTest):
    def test_every_rule_in_every_dtype(self):
        for dtype in ("f32", "f64", "bf16", "f16"):
            arguments = ["verify", "--gradient", "--rule", "all", "--dtype", dtype, "--tokens", "40", "--key-dim", "8", "--value-dim", "6"]
            text = self.ok(*arguments)
            for rule in RULES:
                self.assertRegex(text, r"(?m)^%s +True +2\^-\d+( +[\d.e+-]+ +[a-z_]+){2} +True +True$" % rule)
            self.assertRegex(text, r"the gradients of the recurrent and the chunkwise form are the layer's derivatives, for 9 rules +True\n\Z")
            verdict = self.json(*arguments)
            self.assertIs(verdict["same"], True)
            self.assertEqual([one["rule"] for one in verdict["rules"]], RULES)
            for one in verdict["rules"]:
                self.assertLess(one["algebra"]["log2_failure"], -100)
                for judgement in one["judgements"]:
                    self.assertLessEqual(judgement["ratio"], one["limit"])

    def test_each_gradient_of_each_form_has_a_line(self):
        text = self.ok("verify", "--gradient", "--rule", "kda", "--tokens", "30")
        for form in ("recurrent", "chunkwise"):
            for name in ("q", "k", "v", "log_decay", "beta", "initial_state", "scale"):
                self.assertRegex(text, r"(?m)^  %s +%s( +[\d.e+-]+){4}  ratio at most [\d.]+ +True$" % (form, name))
        self.assertRegex(text, r"(?m)^  gradients = derivatives +True$")
        verdict = self.json("verify", "--gradient", "--rule", "rwkv6", "--tokens", "30", "--form", "chunkwise", "--normalize")
        self.assertEqual([(one["form"], one["tensor"]) for one in verdict["judgements"]],
                         [("chunkwise", name) for name in ("q", "k", "v", "log_decay", "bonus", "initial_state", "initial_key_sum", "scale")])

    def test_the_default_rule_is_linear(self):
        self.assertEqual(self.json("verify", "--gradient")["rule"], "linear")

    def test_sizes_at_the_edge(self):
        for arguments in (["--tokens", "0"], ["--tokens", "1"],
                          ["--tokens", "5", "--key-dim", "1", "--value-dim", "1", "--heads", "1"], ["--tokens", "5", "--chunk", "1"]):
            for rule in ("linear", "retention", "rwkv6", "rwkv7"):
                self.assertIs(self.json("verify", "--gradient", "--rule", rule, *arguments)["same"], True)

    def test_planted_errors_in_each_half_alone(self):
        size = ["--tokens", "40", "--key-dim", "8", "--value-dim", "6"]
        for plant, without in {"decay": ["linear", "delta"], "scale": ["rwkv7"], "mask": []}.items():
            for half in ("algebra", "floating-point"):
                with self.subTest(plant=plant, half=half):
                    verdict = self.json("verify", "--gradient", "--rule", "all", *size, "--plant", plant, "--plant-in", half, expect=1)
                    self.assertEqual([one["rule"] for one in verdict["left_out"]], without)
                    for one in verdict["rules"]:
                        wrong = {judgement["form"] for judgement in one["judgements"] if not judgement["same"]}
                        self.assertIs(one["same"], False)
                        self.assertIs(one["algebra"]["same"], half != "algebra")
                        self.assertEqual(wrong, set() if half == "algebra" else {"chunkwise"})
            self.assertIn("An error is planted in the chunkwise form's gradients", self.fails("verify", "--gradient", *size, "--rule", "all", "--plant", plant))

    def test_tensors_from_files(self):
        arrays = layer("gated_delta", T=20)
        arrays["valid"] = Array("BOOL", [1, 20], [t % 5 != 3 for t in range(20)])
        path = self.write("a.safetensors", safetensors(arrays, {"rule": "gated_delta", "form": "parallel"}))
        self.assertIn("The gradients of the layer of %s: are they its derivatives?" % path, self.ok("verify", "--gradient", "--input", path))
        self.fails("verify", "--gradient", "--input", path, "--plant", "mask")

    def test_refusals(self):
        self.refused("verify", "--gradient", "--form", "parallel", says=["form is parallel", "no gradients"])
        self.refused("verify", "--gradient", "--form", "recurrent", "--plant", "mask", says="form is recurrent")
        self.refused("verify", "--gradient", "--form", "quadratic", says="--form")
        self.refused("verify", "--gradient", "--plant", "decay", says="linear has no decay")
        self.refused("verify", "--gradient", "--tolerance", "1", says="--tolerance")
        self.refused("verify", "--gradient", "--operands", "bf16", says="--operands")
        self.refused("verify", "--form", "recurrent", says="--gradient")
        self.refused("verify", "--gradient", "--tokens", "100000000", "--key-dim", "8", "--value-dim", "1000", "--heads", "1", says="GiB")


class BadUse(CommandTest):
    def test_no_command(self):
        code, out, err = self.run_it()
        self.assertEqual(code, 2)
        self.assertIn("Usage: tercet", out)

    def test_sentences(self):
        far = "9" * 40
        for arguments, says in [
                (["nope"], "nope"), (["verify", "--nope"], "--nope"), (["verify", "extra"], "extra"), (["rules", "extra"], "extra"), ([""], ""),
                (["verify", "--rule", "lineer"], ["--rule", "lineer", "linear, retention"]), (["verify", "--rule", ""], "--rule"),
                (["verify", "--rule"], "--rule"), (["verify", "--tokens", "-1"], ["--tokens", "-1"]), (["verify", "--tokens", "x"], "--tokens is 'x'"),
                (["verify", "--tokens", far], far), (["verify", "--tokens", "1.5"], "1.5"), (["verify", "--tokens", ""], "--tokens"),
                (["verify", "--tokens", " 5"], "--tokens"), (["verify", "--tokens", "0x10"], "--tokens"), (["verify", "--batch", "-1"], "--batch"),
                (["verify", "--heads", "0"], "one head"), (["verify", "--key-dim", "0"], "one channel"), (["verify", "--value-dim", "-2"], "--value-dim"),
                (["verify", "--tokens", "9223372036854775807", "--key-dim", "9223372036854775807"], "would take"),
                (["verify", "--tokens", "4294967296", "--heads", "4294967296"], "would take"),
                (["verify", "--tokens", "0", "--key-dim", "4294967296", "--value-dim", "4294967296"], "would take"),
                (["verify", "--chunk", "-1"], "chunk is -1"), (["verify", "--chunk", "many"], "--chunk"), (["verify", "--scale", "nan"], "scale is nan"),
                (["verify", "--scale", "inf"], "scale is inf"), (["verify", "--scale", "1e999"], "--scale"), (["verify", "--scale", "1,5"], "--scale"),
                (["verify", "--eps", "-1"], "eps is -1"), (["verify", "--eps", "nan"], "eps"), (["verify", "--seed", "-1"], "--seed"),
                (["verify", "--seed", "18446744073709551616"], "--seed"), (["verify", "--dtype", "f8"], ["--dtype", "f32, f64, bf16 or f16"]),
                (["verify", "--feature-map", "gelu"], ["--feature-map", "elu_plus_one"]), (["verify", "--threads", "-1"], "threads is -1"),
                (["verify", "--threads", far], "--threads"), (["verify", "--target", "Z80"], "Z80"), (["verify", "--table-limit", "-1"], "table_limit"),
                (["verify", "--normalize=perhaps"], "perhaps"), (["verify", "--scale", "1", "--scale", "2"], "--scale"),
                (["verify", "--plant", "typo"], ["typo", "decay, scale or mask"]), (["verify", "--plant-in", "both"], "--plant"),
                (["verify", "--plant", "mask", "--plant-in", "here"], "here"), (["verify", "--tolerance", "1"], "--tolerance"),
                (["verify", "--operands", "bf16"], "--operands"),
                (["verify", "--form", "parallel"], "--form"), (["run"], "--input"), (["run", "--input", "a.npz"], "--output"),
                (["info", "--rule", "linear"], "--rule"), (["--json"], "--json")]:
            with self.subTest(arguments=arguments):
                self.refused(*arguments, says=says)
        self.refused("info", env={"TERCET_TARGET": "Z80"}, says="Z80")
        self.refused("verify", env={"TERCET_TARGET": "Z80"}, says="Z80")

    def test_control_characters_are_escaped(self):
        self.refused("verify", "--rule", "a\x1b[31mb\n", says="a\\x1b[31mb\\x0a")
        self.refused("verify", "--input", "x\u009b2J.npz", says="x\\xc2\\x9b2J.npz")
        self.refused("a\x07\u202eb", says="a\\x07\\xe2\\x80\\xaeb")
        self.refused(b"\xff\xfe", says="\\xff\\xfe")
        self.refused("verify", "--rule", "größe", says="größe")

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([BIN, "verify"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr.decode(), r"\Atercet: [^\n]+\n\Z")


class Help(CommandTest):
    def test_everywhere(self):
        for arguments in ([], ["verify"], ["run"], ["bench"], ["rules"], ["info"]):
            text = self.ok(*arguments, "--help")
            self.assertIn("Usage: tercet", text)
            self.assertIn("Exit codes: 0", text)
        for command in ("verify", "run", "bench"):
            self.assertIn("Examples\n  tercet " + command, self.ok(command, "--help"))
        self.assertIn("--plant decay", self.ok("verify", "--help"))

    def test_its_examples_are_taken(self):
        for line in re.findall(r"(?m)^  (tercet verify.*?)(?:  .*)?$", self.ok("verify", "--help")):
            if "--input" not in line:
                self.run_it(*line.split()[1:], expect=1 if "--plant" in line else 0)

    def test_version(self):
        self.assertRegex(self.ok("--version"), r"\Atercet \d+\.\d+\.\d+\n\Z")

    def test_rules(self):
        text, listed = self.ok("rules"), self.json("rules")["rules"]
        self.assertEqual([rule["name"] for rule in listed], RULES)
        for rule in listed:
            for part in (rule["name"] + "\n", rule["equation"], rule["also_known_as"]):
                self.assertIn(part, text)
            self.assertEqual(set(rule["inputs"]), set(layer(rule["name"], state=False)))
            self.assertEqual(rule["can_normalize"], rule["name"] in NORMALIZED)
            self.assertEqual(len(rule["inputs"]["q"].split(",")), 4)

    def test_info(self):
        info = self.json("info")
        self.assertIn(info["target"], info["targets"])
        self.assertGreaterEqual(info["threads"], 1)
        self.assertEqual(set(info["versions"]), {"tercet", "compiler", "highway", "onetbb"})
        self.assertTrue(all(info["versions"].values()), info)
        text = self.ok("info")
        for word in [info["cpu"], info["target"], "threads", info["versions"]["highway"], info["versions"]["onetbb"]]:
            self.assertIn(word, text)
        for name in info["targets"]:
            self.assertEqual(self.json("info", env={"TERCET_TARGET": name})["target"], name)


class Bench(CommandTest):
    """No time is asserted, only that there is one."""
    TINY = ["--heads", "2", "--key-dim", "4", "--value-dim", "6", "--repeat", "5", "--seconds", "0.0001"]
    KEYS = {"rule", "form", "chunk", "dtype", "decay", "batch", "tokens", "heads", "key_dim", "value_dim", "threads", "target", "ns_per_token_head",
            "gflops", "peak_fraction", "rmw_fraction", "tokens_per_second", "workspace_bytes", "peak_rss_bytes", "added_bytes"}
    WORK = {"linear": 4, "retention": 4, "simple_gla": 5, "gla": 5, "rwkv6": 5, "delta": 6, "gated_delta": 7, "kda": 7, "rwkv7": 9}
    GRADIENT_WORK = {"linear": 14, "retention": 14, "simple_gla": 17, "gla": 17, "rwkv6": 17, "delta": 22, "gated_delta": 25, "kda": 25, "rwkv7": 33}

    def test_every_layer_named_is_timed(self):
        said = self.json("bench", *self.TINY, "--form", ",".join(FORMS), "--chunk", "0,2", "--dtype", "f32,f64", "--tokens", "1,5", "--batch", "2")
        self.assertEqual(said["left_out"], [])
        rows, machine = said["rows"], said["machine"]
        wanted = {(rule, form, chunk, dtype, tokens) for rule in RULES for form in FORMS for dtype in ("f32", "f64") for tokens in (1, 5)
                  for chunk in ((0, 2) if form in ("chunkwise", "automatic") else (0,))}
        self.assertEqual(sorted(wanted), sorted((row["rule"], row["form"], row["chunk"], row["dtype"], row["tokens"]) for row in rows))
        self.assertTrue({"cpu", "target", "compiler", "version", "peaks"} <= set(machine))
        peaks = machine["peaks"]
        for name in ("fma_f32_gflops", "fma_f64_gflops", "copy_cache_gbytes_per_second", "copy_dram_gbytes_per_second"):
            self.assertGreater(peaks[name], 0)
        self.assertTrue(peaks["amx_bf16_gflops"] is None or peaks["amx_bf16_gflops"] > 0)
        for row in rows:
            self.assertEqual(set(row), self.KEYS)
            self.assertEqual([row[name] for name in ("batch", "heads", "key_dim", "value_dim", "threads")], [2, 2, 4, 6, 1])
            self.assertEqual(row["target"], machine["target"])
            ns = row["ns_per_token_head"]
            self.assertGreater(ns, 0)
            self.assertAlmostEqual(row["gflops"] * ns, self.WORK[row["rule"]] * 4 * 6, delta=1e-6)
            self.assertAlmostEqual(row["gflops"] / peaks["fma_%s_gflops" % row["dtype"]], row["peak_fraction"], delta=1e-9)
            self.assertAlmostEqual(row["tokens_per_second"] * ns * 2, 1e9, delta=1)
            self.assertEqual(row["rmw_fraction"] is None, row["tokens"] > 1)
            self.assertTrue(row["tokens"] > 1 or row["rmw_fraction"] > 0)
            self.assertGreater(row["workspace_bytes"], 64)
            self.assertGreater(row["peak_rss_bytes"], 1 << 20)
            self.assertGreaterEqual(row["added_bytes"], 0)

    def test_gradient(self):
        forms = [form for form in FORMS if form != "parallel"]
        given = [*self.TINY, "--gradient", "--form", ",".join(forms), "--chunk", "0,2", "--dtype", "f32,bf16", "--tokens", "1,5", "--batch", "2"]
        said = self.json("bench", *given)
        self.assertEqual(said["left_out"], [])
        wanted = {(rule, form, chunk, dtype, tokens) for rule in RULES for form in forms for dtype in ("f32", "bf16") for tokens in (1, 5)
                  for chunk in ((0, 2) if form in ("chunkwise", "automatic") else (0,))}
        self.assertEqual(sorted(wanted), sorted((row["rule"], row["form"], row["chunk"], row["dtype"], row["tokens"]) for row in said["rows"]))
        for row in said["rows"]:
            self.assertEqual(set(row), self.KEYS | {"gradient", "forward_ns_per_token_head", "ratio"})
            self.assertIs(row["gradient"], True)
            ns, forward = row["ns_per_token_head"], row["forward_ns_per_token_head"]
            self.assertGreater(ns, 0)
            self.assertGreater(forward, 0)
            self.assertAlmostEqual(row["ratio"], ns / forward, delta=1e-9 * row["ratio"])
            self.assertAlmostEqual(row["gflops"] * ns, self.GRADIENT_WORK[row["rule"]] * 4 * 6, delta=1e-6)
            self.assertAlmostEqual(row["gflops"] / said["machine"]["peaks"]["fma_f32_gflops"], row["peak_fraction"], delta=1e-9)
            self.assertIsNone(row["rmw_fraction"])  # there is no state in place

    def test_the_gradient_keeps_states(self):
        kept = {}
        for gradient in ([], ["--gradient"]):
            rows = self.json("bench", *self.TINY, "--rule", "gla", "--tokens", "64,1024", "--threads", "1", *gradient)["rows"]
            kept[bool(gradient)] = [row["workspace_bytes"] for row in rows]
        states = (1024 - 64) / 32 * 4 * 6 * 4  # more, of a head: one a chunk of 32
        self.assertLess(kept[False][1] - kept[False][0], states)
        self.assertGreaterEqual(kept[True][1] - kept[True][0], states)

    def test_the_gradient_in_text(self):
        text = self.ok("bench", *self.TINY, "--rule", "rwkv6,kda", "--gradient", "--tokens", "9", "--normalize")
        self.assertRegex(text, r"(?m)^rule .* threads +forward +ns +ratio +GFLOP/s")
        self.assertRegex(text, r"(?m)^rwkv6 +automatic +0 +f32 +random +1 +9 +2 +4 +6 +1 +[\d.]+ +[\d.]+ +\d+\.\d\d +[\d.]+ ")
        self.assertRegex(text, r"(?m)^left out: kda, automatic form, 9 tokens: normalize")

    def test_defaults(self):
        row, = self.json("bench", "--rule", "kda", "--tokens", "3", "--heads", "1", "--key-dim", "4", "--seconds", "0.0001")["rows"]
        self.assertEqual([row[name] for name in ("form", "chunk", "dtype", "decay", "batch", "value_dim", "threads")],
                         ["automatic", 0, "f32", "random", 1, 4, 1])

    def test_text_has_a_line_for_each_layer(self):
        text = self.ok("bench", *self.TINY, "--rule", "linear,gla,retention", "--decay", "random,mild,strong,none,total", "--tokens", "300")
        for part in ("cpu ", "target ", "fma ", "amx ", "copy ", " GFLOP/s", "of peak", "of loop"):
            self.assertIn(part, text)
        self.assertEqual(len(re.findall(r"(?m)^linear +automatic .* none ", text)), 1)  # it has no decay
        for rule in ("gla", "retention"):
            self.assertEqual(re.findall(r"(?m)^%s +automatic +0 +f32 +(\w+) " % rule, text), ["random", "mild", "strong", "none", "total"])

    def test_machine_flags(self):
        for name in self.json("info")["targets"]:
            said = self.json("bench", *self.TINY, "--rule", "rwkv7", "--tokens", "2", "--target", name.lower())
            self.assertEqual([said["machine"]["target"], said["rows"][0]["target"]], [name, name])
        rows = self.json("bench", *self.TINY, "--rule", "delta", "--tokens", "1,9", "--threads", "1,2,0")["rows"]
        have = self.json("info")["threads"]
        self.assertEqual([row["threads"] for row in rows], [1, min(2, have), have] * 2)

    def test_what_can_not_be_timed_is_left_out(self):
        said = self.json("bench", *self.TINY, "--tokens", "20", "--normalize", "--feature-map", "relu", "--form", "parallel,recurrent", "--table-limit", "9")
        self.assertEqual([(row["rule"], row["form"]) for row in said["rows"]], [(rule, "recurrent") for rule in NORMALIZED])
        self.assertEqual(len(said["left_out"]), 13)
        for one in said["left_out"]:
            self.assertIn("normalize" if one["layer"].split(",")[0] not in NORMALIZED else "table_limit", one["why"])
        self.refused("bench", *self.TINY, "--rule", "delta,kda", "--normalize", says="no layer is left to time: normalize")

    def test_refusals(self):
        for arguments, says in [
                (["--rule", "linear,lineer"], ["--rule is 'lineer'", "linear, retention"]), (["--rule", "linear,all"], "'all'"), (["--rule", ""], "--rule"),
                (["--form", "automatic,fast"], "--form is 'fast'"), (["--dtype", "i32"], ["--dtype is 'i32'", "f32"]), (["--dtype", "f32,"], "--dtype is ''"),
                (["--decay", "soft"], "--decay is 'soft'"), (["--tokens", "1,0"], "--tokens is '0'"), (["--tokens", "1 2"], "--tokens"),
                (["--heads", "0"], "--heads"), (["--key-dim", "x"], "--key-dim"), (["--value-dim", "0"], "--value-dim"), (["--batch", "0"], "--batch"),
                (["--chunk", "1,-1"], "--chunk is '-1'"), (["--form", "recurrent", "--chunk", "3"], "chunk is 3"), (["--threads", "-1"], "threads is -1"),
                (["--threads", "1,many"], "--threads is 'many'"), (["--repeat", "4"], ["--repeat is '4'", "at least 5"]), (["--seconds", "0"], "--seconds"),
                (["--seconds", "nan"], "--seconds"), (["--target", "Z80"], "Z80"), (["--scale", "inf"], "scale is inf"), (["--seed", "-1"], "--seed"),
                (["--tokens", "99999999999"], "would take"), (["--tokens", "4294967296", "--heads", "4294967296"], "would take"),
                (["--input", "a.npz"], "--input"), (["--plant", "mask"], "--plant"),
                (["--gradient", "--rule", "gla", "--heads", "1", "--tokens", "4", "--form", "recurrent,parallel"], ["form is parallel", "no gradients"]),
                (["--gradient", "--tokens", "99999999999"], "would take")]:
            with self.subTest(arguments=arguments):
                self.refused("bench", *arguments, says=says)
        self.refused("bench", env={"TERCET_TARGET": "Z80"}, says="Z80")

    def test_the_examples_of_its_help_are_taken(self):
        lines = re.findall(r"(?m)^  tercet bench(.*?)(?:  .*)?$", self.ok("bench", "--help"))
        self.assertGreater(len(lines), 3)
        for line in lines:
            given = line.split()
            small = ["--heads", "1", "--key-dim", "4", "--seconds", "0.0001"] + ([] if "--tokens" in given else ["--tokens", "8"])
            self.ok("bench", *given, *small)


class Page(CommandTest):
    def masked(self, text):
        """What is the same on every machine: numbers, where the ratio is worst, targets and versions are not."""
        text = re.sub(r"(out|final_state|final_key_sum) +(?=\d)", "# ", text)
        text = re.sub(r"(?<=\d) +(q|k|v|log_decay|beta|remove|write|bonus|initial_state|initial_key_sum|scale) +(?=\d|True|False)", " # ", text)
        text = re.sub(r"(?m)^(cpu|target|targets|compiler|highway|onetbb|amx) .*$", r"\1 #", text)
        text = re.sub(r"target \w+", "target #", text)
        return re.sub(r" +", " ", re.sub(r"-?\d[\d.e+-]*", "#", text))

    def test_it_shows_what_the_command_says(self):
        docs = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs", "cli.md")
        with open(docs, encoding="utf-8") as file:
            blocks = re.findall(r"(?ms)^```console\n(.*?)^```$", file.read())
        with open(os.path.join(GOLDEN, "onnx_linear_attention", "gated_delta.safetensors"), "rb") as file:
            self.write("layer.safetensors", file.read())
        environment = {name: value for name, value in os.environ.items() if name != "TERCET_TARGET"}
        commands = re.findall(r"(?ms)^\$ tercet ?([^\n]*)\n(.*?)(?=^\$ |\Z)", "".join(blocks))
        self.assertGreater(len(commands), 6)
        for command, shown in commands:
            with self.subTest(command=command):
                done = subprocess.run([BIN, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder, env=environment)
                said, shown = self.masked(done.stdout.decode()), self.masked(shown)
                if shown.endswith("[...]\n"):
                    shown = shown[:-len("[...]\n")]
                    said = said[:len(shown)]
                self.assertEqual(said, shown)


class Terminal(CommandTest):
    def on_terminal(self, *arguments, env=None, stderr=False):
        """What the command writes to a terminal: its stdout, or its stderr."""
        ours, theirs = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environment.update(env or {})
        streams = {"stderr": theirs, "stdout": subprocess.DEVNULL} if stderr else {"stdout": theirs, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([BIN, *arguments], env=environment, **streams) as process:
            os.close(theirs)
            text = b""
            while select.select([ours], [], [], 300)[0]:
                try:
                    data = os.read(ours, 65536)
                except OSError:  # what Linux says when the other side has closed
                    break
                if not data:
                    break
                text += data
            os.close(ours)
        return text.decode()

    def test_colour_only_on_a_terminal(self):
        self.assertIn("\x1b[32mTrue\x1b[0m", self.on_terminal("verify"))
        self.assertIn("\x1b[31mFalse\x1b[0m", self.on_terminal("verify", "--plant", "mask"))
        self.assertNotIn("\x1b", self.on_terminal("verify", env={"NO_COLOR": "1"}))
        self.assertNotIn("\x1b", self.ok("verify"))
        plain = re.sub("\x1b\\[\\d+m", "", self.on_terminal("verify", "--rule", "all"))
        self.assertEqual(plain.replace("\r\n", "\n"), self.ok("verify", "--rule", "all"))

    def test_progress_only_on_a_terminal_and_for_long_work(self):
        self.assertEqual(self.on_terminal("verify", stderr=True), "")
        size = ["verify", "--rule", "kda", "--key-dim", "64", "--value-dim", "64", "--threads", "1", "--tokens"]
        count = 1000
        while True:  # until it takes long enough on this machine
            begin = time.monotonic()
            text = self.on_terminal(*size, str(count), stderr=True)
            if time.monotonic() - begin > 2.5:
                break
            count *= 2
        self.assertRegex(text, r"\r\x1b\[K\[[#-]{30}\] +\d+ % ")
        self.assertTrue(text.endswith("\r\x1b[K"), repr(text[-80:]))


class Files(CommandTest):
    def test_golden_answers(self):
        paths = sorted(glob.glob(os.path.join(GOLDEN, "**", "*.safetensors"), recursive=True))
        self.assertGreaterEqual(len(paths), 13)
        for path in paths:
            with self.subTest(path=path):
                tolerance = ["--tolerance", "1e-5"] if "onnx" in path else []
                verdict = self.json("verify", "--input", path, *tolerance)
                self.assertIs(verdict["same"], True)
                self.assertEqual(verdict["judgements"][3]["form"], "expected")
                self.assertIs(verdict["judgements"][3]["same"], True)
                self.assertEqual(verdict["rule"], read(path)[1]["rule"])

    def test_each_rule_in_each_kind_of_file(self):
        for rule in RULES:
            arrays = layer(rule)
            kinds = [["--input", self.write("a.safetensors", safetensors(arrays))], ["--input", self.path("a.npz")], ["--input", self.path("b.npz")]]
            npz(self.path("a.npz"), arrays)
            npz(self.path("b.npz"), arrays, zipfile.ZIP_DEFLATED)
            one_by_one = []
            for name, array in arrays.items():
                if name in ("q", "beta"):  # named by its stem
                    one_by_one += ["--input", self.write(name + ".npy", npy(array))]
                else:
                    one_by_one += ["--input", "%s=%s" % (name, self.write("the %s here.npy" % name, npy(array)))]
            verdicts = [self.json("verify", "--rule", rule, "--chunk", "4", *kind) for kind in kinds + [one_by_one]]
            self.assertIs(verdicts[0]["same"], True)
            for verdict in verdicts[1:]:
                self.assertEqual(verdict, verdicts[0])

    def test_metadata(self):
        arrays = layer("linear", state=False)
        said = {"rule": "linear", "scale": "0.5", "feature-map": "elu_plus_one", "chunk": "3", "format": "pt", "threads": "x", "seed": "?", "note": "-"}
        path = self.write("a.safetensors", safetensors(arrays, said))
        verdict = self.json("verify", "--input", path)
        self.assertEqual([verdict[name] for name in ("rule", "scale", "feature_map", "chunk", "normalize")], ["linear", 0.5, "elu_plus_one", 3, False])
        verdict = self.json("verify", "--input", path, "--scale", "2", "--feature-map", "relu", "--chunk", "5", "--seed", "4")
        self.assertEqual([verdict[name] for name in ("scale", "feature_map", "chunk")], [2, "relu", 5])
        path = self.write("b.safetensors", safetensors(arrays, dict(said, normalize="True")))
        self.assertIs(self.json("verify", "--input", path)["normalize"], True)
        self.assertIs(self.json("verify", "--input", path, "--normalize=false")["normalize"], False)
        path = self.write("c.safetensors", safetensors(arrays, {"rule": "linear", "feature_map": "l2_norm", "eps": "0.25", "form": "recurrent"}))
        self.assertEqual(self.json("verify", "--input", path)["feature_map"], "l2_norm")

    def test_a_bad_value_in_metadata_names_file_key_and_value(self):
        good = {"rule": "linear"}
        for key, value in [("rule", "linnear"), ("rule", "all"), ("scale", "half"), ("feature_map", "elu"), ("feature-map", "elu"), ("eps", "small"),
                           ("normalize", "maybe"), ("chunk", "4.5"), ("tolerance", "1e-5 "), ("operands", "f8"), ("form", "triangular")]:
            with self.subTest(key=key):
                path = self.write("bad.safetensors", safetensors(layer("linear"), dict(good, **{key: value})))
                self.refused("verify", "--input", path, says=["bad.safetensors", key.replace("-", "_"), "'%s'" % value])
        path = self.write("bad.safetensors", safetensors(layer("linear"), {"rule": "linear", "scale": "half"}))
        self.json("verify", "--input", path, "--scale", "0.5")  # the flag wins, so nobody reads it

    def test_two_files(self):
        arrays = layer("gla")
        left = self.write("left.safetensors", safetensors({name: arrays[name] for name in ("q", "k")}, {"rule": "gla"}))
        right = self.write("right.safetensors", safetensors({name: arrays[name] for name in arrays if name not in ("q", "k")}, {"scale": "1"}))
        self.assertEqual(self.json("verify", "--input", left, "--input", right)["scale"], 1)
        self.refused("verify", "--input", left, "--input", right, "--input", left, says=["is given twice", "left.safetensors"])
        other = self.write("other.safetensors", safetensors({"v": arrays["v"]}, {"rule": "linear"}))
        self.refused("verify", "--input", left, "--input", other, says=["left.safetensors", "other.safetensors", "rule"])

    def test_expected_answers(self):
        arrays = layer("gated_delta", dtype="F64")
        whole = self.write("whole.safetensors", safetensors(arrays, {"rule": "gated_delta"}))
        self.ok("run", "--input", whole, "--output", self.path("out.npz"), "--final-state", self.path("state.npz"))
        answers = {"expected.out": read(self.path("out.npz"))[0]["out"], "expected.final_state": read(self.path("state.npz"))[0]["final_state"]}
        for name, answer in answers.items():
            path = self.write("right.safetensors", safetensors({**arrays, name: answer}, {"rule": "gated_delta"}))
            self.assertRegex(self.ok("verify", "--input", path), r"and the expected answers are the same function +True\n\Z")
            wrong = Array(answer.dtype, answer.shape, answer.numbers)
            wrong.numbers[7] += 1e-9
            path = self.write("wrong.safetensors", safetensors({**arrays, name: wrong}, {"rule": "gated_delta"}))
            verdict = self.json("verify", "--input", path, expect=1)
            self.assertEqual([one["same"] for one in verdict["judgements"]], [True, True, True, False])
            self.assertEqual(verdict["judgements"][3]["tensor"], name[len("expected."):])
            self.assertIs(verdict["algebra"]["same"], True)
            self.assertRegex(self.fails("verify", "--input", path), r"expected .* False\n")
            self.ok("verify", "--input", path, "--tolerance", "1e-6")
            for operands in ("bf16", "f16", "tf32"):  # an error of 1e-9 is within what these round
                verdict = self.json("verify", "--input", path, "--operands", operands)
                self.assertEqual([one["operands"] for one in verdict["judgements"]], [None, None, None, operands])
            self.assertIn("operands of products are rounded, which the noise counts in: expected to tf32\n",
                          self.ok("verify", "--input", path, "--operands", "tf32"))
            path = self.write("written.safetensors", safetensors({**arrays, name: wrong}, {"rule": "gated_delta", "tolerance": "1e-6"}))
            self.ok("verify", "--input", path)
            self.fails("verify", "--input", path, "--tolerance", "0")
            self.refused("verify", "--input", path, "--tolerance", "-1", says="tolerance")
            path = self.write("said.safetensors", safetensors({**arrays, name: wrong}, {"rule": "gated_delta", "operands": "bf16"}))
            self.ok("verify", "--input", path)
            self.refused("verify", "--input", path, "--operands", "f8", says=["--operands", "bf16, f16 or tf32"])
        normalized = layer("gla", dtype="F64", normalize=True)
        arguments = ["--rule", "gla", "--normalize", "--feature-map", "elu_plus_one"]
        self.ok("run", *arguments, "--input", self.write("n.safetensors", safetensors(normalized)), "--output", self.path("o.npy"), "--final-state",
                self.path("s.safetensors"))
        normalized["expected.final_key_sum"] = read(self.path("s.safetensors"))[0]["final_key_sum"]
        self.ok("verify", *arguments, "--input", self.write("n.safetensors", safetensors(normalized)))
        normalized["expected.final_key_sum"].numbers[0] *= 1.001
        self.fails("verify", *arguments, "--input", self.write("n.safetensors", safetensors(normalized)))

    def test_a_wrong_name_gets_the_right_one(self):
        for name, meant in [("query", "q"), ("Q", "q"), ("K", "k"), ("key", "k"), ("Value", "v"), ("g", "log_decay"), ("gate", "log_decay"), ("w", "log_decay"),
                            ("decay", "log_decay"), ("log-decay", "log_decay"), ("logdecay", "log_decay"), ("h0", "initial_state"),
                            ("state", "initial_state"), ("inital_state", "initial_state"), ("cu_seqlens", "offsets"), ("offset", "offsets"),
                            ("mask", "valid"), ("a", "remove"), ("b", "write"), ("u", "bonus"), ("beat", "beta"), ("out", "expected.out"),
                            ("expected_out", "expected.out"), ("final_state", "expected.final_state"), ("C", "q"), ("B", "k"),
                            ("initial_keysum", "initial_key_sum")]:
            with self.subTest(name=name):
                arrays = dict(layer("linear"), **{name: Array("F32", [1], [0])})
                path = self.write("a.safetensors", safetensors(arrays, {"rule": "linear"}))
                self.refused("verify", "--input", path, says=["'%s'" % name, "'%s' was probably meant" % meant])
                self.refused("run", "--input", path, "--output", self.path("o.npy"), says="'%s' was probably meant" % meant)
        path = self.write("a.safetensors", safetensors({"model.layers.0.weight": Array("F32", [1], [0])}))
        self.refused("verify", "--rule", "linear", "--input", path, says=["model.layers.0.weight", "the names are q k v log_decay"])
        path = self.write("a.safetensors", safetensors({"q\x1b[2J": Array("F32", [1], [0])}))
        self.refused("verify", "--rule", "linear", "--input", path, says="q\\x1b[2J")

    def test_what_does_not_go_with_input(self):
        path = self.write("a.safetensors", safetensors(layer("linear")))
        self.refused("verify", "--input", path, says="no rule")
        self.refused("run", "--input", path, "--output", self.path("o.npy"), says="no rule")
        self.refused("verify", "--input", path, "--rule", "all", says="all")
        self.refused("run", "--input", path, "--rule", "all", "--output", self.path("o.npy"), says="all")
        for flag, value in [("--tokens", "3"), ("--key-dim", "3"), ("--value-dim", "3"), ("--heads", "3"), ("--q-heads", "3"), ("--k-heads", "3"),
                            ("--v-heads", "3"), ("--batch", "3"), ("--dtype", "f64")]:
            self.refused("verify", "--rule", "linear", "--input", path, flag, value, says=[flag, "--input"])
        self.refused("verify", "--input", "name=" + path, "--rule", "linear", says=".npy")
        self.refused("verify", "--input", self.path("absent.npz"), "--rule", "linear", says="absent.npz")
        self.refused("verify", "--input", self.folder, "--rule", "linear")
        self.refused("verify", "--input", path + ".txt", "--rule", "linear", says=".safetensors")
        self.fails("verify", "--input", path, "--rule", "linear", "--plant", "mask", "--seed", "3")

    def test_the_library_s_own_refusals_pass_through(self):
        arrays = layer("gated_delta")
        cases = [("beta", None, ["beta", "gated_delta"]), ("q", Array("F32", [1, 12, 8], [0] * 96), ["q has shape", "[B, T, H, K]"]),
                 ("log_decay", Array("F32", [1, 12, 2], [0.5] * 24), ["log_decay", "0.5"]), ("log_decay", Array("F64", [1, 12, 2], [0] * 24), "f64"),
                 ("beta", Array("I32", [1, 12, 2], [0] * 24), "i32"), ("bonus", Array("F32", [2, 4], [0] * 8), "bonus"),
                 ("offsets", Array("I64", [3], [0, 9, 5]), "offsets"), ("valid", Array("F32", [1, 12], [1] * 12), "valid"),
                 ("q", Array("F32", [1, 12, 1, 2, 4], [0] * 96), "5 axes"), ("q", Array("F32", [], [0]), "0 axes")]
        for name, array, says in cases:
            with self.subTest(name=name, says=says):
                changed = {key: value for key, value in {**arrays, name: array}.items() if value is not None}
                path = self.write("a.safetensors", safetensors(changed, {"rule": "gated_delta"}))
                self.refused("verify", "--input", path, says=says)
                self.refused("run", "--input", path, "--output", self.path("o.npz"), says=says)
        self.assertFalse(os.path.exists(self.path("o.npz")))

    def test_empty_tensors_of_huge_sizes(self):
        huge = 1 << 40
        for shape in ([1, 0, 1, huge], [0, 1, 1, huge], [0, huge, 1, huge], [1, 0, huge, huge]):
            arrays = {name: Array("F32", shape, []) for name in ("q", "k", "v")}
            path = self.write("a.safetensors", safetensors(arrays, {"rule": "linear"}))
            self.refused("verify", "--input", path)
            self.refused("run", "--input", path, "--output", self.path("o.npz"), "--final-state", self.path("s.npz"))

    def test_truncated_files(self):
        arrays = layer("linear", T=3)
        npz(self.path("a.npz"), arrays, zipfile.ZIP_DEFLATED)
        with open(self.path("a.npz"), "rb") as file:
            zipped = file.read()
        for ending, data in [("safetensors", safetensors(arrays, {"rule": "linear"})), ("npz", zipped), ("npy", npy(arrays["q"]))]:
            for length in sorted({0, 1, 7, 8, 9, 10, 12, 64, 100, len(data) // 2, len(data) - 23, len(data) - 1}):
                path = self.write("q." + ending, data[:length])
                self.refused("verify", "--rule", "linear", "--input", path, says="q." + ending)

    def test_dtypes_of_offsets_and_valid(self):
        arrays = layer("kda", state=False)
        verdicts = []
        for integer, boolean in [("I64", "BOOL"), ("I32", "U8")]:
            given = dict(arrays, offsets=Array(integer, [4], [0, 5, 5, 12]), valid=Array(boolean, [1, 12], [1] * 9 + [0, 1, 1]))
            verdicts.append(self.json("verify", "--rule", "kda", "--input", self.write("a.safetensors", safetensors(given))))
            self.assertEqual(verdicts[-1]["sequences"], 3)
        self.assertEqual(*verdicts)
        self.assertIs(verdicts[0]["same"], True)

    def test_numbers_that_are_none(self):
        arrays = layer("gla")
        arrays["v"].numbers[5] = math.nan
        arrays["q"].numbers[40] = math.inf
        verdict = self.json("verify", "--rule", "gla", "--input", self.write("a.safetensors", safetensors(arrays)))  # and it is JSON all the same
        self.assertIs(verdict["same"], True)


class Run(CommandTest):
    def run_layer(self, rule, arrays, form, *more, name="x"):
        """The numbers of out, and of the state at the end."""
        path = self.write(name + ".safetensors", safetensors(arrays))
        out, state = self.path(name + ".out.safetensors"), self.path(name + ".state.safetensors")
        self.ok("run", "--rule", rule, "--form", form, "--input", path, "--output", out, "--final-state", state, *more)
        self.assertEqual(list(read(out)[0]), ["out"])
        return read(out)[0]["out"], read(state)[0]

    def close(self, a, b, delta):
        self.assertEqual(a.shape, b.shape)
        for x, y in zip(a.numbers, b.numbers):
            self.assertAlmostEqual(x, y, delta=delta)

    def test_every_rule_and_form(self):
        for rule in RULES:
            arrays = layer(rule, dtype="F64")
            parallel = self.run_layer(rule, arrays, "parallel")
            self.assertEqual(parallel[0].shape, [1, 12, 2, 3])
            self.assertEqual(parallel[0].dtype, "F64")
            self.assertEqual(parallel[1]["final_state"].shape, [1, 2, 4, 3])
            self.assertGreater(max(abs(x) for x in parallel[0].numbers), 1e-3)
            for form, more in [("recurrent", []), ("chunkwise", ["--chunk", "5"]), ("automatic", [])]:
                out, state = self.run_layer(rule, arrays, form, *more)
                self.close(out, parallel[0], 1e-12)
                self.close(state["final_state"], parallel[1]["final_state"], 1e-12)

    def test_it_computes_the_layer(self):
        arrays = layer("simple_gla", dtype="F64", H=1, T=7)
        out, state = self.run_layer("simple_gla", arrays, "chunkwise", "--chunk", "3", "--scale", "0.7")
        S = [arrays["initial_state"].numbers[3 * c:3 * c + 3] for c in range(4)]
        for t in range(7):
            q, k, v = (arrays[name].numbers for name in ("q", "k", "v"))
            D = math.exp(arrays["log_decay"].numbers[t])
            S = [[D * S[c][j] + k[4 * t + c] * v[3 * t + j] for j in range(3)] for c in range(4)]
            for j in range(3):
                self.assertAlmostEqual(out.numbers[3 * t + j], 0.7 * sum(S[c][j] * q[4 * t + c] for c in range(4)), delta=1e-13)
        self.close(state["final_state"], Array("F64", [1, 1, 4, 3], sum(S, [])), 1e-13)

    def test_pieces_give_what_one_call_gives(self):
        for rule, more in [("gla", []), ("kda", []), ("rwkv7", []), ("rwkv6", []), ("linear", ["--normalize", "--feature-map", "elu_plus_one"])]:
            for form, exact in [("recurrent", True), ("chunkwise", False)]:
                for ending in ("safetensors", "npz", "npy"):
                    if more and ending == "npy":
                        continue  # two tensors
                    with self.subTest(rule=rule, form=form, ending=ending):
                        arrays = layer(rule, dtype="F32", normalize=bool(more))
                        whole, state = self.run_layer(rule, arrays, form, *more)
                        begin = {name: array for name, array in arrays.items() if name.startswith("initial_")}
                        before = self.write("before.safetensors", safetensors(begin))
                        numbers = []
                        for number, (first, last) in enumerate([(0, 5), (5, 6), (6, 12)]):
                            path = self.write("piece.safetensors", safetensors(piece(arrays, first, last)))
                            after = self.path("after%d.%s" % (number, ending))
                            self.ok("run", "--rule", rule, "--form", form, "--input", path, "--initial-state", before, "--output",
                                    self.path("piece.npy"), "--final-state", after, *more)
                            numbers += read(self.path("piece.npy"))[0][""].numbers
                            before = after
                        last = read(before)[0]
                        if ending == "npy":
                            last = {"final_state": last[""]}
                        self.assertEqual(set(last), {"final_state", "final_key_sum"} if more else {"final_state"})
                        if exact:
                            self.assertEqual(numbers, whole.numbers)
                            self.assertEqual({name: array.numbers for name, array in last.items()}, {name: array.numbers for name, array in state.items()})
                        else:
                            self.close(Array("F32", whole.shape, numbers), whole, 1e-5)

    def test_packed_sequences_and_valid_tokens(self):
        arrays = layer("gated_delta", state=False)
        packed = dict(arrays, offsets=Array("I64", [4], [0, 5, 5, 12]))
        out, state = self.run_layer("gated_delta", packed, "recurrent")
        self.assertEqual(state["final_state"].shape, [3, 2, 4, 3])
        parts = [self.run_layer("gated_delta", piece(arrays, *part), "recurrent") for part in [(0, 5), (5, 12)]]
        self.assertEqual(out.numbers, parts[0][0].numbers + parts[1][0].numbers)
        self.assertEqual(state["final_state"].numbers, parts[0][1]["final_state"].numbers + [0] * 24 + parts[1][1]["final_state"].numbers)
        masked = dict(arrays, valid=Array("BOOL", [1, 12], [True] * 5 + [False] * 7))
        out, state = self.run_layer("gated_delta", masked, "recurrent")
        self.assertEqual(out.numbers, parts[0][0].numbers + [0] * 42)
        self.assertEqual(state["final_state"].numbers, parts[0][1]["final_state"].numbers)

    def test_sixteen_bits(self):
        for dtype, unit in (("BF16", 2**-8), ("F16", 2**-11)):
            for rule in RULES:
                arrays = layer(rule, dtype=dtype)
                # What the file holds, and a state and a gate in f32 beside it.
                arrays = {name: Array.of(dtype, array.shape, array.bytes()) for name, array in arrays.items()}
                arrays["initial_state"].dtype = "F32"
                for name in ("log_decay", "write"):
                    if name in arrays:
                        arrays[name].dtype = "F32"
                # Chunks of bf16 may be products on tiles, which have a tolerance and a test of their own.
                form = ["recurrent"] if dtype == "BF16" else ["chunkwise", "--chunk", "5"]
                out, state = self.run_layer(rule, arrays, *form)
                self.assertEqual([out.dtype, state["final_state"].dtype], [dtype, "F32"])
                wide = {name: Array("F64", array.shape, array.numbers) for name, array in arrays.items()}
                exact, exact_state = self.run_layer(rule, wide, "recurrent")
                self.close(out, exact, 1.01 * unit * max(abs(x) for x in exact.numbers))
                self.close(state["final_state"], exact_state["final_state"], 1e-5 * max(abs(x) for x in exact_state["final_state"].numbers))
                verdict = self.json("verify", "--rule", rule, "--input", self.write("n.safetensors", safetensors(arrays)))
                self.assertEqual([verdict["dtype"], verdict["same"]], [dtype.lower(), True])
        # NumPy has f16 and no bf16.
        half, brain = (self.write(name, safetensors(layer("linear", dtype=dtype, state=False)))
                       for name, dtype in (("h.safetensors", "F16"), ("b.safetensors", "BF16")))
        self.ok("run", "--rule", "linear", "--input", half, "--output", self.path("o.npz"), "--final-state", self.path("s.npz"))
        self.assertEqual([read(self.path("o.npz"))[0]["out"].dtype, read(self.path("s.npz"))[0]["final_state"].dtype], ["F16", "F32"])
        self.refused("run", "--rule", "linear", "--input", brain, "--output", self.path("b.npz"), says=["b.npz", ".safetensors", "bf16"])
        self.assertFalse(os.path.exists(self.path("b.npz")))

    def test_grouped_heads(self):
        arrays = layer("linear", H=1, state=False)
        arrays["q"] = layer("linear", H=6, state=False)["q"]
        arrays["v"] = layer("linear", H=2, state=False)["v"]
        out, state = self.run_layer("linear", arrays, "chunkwise")
        self.assertEqual(out.shape, [1, 12, 6, 3])
        self.assertEqual(state["final_state"].shape, [1, 2, 4, 3])

    def test_what_it_says(self):
        path = self.write("a.safetensors", safetensors(layer("delta"), {"rule": "delta"}))
        out, state = self.path("o.npy"), self.path("s.npz")
        text = self.ok("run", "--input", path, "--output", out, "--final-state", state)
        for part in ["delta", "automatic", "f32", out + ": out (1, 12, 2, 3)", state + ": final_state (1, 2, 4, 3)"]:
            self.assertIn(part, text)
        said = self.json("run", "--input", path, "--form", "recurrent", "--output", out)
        self.assertEqual(said["written"], [{"file": out, "tensor": "out", "dtype": "f32", "shape": [1, 12, 2, 3]}])
        self.assertEqual([said["rule"], said["form"]], ["delta", "recurrent"])
        self.assertTrue(said["target"])

    def test_options_in_metadata(self):
        arrays = layer("linear", state=False)
        said = {"rule": "linear", "form": "chunkwise", "chunk": "5", "scale": "3", "feature_map": "relu"}
        path = self.write("a.safetensors", safetensors(dict(arrays, **{"expected.out": Array("F32", [1], [7])}), said))
        self.ok("run", "--input", path, "--output", self.path("o.npz"))  # expected.* is not used
        self.assertEqual(self.json("run", "--input", path, "--output", self.path("o.npz"))["form"], "chunkwise")
        out, _ = self.run_layer("linear", arrays, "chunkwise", "--chunk", "5", "--scale", "3", "--feature-map", "relu")
        self.assertEqual(read(self.path("o.npz"))[0]["out"].numbers, out.numbers)
        self.ok("run", "--input", path, "--form", "recurrent", "--scale", "1", "--output", self.path("o.npz"))  # the file's chunk is for the form that has them
        out, _ = self.run_layer("linear", arrays, "recurrent", "--scale", "1", "--feature-map", "relu")
        self.assertEqual(read(self.path("o.npz"))[0]["out"].numbers, out.numbers)
        self.refused("run", "--input", path, "--form", "recurrent", "--chunk", "5", "--output", self.path("o.npz"), says="chunk is 5")

    def test_the_state_by_file(self):
        arrays = layer("gla")
        with_state = self.write("with.safetensors", safetensors(arrays))
        alone = {name: array for name, array in arrays.items() if name != "initial_state"}
        without = self.write("without.safetensors", safetensors(alone))
        state = self.write("state.safetensors", safetensors({"initial_state": arrays["initial_state"]}))
        out = self.path("o.npy")
        run = ["run", "--rule", "gla", "--output", out]
        self.refused(*run, "--input", with_state, "--initial-state", state, says=["initial state", "twice"])
        self.ok(*run, "--input", with_state)
        given = read(out)[0][""].numbers
        self.ok(*run, "--input", without, "--initial-state", state)
        self.assertEqual(read(out)[0][""].numbers, given)
        both = self.write("both.safetensors", safetensors({"initial_state": arrays["initial_state"], "final_state": arrays["initial_state"]}))
        self.refused(*run, "--input", without, "--initial-state", both, says=["final_state", "initial_state"])
        self.refused(*run, "--input", without, "--initial-state", without, says="no state")
        self.refused(*run, "--input", without, "--initial-state", self.path("absent.npz"), says="absent.npz")

    def test_a_failure_leaves_the_old_file_whole(self):
        old = b"what was there before"
        out, state = self.write("o.npz", old), self.write("s.npz", old)
        good = self.write("a.safetensors", safetensors(layer("linear"), {"rule": "linear"}))
        bad = self.write("b.safetensors", safetensors(dict(layer("linear"), beta=Array("F32", [1], [0])), {"rule": "linear"}))
        short = self.write("c.safetensors", safetensors(layer("linear"), {"rule": "linear"})[:-1])
        for arguments in (["--input", bad], ["--input", short], ["--input", good, "--form", "sideways"], ["--input", good, "--target", "Z80"],
                          ["--input", good, "--form", "parallel", "--table-limit", "1"], ["--input", good, "--initial-state", short]):
            self.refused("run", *arguments, "--output", out, "--final-state", state)
            for path in (out, state):
                with open(path, "rb") as file:
                    self.assertEqual(file.read(), old)
        self.refused("run", "--input", good, "--output", self.path("no/such/folder.npz"), says="folder.npz")
        self.refused("run", "--input", good, "--output", self.path("o.txt"), says="o.txt")
        self.refused("run", "--input", good, "--output", out, "--final-state", self.path("s.pt"), says="s.pt")
        self.refused("run", "--input", good, "--output", out, "--final-state", self.path("./o.npz"), says="same file")
        normal = ["--normalize", "--feature-map", "relu", "--input", self.write("n.safetensors", safetensors(layer("linear", state=False), {"rule": "linear"}))]
        self.refused("run", *normal, "--output", out, "--final-state", self.path("s.npy"), says="final_key_sum")
        with open(out, "rb") as file:
            self.assertEqual(file.read(), old)
        names = set(os.listdir(self.folder))
        self.ok("run", "--input", good, "--output", out)
        self.assertEqual(set(os.listdir(self.folder)), names)  # no temporary file stays
        self.ok("run", "--input", good, "--output", good)  # what was read may be written over
        self.assertEqual(list(read(good)[0]), ["out"])


if __name__ == "__main__":
    unittest.main()
