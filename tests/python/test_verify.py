"""tercet.verify, and the command that the package installs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import layer

import tercet


def test_the_forms_are_the_same(rule):
    verdict = tercet.verify(**layer(rule, tokens=40), chunk=16)
    assert verdict and verdict.same and verdict.data["algebra"]["same"]
    assert [judgement["form"] for judgement in verdict.data["judgements"]] == ["parallel", "recurrent", "chunkwise"]
    assert "the same function: True" in str(verdict) and rule in repr(verdict)
    html = verdict._repr_html_()
    assert "the same function" in html and "<pre>" in html and "\x1b" not in html + str(verdict)


def test_expected_answers_are_judged():
    call = layer("gated_delta", tokens=40)
    out, state = tercet.attend(**call, return_state=True)
    assert tercet.verify(**call, expected_out=out, expected_final_state=state)
    wrong = out.copy()
    wrong[0, 5] *= 1.001
    verdict = tercet.verify(**call, expected_out=wrong)
    assert not verdict and verdict.data["judgements"][-1]["form"] == "expected"
    assert tercet.verify(**call, expected_out=wrong, tolerance=0.01)


def test_expected_answers_of_rounded_operands():
    call = layer("kda", tokens=40)

    def rounded(x):  # to bf16
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    out, state = tercet.attend(**{**call, **{name: rounded(call[name]) for name in ("q", "k", "v")}}, return_state=True)
    answers = {"expected_out": out, "expected_final_state": state}
    assert not tercet.verify(**call, **answers)
    verdict = tercet.verify(**call, **answers, operands="bf16")
    assert verdict and verdict.data["judgements"][-1]["operands"] == "bf16"
    assert not tercet.verify(**call, **{**answers, "expected_out": -out}, operands="bf16")
    with pytest.raises(ValueError, match="operands is 'f8' and must be 'bf16', 'f16', 'tf32' or None"):
        tercet.verify(**call, **answers, operands="f8")
    with pytest.raises(ValueError, match="operands is 'bf16' and must be None without expected answers"):
        tercet.verify(**call, operands="bf16")


def test_gradients():
    assert tercet.verify(**layer("kda", tokens=40), gradient=True)
    with pytest.raises(ValueError, match="expected answers"):
        tercet.verify(**layer("kda"), gradient=True, expected_out=np.zeros(3))
    with pytest.raises(ValueError, match="form is 'recurrent'"):
        tercet.verify(**layer("kda"), form="recurrent")


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "tercet", *arguments], capture_output=True, text=True, timeout=120)


def test_the_command():
    six = command("verify")
    assert six.returncode == 0 and "the same function" in six.stdout and six.stderr == ""
    assert command("verify", "--rule", "kda", "--plant", "decay").returncode == 1
    bad = command("verify", "--rule", "nothing")
    assert bad.returncode == 2 and bad.stdout == "" and "nothing" in bad.stderr
    verdict = json.loads(command("verify", "--rule", "linear", "--json").stdout)
    assert verdict["same"] is True
    assert command("--version").stdout == f"tercet {tercet.__version__}\n"
