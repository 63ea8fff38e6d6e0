"""Logs as demonstrations: their prompts are, token by token, those of the program that was logged."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import ludus
from log_files import ANTHROPIC_TOOL, ASKED, FLAT_TOOL, OPENAI_TOOL, SYSTEM
from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, ConfigError, Message, Task
from ludus.core.messages import ToolSpec
from ludus.engine import FakeEngine
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Rollout
from ludus.serve.model import ProgramAgent
from ludus.tools import as_toolset
from ludus.training import read_conversations, read_labelled, read_pairs, trajectory_of
from ludus.training.data.conversations import parse_conversations

TOKENIZER = ByteTokenizer()
RENDERER = Renderer(TOKENIZER, load_format("hermes"))
FUNCTION = OPENAI_TOOL["function"]
SPEC = ToolSpec(FUNCTION["name"], FUNCTION["description"], FUNCTION["parameters"])
REPLIES = [
    '<tool_call>\n{"name": "assign", "arguments": {"to": "billing"}}\n</tool_call>',
    "Sent to billing.",
]


def written(path: Path, values: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in values))
    return path


class LoggedClient:
    """A client of a model API that logs its requests and responses."""

    def __init__(self, base_url: str, key: str, log: Path) -> None:
        self.base_url, self.key, self.log = base_url, key, log

    def ask(self, path: str, **request: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        body = json.dumps({"model": "policy", **request}).encode()
        response: dict[str, Any] = json.load(
            urllib.request.urlopen(urllib.request.Request(f"{self.base_url}/{path}", body, headers))
        )
        with self.log.open("a") as file:
            file.write(json.dumps({"request": request, "response": response}) + "\n")
        return response


def by_chat(client: LoggedClient) -> None:
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    for _ in REPLIES:
        answer = client.ask("chat/completions", messages=said, tools=[OPENAI_TOOL])
        message = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": "ok"}
            for c in message.get("tool_calls", ())
        ]
        said = [*said, message, *results]


def by_responses(client: LoggedClient) -> None:
    items: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in REPLIES:
        output = client.ask("responses", input=items, instructions=SYSTEM, tools=[FLAT_TOOL])["output"]
        calls = [one["call_id"] for one in output if one["type"] == "function_call"]
        items = [*items, *output]
        items += [{"type": "function_call_output", "call_id": id, "output": "ok"} for id in calls]


def by_messages(client: LoggedClient) -> None:
    said: list[Any] = [{"role": "user", "content": ASKED}]
    for _ in REPLIES:
        answer = client.ask(
            "messages", messages=said, system=SYSTEM, tools=[ANTHROPIC_TOOL], max_tokens=100
        )
        calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "ok"} for id in calls]
        said = [
            *said,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": results},
        ]


@pytest.mark.parametrize("talk", [by_chat, by_responses, by_messages])
async def test_logs_of_a_program_have_the_tokens_of_its_episode(
    talk: Callable[[LoggedClient], None], tmp_path: Path
) -> None:
    def play(task: Task, base_url: str, key: str) -> None:
        talk(LoggedClient(base_url, key, tmp_path / "calls.jsonl"))

    rollout = Rollout(
        engine=FakeEngine(REPLIES, TOKENIZER),
        renderer=RENDERER,
        scorer=Scorer([]),
        tools=as_toolset([]),
        agent=(agent := ProgramAgent(play)),
        budgets=Budgets(),
    )
    try:
        played = await rollout.play(Task.of("?", id="0"), attempt=0, seed=0)
    finally:
        await agent.close()
    assert played.failure is None and played.turns == 2
    assert len((tmp_path / "calls.jsonl").read_text().splitlines()) == 2
    (shown,) = read_conversations(tmp_path)
    again = trajectory_of(shown, RENDERER, ())
    assert [list(one.tokens) for one in again.sequences] == [
        list(one.tokens) for one in played.sequences
    ]
    assert again.action_mask == played.action_mask


ROW = {
    "messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "billing"}],
    "prompt": [{"role": "user", "content": ASKED}],
}
PAIR = {
    "prompt": ROW["prompt"],
    "chosen": ROW["messages"][1:],
    "rejected": [{"role": "assistant", "content": "no"}],
}
READERS: dict[str, tuple[Callable[[Path], Any], Mapping[str, Any]]] = {
    "conversations": (lambda path: read_conversations(path)[0], {"messages": ROW["messages"]}),
    "code": (
        lambda path: parse_conversations([json.loads(path.read_text())])[0],
        {"messages": ROW["messages"]},
    ),
    "completion": (
        lambda path: read_conversations(path)[0],
        {"prompt": ROW["prompt"], "completion": ROW["messages"][1:]},
    ),
    "chosen": (lambda path: read_pairs(path)[0][0], PAIR),
    "rejected": (lambda path: read_pairs(path)[0][1], PAIR),
    "label": (lambda path: read_labelled(path)[0][0], {"messages": ROW["messages"], "label": True}),
}


FIELDS = [{"tools": [OPENAI_TOOL]}, {"tools": [ANTHROPIC_TOOL]}, {"tools": json.dumps([OPENAI_TOOL])},
          {"functions": [FUNCTION]}]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("reader", READERS)
def test_the_tools_of_a_row_are_in_its_prompt(
    reader: str, field: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever the run's own are; a row without tools has the run's."""
    read, row = READERS[reader]
    asked = [Message("user", ASKED)]
    others = [ToolSpec("other", "Another tool.", SPEC.parameters)]
    with_tools = read(written(tmp_path / "rows.jsonl", [{**row, **field}]))
    without = read(written(tmp_path / "rows.jsonl", [row]))
    none = read(written(tmp_path / "rows.jsonl", [{**row, "tools": []}]))
    for shown, tools in [(with_tools, [SPEC]), (without, others), (none, [])]:
        (sequence,) = trajectory_of(shown, RENDERER, others).sequences
        assert sequence.segments[0].tokens == RENDERER.prompt(asked, tools)


@pytest.mark.parametrize(("tools", "why"), [
    ("[{", "cannot be read"),
    ({"name": "a"}, "must be a list of tools"),
    ([3], "a tool is an object"),
    ([{"type": "function", "function": {"description": "?"}}], "needs a name"),
    ([OPENAI_TOOL, OPENAI_TOOL], "two tools have the same name"),
    ([{"type": "web_search"}], "only functions can"),
    ([{**FUNCTION, "parameters": "x"}], "a JSON Schema"),
    ([{"type": ["function"], "name": "a"}], "must be a text"),
])  # fmt: skip
@pytest.mark.parametrize("reader", READERS)
def test_tools_that_cannot_be_used_are_refused(
    reader: str, tools: Any, why: str, tmp_path: Path
) -> None:
    read, row = READERS[reader]
    place = "demonstration 1" if reader == "code" else "rows.jsonl, line 1"
    with pytest.raises(ConfigError, match=f"{place}.*{why}"):
        read(written(tmp_path / "rows.jsonl", [{**row, "tools": tools}]))


TOOLS = ("refund", "reset", "reboot", "resend")


def tool_called(name: str) -> dict[str, Any]:
    about = {
        "name": name,
        "description": "Solves it.",
        "parameters": {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": about}


def use_what_is_offered(task: Task, base_url: str, key: str) -> float:
    """A program whose request alone says which tool there is."""
    client = LoggedClient(base_url, key, Path(task.metadata["log"]))
    asked = [{"role": "user", "content": task.messages[-1].content}]
    reply = client.ask("chat/completions", messages=asked, tools=[tool_called(task.target)])
    calls = reply["choices"][0]["message"].get("tool_calls") or []
    return float([call["function"]["name"] for call in calls] == [task.target])


def test_a_folder_of_logs_warm_starts_a_program(tmp_path: Path) -> None:
    """Its program then succeeds; after the same logs without their tools, it cannot know what there is."""
    asked = [f"Ticket {number}" for number in range(24)]
    success = {}
    for field in ("tools", "dropped"):
        folder = tmp_path / field
        folder.mkdir()
        for number, text in enumerate(asked):
            name = TOOLS[number % len(TOOLS)]
            call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
            request = {"messages": [{"role": "user", "content": text}], field: [tool_called(name)]}
            reply = {"role": "assistant", "content": None, "tool_calls": [call]}
            choices = [{"message": reply, "finish_reason": "tool_calls"}]
            (folder / f"{number}.json").write_text(
                json.dumps({"request": request, "response": {"choices": choices}})
            )
        log = str(tmp_path / "calls.jsonl")
        result = ludus.train(
            model={"scratch": {"layers": 1, "width": 64}},
            tasks=str(folder),
            held_out=[
                Task.of(f"Ticket {number}", TOOLS[number % 4], log=log) for number in range(30, 38)
            ],
            agent=use_what_is_offered,
            demonstrations=str(folder),
            stage=[{"kind": "sft", "steps": 30, "batch": 12, "optimizer": {"learning_rate": 1e-2}}],
            budgets={"max_turns": 1, "max_turn_tokens": 24},
            evaluation={"attempts": 2},
            run={"folder": str(tmp_path / f"run_{field}")},
            progress=False,
        )
        success[field] = result.metrics[-1]["eval/success"]
    assert success["tools"] >= 0.9 and success["dropped"] <= 0.5, success
