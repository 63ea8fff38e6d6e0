"""`ludus check recipe` compares the prompts of demonstrations with that of an episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from log_files import ASKED, OPENAI_TOOL, SYSTEM
from ludus.cli.check.recipe import recipe_findings

AGENT = """
import json, urllib.request

def play(task, base_url, key):
    asked = [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": task.messages[-1].content}]
    body = json.dumps({"model": "policy", "messages": asked, "tools": [TOOL]}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, head)).read()
""".replace("SYSTEM", SYSTEM).replace("TOOL", repr(OPENAI_TOOL))
RECIPE = """
rewards = ["exact_match"]
[model.scratch]
width = 32
[tasks]
train = "tasks.jsonl"
[agent]
loop = "agent.py:play"
[warm_start]
demonstrations = "logs"
steps = 1
"""
USER, ANSWER = {"role": "user", "content": ASKED}, {"role": "assistant", "content": "billing"}
TOLD = {"role": "system", "content": SYSTEM}
OTHER = {**OPENAI_TOOL, "function": {**OPENAI_TOOL["function"], "name": "route"}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "equal": (
        {"messages": [TOLD, USER, ANSWER], "tools": [OPENAI_TOOL]},
        "have the prompt of an episode",
    ),
    "no tools": (
        {"messages": [TOLD, USER, ANSWER]},
        "2 demonstrations have no tools, which episodes have:",
    ),
    "other tools": (
        {"messages": [TOLD, USER, ANSWER], "tools": [OTHER]},
        "2 demonstrations have other tools than episodes (route):",
    ),
    "no system": (
        {"messages": [USER, ANSWER], "tools": [OPENAI_TOOL]},
        "2 demonstrations have no system prompt, which episodes have:",
    ),
    "both": (
        {"messages": [{**TOLD, "content": "You sort."}, USER, ANSWER], "tools": []},
        "another system prompt than episodes and no tools, which episodes have:",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_prompts_that_part_are_shown_with_the_cause(case: str, tmp_path: Path) -> None:
    row, told = CASES[case]
    (tmp_path / "logs").mkdir()
    for number in range(2):
        (tmp_path / "logs" / f"{number}.json").write_text(json.dumps(row))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Locked out.", "target": "access"}\n')
    (tmp_path / "recipe.toml").write_text(RECIPE)
    found = recipe_findings(tmp_path / "recipe.toml", [])
    [(severity, text)] = [one for one in found if "demonstrations have" in one[1]]
    assert told in text and severity == ("info" if case == "equal" else "warning")
    if case == "no tools":  # what each side goes on with, after what both have
        assert f"after '<|im_start|>system\\n{SYSTEM}':" in text
        assert "demonstration: '<|im_end|>" in text and "episode:       '\\n\\n# Tools" in text
        assert '"assign"' not in text.partition("episode:")[0]
