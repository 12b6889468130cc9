"""Whether the forms of a layer are the same function: the proof of `tercet verify`, on arrays."""

from __future__ import annotations

import html
import json
from typing import Any

from tercet import _core

Array = Any


class Verdict:
    """What `verify` found: true where everything is the same function. `print` shows both halves of the proof; `data` has its numbers."""

    def __init__(self, data: dict[str, Any], text: str) -> None:
        self.data = data  # as `tercet verify --json` gives it: rule, sizes, "algebra", "floating_point" and what they hold
        self.text = text

    @property
    def same(self) -> bool:
        """Both halves hold, for every form, and for the expected answers where they were given."""
        return bool(self.data["same"])

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        return f"{self.text}\nthe same function: {self.same}"

    def __repr__(self) -> str:
        return f"<Verdict {self.data['rule']}: {'the same function' if self.same else 'not the same function'}>"

    def _repr_html_(self) -> str:
        colour, words = ("#2e7d32", "the same function") if self.same else ("#c62828", "not the same function")
        return f'<p><b style="color:{colour}">{html.escape(str(self.data["rule"]))}: {words}</b></p><pre>{html.escape(self.text)}</pre>'


def verify(
    q: Array,
    k: Array,
    v: Array,
    *,
    rule: str,
    log_decay: Array | None = None,
    beta: Array | None = None,
    remove: Array | None = None,
    write: Array | None = None,
    bonus: Array | None = None,
    form: str = "automatic",
    chunk: int | None = None,
    scale: float | None = None,
    feature_map: str = "identity",
    eps: float = 1e-6,
    normalize: bool = False,
    initial_state: Array | None = None,
    initial_key_sum: Array | None = None,
    offsets: Array | None = None,
    valid: Array | None = None,
    gradient: bool = False,
    expected_out: Array | None = None,
    expected_final_state: Array | None = None,
    expected_final_key_sum: Array | None = None,
    tolerance: float = 0.0,
    operands: str | None = None,
    seed: int = 1,
    threads: int = 0,
    target: str | None = None,
) -> Verdict:
    """Computes the layer in all three forms and judges whether they are the same function, in exact algebra and in floating point.

    Arguments as for `attend`, and:
        gradient: judge the gradients of the recurrent and the chunkwise form instead (or of the one that `form` names).
        expected_out, expected_final_state, expected_final_key_sum: somebody's answers, judged like a fourth form.
        tolerance: how exactly those were written down, relative to the largest of them; 0: to the last bit.
        operands: 'bf16', 'f16' or 'tf32' where those come from products of operands that are rounded to it, over chunks of `chunk` tokens, as on
            tensor cores or Intel AMX; None: not rounded.
        seed: of the field elements and of the random roundings.

    Returns:
        A `Verdict`, which is true where all is the same function.
    """
    if gradient and any(answer is not None for answer in (expected_out, expected_final_state, expected_final_key_sum)):
        raise ValueError("gradient is True and expected answers were given, and there are none to gradients")
    if not gradient and form != "automatic":
        raise ValueError(f"form is '{form}' and must be 'automatic' without gradient: all three forms are computed")
    inputs = (q, k, v, log_decay, beta, remove, write, bonus, initial_state, initial_key_sum, offsets, valid)
    options = (rule, form, chunk, scale, feature_map, eps, normalize, True, threads, target)
    answers = (expected_out, expected_final_state, expected_final_key_sum)
    if operands is not None and all(answer is None for answer in answers):
        raise ValueError(f"operands is '{operands}' and must be None without expected answers, whose products it is about")
    found, text = _core.verify(inputs, options, gradient, seed, *answers, tolerance, operands)
    return Verdict(json.loads(found), text)
