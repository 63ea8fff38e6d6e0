"""Features of a chat template, found by probing it, and messages adapted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from ludus.chat.chat_entries import CallData, ChatEntry, Piece, as_chat, split_at_marks
from ludus.chat.chat_template import SafeTemplate, short_id
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
    call_data: CallData | None = None
    """How it takes calls as data, where it renders results only after such."""
    short_ids: bool = False
    """It insists on ids of calls with nine letters and digits."""
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
    if role == "assistant" and features.call_data is not None:
        return _data_entry(message, format, features)
    if role == "assistant":
        return ChatEntry(role, split_at_marks(action_text(message, format), (*THINK, *format.marks)))
    if role == "tool" and (format.result_role == "user" or not features.tool_role):
        # The role makes it a result; a user's text is none, whatever it looks like.
        opening, closing = format.result_frame
        pieces = content_pieces(message, features, "user")
        return ChatEntry("user", (Piece(opening, True), *pieces, Piece(closing, True)))
    if role == "system" and not features.system:
        role = "user"
    id = message.tool_call_id
    if role == "tool" and features.short_ids:
        id = short_id(id or "")
    return ChatEntry(role, content_pieces(message, features, role), message.name, id)


def _data_entry(message: Message, format: ActionFormat, features: TemplateFeatures) -> ChatEntry:
    """An assistant's message with thought and calls as data: as the template has it, not as it was sampled."""
    data = features.call_data or CallData()
    parsed = format.parse(action_text(message, format))
    text, thought = parsed.text, parsed.thought
    if any(call.fault is not None for call in parsed.calls):  # results follow such calls, too
        text, thought = message.content, ""
        for mark in format.marks:
            text = text.replace(mark, " ")
    elif thought and not data.thought_key:
        text, thought = f"{THINK[0]}\n{thought}\n{THINK[1]}\n\n{text}", ""
    elif thought and text and parsed.calls and data.one_call:
        text, thought = "", f"{thought}\n{text}"  # harmony has one place for both
    ids = iter([call.id for call in message.tool_calls])
    calls: list[ToolCall] = []
    for call in parsed.calls:
        id = call.id or next(ids, "")
        calls.append(
            ToolCall(call.name or NAMELESS, call.arguments, short_id(id) if features.short_ids else id)
        )
    pieces = split_at_marks(text, THINK)
    return ChatEntry("assistant", pieces, calls=tuple(calls), thought=thought, data=data)


def stub_entries(new: Sequence[ChatEntry], features: TemplateFeatures, word: str) -> list[ChatEntry]:
    """A user's message and an assistant's that says `word`, or calls with it what `new` brings results of."""
    user = ChatEntry("user", (Piece("?", True),))
    results = list(takewhile(lambda entry: entry.role == "tool", new))
    if features.call_data is None or not results:
        return [user, ChatEntry("assistant", (Piece(word, True),))]
    calls = [ToolCall(entry.name or NAMELESS, {}, entry.tool_call_id or "") for entry in results]
    if features.call_data.one_call:
        calls = calls[-1:]
    calls[-1] = replace(calls[-1], arguments={"key": word})
    return [
        user,
        ChatEntry("assistant", (), calls=tuple(calls), data=features.call_data, is_stub=True),
    ]


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
    return format.action_text(message.content, message.tool_calls)


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


NAMELESS = "tool"
"""The name of a call that could not be read, for a template that renders results after calls only."""
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
RESULT: Json = {
    "role": "tool",
    "content": WORD,
    "name": TOOL.name,
    "tool_call_id": "call00000",
}


def probe(template: SafeTemplate, format: ActionFormat) -> TemplateFeatures:
    """Probe a template with conversations of the kinds that episodes have."""
    tokenizer = template.tokenizer
    user, act = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    if not _shows(tokenizer, [user, {"role": "assistant", "content": WORD}, user]):
        raise ConfigError(
            "the chat template does not render a plain conversation (user, assistant, user); "
            "give the tokenizer another chat_template"
        )
    opened = _opened(tokenizer, [user])
    written = written_calls(tokenizer)
    style = next((style for style, text in written if reads(format, text, tokenizer)), None)
    features = TemplateFeatures(
        short_ids=[_takes_id(tokenizer, id) for id in ("call_0_0", "call00000")] == [False, True],
        system=_shows(tokenizer, [{"role": "system", "content": WORD}, user]),
        tool_role=_takes_results(tokenizer, [act], [act, RESULT], opened),
        alternates=not _shows(tokenizer, [user, {"role": "user", "content": WORD}]),
        native_tools=style is not None
        and TOOL.description in tokenizer.apply_chat_template([user], [TOOL.as_openai()], True),
        opens_thinking=opened,
        lead=_lead(tokenizer, user),
    )
    if not features.tool_role and style is not None:
        data = _completed(tokenizer, style)
        one, two = _calling(1, data), _calling(2, data)
        twice = [one, RESULT, one] if data.one_call else [two, RESULT]
        if data.one_call <= _writes_one(format) and _takes_results(tokenizer, [one], twice, opened):
            features = replace(features, tool_role=True, call_data=data)
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

    White space does not count: many templates trim it, and it stays as sampled. Nor does the writing of calls
    that the template is given as data.
    """
    *before, action = conversation
    read = template.text(before, tools, True)
    now = template.text([*conversation, *new], tools, True)
    if action.data is None:
        sampled = "".join(piece.text for piece in action.pieces).removeprefix(features.opens_thinking)
    else:
        alone = template.text(conversation, tools, False)
        if (
            not alone.startswith(read.removesuffix(features.opens_thinking))
            or action.thought not in alone
        ):
            return True
        sampled = template.without_end(alone)[len(read) :]
    return not (now.startswith(read) and _solid(now[len(read) :]).startswith(_solid(sampled)))


def _solid(text: str) -> str:
    return "".join(text.split())


def _rewritten(template: SafeTemplate, format: ActionFormat, features: TemplateFeatures) -> list[str]:
    """The kinds of conversation in which earlier turns do not stay as they were."""
    tools = [TOOL] if features.native_tools else []
    thinking = f"{THINK[0]}\nhm {WORD}\n{THINK[1]}\n\n"
    words, opened = f"so {OTHER}", features.opens_thinking and f"{THINK[0]}\n\n{THINK[1]}\n\n"
    answer, deep_answer = (
        Message("assistant", format.action_text(thought + format.render_action(words), ()))
        for thought in (opened, thinking)
    )
    call, deep_call = (
        Message(
            "assistant", format.action_text(thought + (format.render_action("", [CALL]) or WORD), ())
        )
        for thought in (opened, thinking)
    )
    user = Message("user", "why")
    result = format.render_result(replace(CALL, id="call00000"), ToolResult(WORD))
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


def written_calls(tokenizer: Tokenizer) -> list[tuple[CallData, str]]:
    """How the template writes a call, in each style of data that it takes."""
    tools = [TOOL.as_openai()]
    user: Json = {"role": "user", "content": "?"}
    found: list[tuple[CallData, str]] = []
    for style in (CallData(), CallData(text_arguments=True)):
        entry = ChatEntry("assistant", (), calls=(replace(CALL, id="call00000"),), data=style)
        try:
            read = tokenizer.apply_chat_template([user], tools, True)
            shown = tokenizer.apply_chat_template([user, as_chat(entry, _verbatim)], tools, False)
            read = read.removesuffix(_opened(tokenizer, [user]))
        except ConfigError:
            continue
        if shown.startswith(read):
            found.append((style, shown.removeprefix(read)))
    return found


def reads(format: ActionFormat, written: str, tokenizer: Tokenizer) -> bool:
    """Whether the format reads the call that a template has written as `CALL`."""
    stops = [text for text, token in tokenizer.controls.items() if token in tokenizer.stop_tokens]
    for end in stops:
        written = written if end in format.marks else written.partition(end)[0]
    calls = format.parse(written).calls
    return [(call.name, call.arguments) for call in calls] == [(CALL.name, CALL.arguments)]


def _verbatim(piece: Piece) -> str:
    return piece.text


def _writes_one(format: ActionFormat) -> bool:
    """Whether the format has no way to write two calls in a turn."""
    try:
        format.render_action("", [CALL, CALL])
    except ValueError:
        return True
    return False


def _takes_id(tokenizer: Tokenizer, id: str) -> bool:
    call = ChatEntry("assistant", (), calls=(ToolCall(TOOL.name, {"key": OTHER}, id),), data=CallData())
    act, user = as_chat(call, _verbatim), {"role": "user", "content": WORD}
    return _shows(tokenizer, [user, act, RESULT | {"tool_call_id": id}])


def _calling(count: int, data: CallData) -> Json:
    """An assistant's message with calls, as dictionaries."""
    calls = tuple(ToolCall(TOOL.name, {"key": OTHER}, f"call0000{i}") for i in range(count))
    return as_chat(ChatEntry("assistant", (), calls=calls, data=data), _verbatim)


def _takes_results(tokenizer: Tokenizer, one: list[Json], two: list[Json], opened: str) -> bool:
    """Whether the template renders the result of a tool after the turns `one`, and a second one after `two`.

    One way of thinking for all turns: some templates open a thought after users only.
    """
    user: Json = {"role": "user", "content": "?"}
    answer: Json = {"role": "assistant", "content": "!"}
    return (
        _shows(tokenizer, [user, *one, RESULT])
        and _shows(tokenizer, [user, *two, RESULT, answer, user])
        and _opened(tokenizer, [user, *one, RESULT]) == opened
    )


def _completed(tokenizer: Tokenizer, style: CallData) -> CallData:
    """The style of a template that takes calls as data, with where it reads thoughts."""
    user: Json = {"role": "user", "content": "?"}

    def shows(word: str, entry: ChatEntry) -> bool:
        try:
            shown = tokenizer.apply_chat_template([user, as_chat(entry, _verbatim)], None, False)
        except ConfigError:
            return False
        return word in shown

    keys = ("reasoning_content", "thinking", "reasoning")
    thinks = [replace(style, thought_key=key) for key in keys]
    said = (Piece(OTHER),)
    call = (ToolCall(TOOL.name, {"key": OTHER}, "call00000"),)
    thinking = next(
        (
            one
            for one in thinks
            if shows(WORD, ChatEntry("assistant", said, thought=WORD, data=one))
            or shows(WORD, ChatEntry("assistant", (), thought=WORD, calls=call, data=one))
        ),
        style,
    )
    two = (replace(CALL, id="call00000"), ToolCall(TOOL.name, {"key": OTHER}, "call00001"))
    both = ChatEntry("assistant", (), calls=two, data=style)
    return replace(thinking, one_call=not shows(OTHER, both))


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
