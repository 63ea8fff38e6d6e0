"""`ludus check` on logs: what was read, and whether their prompts are those of episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from log_files import ASKED, OPENAI_TOOL, SYSTEM, chat_logs
from ludus.chat.api_fields import parse_tools
from ludus.cli.check.recipe import recipe_findings
from ludus.cli.main import app
from ludus.training import read_conversations
from ludus.training.data.conversations import tools_of

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


def test_tools_of_the_recipe_in_other_words_are_told_with_what_to_do(tmp_path: Path) -> None:
    """A row's own schema of a tool that the recipe has: other tokens than an episode's."""
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [USER, ANSWER], "tools": [OPENAI_TOOL]}) + "\n"
    )
    (tmp_path / "desk.py").write_text(
        "import ludus\n\n\n@ludus.tool\ndef assign(to: str) -> str:\n"
        '    """Send it to a team."""\n    return to\n'
    )
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Locked out.", "target": "access"}\n')
    own = RECIPE.replace('loop = "agent.py:play"', 'tools = ["desk.py:assign"]')
    (tmp_path / "recipe.toml").write_text(own.replace('"logs"', '"rows.jsonl"'))
    found = recipe_findings(tmp_path / "recipe.toml", [])
    [(severity, text)] = [one for one in found if "demonstrations have" in one[1]]
    assert (
        severity == "warning" and "have the tools of episodes (assign) in other words or schemas" in text
    )
    assert "(rows without the field tools get the recipe's as they are)" in text


def test_check_data_takes_a_folder_of_logs(tmp_path: Path) -> None:
    """It says what was read and what was not, and writes what is kept."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    logs.mkdir()
    for number, log in enumerate([*chat_logs(), {"event": "started"}]):
        (logs / f"{number}.json").write_text(json.dumps(log))
    command = ["check", "data", str(logs), "min_turns=1", "--out", str(out)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "1 conversations in 3 file(s); 1 logs whose conversation another goes on with" in done.output
    assert (
        f"1 logs cannot be read, and are left out:\n  {logs / '2.json'}: it is in no form" in done.output
    )
    (kept,) = read_conversations(out / "examples.parquet")
    assert [message.role for message in kept] == ["system", "user", "assistant", "tool", "assistant"]
    assert tools_of(kept) == parse_tools([OPENAI_TOOL]), (
        "the prompts of what was kept are those of the logs"
    )
    missing = CliRunner().invoke(app, ["check", "data", str(tmp_path / "nothing")])
    assert missing.exit_code == 1 and "there is no file" in str(missing.exception)
