"""Fields of requests of model APIs: texts, images, calls and tools. What is wrong with one is an `ApiError`."""

from __future__ import annotations

import logging
import marshal
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.images import PARTS, ImageError, image_of_part
from ludus.core.lru import LruCache
from ludus.core.messages import IMAGE_MARK, Json, Media, Message, ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, whole_json

log = logging.getLogger(__name__)
_noted: set[str] = set()
"""Kinds of tools whose absence was logged."""

MOST_MESSAGES = 10_000
MOST_TOOLS = 1_000
MOST_TOOL_BYTES = 1_000_000
"""Names, descriptions and schemas of all tools together."""
_LONGEST = 8192
"""Bytes of a message that is remembered."""
_EMPTY = {"type": "object", "properties": {}}
_TEXTS = ("text", "input_text", "output_text", "refusal")


class ApiError(LudusError):
    """Why a request has no reply, with the HTTP status that says so."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be understood or served."""
    return ApiError(400, message, param=param, code=code)


def list_field(body: Mapping[str, Any], name: str, most: int = MOST_MESSAGES) -> list[Json]:
    value = body.get(name)
    found = [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise bad(f"'{name}' must be a list of objects", name)
    if len(found) > most:
        raise ApiError(413, f"'{name}' has {len(found):,} entries, and may have {most:,}", param=name)
    return found


def content_text(content: Any, where: str) -> str:
    """The text of a message that holds no images; parts are joined, None is no text."""
    text, media = read_content(content, where)
    if media:
        raise bad(f"{where} holds an image, which is for messages of users and results", where)
    return text


def read_content(content: Any, where: str) -> tuple[str, tuple[Media, ...]]:
    """A message's text, with a mark for each image, and its images."""
    if content is None or isinstance(content, str):
        return content or "", ()
    if not isinstance(content, list):
        raise bad(f"the content of {where} must be a text or a list of parts", where)
    if len(content) > MOST_MESSAGES:
        said = f"{where} has {len(content):,} parts, and may have {MOST_MESSAGES:,}"
        raise ApiError(413, said, param=where)
    texts: list[str] = []
    media: list[Media] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in PARTS:
            try:
                media.append(image_of_part(part))
            except ImageError as error:
                raise bad(f"{where}: {error}", where, "invalid_image") from None
            texts.append(IMAGE_MARK)
            continue
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise bad(f"{where} holds a part of type {kind!r}: only text and images can be read", where)
        texts.append(text)
    return "".join(texts), tuple(media)


_known: LruCache[tuple[Message, ...]] = LruCache(
    1 << 25, lambda messages: 1000 + 2 * sum(len(message.content) for message in messages)
)


class ReadOnce:
    """The messages that a message of an API was read as before: the same objects when it comes again.

    Clients send the whole conversation with every request: what is not new in it should cost next to nothing.
    """

    def __init__(self, api: str, raw: Json) -> None:
        self._key: bytes | None = None
        try:
            key = marshal.dumps((api, raw), 2)  # version 2 is the same for equal values: no references
        except ValueError:  # nested too deeply
            key = bytes(_LONGEST + 1)
        if len(key) <= _LONGEST:
            self._key = key
        self.messages = None if self._key is None else _known.find(self._key)

    def keep(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Remember what it was read as."""
        return messages if self._key is None else _known.get(self._key, lambda: messages)


def read_call(name: Any, arguments: Any, id: Any, where: str) -> ToolCall:
    """A call in a message; the arguments are an object, or its JSON."""
    if not isinstance(name, str) or not name:
        raise bad(f"{where}: a call needs the name of a tool", where)
    if isinstance(arguments, str):
        try:
            arguments = whole_json(arguments) if arguments.strip() else {}
        except BadJson as error:
            raise bad(f"{where}: the arguments of {name!r:.80} cannot be read: {error}", where) from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise bad(f"{where}: the arguments of {name!r} must be an object", where)
    return ToolCall(name, arguments, id if isinstance(id, str) else "")


def _read_tool(tool: Any, schema: str, where: str) -> ToolSpec:
    if not isinstance(tool, dict):
        raise bad(f"{where} has no 'function'", where)
    name, description = tool.get("name"), tool.get("description")
    parameters = tool.get(schema)
    if not isinstance(name, str) or not name:
        raise bad(f"{where} needs a name", where)
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise bad(f"{where}: description must be a text and {schema} a JSON Schema", where)
    return ToolSpec(name, description or "", parameters or dict(_EMPTY))


def read_tools(
    body: Json,
    kinds: Sequence[str | None],
    place: str,
    *,
    schema: str = "parameters",
    inner: str | None = None,
) -> tuple[tuple[ToolSpec, ...], tuple[str, ...]]:
    """The tools that a client offers, and the names of those that are left out.

    `schema` is the field with a tool's parameters, `inner` the one that holds the tool, if any does.
    Tools of other kinds than these are run by the API's own servers, or have a form that is not written out: a
    model that was not trained for them cannot call them. To be told to call one of them is an error.
    """
    tools: list[ToolSpec] = []
    left_out: list[str] = []
    for number, tool in enumerate(list_field(body, "tools", MOST_TOOLS)):
        if not isinstance(tool.get("type"), str | None):
            raise bad(f"the type of {place.format(number)} must be a text", place.format(number))
        if tool.get("type") in kinds:
            found = tool if inner is None else tool.get(inner)
            tools.append(_read_tool(found, schema, place.format(number)))
            continue
        kind, name = str(tool.get("type")), tool.get("name")
        left_out.append(kind if name in (None, kind) else f"{kind}:{name}")
        if kind not in _noted and len(_noted) < 100:
            _noted.add(kind)
            log.warning(
                "tools of type %.80r are left out of prompts: the model cannot call them, only functions",
                kind,
            )
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad("two tools have the same name", "tools")
    size = len(marshal.dumps([(tool.name, tool.description, tool.parameters) for tool in tools], 2))
    if size > MOST_TOOL_BYTES:
        said = f"'tools' has {size:,} bytes of names, descriptions and schemas, and may have"
        raise ApiError(413, f"{said} {MOST_TOOL_BYTES:,}", param="tools")
    _check_choice(body.get("tool_choice"), names, left_out)
    return tuple(tools), tuple(left_out)


def as_chat_tools(given: Any) -> list[Any]:
    """Tools of OpenAI's APIs (with `function` around them or not) or Anthropic's, or JSON of these."""
    found = _from_json(given)
    if not isinstance(found, list | tuple):
        raise bad(f"'tools' must be a list of tools, or its JSON, not {given!r:.80}", "tools")
    return [_as_chat_tool(_from_json(one)) for one in found]


def _from_json(given: Any) -> Any:
    try:
        return whole_json(given) if isinstance(given, str) else given
    except BadJson as error:
        raise bad(f"'tools' cannot be read: {error}", "tools") from None


def _as_chat_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        raise bad(f"a tool is an object with a name and a JSON Schema, not {tool!r:.80}", "tools")
    if isinstance(tool.get("function"), dict):
        return {**tool, "type": tool.get("type") or "function"}
    schema = next((one for one in ("input_schema", "parameters") if one in tool), None)
    if schema is None and tool.get("type") not in (None, "function"):
        return tool
    function = {name: tool.get(name) for name in ("name", "description")}
    return {"type": "function", "function": function | {"parameters": tool.get(schema or "parameters")}}


def parse_tools(given: Any) -> tuple[ToolSpec, ...]:
    """The tools of a row of data; one that cannot be called is refused."""
    tools, left_out = read_tools(
        {"tools": as_chat_tools(given)}, ("function",), "tools[{}]", inner="function"
    )
    if left_out:
        raise bad(
            f"a tool of type {left_out[0]!r:.80} cannot be called here, only functions can: leave it out",
            "tools",
        )
    return tools


def _check_choice(choice: Any, names: Sequence[str], left_out: Sequence[str]) -> None:
    """Refuse a choice that forces a tool which is left out."""
    if not left_out or choice is None:
        return
    told: Json = choice if isinstance(choice, dict) else {"type": choice}
    kind, inner = told.get("type"), told.get("function") or told.get("custom")
    name = inner.get("name") if isinstance(inner, dict) else told.get("name")
    kinds = [one.partition(":")[0] for one in left_out]
    is_out = kind in kinds if name is None else name not in names
    if is_out or (kind in ("any", "required") and not names):
        raise bad(
            f"'tool_choice' asks for {name or kind!r:.80}, which cannot be called here: only functions can",
            "tool_choice",
        )
