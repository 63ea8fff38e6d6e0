"""A tool set that is asked in JSON. Worker processes and Ray actors both hold one."""

from __future__ import annotations

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolCall, ToolContext
from ludus.core.registry import load_reference
from ludus.remote.channel import PING, Frame
from ludus.tools.hosting.host import FACTS, ask_tools, error_from_json, error_to_json, facts_of
from ludus.tools.wire import result_to_json, spec_to_json, task_from_json


class HostedTools:
    """The service of a worker (`remote/worker.py`).

    A long result travels as the body of its frame, so that it is neither quoted into JSON nor parsed out of it.
    """

    def __init__(self) -> None:
        self._contexts: dict[str, ToolContext] = {}

    async def answer(self, head: Json, body: bytes = b"") -> Frame:
        """`{"reply": ...}` or `{"error": ...}`; with `"text"`, the body is the content of the reply."""
        operation = head["operation"]
        try:
            if operation == PING:
                return {"reply": {}}, b""
            if operation == "start":
                return {"reply": await self._load(head["references"], head["loader"])}, b""
            reply, text = await self._perform(operation, head["body"])
        except Exception as error:  # noqa: BLE001 - raised again where the host is
            return {"error": error_to_json(error)}, b""
        if text is None:
            return {"reply": reply}, b""
        return {"reply": reply, "text": True}, text.encode("utf-8", "replace")

    async def _load(self, references: list[str | Json], loader: str) -> Json:
        """Build the tools; gives their facts."""
        try:
            self._tools = load_reference(loader)(references)
            return {"tools": FACTS.dump_python(await facts_of(self._tools))}
        except ConfigError:
            raise
        except Exception as error:
            message = f"the tools could not be loaded: {type(error).__name__}: {error}"
            raise ConfigError(message) from error

    async def _perform(self, operation: str, body: Json) -> tuple[Json, str | None]:
        if operation == "open":
            context = ToolContext(body["episode"], task_from_json(body["task"]))
            await self._tools.open(context)
            self._contexts[context.episode] = context
            return {}, None
        if operation == "close":
            closing = self._contexts.pop(body["episode"], None)
            if closing is not None:
                await self._tools.close(closing)
            return {}, None
        if operation == "ask" and body["episode"] is None:
            return await ask_tools(self._tools, body["what"], None, body["body"]), None
        context = self._contexts[body["episode"]]
        if operation == "ask":
            return await ask_tools(self._tools, body["what"], context, body["body"]), None
        if operation == "list":
            return {"tools": [spec_to_json(spec) for spec in await self._tools.list(context)]}, None
        call = body["call"]
        result = await self._tools.call(ToolCall(call["name"], call["arguments"], call["id"]), context)
        return result_to_json(result, content=False), result.content


def reply_of(head: Json, body: bytes = b"") -> Json:
    """The reply in the answer of a worker; the error in it is raised again."""
    if "error" in head:
        raise error_from_json(head["error"])
    reply: Json = head["reply"]
    return {**reply, "content": body.decode()} if head.get("text") else reply
