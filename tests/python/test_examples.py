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
