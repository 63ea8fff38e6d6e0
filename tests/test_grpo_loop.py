"""`examples/grpo_loop.py`: the flat loop runs, is short, and learns."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest

LOOP = Path(__file__).parent.parent / "examples" / "grpo_loop.py"


@pytest.fixture
def loop() -> dict[str, Any]:
    return runpy.run_path(str(LOOP))


def test_it_fits_on_a_few_screens() -> None:
    assert len(LOOP.read_text().splitlines()) <= 250


@pytest.mark.slow
def test_it_runs(loop: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    success = asyncio.run(loop["main"](steps=1, warm_steps=1))
    assert 0 <= success <= 1
    assert "after GRPO" in capsys.readouterr().out


@pytest.mark.slow
def test_it_learns(loop: dict[str, Any]) -> None:
    assert asyncio.run(loop["main"]()) > 0.8
