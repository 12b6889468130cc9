"""The examples do what they say. C++'s are tests of their own."""

import contextlib
import importlib
import io
import json
import pathlib
import re
import sys

import numpy as np
import pytest

import tercet

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "six_tokens.ipynb"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def printed(outputs):
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def assert_alike(said, saved):
    """The same words, and the same numbers to the four decimals that are printed; what rounding leaves of a zero is one of them."""
    number = r"-?\d+\.?\d*(?:e[+-]\d+)?"
    assert re.sub(r"\s", "", re.sub(number, "#", said)) == re.sub(r"\s", "", re.sub(number, "#", saved))
    np.testing.assert_allclose([float(x) for x in re.findall(number, said)], [float(x) for x in re.findall(number, saved)], rtol=0, atol=2e-4)


def test_notebook_cells():
    names, texts = {}, 0
    with np.printoptions():  # the notebook sets its own
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                said = io.StringIO()
                with contextlib.redirect_stdout(said):
                    exec("".join(cell["source"]), names)
                assert_alike(said.getvalue(), printed(cell["outputs"]))
                texts += said.getvalue() != ""
    assert texts > 5
    assert isinstance(names["verdict"], tercet.Verdict) and names["verdict"].same


def test_notebook_in_jupyter(monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(tercet.__file__).parents[1]))
    saved = nbformat.read(NOTEBOOK, as_version=4)
    ran = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(ran, timeout=60).execute()
    for cell, before in zip(ran.cells, saved.cells, strict=True):
        if cell.cell_type == "code":
            assert_alike(printed(cell.outputs), printed(before.outputs))
    last = ran.cells[-1].outputs[-1].data
    assert last["text/plain"] == "<Verdict delta: the same function>"
    assert "the same function" in last["text/html"]


def test_rwkv7_reverses_1_to_60_digits(example):
    found = example("rwkv7_reverse").measure(range(1, 61), strings=4)
    digits = 4 * sum(range(1, 61))
    assert len(found) == 5
    for way, counts in found.items():
        assert counts == (digits, digits, 0), way


def test_rwkv7_measure_sees_a_fault(example, monkeypatch):
    reverse = example("rwkv7_reverse")
    weights = reverse.read_safetensors(reverse.WEIGHTS)
    weights["rosa1.o.bias"] = np.zeros_like(weights["rosa1.o.bias"])
    monkeypatch.setattr(reverse, "read_safetensors", lambda path: weights)
    for right, total, wrong in reverse.measure(range(20, 24), strings=2).values():
        assert right < total and wrong > 0


def test_rwkv7_command(example, monkeypatch, capsys):
    reverse = example("rwkv7_reverse")
    monkeypatch.setattr(sys, "argv", ["rwkv7_reverse.py", "12345"])
    reverse.main()
    assert capsys.readouterr().out.startswith("12345,54321#\n")


def test_qwen3_next_generates_the_same(example):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers.models.qwen3_next")
    qwen3_next = example("qwen3_next")
    model = qwen3_next.model(width=64)
    prompt = torch.randint(0, 1024, (2, 100), generator=torch.Generator().manual_seed(1))
    plain, *_ = qwen3_next.generate(model, prompt, 12)
    with tercet.transformers.enable(model) as report:
        ours, *_ = qwen3_next.generate(model, prompt, 12)
    assert torch.equal(plain, ours) and ours.shape == (2, 12)
    assert len(set(ours.flatten().tolist())) > 8  # not one token again and again, which any model would agree on
    assert report.served >= 3 * 12 and not report.left


def test_qwen3_next_command(example, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.qwen3_next")
    monkeypatch.setattr(sys, "argv", ["qwen3_next.py", "--prompt", "70", "--tokens", "3", "--threads", "1"])
    example("qwen3_next").main()
    assert capsys.readouterr().out.endswith("the tokens are the same: True\n")


@pytest.fixture
def training(example):
    """train_bytes on one thread, and a text."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_bytes = example("train_bytes")
    yield train_bytes, train_bytes.text(100_000)
    torch.set_num_threads(threads)


def test_training_has_the_losses_of_the_fallback(training):
    pytest.importorskip("transformers.models.qwen3_next")
    train_bytes, data = training
    _, ours = train_bytes.train(train_bytes.rule_of_tercet(1), data, 8, 200)
    _, theirs = train_bytes.train(train_bytes.rule_of_transformers(), data, 8, 200)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert ours[-1] < ours[0] - 0.5


def test_training_is_timed(training):
    train_bytes, data = training
    rule = train_bytes.rule_of_tercet(1)
    _, plain = train_bytes.train(rule, data, 3, 200)
    _, timed = train_bytes.train(lambda *inputs: train_bytes.Timed.apply(rule, *inputs), data, 3, 200)
    assert plain == timed
    assert all(0 < seconds < 1 for seconds in train_bytes.rule_seconds(rule, data, 200, 1))


def test_written_bytes_are_those_of_the_whole_text(training):
    import torch

    train_bytes, data = training
    model, _ = train_bytes.train(train_bytes.rule_of_tercet(1), data, 2, 200)
    written, first, last = train_bytes.write(model, data[:50], 40)
    assert len(written) == 40 and first == last > 0
    tokens, memories = torch.tensor([list(data[:50] + written)]), [train_bytes.Memory() for _ in range(train_bytes.LAYERS)]
    with torch.inference_mode():
        whole = model(tokens)[0]
        steps = [model(piece, memories)[0] for piece in (tokens[:, :50], *tokens[:, 50:].split(1, dim=1))]
    assert torch.allclose(torch.cat(steps), whole, rtol=1e-4, atol=1e-4)
