"""A server's answer to a call, as the model reads it: text, structured content, images, links to
resources.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import mcp_types as types

from ludus.core.failures import Fault
from ludus.core.messages import Json, Media, ToolResult
from ludus.tools.calling import OutputLimits, text_of
from ludus.tools.json_schema import argument_problems

_log = logging.getLogger(__name__)


def result_of_call(
    answer: types.CallToolResult, tool: str, limits: OutputLimits, returns: Json | None
) -> ToolResult:
    """The result of a tool call. What the server calls an error is the model's: it reads it."""
    text, media = _rendered(answer.content)
    structured = answer.structured_content
    if structured is not None and not text:
        text = text_of(structured)
    if not answer.is_error and returns is not None:
        _check_returns(tool, structured, returns)
    fault = Fault.TOOL_RAISED if answer.is_error else None
    content = text or ("the tool failed, and says no more" if answer.is_error else "done")
    return ToolResult(limits.apply(content), fault=fault, media=media)


def result_of_resource(answer: types.ReadResourceResult, limits: OutputLimits) -> ToolResult:
    """The content of a resource."""
    blocks = [types.EmbeddedResource(type="resource", resource=one) for one in answer.contents]
    text, media = _rendered(blocks)
    return ToolResult(limits.apply(text or "(empty)"), media=media)


def result_of_prompt(answer: types.GetPromptResult, limits: OutputLimits) -> ToolResult:
    """A prompt with its arguments filled in: who says what."""
    told: list[str] = []
    media: list[Media] = []
    for message in answer.messages:
        text, found = _rendered([message.content])
        told.append(f"{message.role}: {text}")
        media += found
    return ToolResult(limits.apply("\n\n".join(told) or "(empty)"), media=tuple(media))


def _rendered(blocks: Iterable[Any]) -> tuple[str, tuple[Media, ...]]:
    texts: list[str] = []
    media: list[Media] = []
    for block in blocks:
        text, found = _block(block)
        texts.append(text)
        media += [found] if found is not None else []
    return "\n".join(text for text in texts if text), tuple(media)


def _block(block: Any) -> tuple[str, Media | None]:
    if isinstance(block, types.TextContent):
        return block.text, None
    if isinstance(block, types.ImageContent | types.AudioContent):
        return _media(block.mime_type, block.data)
    if isinstance(block, types.ResourceLink):
        about = ", ".join(one for one in (block.mime_type, block.description) if one)
        return f"[resource {block.name}: {block.uri}{f' ({about})' if about else ''}]", None
    if isinstance(block, types.EmbeddedResource):
        inside = block.resource
        if isinstance(inside, types.TextResourceContents):
            return inside.text, None
        text, found = _media(inside.mime_type or "application/octet-stream", inside.blob)
        return f"{text} {inside.uri}", found
    return f"[{getattr(block, 'type', 'something')} that cannot be shown]", None


def _media(kind: str, data: str) -> tuple[str, Media | None]:
    """Something that is not text, as the project carries it: by its hash, with its bytes."""
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return f"[{kind[:80]} that is no base64]", None
    return f"[{kind[:80]}]", Media(kind[:80], hashlib.sha256(raw).hexdigest(), raw)


_LIARS: set[str] = set()


def _check_returns(tool: str, structured: Any, returns: Json) -> None:
    """Say once for each tool that what it gives is not what its output schema says; the result counts."""
    if structured is None:
        problems = ["it has an output schema, and gave no structured content"]
    else:
        problems = argument_problems(returns, structured)
    if problems and tool not in _LIARS:
        _LIARS.add(tool)
        _log.warning("the MCP tool %r does not keep to its output schema: %s", tool, problems[0])
