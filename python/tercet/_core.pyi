from typing import Any

def attend(
    inputs: tuple, options: tuple, return_state: bool, return_saved: bool, out: Any | None, final_state: Any | None, final_key_sum: Any | None
) -> Any: ...
def attend_delta(
    rule: str, tensors: tuple, return_state: bool, l2_norm: bool, own_l2_norm: Any | None, options: dict, named: frozenset
) -> tuple | None: ...
def only_computes(tensors: tuple) -> bool: ...
def gradient(
    inputs: tuple,
    options: tuple,
    grad_out: Any | None,
    grad_final_state: Any | None,
    grad_final_key_sum: Any | None,
    saved: Any | None,
    wanted: Any | None,
) -> list: ...
def verify(
    inputs: tuple,
    options: tuple,
    gradient: bool,
    seed: int,
    expected_out: Any | None,
    expected_final_state: Any | None,
    expected_final_key_sum: Any | None,
    tolerance: float,
    operands: str | None,
) -> tuple[str, str]: ...
def rules() -> list[tuple]: ...
def targets() -> list[str]: ...
def version() -> str: ...
def concurrency() -> int: ...
def command(arguments: list[str]) -> int: ...
