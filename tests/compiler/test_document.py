"""The committed page of ops is what the registry says now."""

from pathlib import Path

import tapeout.compiler
from tapeout.compiler.document import cost_text, page, tile_ops
from tapeout.dialects.define import REGISTRY, signature

PAGE = Path(tapeout.compiler.__file__).resolve().parent.parent / "docs" / "ops.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "docs/ops.md is old: python -m tapeout.compiler.document > docs/ops.md"


def test_every_op_is_there_with_a_cost() -> None:
    text = page()
    assert len(REGISTRY) > 35 and len(tile_ops()) >= 9
    for declaration in REGISTRY.values():
        assert f"### `{signature(declaration)}`\n\n{declaration.sentence}" in text
        assert cost_text(declaration).startswith("Cost:") and cost_text(declaration) in text


def test_costs_without_words_show_their_body() -> None:
    assert cost_text(REGISTRY["nn.embed"]) == "Cost:\n\n```python\nreturn row_gather_cost(operands[0], operands[1], results, sizes)\n```"
    assert cost_text(REGISTRY["mla.attend"]).startswith("Cost: 4*A*D operations a key")
