"""What the pages on PyTorch and on flash-linear-attention show runs as it stands there."""

import pathlib
import re

import pytest

pytest.importorskip("torch")

from tercet import fla  # noqa: E402

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["torch.md", "fla.md"])
def test_blocks_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_the_table_has_every_function():
    table = [line for line in (DOCS / "fla.md").read_text().splitlines() if line.startswith("| ")]
    assert sorted(re.findall(r"`(\w+)`", "\n".join(table))) == sorted(fla.__all__)
