"""The examples of docs/use/offline.md run in order without changes."""

from __future__ import annotations

import re
from pathlib import Path

from baton_engine.random_checkpoint import create_checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "use" / "offline.md"


def test_all_examples_run(tmp_path: Path) -> None:
    model = create_checkpoint(
        tmp_path / "tiny",
        "qwen3",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        vocab_size=512,
    )
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 9
    names = {"MODEL": str(model)}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, example {number}", "exec"), names)
