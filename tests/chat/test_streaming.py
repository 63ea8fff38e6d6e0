"""Streams of text are views of tokens: what they show is a prefix of the finished reply, and all of it in the
end."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ludus.chat import Renderer, load_format
from ludus.chat.formats import FORMATS
from ludus.chat.streaming import Detokenizer, ReplyView, read_completion
from ludus.chat.tokenizers import CHATML, HFTokenizer
from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason
from ludus.core.messages import ToolSpec
from ludus.core.tokenizer import ByteTokenizer, Tokenizer
from ludus.engine.embedded.request import StopChecker
from ludus.training import fit_tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@cache
def byte_level() -> HFTokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it."""
    text = "the cat sat on the mat, 日本語 emoji 😀 naïve café <tool_call> Action: add\n```python"
    return HFTokenizer(fit_tokenizer([text] * 10, vocabulary=340))


@cache
def byte_fallback() -> HFTokenizer:
    """As SentencePiece has it (Llama 2, Mistral): spaces before words, bytes for what the vocabulary lacks."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "▁Action"]
    words += sorted(set(string.printable) - set(string.whitespace))
    model = models.BPE(
        {word: id for id, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))


BIG = ["STOPSTOP", "aSTOP STOPb", "STOPE", "OPEN", "\n\n\n", "ababa", "a\n\nSTOP", "\nObservation: STOP",
       "STO", "hm STOP</"]  # fmt: skip


GENERATION = "{{- '<|im_start|>assistant\\n' }}"
OPENING = CHATML.replace(GENERATION, GENERATION.replace("\\n", "\\n<think>\\n"))
"""The prompt opens a thought: its words are part of the reply, and stop nothing."""
LEADING = CHATML.replace(
    "message.role + '\\n' + message.content",
    "message.role + ('\\n\\n\\n' if message.role == 'assistant' else '\\n') + message.content",
)
"""The model samples two line breaks before its text: they may stop it, and are no part of the reply."""


@cache
def big_tokens(template: str = CHATML) -> HFTokenizer:
    """Tokens that hold several stop strings, parts of them, and text around them."""
    inner = fit_tokenizer(["the cat sat on the mat"] * 10, vocabulary=300)
    inner.add_tokens(BIG)
    return HFTokenizer(inner, chat_template=template)


TOKENIZERS: dict[str, Any] = {
    "bytes": ByteTokenizer,
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "big tokens": big_tokens,
    "big tokens after <think>": partial(big_tokens, OPENING),
    "big tokens after a lead": partial(big_tokens, LEADING),
}


def cut(items: Sequence[Any], edges: Sequence[int]) -> list[Sequence[Any]]:
    """`items` in pieces, as steps of an engine report them."""
    places = sorted({0, len(items), *(edge % (len(items) + 1) for edge in edges)})
    return [items[a:b] for a, b in pairwise(places)]


EDGES = st.lists(st.integers(0, 400), max_size=60)


# Characters


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_text_comes_in_whole_characters_and_is_what_decode_gives(name: str, data: Any) -> None:
    tokenizer: Tokenizer = TOKENIZERS[name]()
    texts = st.text(max_size=20).map(tokenizer.encode)
    ids = st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=12)
    tokens = [token for piece in data.draw(st.lists(texts | ids, max_size=6)) for token in piece]
    detokenizer, shown = Detokenizer(tokenizer), ""
    for piece in cut(tokens, data.draw(EDGES)):
        shown += detokenizer.push(piece)
        assert tokenizer.decode(tokens).startswith(shown)
    for _ in range(10):  # whole characters leave nothing to wait for
        end = tokenizer.encode(".")
        tokens += end
        shown += detokenizer.push(end)
    assert shown == tokenizer.decode(tokens)


def test_a_character_is_never_shown_by_halves() -> None:
    tokenizer, text = ByteTokenizer(), "né 日本 😀!"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in tokenizer.encode(text)]
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_never_become_a_character_cost_no_quadratic_time() -> None:
    decoded = 0

    class Counting(ByteTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return super().decode(tokens)

    detokenizer = Detokenizer(Counting())
    for _ in range(8192):
        assert detokenizer.push([0xFF]) == ""
    assert decoded < 40 * 8192
    tail = "".join(detokenizer.push([token]) for token in b"a" * 1000)
    assert tail.startswith("\N{REPLACEMENT CHARACTER}" * 8192 + "a")


# Replies

ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {}, "b": {}}})
PYTHON = ToolSpec("python", "Run.", {"type": "object", "properties": {"code": {}}, "required": ["code"]})
SQL = ToolSpec("sql", "Ask.", {"type": "object", "properties": {"query": {}}})
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FORMATS if name != "plain"),
    *(("plain", {"take": take}) for take in ("text", "last_line", "label")),
]
PIECES = [
    "<think>", "</think>", "hm", " ", "\n", "\n\n", "I add.", "<", "<tool", "<tool_call>", "</tool_call>",
    '{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "add", "parameters": {}}', '{"x": 1}', "{", ";",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<|python_tag|>", "<|python",
    "```", "```python\n", "\n```\n", "```json\n", "````", "``", "print(1)",
    "<python>", "</python>", "<sql>", "</sql>", "<answer>", "</answer>", "42", "<ans",
    "Thought:", "Thought", "Action:", "Action: add\n", "Action Input:", "Action Input: {}", "Action ",
    "\nObservation:", "\nInput: {}", "Input:", "\nAnswer: 5", "Answer", "Action: Finish\n",
    " Action: add Input: {}", "Final Answer: 5", "ST", "STOP", "OP", "é", "日本", "😀", *BIG,
]  # fmt: skip
STOPS = st.sampled_from(
    [(), ("STOP",), ("STOP", "OPE", "\n\n"), ("aba",), ("TO", "STOP", "P"), ("\n", "<think>"),
     ("STOP", "STOPS")]
)  # fmt: skip


def generated(
    tokenizer: Tokenizer, text: str, format_stops: Sequence[str], stops: Sequence[str]
) -> Completion:
    """What an engine samples that would write `text`: it ends with the first stop string."""
    tokens: list[int] = []
    every = (*format_stops, *stops)
    checker = StopChecker(every, tokenizer.decode) if every else None
    for token in tokenizer.encode(text):
        tokens.append(token)
        if checker is not None and (stop := checker.push(token)) is not None:
            return Completion(tokens, [], FinishReason.STOP_STRING, stop=stop)
    return Completion([*tokens, tokenizer.stop_tokens[0]], [], FinishReason.STOP_TOKEN)


@cache
def renderer_of(name: str, format: int) -> Renderer:
    kind, options = OPTIONS[format]
    made = Renderer(TOKENIZERS[name](), load_format(kind, **options), history="keep")
    return made.bound([PYTHON, SQL])


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("format", range(len(OPTIONS)), ids=[f"{k} {o}" for k, o in OPTIONS])
@given(data=st.data())
def test_deltas_add_up_to_the_reply(tokenizer: str, format: int, data: Any) -> None:
    renderer = renderer_of(tokenizer, format)
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=14)))
    stops = data.draw(STOPS)
    parses = data.draw(st.booleans())
    completion = generated(renderer.tokenizer, text, renderer.format.stops, stops)
    reply = read_completion(renderer, completion, "id", stops, parses)
    view = ReplyView(renderer, stops, parses)
    thought = said = ""
    for piece in cut(completion.tokens[:-1], data.draw(EDGES)):
        more, text_more = view.push(piece)
        thought, said = thought + more, said + text_more
        assert reply.thought.startswith(thought) and reply.text.startswith(said)
    rest = view.finish(reply.thought, reply.text)
    assert (thought + rest[0], said + rest[1]) == (reply.thought, reply.text)


def test_templates_with_an_opening_and_a_lead_are_known() -> None:
    features = [renderer_of(name, 0).features for name in list(TOKENIZERS)[-2:]]
    assert [(one.opens_thinking, one.lead) for one in features] == [("<think>\n", ""), ("", "\n\n")]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """What was said before the first stop string was complete; before the longest, if two end together."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("format", range(len(OPTIONS)), ids=[f"{k} {o}" for k, o in OPTIONS])
@given(data=st.data())
def test_a_reply_is_what_was_said_before_the_first_stop(tokenizer: str, format: int, data: Any) -> None:
    renderer = renderer_of(tokenizer, format)
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=10)))
    stops, parses = data.draw(STOPS), data.draw(st.booleans())
    completion = generated(renderer.tokenizer, text, renderer.format.stops, stops)
    tokens = completion.tokens[: -1 if completion.finish is FinishReason.STOP_TOKEN else None]
    said = before_stop(renderer.tokenizer.decode(tokens), stops)
    again = renderer.tokenizer.encode(said)
    assume(renderer.tokenizer.decode(again) == said)
    shorter = Completion(again, [], FinishReason.LENGTH)
    expected = read_completion(renderer, shorter, "id", (), parses)
    reply = read_completion(renderer, completion, "id", stops, parses)
    assert (reply.thought, reply.calls) == (expected.thought, expected.calls)
    assert reply.text.strip() == expected.text
    if completion.stop in stops and not reply.calls and not said[-1:].isspace():
        assert reply.text == expected.text
    elif completion.stop in stops and not reply.calls and reply.text:
        whole = renderer.features.opens_thinking + said  # a format without thoughts shows what opens one
        assert whole.endswith(reply.text), "white space before a stop string is part of the reply"
    assert reply.message.content == renderer.text_of(completion), "all that was sampled is recorded"
    assert not any(stop in said for stop in stops)


def shown_early(text: str, format: str, **options: Any) -> str:
    """What is shown of an unfinished reply."""
    tokenizer = ByteTokenizer()
    renderer = Renderer(tokenizer, load_format(format, **options)).bound([PYTHON, SQL])
    return ReplyView(renderer, ["STOP"], True).push(tokenizer.encode(text))[1]


@pytest.mark.parametrize(
    ("format", "text", "shown"),
    [
        ("hermes", "I add. <tool_ca", "I add."),
        ("hermes", "a <b> c", "a <b> c"),
        ("hermes", "I add.\n<tool_call>\n{", "I add."),
        ("hermes", "one ST", "one"),
        ("hermes", "one STO.", "one STO."),
        ("hermes", "<think>no</think> yes", "yes"),
        ("hermes", "<think>no", ""),
        ("llama3", "Let me see<|python", "Let me see"),
        ("llama3", '{"na', ""),
        ("fenced", "see ```x``` and\n```py", "see ```x``` and"),
        ("fenced", "so\n```json\n{}\n```\nand", "so\n```json\n{}\n```\nand"),
        ("fenced", "so\n```python\nprint(1)\n", "so"),
        ("tags", "so <pyth", "so"),
        ("tags", "so <python>1", "so"),
        ("tags", "<answer>4", "<answer>4"),
        ("react", "Well.\nActio", "Well."),
        ("react", "Well.\nActing", "Well.\nActing"),
        ("react", "Thought: x", ""),
        ("react", "Well.\nAnswe", "Well."),
        ("react", "Well.\nAnswer: 4", "Well."),
        ("react", "Well.\nAction: python\nInput: 4", "Well."),
        ("plain", "go west", ""),
    ],
)
def test_what_is_decided_is_shown_and_nothing_else(format: str, text: str, shown: str) -> None:
    assert shown_early(text, format) == shown


def test_a_format_that_does_not_say_what_is_certain_is_held_back() -> None:
    from ludus.chat.formats.json_calls import HermesFormat

    class Own(HermesFormat):
        def certain(self, body: str) -> int:
            return super(HermesFormat, self).certain(body)

    tokenizer = ByteTokenizer()
    view = ReplyView(Renderer(tokenizer, Own()), [], True)
    assert view.push(tokenizer.encode("hello there")) == ("", "")
    assert view.finish("", "hello there") == ("", "hello there")


def test_a_reply_that_is_not_what_was_streamed_is_an_error() -> None:
    tokenizer = ByteTokenizer()
    view = ReplyView(Renderer(tokenizer, load_format("hermes")), [], True)
    view.push(tokenizer.encode("hello"))
    with pytest.raises(EngineError, match="differs"):
        view.finish("", "other")
