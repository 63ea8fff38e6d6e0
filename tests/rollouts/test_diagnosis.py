"""Failure modes of episodes that were really played, and what a diagnosis says of many."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_parts import called, one, play_one, rollout

from ludus.core.trajectory import Trajectory
from ludus.observe import diagnose
from ludus.observe.diagnosis import ADVICE, FailureMode, failure_mode
from ludus.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ValueError("a must not be negative")
    return a + b


def zero() -> float:
    return 0.0


GOOD = called("add", a=1, b=2)
TYPO = '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>'
SCRIPTS: dict[str, tuple[list[str], dict[str, Any], FailureMode]] = {
    "a call that cannot be parsed": ([TYPO, "3"], {}, FailureMode.FORMAT),
    "a tool that does not exist": ([called("sum", a=1, b=2), "3"], {}, FailureMode.TOOL_CHOICE),
    "arguments of the wrong type": ([called("add", a="one", b=2), "3"], {}, FailureMode.ARGUMENTS),
    "arguments that the tool refuses": ([called("add", a=-1, b=2), "3"], {}, FailureMode.ARGUMENTS),
    "no end": ([GOOD] * 9, {"max_turns": 4}, FailureMode.EFFICIENCY),
    "cut within its turn": (["so " * 90], {"max_turn_tokens": 16}, FailureMode.EFFICIENCY),
    "a wrong answer": ([GOOD, "4"], {}, FailureMode.KNOWLEDGE),
    "a slip that was mended": ([TYPO, GOOD, GOOD, "4"], {}, FailureMode.KNOWLEDGE),
    "mostly slips": ([TYPO, TYPO, GOOD, "4"], {}, FailureMode.FORMAT),
}


async def played(script: list[str], budgets: dict[str, Any], rewards: Any = zero) -> Trajectory:
    return await play_one(rollout(script, tools=[add], rewards=[rewards], budgets=budgets))


@pytest.mark.parametrize("name", SCRIPTS)
async def test_each_way_to_fail_has_its_mode(name: str) -> None:
    script, budgets, mode = SCRIPTS[name]
    episode = await played(script, budgets)
    assert episode.is_trainable and failure_mode(episode) is mode


async def test_not_calling_is_a_choice_where_successes_call() -> None:
    idle = await played(["3"], {})
    assert diagnose([idle]).findings[0].mode is FailureMode.KNOWLEDGE
    callers = [await played([GOOD, "3"], {}, one) for _ in range(2)]
    found = diagnose([idle, *callers])
    assert [(one.mode, one.count) for one in found.findings] == [(FailureMode.TOOL_CHOICE, 1)]
    assert (found.scored, found.failed) == (3, 1)
    assert found.metrics["failure_mode/tool_choice"] == pytest.approx(1 / 3)
    assert sum(found.metrics.values()) == pytest.approx(1 / 3) and len(found.metrics) == 5


async def test_a_diagnosis_names_the_most_frequent_first_with_examples_and_advice() -> None:
    wrong = [await played([GOOD, "<b>|4\n`"], {}) for _ in range(4)]
    bad = [await played([TYPO, "3"], {}) for _ in range(2)]
    found = diagnose([*bad, *wrong])
    assert [one.mode for one in found.findings] == [FailureMode.KNOWLEDGE, FailureMode.FORMAT]
    assert len(found.findings[0].examples) == 3 and len(found.findings[1].examples) == 2
    assert "4" in found.findings[0].examples[0].excerpt
    text = found.markdown
    assert "6 of 6 scored episodes did not succeed" in text and ADVICE[FailureMode.FORMAT] in text
    assert "<b>" not in text, "what a model wrote is escaped"
    assert diagnose([]).markdown == "" and diagnose([]).metrics == {}


async def test_modes_and_successes_add_up() -> None:
    failed = [await played(script, budgets) for script, budgets, _ in SCRIPTS.values()]
    good = [await played(["3"], {}, one) for _ in range(3)]
    found = diagnose([*failed, *good])
    assert (found.scored, found.failed) == (len(SCRIPTS) + 3, len(SCRIPTS))
