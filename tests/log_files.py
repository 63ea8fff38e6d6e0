"""One conversation of two requests as each kind of log has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

SYSTEM, ASKED, RESULT, ANSWER = (
    "You route tickets.",
    "Charged twice.",
    "billing is open",
    "Sent to billing.",
)
SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
ABOUT = {"name": "assign", "description": "Assign the ticket."}
OPENAI_TOOL = {"type": "function", "function": {**ABOUT, "parameters": SCHEMA, "strict": True}}
FLAT_TOOL = {"type": "function", **ABOUT, "parameters": SCHEMA}
ANTHROPIC_TOOL = {**ABOUT, "input_schema": SCHEMA}
ARGUMENTS = {"to": "billing"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "assign", "arguments": json.dumps(ARGUMENTS)},
}

BEGIN = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
REST = [CALLS, {"role": "tool", "tool_call_id": "c1", "content": RESULT}]
SAYS = {"role": "assistant", "content": ANSWER, "refusal": None, "annotations": []}


def chat_response(message: Mapping[str, Any], finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": dict(message), "finish_reason": finish, "logprobs": None}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "gpt-4o", "choices": [choice]}


def chat_logs() -> list[Any]:
    request = {"model": "gpt-4o", "temperature": 0.2, "tools": [OPENAI_TOOL]}
    first = {"request": {**request, "messages": BEGIN}, "response": chat_response(CALLS, "tool_calls")}
    second = {"request": {**request, "messages": [*BEGIN, *REST]}, "response": chat_response(SAYS)}
    return [first, second]


def flat_chat_logs() -> list[Any]:
    """Bodies in one table; the response as text, and older clients' `functions`."""
    ends = {"messages": [*BEGIN, *REST], "functions": [{**ABOUT, "parameters": SCHEMA}]}
    first, _ = chat_logs()
    return [
        {**first["request"], "response": json.dumps(first["response"])},
        {**ends, **chat_response(SAYS)},
    ]


def responses_logs() -> list[Any]:
    request = {"model": "gpt-4o", "instructions": SYSTEM, "tools": [FLAT_TOOL]}
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "assign", "status": "completed",
            "arguments": json.dumps(ARGUMENTS)}  # fmt: skip
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    said = [{"type": "output_text", "text": ANSWER, "annotations": []}]
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": said,
    }
    result = {"type": "function_call_output", "call_id": "c1", "output": RESULT}
    asked = [{"role": "user", "content": ASKED}]

    def response(output: list[Any]) -> dict[str, Any]:
        return {"object": "response", "status": "completed", "error": None, "output": output}

    return [
        {"request": {**request, "input": ASKED}, "response": response([thought, call])},
        {
            "request": {**request, "input": [*asked, thought, call, result]},
            "response": response([message]),
        },
    ]


def anthropic_logs() -> list[Any]:
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    request = {"model": "claude", "max_tokens": 1024, "tools": [ANTHROPIC_TOOL], "system": system}
    call = {"type": "tool_use", "id": "c1", "name": "assign", "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": RESULT}]}
    asked = [{"role": "user", "content": ASKED}]
    more = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    def response(block: Any, reason: str) -> dict[str, Any]:
        thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
        about = {"id": "msg_1", "type": "message", "role": "assistant", "stop_reason": reason}
        return {**about, "content": [thought, block], "usage": {"input_tokens": 9, "output_tokens": 9}}

    return [
        {"request": {**request, "messages": asked}, "response": response(call, "tool_use")},
        {
            "request": {**request, "messages": [*asked, *more]},
            "response": response({"type": "text", "text": ANSWER}, "end_turn"),
        },
    ]


def langsmith_logs() -> list[Any]:
    """A trace: the runs of the model below that of the graph, messages in LangChain's three forms."""

    def made(kind: str, **fields: Any) -> dict[str, Any]:
        names = ["langchain", "schema", "messages", kind]
        return {"lc": 1, "type": "constructor", "id": names, "kwargs": fields}

    calls = [{"name": "assign", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}]
    begin = [made("SystemMessage", content=SYSTEM, type="system"), made("HumanMessage", content=ASKED)]
    called = {"content": "", "type": "ai", "tool_calls": calls, "invalid_tool_calls": [],
              "additional_kwargs": {"tool_calls": [CALL]}}  # fmt: skip
    rest = [
        {"type": "ai", "data": {**called, "id": "run-1"}},
        {"type": "tool", "content": RESULT, "tool_call_id": "c1", "name": "assign", "status": "success"},
    ]
    extra = {"invocation_params": {"model": "gpt-4o", "tools": [OPENAI_TOOL]}, "metadata": {}}

    def run(given: list[Any], said: Any, finish: str) -> dict[str, Any]:
        made = {"text": "", "generation_info": {"finish_reason": finish}, "message": said}
        outputs = {"generations": [[made]], "llm_output": None}
        about = {"id": "r", "trace_id": "t", "run_type": "llm", "name": "ChatOpenAI", "error": None}
        return {**about, "inputs": {"messages": [given]}, "outputs": outputs, "extra": extra}

    says = made("AIMessage", content=[{"type": "text", "text": ANSWER}], tool_calls=[])
    human = {"type": "human", "content": ASKED, "id": "h"}
    graph = {"id": "g", "trace_id": "t", "run_type": "chain", "name": "LangGraph", "error": None,
             "inputs": {"messages": [human]}, "outputs": {"messages": [human, *rest, says]},
             "child_runs": [run(begin, made("AIMessage", **called), "tool_calls"),
                            {"id": "x", "trace_id": "t", "run_type": "tool", "inputs": {"input": "{}"},
                             "outputs": {"output": RESULT}},
                            run([*begin, *rest], says, "stop")]}  # fmt: skip
    return [graph]


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def otel_attributes() -> list[dict[str, Any]]:
    """The attributes of two spans, as the conventions of 2025 have them."""
    asked = {"role": "user", "parts": [part("text", content=ASKED)]}
    call = {
        "role": "assistant",
        "parts": [part("tool_call", id="c1", name="assign", arguments=ARGUMENTS)],
    }
    result = {"role": "tool", "parts": [part("tool_call_response", id="c1", response=RESULT)]}
    says = {"role": "assistant", "parts": [part("text", content=ANSWER)]}

    def span(given: list[Any], said: Any, finish: str) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.system_instructions": json.dumps([part("text", content=SYSTEM)]),
            "gen_ai.input.messages": json.dumps(given),
            "gen_ai.output.messages": json.dumps([{**said, "finish_reason": finish}]),
            "gen_ai.tool.definitions": json.dumps([FLAT_TOOL]),
        }

    return [span([asked], call, "tool_call"), span([asked, call, result], says, "stop")]


def otel_logs() -> list[Any]:
    """Spans as the SDK's console exporter writes them, and one of a tool."""
    others = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "assign"}
    return [
        {
            "name": "chat gpt-4o",
            "context": {"trace_id": "0x1", "span_id": str(n)},
            "events": [],
            "attributes": one,
        }
        for n, one in enumerate([*otel_attributes(), others])
    ]


def _any(value: Any) -> dict[str, Any]:
    return {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}


def otlp_logs() -> list[Any]:
    """Spans as OTLP's JSON has them."""
    spans = [
        {"traceId": "1", "spanId": str(n), "name": "chat",
         "attributes": [{"key": key, "value": _any(value)} for key, value in one.items()]}
        for n, one in enumerate(otel_attributes())
    ]  # fmt: skip
    return [{"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans}]}]}]


def event_logs() -> list[Any]:
    """Log records, one for each message: the conventions before."""
    call = {"kvlistValue": {"values": [
        {"key": "id", "value": _any("c1")}, {"key": "type", "value": _any("function")},
        {"key": "function", "value": {"kvlistValue": {"values": [
            {"key": "name", "value": _any("assign")},
            {"key": "arguments", "value": _any(json.dumps(ARGUMENTS))}]}}}]}}  # fmt: skip
    calls = {"key": "tool_calls", "value": {"arrayValue": {"values": [call]}}}

    def record(name: str, *pairs: Any, **texts: str) -> dict[str, Any]:
        values = [*({"key": key, "value": _any(value)} for key, value in texts.items()), *pairs]
        ids = {"traceId": "1", "spanId": "2", "eventName": name, "attributes": []}
        return {**ids, "body": {"kvlistValue": {"values": values}}}

    said = {
        "key": "message",
        "value": {"kvlistValue": {"values": [{"key": "content", "value": _any(ANSWER)}]}},
    }
    records = [
        record("gen_ai.system.message", content=SYSTEM),
        record("gen_ai.user.message", content=ASKED),
        record("gen_ai.assistant.message", calls),
        record("gen_ai.tool.message", content=RESULT, id="c1"),
        record("gen_ai.choice", said, finish_reason="stop"),
    ]
    return [{"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}]


def numbered_logs() -> list[Any]:
    """A span as OpenLLMetry writes it: an attribute for each field of each message."""
    attributes = {
        "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": SYSTEM,
        "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": ASKED,
        "gen_ai.prompt.2.role": "assistant", "gen_ai.prompt.2.tool_calls.0.id": "c1",
        "gen_ai.prompt.2.tool_calls.0.name": "assign",
        "gen_ai.prompt.2.tool_calls.0.arguments": json.dumps(ARGUMENTS),
        "gen_ai.prompt.3.role": "tool", "gen_ai.prompt.3.tool_call_id": "c1", "gen_ai.prompt.3.content": RESULT,
        "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": ANSWER,
        "gen_ai.completion.0.finish_reason": "stop",
        "llm.request.functions.0.name": "assign", "llm.request.functions.0.description": ABOUT["description"],
        "llm.request.functions.0.parameters": json.dumps(SCHEMA),
    }  # fmt: skip
    return [{"name": "openai.chat", "context": {"trace_id": "1"}, "attributes": attributes}]


FORMS = {
    "chat": chat_logs, "flat": flat_chat_logs, "responses": responses_logs, "anthropic": anthropic_logs,
    "langsmith": langsmith_logs, "otel": otel_logs, "otlp": otlp_logs, "events": event_logs,
    "numbered": numbered_logs,
}  # fmt: skip


def values_within(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every table or list in a value, with each of its keys."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from values_within(inner)
