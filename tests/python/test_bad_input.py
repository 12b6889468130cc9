"""What can't be computed is refused in words, and never crashes."""

import ctypes
import random

import numpy as np
import pytest
from conftest import RULES, layer

import tercet

BAD = [
    ({"q": None}, TypeError, "q is a NoneType and must be an array"),
    ({"q": [[1.0]]}, TypeError, "q is a list and must be an array"),
    ({"q": "text"}, TypeError, "q is a str and must be an array"),
    ({"k": 3.0}, TypeError, "k is a float and must be an array"),
    ({"k": np.zeros((2, 13, 2, 8), np.int8)}, TypeError, "k is of dtype int8"),
    ({"k": np.zeros((2, 13, 2, 8), complex)}, TypeError, "k is of dtype complex128"),
    ({"k": np.zeros((2, 13, 2, 8), ">f4")}, TypeError, "byte order"),
    ({"k": np.zeros((2, 13, 2, 8), object)}, TypeError, "k is a numpy.ndarray of dtype object"),
    ({"k": np.zeros((2, 13, 2, 8), "f4,i4")["f0"][..., :]}, None, ""),
    ({"k": np.zeros((2, 13, 2, 8), "f4,i1")["f0"]}, TypeError, "whole elements"),
    ({"k": np.zeros((2, 13, 2, 8))}, TypeError, "k is f64"),
    ({"k": np.zeros((2, 13, 2, 7), np.float32)}, ValueError, "k"),
    ({"k": np.zeros((13, 2, 8), np.float32)}, ValueError, "k"),
    ({"v": np.zeros((2, 13, 1, 2, 5), np.float32)}, ValueError, "v has rank 5"),
    ({"q": np.float32(3)}, ValueError, "q has no axes"),
    ({"log_decay": np.array(0.0, np.float32)}, ValueError, "log_decay has no axes"),
    ({"log_decay": np.zeros((2, 13, 2), np.float32)}, ValueError, "log_decay"),
    ({"beta": None, "rule": "delta"}, ValueError, "beta"),
    ({"rule": "nothing"}, ValueError, "rule is 'nothing' and must be one of linear, retention"),
    ({"rule": 3}, TypeError, "rule is a int and must be a string"),
    ({"form": "square"}, ValueError, "form is 'square'"),
    ({"feature_map": "gelu"}, ValueError, "feature_map is 'gelu'"),
    ({"chunk": -1}, ValueError, "chunk"),
    ({"chunk": 2.5}, TypeError, "chunk is a float and must be an integer"),
    ({"chunk": 2**70}, ValueError, "chunk"),
    ({"scale": "big"}, TypeError, "scale is a str and must be a number"),
    ({"normalize": 1}, TypeError, "normalize is a int and must be True or False"),
    ({"eps": -1.0, "feature_map": "l2_norm"}, ValueError, "eps"),
    ({"threads": -1}, ValueError, "threads"),
    ({"target": "abacus"}, ValueError, "abacus"),
    ({"initial_state": np.zeros((2, 2, 8, 4), np.float32)}, ValueError, "initial_state"),
    ({"offsets": np.array([0, 13])}, ValueError, "batch of 1"),
    ({"offsets": np.zeros(0, np.int64)}, ValueError, "offsets"),
    ({"offsets": 7}, TypeError, "offsets is a int"),
    ({"valid": np.ones((2, 13), np.float32)}, TypeError, "valid"),
    ({"out": np.zeros((2, 13, 2, 4), np.float32)}, ValueError, "out"),
    ({"out": np.zeros((2, 13, 2, 5))}, TypeError, "out"),
    ({"unknown": 3}, TypeError, "unknown"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: ",".join(case[0]))
def test_refusals(case):
    change, error, sentence = case
    if error is None:
        tercet.attend(**{**layer("linear"), **change})
        return
    with pytest.raises(error, match=sentence):
        tercet.attend(**{**layer("linear"), **change})


def test_nothing_is_written_where_a_call_is_refused():
    call = layer("gated_delta")
    out, state = np.full((2, 13, 2, 5), 7, np.float32), np.full((2, 2, 8, 5), 7, np.float32)
    call["log_decay"][1, 12, 1] = 0.5
    with pytest.raises(ValueError, match="log_decay"):
        tercet.attend(**call, out=out, final_state=state)
    assert (out == 7).all() and (state == 7).all()


def test_read_only_arrays():
    call = layer("linear")
    for value in call.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    out = tercet.attend(**call)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        tercet.attend(**call, out=out)
    with pytest.raises(ValueError, match="q"):
        q = np.zeros((2, 13, 2, 5), np.float32)
        tercet.attend(q, q, q, rule="linear", out=q)


def test_a_released_buffer():
    call = layer("linear")
    view = memoryview(call["q"])
    view.release()
    with pytest.raises((TypeError, ValueError)):
        tercet.attend(**{**call, "q": view})


def test_torch_tensors_that_can_not_be_read():
    torch = pytest.importorskip("torch")
    call = {name: value if name == "rule" else torch.from_numpy(value) for name, value in layer("linear").items()}
    for change in (
        call["k"].to("meta"),
        call["k"].to_sparse(),
        torch.quantize_per_tensor(call["k"], 0.1, 0, torch.qint8) if hasattr(torch, "quantize_per_tensor") else None,
        call["k"].to(torch.complex64),
        call["k"].int(),
        torch.zeros(()),
    ):
        with pytest.raises((TypeError, ValueError), match="k"):
            tercet.attend(**{**call, "k": change})
    freed = call["k"].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        tercet.attend(**{**call, "k": freed})
    with torch.no_grad(), pytest.raises((TypeError, ValueError)):
        tercet.attend(**{**call, "k": torch.nn.utils.rnn.PackedSequence(call["k"], torch.tensor([1]))})


class Hostile:
    """Speaks DLPack, and says something else each time."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack__(self, **kwargs):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __dlpack_device__(self):
        return (1, 0)


def test_hostile_objects():
    call = layer("linear")
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for answer in (None, 3, RuntimeError("no"), KeyboardInterrupt(), make(1, b"another", None)):
        with pytest.raises((TypeError, KeyboardInterrupt)):
            tercet.attend(**{**call, "q": Hostile(answer)})


def mutate(rng, call):
    """One or two arguments changed to something that may be right or wrong."""
    call = dict(call)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(set(call) | {"beta", "log_decay", "bonus", "remove", "initial_state", "valid", "offsets", "chunk", "scale", "out", "eps", "threads"}))
        value = call.get(name)
        if isinstance(value, np.ndarray) and rng.random() < 0.7:
            kind = rng.randrange(10)
            if kind == 0:
                value = value[..., ::-1]
            elif kind == 1:
                value = value[tuple(slice(0, rng.randrange(3)) for _ in value.shape)]
            elif kind == 2:
                value = value.astype(rng.choice(("f4", "f8", "f2", "i8", "i4", "?", "c8", "u2", ">f4", "O", "S3")))
            elif kind == 3:
                value = value[..., None]
            elif kind == 4:
                value = value.reshape(-1)
            elif kind == 5:
                value = np.broadcast_to(value[:1], value.shape)
            elif kind == 6:
                value = value.T
            elif kind == 7:
                value = value * np.array(rng.choice((np.nan, np.inf, -1e30, -1)), value.dtype)
            elif kind == 8:
                value = np.lib.stride_tricks.as_strided(value, value.shape, [0] * value.ndim)
            else:
                value = memoryview(value)
        else:
            value = rng.choice((None, 0, -1, 2**40, 2**80, 1.5, float("nan"), "x", b"x", [], {}, np.zeros(3), np.zeros((0, 4), "f4"), np.array([0, 2, 1]), object(), call["q"]))
        call[name] = value
    return call


def test_a_thousand_mutations():
    rng = random.Random(20261130)
    computed = refused = 0
    for at in range(1500):
        call = mutate(rng, layer(rng.choice(RULES), tokens=5))
        function = tercet.attend if at % 3 else lambda **call: tercet.gradient(grad_out=np.ones((2, 5, 2, 5), np.float32), **call)
        try:
            function(**call)
            computed += 1
        except (TypeError, ValueError, MemoryError) as error:
            assert str(error)
            refused += 1
    assert computed > 50 and refused > 500
