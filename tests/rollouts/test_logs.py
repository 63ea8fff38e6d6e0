"""Logs as people have them, read as the model server reads a request."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from log_files import (
    ANSWER,
    ANTHROPIC_TOOL,
    ASKED,
    BEGIN,
    FLAT_TOOL,
    FORMS,
    OPENAI_TOOL,
    REST,
    SAYS,
    SYSTEM,
    anthropic_logs,
    chat_logs,
    chat_response,
    values_within,
)
from ludus.chat.api_fields import parse_tools
from ludus.chat.api_requests import read_chat
from ludus.core import ConfigError
from ludus.rollouts import load_tasks
from ludus.rollouts.tasksets import read_rows
from ludus.training import read_conversations

EXPECTED = read_chat({"messages": [*BEGIN, *REST, SAYS], "tools": [OPENAI_TOOL]})


def written(path: Path, values: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in values))
    return path


def rows_of(source: Path) -> list[Any]:
    return [row for _, row in read_rows(str(source))]


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_log_is_the_same_conversation(form: str, ending: str, tmp_path: Path) -> None:
    """Both requests are logged, and the second has the whole conversation."""
    folder = written(tmp_path / "logs" / f"all.{ending}", FORMS[form]()).parent
    (row,) = rows_of(folder)
    assert tuple(row["messages"]) == EXPECTED.messages
    assert row["answer"] == ANSWER
    if form != "events":  # which have no place for tools
        assert parse_tools(row["tools"]) == EXPECTED.tools
    assert rows_of(folder / f"all.{ending}") == [row], "a file is read like a folder"


def test_files_of_one_conversation_each(tmp_path: Path) -> None:
    files = {
        "a": {"messages": BEGIN + REST + [{"role": "assistant", "content": ANSWER}]},
        "b": chat_logs()[1],
    }
    files |= {
        "c": [*BEGIN[1:], {"role": "assistant", "content": "yes"}],
        "d": {"prompt": "1+1?", "completion": "2"},
    }
    for name, value in files.items():
        written(tmp_path / name / f"{name}.json", [value])
    found = {Path(place).stem: row for place, row in read_rows(str(tmp_path))}
    assert len(found) == 4 and tuple(found["b"]["messages"]) == EXPECTED.messages
    assert found["d"] == files["d"] and found["c"]["messages"] == files["c"]


@pytest.mark.parametrize("tools", [[OPENAI_TOOL], [ANTHROPIC_TOOL], [FLAT_TOOL], json.dumps([OPENAI_TOOL]),
                                   [json.dumps(OPENAI_TOOL)], [OPENAI_TOOL["function"]]])  # fmt: skip
def test_tools_are_read_in_every_form(tools: Any) -> None:
    assert parse_tools(tools) == EXPECTED.tools


def test_what_cannot_be_read_is_named_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = chat_logs()
    broken = {
        "cut": {**second, "response": chat_response(SAYS, "length")},
        "empty": {**second, "response": chat_response({"role": "assistant", "content": " "})},
        "failed": {**second, "response": {"error": {"message": "rate limit"}}},
        "odd": {"question": "?", "answer": "!"},
        "silent": {"context": {}, "attributes": {"gen_ai.operation.name": "chat"}},
    }
    for name, value in broken.items():
        written(tmp_path / f"{name}.jsonl", [value])
    written(tmp_path / "good.jsonl", [first, second]).write_text(
        "\n".join(json.dumps(one) for one in [first, second]) + '\n{"request": {"mess'
    )
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "latin.json").write_bytes(b'{"messages": "\xe9"}')
    with caplog.at_level(logging.INFO):
        (row,) = rows_of(tmp_path)
    assert row["answer"] == ANSWER
    said = caplog.text
    assert "7 logs cannot be read" in said and "and 2 more" in said
    assert "1 conversations in 7 file(s); 1 files .txt" in said
    assert "1 logs whose conversation another goes on with" in said
    for place, why in [("cut.jsonl, line 1", "cut off"), ("empty.jsonl", "says nothing"),
                       ("failed.jsonl", "rate limit"), ("latin.json", "UTF-8"),
                       ("good.jsonl, line 3", "not JSON")]:  # fmt: skip
        assert any(place in line and why in line for line in said.splitlines()), (place, said)


def test_an_entry_that_no_row_may_be_does_not_refuse_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too long, no list of messages, a message of no role: left out and named, for tasks and demonstrations."""
    monkeypatch.setattr("ludus.rollouts.task_files.MOST_CHARACTERS", 2_000)
    _, good = chat_logs()
    long, no_list = copy.deepcopy(good), copy.deepcopy(good)
    long["request"]["messages"][-1]["content"] = "x" * 2_000
    no_list["request"]["messages"] = "not a list"
    user, said = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
    entries = {
        "call_long": (long, "'messages' has 2,"),
        "call_no_list": (no_list, "the assistant speaks first"),
        "row_long": ({"messages": [{**user, "content": "x" * 2_001}, said]}, "may have 2,000"),
        "row_no_list": ({"messages": "not a list"}, "not 'not a list'"),
        "row_role": ({"messages": [user, {**said, "role": "bot"}]}, "not 'bot'"),
        "row_first": ({"messages": [said, user]}, "the assistant speaks first"),
        "row_empty": ({"messages": []}, "no messages"),
    }
    for name, (entry, why) in entries.items():
        written(tmp_path / name / "good.jsonl", [good])
        written(tmp_path / name / "bad.jsonl", [entry])
        [conversation] = read_conversations(tmp_path / name)
        assert conversation[-1].content == ANSWER
        assert len(load_tasks(str(tmp_path / name))) == 1
        told = next(line for line in caplog.text.splitlines() if f"{name}/bad.jsonl, line 1: " in line)
        assert why in told and f"{name}: 1 logs cannot be read" in caplog.text


def test_one_file_may_be_one_conversation_and_else_says_what_it_is(tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    one.write_text(
        '{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}'
    )
    [conversation] = read_conversations(one)
    assert [message.content for message in conversation] == ["Hi.", "Hello."]
    for text, kind in [('{"a": 1}', "an object"), ("null", "the value null"), ("3", "the value 3")]:
        one.write_text(text)
        with pytest.raises(ConfigError, match=rf"one\.json holds {kind}, not a list of rows"):
            read_conversations(one)


def test_thoughts_and_hosted_tools_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, second = anthropic_logs()
    second["request"]["tools"].append({"type": "web_search_20250305", "name": "web_search"})
    with caplog.at_level(logging.INFO):
        (row,) = rows_of(written(tmp_path / "one.jsonl", [second]))
    assert parse_tools(row["tools"]) == EXPECTED.tools
    assert "1 replies whose thoughts are left out" in caplog.text


def test_other_conversations_and_other_samples_are_kept(tmp_path: Path) -> None:
    first, second = chat_logs()
    other = copy.deepcopy(second)
    other["response"]["choices"][0]["message"]["content"] = "Done."
    without = {**second, "request": {**second["request"], "tools": []}}
    found = rows_of(written(tmp_path / "logs.jsonl", [second, first, other, second, without]))
    assert [row["answer"] for row in found] == [ANSWER, "Done.", ANSWER]
    assert [len(row["tools"]) for row in found] == [1, 1, 0]


def test_tasks_are_what_was_asked(tmp_path: Path) -> None:
    """Each opening once, with the system prompt; the answer is a target where the columns say so."""
    _, second = chat_logs()
    other = copy.deepcopy(second)
    other["request"]["messages"] = [{"role": "user", "content": "Locked out."}]
    other["target"] = "access"
    folder = written(tmp_path / "logs" / "all.jsonl", [*chat_logs(), second, other]).parent
    one, two = load_tasks(str(folder))
    assert [(m.role, m.content) for m in one.messages] == [("system", SYSTEM), ("user", ASKED)]
    assert (one.target, two.target) == (None, "access")
    assert one.metadata == {"answer": ANSWER}
    assert load_tasks(str(folder / "all.jsonl"), {"target": "answer"})[0].target == ANSWER
    talk = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWER}]
    (task,) = load_tasks(str(written(tmp_path / "talks" / "a.json", [{"conversations": talk}]).parent))
    assert [(m.role, m.content) for m in task.messages] == [("user", ASKED)] and not task.metadata


@pytest.mark.parametrize(("files", "told"), [
    ({}, "holds no .json or .jsonl files"),
    ({"a.csv": "x"}, "holds no .json or .jsonl files"),
    ({"a.json": "[]"}, "no conversations that can be read"),
    ({"a.jsonl": '{"a": 1}'}, "a.jsonl, line 1: it is in no form of logs"),
    ({"a.json": "[" * 100_000}, "nested too deeply"),
    ({"a.json": '{"messages": ' + '{"a": ' * 300 + "1" + "}" * 301}, "nested"),
])  # fmt: skip
def test_a_folder_without_logs_is_refused(files: dict[str, str], told: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        rows_of(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_damaged_logs_are_a_sentence(form: str, tmp_path: Path) -> None:
    """Any value of a log replaced by another is read, or named."""
    random = Random(form)
    odd = [None, 0, True, "", "x", "{", [], {}, [None], [[]], {"a": 1}, ["x"], [{}], {"type": []}, 1e9]
    places = len(list(values_within(FORMS[form]())))
    for number in range(places):
        damaged = copy.deepcopy(FORMS[form]())
        table, key = list(values_within(damaged))[number]
        table[key] = copy.deepcopy(random.choice(odd))
        source = written(tmp_path / f"{number}.jsonl", damaged)
        try:
            found = rows_of(source)
        except ConfigError as error:
            assert str(source) in str(error)
        else:
            assert found
