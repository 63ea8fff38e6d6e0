"""Features of a chat template, found by probing it, and messages adapted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludus.chat.chat_template import ChatEntry, Piece, SafeTemplate, split_at_marks
from ludus.chat.formats.base import THINK, ActionFormat
from ludus.core.failures import ConfigError
from ludus.core.messages import IMAGE_MARK, Json, Media, Message, Role, ToolCall, ToolResult, ToolSpec
from ludus.core.tokenizer import Tokenizer, images_of


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """Features of a chat template, as probed."""

    system: bool = True
    """It has a place for a system prompt."""
    tool_role: bool = True
    """It renders results of tools as such."""
    alternates: bool = False
    """It insists that users and assistants take turns."""
    native_tools: bool = False
    """It describes tools itself, and writes calls the way the action format reads them."""
    opens_thinking: str = ""
    """The `<think>` that it puts at the end of its generation prompt."""
    lead: str = ""
    """White space that it writes before an assistant's text, and that the model samples itself."""
    rewrites: tuple[str, ...] = ()
    """The kinds of conversation in which it rewrites earlier turns; empty when it preserves prefixes."""
    image: str = ""
    """The placeholder of an image; empty for a model that reads text only."""
    image_roles: frozenset[Role] = frozenset()
    """The roles whose images it writes itself; elsewhere the placeholder stands in the text."""


def chat_entries(
    messages: Sequence[Message], format: ActionFormat, features: TemplateFeatures
) -> list[ChatEntry]:
    """The template's input for `messages`, in the roles that it knows."""
    made = [_entry(message, format, features) for message in messages]
    return _merged(made) if features.alternates else made


def with_description(
    made: Sequence[ChatEntry], description: str, format: ActionFormat, features: TemplateFeatures
) -> list[ChatEntry]:
    """The conversation with `description` in the system prompt, or before the first message.

    It names tools that others made: only the format's own marks are special in it.
    """
    if not description:
        return list(made)
    frame = [text.strip() for text in format.result_frame if text.strip()]
    text = split_at_marks(description, (*THINK, *format.marks, *frame))
    home: Role = "system" if features.system else "user"
    if not made or made[0].role != home:
        return [ChatEntry(home, text), *made]
    gap = Piece("\n\n", trusted=True)
    first = made[0].pieces
    joined = (*first, gap, *text) if home == "system" else (*text, gap, *first)
    return [replace(made[0], pieces=joined), *made[1:]]


def _entry(message: Message, format: ActionFormat, features: TemplateFeatures) -> ChatEntry:
    role = message.role
    if role == "assistant":
        return ChatEntry(role, split_at_marks(action_text(message, format), (*THINK, *format.marks)))
    if role == "tool" and (format.result_role == "user" or not features.tool_role):
        # The role makes it a result; a user's text is none, whatever it looks like.
        opening, closing = format.result_frame
        pieces = content_pieces(message, features, "user")
        return ChatEntry("user", (Piece(opening, True), *pieces, Piece(closing, True)))
    if role == "system" and not features.system:
        role = "user"
    return ChatEntry(role, content_pieces(message, features, role), message.name, message.tool_call_id)


def shown_images(message: Message) -> list[Media]:
    """The images of a message that a model which sees is shown: not what an assistant wrote."""
    return [] if message.role == "assistant" else [one for one in message.media if one.is_image]


def content_pieces(message: Message, features: TemplateFeatures, role: Role) -> tuple[Piece, ...]:
    """A message's text with its images in their places: at their marks, or before the text."""
    content, images = message.content, len(shown_images(message))
    if not images or not features.image:
        return (Piece(content.replace(IMAGE_MARK, UNSEEN, images)),)
    *texts, last = content.split(IMAGE_MARK, images)
    is_part = role in features.image_roles
    image = Piece("", True, is_image=True) if is_part else Piece(features.image, True)
    gap = () if is_part else (Piece("\n", True),)
    pieces: list[Piece] = []
    for _ in range(images - len(texts)):
        pieces += [image, *gap]
    for text in texts:
        pieces += [Piece(text), image] if text else [image]
    return (*pieces, Piece(last)) if last or not pieces else tuple(pieces)


def action_text(message: Message, format: ActionFormat) -> str:
    """The text of an assistant's message, calls included: as it was sampled, or as the format writes it."""
    if message.tool_calls and not format.parse(message.content).calls:
        return format.render_action(message.content, message.tool_calls)
    return message.content


def _merged(made: Sequence[ChatEntry]) -> list[ChatEntry]:
    """Neighbouring messages of a user joined, for templates that insist on turns."""
    result: list[ChatEntry] = []
    for entry in made:
        if result and entry.role == "user" == result[-1].role:
            joined = (*result[-1].pieces, Piece("\n\n", True), *entry.pieces)
            result[-1] = replace(result[-1], pieces=joined)
        else:
            result.append(entry)
    return result


UNSEEN = "[image]"
"""Text in place of an image, for a model that reads text only."""

# Probing: the template renders small conversations, and its output shows what it does.

WORD, OTHER = "zebra7", "quagga8"
TOOL = ToolSpec(
    "zebra_lookup",
    "Look a word up.",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)
CALL = ToolCall(TOOL.name, {"key": WORD})


def probe(template: SafeTemplate, format: ActionFormat) -> TemplateFeatures:
    """Probe a template with conversations of the kinds that episodes have."""
    tokenizer = template.tokenizer
    user, act = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    if not _shows(tokenizer, [user, {"role": "assistant", "content": WORD}, user]):
        raise ConfigError(
            "the chat template does not render a plain conversation (user, assistant, user); "
            "give the tokenizer another chat_template"
        )
    result = {"role": "tool", "content": WORD, "name": TOOL.name, "tool_call_id": "call00000"}
    features = TemplateFeatures(
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
    images = images_of(tokenizer)
    if images is not None:
        roles = _image_roles(tokenizer, images.text, [user, act])
        features = replace(features, image=images.text, image_roles=roles)
    return replace(features, rewrites=tuple(_rewritten(template, format, features)))


def _image_roles(tokenizer: Tokenizer, placeholder: str, before: list[Json]) -> frozenset[Role]:
    """The roles in which the template writes one placeholder for a part that is an image."""

    def takes(role: Role) -> bool:
        parts = [{"type": "image"}, {"type": "text", "text": WORD}]
        message: Json = {"role": role, "content": parts}
        if role == "tool":
            message |= {"name": TOOL.name, "tool_call_id": "call00000"}
        try:
            text = tokenizer.apply_chat_template([*before, message], None, True)
        except ConfigError:
            return False
        return text.count(placeholder) == 1 and text.count(WORD) == 1

    roles: tuple[Role, ...] = ("user", "tool")
    return frozenset(role for role in roles if takes(role))


def is_rewritten(
    template: SafeTemplate,
    conversation: Sequence[ChatEntry],
    new: Sequence[ChatEntry],
    tools: Sequence[ToolSpec],
    features: TemplateFeatures,
) -> bool:
    """Whether the template, given `new` messages, changes what the model has read and sampled so far.

    White space around the action does not count: many templates trim it, and it stays as sampled.
    """
    *before, action = conversation
    sampled = "".join(piece.text for piece in action.pieces).removeprefix(features.opens_thinking)
    read = template.text(before, tools, True)
    now = template.text([*conversation, *new], tools, True)
    return not (now.startswith(read) and now[len(read) :].lstrip().startswith(sampled.strip()))


def _rewritten(template: SafeTemplate, format: ActionFormat, features: TemplateFeatures) -> list[str]:
    """The kinds of conversation in which earlier turns do not stay as they were."""
    tools = [TOOL] if features.native_tools else []
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
        kind for kind, messages in kinds.items() if _changes(template, format, features, messages, tools)
    ]


def _changes(
    template: SafeTemplate,
    format: ActionFormat,
    features: TemplateFeatures,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> bool:
    made = chat_entries(messages, format, features)
    actions = [index for index, entry in enumerate(made) if entry.role == "assistant"]
    for start, stop in zip(actions, [*actions[1:], len(made)], strict=True):
        if is_rewritten(template, made[: start + 1], made[start + 1 : stop], tools, features):
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
    """The white space between the generation prompt and the text of an assistant's message."""
    prompt = tokenizer.apply_chat_template([user], None, True)
    shown = tokenizer.apply_chat_template([user, {"role": "assistant", "content": WORD}], None, False)
    lead = shown.removeprefix(prompt).partition(WORD)[0]
    return lead if shown.startswith(prompt) and not lead.strip() else ""


def _opened(tokenizer: Tokenizer, chat: list[Json]) -> str:
    """The opening of a thought that ends the generation prompt, white space included."""
    text = tokenizer.apply_chat_template(chat, None, True)
    _, opening, tail = text.rpartition(THINK[0])
    return opening + tail if opening and not tail.strip() else ""
