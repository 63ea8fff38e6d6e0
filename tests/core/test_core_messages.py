"""Messages in the forms that files and servers of chats have them."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core import Message, Task

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_a_call_may_come_without_text_and_with_arguments_as_json(
    content: dict[str, Any], arguments: Any
) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    message = Message.parse({"role": "assistant", "tool_calls": [call], **content})
    assert message.content == ""
    assert [(one.name, one.arguments, one.id) for one in message.tool_calls] == [("add", {"a": 1}, "c1")]


@pytest.mark.parametrize(
    "arguments", [{}, {"arguments": None}, {"arguments": " "}, {"arguments": "null"}]
)
def test_a_call_may_come_without_arguments(arguments: dict[str, Any]) -> None:
    call = {"id": None, "function": {"name": "look", **arguments}}
    message = Message.parse({"role": "assistant", "content": [], "tool_calls": [call]})
    assert [(one.name, one.arguments, one.id) for one in message.tool_calls] == [("look", {}, "")]


def test_fields_that_clients_leave_empty_are_none() -> None:
    empty = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert Message.parse({"role": "assistant", "content": "5", **empty}) == Message("assistant", "5")


def test_the_cause_is_named() -> None:
    call = {"function": {"name": "add", "arguments": "{a"}}
    with pytest.raises(ValueError, match="the arguments of a call of 'add' are not JSON"):
        Message.parse({"role": "assistant", "tool_calls": [call]})


def test_a_text_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "1 plus "}, {"type": "text", "text": "2?"}]
    assert Message.parse({"role": "user", "content": parts}).content == "1 plus 2?"


@pytest.mark.parametrize(
    "raw",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
        {"role": "user", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": 5},
        {"role": "assistant", "content": "", "tool_calls": ["add"]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]},
        {"role": "assistant", "content": "", "refusal": "no"},
        {"role": "assistant", "content": "5", "weight": 0},  # as others say that it is not to be learned
        {"role": "user", "content": "5", "name": 3},
        {"role": "tool", "content": "5", "tool_call_id": 3},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
        },
        {"role": "nobody", "content": ""},
    ],
)
def test_what_is_no_message_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Message.parse(raw)


def test_metadata_may_be_given_as_a_table_too():
    task = Task.of("?", metadata={"a": 1}, b=2)
    assert (
        task.metadata
        == {"a": 1, "b": 2}
        == Task.parse({"prompt": "?", "metadata": {"a": 1}, "b": 2}).metadata
    )
    with pytest.raises(ValueError, match="'a' twice"):
        Task.of("?", metadata={"a": 1}, a=2)
    with pytest.raises(ValueError, match="table of fields"):
        Task.of("?", metadata="a")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": ["a", "b"]}, """a message is {"role": "user", "content": "..."}, not 'a'"""),
        (
            {"messages": {"role": "user", "content": "x"}},
            "a prompt is a text or a list of messages, not {",
        ),
        (
            {"messages": [{"role": "user", "content": [3]}]},
            "a list of parts of type text or image, not [3]",
        ),
        ({"prompt": "x", "envs": "safe"}, """such as {"safe": {}}, not 'safe'"""),
        ({"prompt": "x", "envs": {"safe": 3}}, """such as {"safe": {}}, not {'safe': 3}"""),
        ({"prompt": "x", "metadata": "a"}, "metadata is a table of fields, not 'a'"),
        ({"prompt": "x", "metadata": [1]}, "metadata is a table of fields, not [1]"),
        ({"prompt": "x", "system": 3}, "system message is text, not 3"),
        ({"prompt": "x", "level": 1, "metadata": {"level": 2}}, "the metadata 'level' twice"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_in_words_of_the_task(
    row: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Task.parse(row)
    assert expected in str(caught.value)
    assert "object has no attribute" not in str(caught.value)


def test_any_column_can_be_metadata() -> None:
    task = Task.parse(
        {"prompt": "x", "id": 4, "cls": "a", "metadata": {"prompt": "p", "id": 5, "target": 6}}
    )
    assert (task.id, task.target) == ("4", None)
    assert task.metadata == {"cls": "a", "prompt": "p", "id": 5, "target": 6}
