"""Finding out what a chat template does, by trying it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, Message, ToolCall, ToolResult, ToolSpec
from ludus.core.tokenizer import Tokenizer
from ludus.rollouts.formats.base import THINK, ActionFormat
from ludus.rollouts.renderers.abilities import Abilities
from ludus.rollouts.renderers.pieces import Entry, entries
from ludus.rollouts.renderers.template import SafeTemplate

WORD, OTHER = "zebra7", "quagga8"
TOOL = ToolSpec(
    "zebra_lookup",
    "Look a word up.",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)
CALL = ToolCall(TOOL.name, {"key": WORD})


def probe(template: SafeTemplate, format: ActionFormat) -> Abilities:
    """What the template does with conversations such as episodes have."""
    tokenizer = template.tokenizer
    user, act = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    if not _shows(tokenizer, [user, {"role": "assistant", "content": WORD}, user]):
        raise ConfigError(
            "the chat template does not render a plain conversation (user, assistant, user); "
            "give the tokenizer another chat_template"
        )
    result = {"role": "tool", "content": WORD, "name": TOOL.name, "tool_call_id": "call00000"}
    abilities = Abilities(
        system=_shows(tokenizer, [{"role": "system", "content": WORD}, user]),
        # One way of thinking for all turns: some templates open a thought after users only.
        tool_role=_shows(tokenizer, [user, act, result])
        and _shows(tokenizer, [user, act, result, result, act, user])
        and _opened(tokenizer, [user, act, result]) == _opened(tokenizer, [user]),
        alternates=not _shows(tokenizer, [user, {"role": "user", "content": WORD}]),
        native_tools=_native(tokenizer, format),
        opens_thinking=_opened(tokenizer, [user]),
        lead=_lead(tokenizer, user),
    )
    return replace(abilities, rewrites=tuple(_rewritten(template, format, abilities)))


def is_rewritten(
    template: SafeTemplate,
    conversation: Sequence[Entry],
    new: Sequence[Entry],
    tools: Sequence[ToolSpec],
    abilities: Abilities,
) -> bool:
    """Whether the template, given `new` messages, changes what the model has read and said so far.

    White space around what was said does not count: many templates trim it, and it stays as sampled.
    """
    *before, action = conversation
    said = "".join(piece.text for piece in action.pieces).removeprefix(abilities.opens_thinking)
    read = template.text(before, tools, True)
    now = template.text([*conversation, *new], tools, True)
    return not (now.startswith(read) and now[len(read) :].lstrip().startswith(said.strip()))


def _rewritten(template: SafeTemplate, format: ActionFormat, abilities: Abilities) -> list[str]:
    """The kinds of conversation in which earlier turns do not stay as they were."""
    tools = [TOOL] if abilities.native_tools else []
    thinking = f"{THINK[0]}\nhm {WORD}\n{THINK[1]}\n\n"
    answer = Message("assistant", format.render_action(f"so {OTHER}"))
    call = Message("assistant", format.render_action("", [CALL]) or WORD)
    deep_answer = replace(answer, content=thinking + answer.content)
    deep_call = replace(call, content=thinking + call.content)
    user, result = Message("user", "why"), format.render_result(CALL, ToolResult(WORD))
    kinds = {
        "several turns": [user, answer, user, answer, user],
        "tool results": [user, call, result, call, result],
        "a new user message after tool results": [user, call, result, answer, user],
        "thinking before tool results": [user, deep_call, result, deep_call, result],
        "thinking before a new user message": [user, deep_answer, user, deep_call, result, answer, user],
    }
    return [
        kind
        for kind, messages in kinds.items()
        if _changes(template, format, abilities, messages, tools)
    ]


def _changes(
    template: SafeTemplate,
    format: ActionFormat,
    abilities: Abilities,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> bool:
    made = entries(messages, format, abilities)
    said = [index for index, entry in enumerate(made) if entry.role == "assistant"]
    for start, stop in zip(said, [*said[1:], len(made)], strict=True):
        if is_rewritten(template, made[: start + 1], made[start + 1 : stop], tools, abilities):
            return True
    return False


def _shows(tokenizer: Tokenizer, chat: list[Json]) -> bool:
    """Whether the template renders `chat` at all, and all of it."""
    try:
        text = tokenizer.apply_chat_template(chat, None, True)
    except ConfigError:
        return False
    return text.count(WORD) == [message["content"] for message in chat].count(WORD)


def _native(tokenizer: Tokenizer, format: ActionFormat) -> bool:
    """Whether the template lists tools, and writes a call that the format reads as the same call."""
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": TOOL.name, "arguments": CALL.arguments},
    }
    user = {"role": "user", "content": "?"}
    chat: list[Json] = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        listed = tokenizer.apply_chat_template([user], [TOOL.as_openai()], True)
        shown = tokenizer.apply_chat_template(chat, [TOOL.as_openai()], False)
    except ConfigError:
        return False
    if TOOL.description not in listed:
        return False
    ends = [text for text, token in tokenizer.controls.items() if token in tokenizer.stop_tokens]
    written = shown.removeprefix(listed)
    for end in ends:
        written = written.partition(end)[0]
    return shown.startswith(listed) and format.parse(written).calls == (CALL,)


def _lead(tokenizer: Tokenizer, user: Json) -> str:
    """The white space between the generation prompt and what the assistant is shown to have said."""
    prompt = tokenizer.apply_chat_template([user], None, True)
    shown = tokenizer.apply_chat_template([user, {"role": "assistant", "content": WORD}], None, False)
    lead = shown.removeprefix(prompt).partition(WORD)[0]
    return lead if shown.startswith(prompt) and not lead.strip() else ""


def _opened(tokenizer: Tokenizer, chat: list[Json]) -> str:
    """The opening of a thought that ends the generation prompt, white space included."""
    text = tokenizer.apply_chat_template(chat, None, True)
    _, opening, tail = text.rpartition(THINK[0])
    return opening + tail if opening and not tail.strip() else ""
