"""Stop tokens, stop strings, lengths: what ends a generation, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_models import make, prompts, stock_greedy
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ByteTokenizer, EngineError, FinishReason, Sampling
from ludus.engine import EmbeddedEngine, StopChecker


def _pieces(tokens: Sequence[int]) -> str:
    """A decoder whose tokens are one, two or three letters; some say nothing."""
    return "".join("abcdefg"[token % 7] * (token % 4) for token in tokens)


async def test_stop_token_is_included_and_stop_string_keeps_its_tokens() -> None:
    model = make()
    context = prompts([8])[0]
    expected = stock_greedy(model, context, 30)
    engine = EmbeddedEngine(model, _pieces)

    token = expected[9]
    cut = expected.index(token) + 1
    stopped = await engine.generate(
        context, Sampling(max_tokens=30, temperature=0, stop_tokens=(token,))
    )
    assert (stopped.tokens, stopped.finish) == (expected[:cut], FinishReason.STOP_TOKEN)

    text = ""
    for count in range(1, 31):
        text = _pieces(expected[:count])
        if len(text) > 12:
            break
    stop = text[6:9]
    first = next(n for n in range(1, 31) if stop in _pieces(expected[:n]))
    sampling = Sampling(max_tokens=30, temperature=0, stop=("never", stop))
    stopped = await engine.generate(context, sampling)
    assert (stopped.tokens, stopped.finish) == (expected[:first], FinishReason.STOP_STRING)
    assert stopped.stop == stop

    full = await engine.generate(context, Sampling(max_tokens=5, temperature=0))
    assert (full.tokens, full.finish, full.stop) == (expected[:5], FinishReason.LENGTH, None)
    await engine.close()


async def test_what_stands_in_the_prompt_stops_nothing() -> None:
    engine = EmbeddedEngine(make(), lambda tokens: "".join(chr(token) for token in tokens))
    completion = await engine.generate([65, 66], Sampling(max_tokens=3, temperature=0, stop=("AB",)))
    assert completion.finish is FinishReason.LENGTH
    await engine.close()


async def test_the_models_context_ends_a_generation() -> None:
    engine = EmbeddedEngine(make(max_position_embeddings=32))
    completion = await engine.generate(prompts([25])[0], Sampling(max_tokens=100))
    assert (len(completion.tokens), completion.finish) == (7, FinishReason.LENGTH)
    with pytest.raises(EngineError, match="max_position_embeddings") as raised:
        await engine.generate(prompts([32])[0], Sampling())
    assert not raised.value.retriable
    await engine.close()


async def test_malformed_requests_are_refused_with_the_cause() -> None:
    engine = EmbeddedEngine(make())
    for tokens, cause in [([], "non-empty"), ([5, 97], "97"), ([-1], "-1"), ([1.5], "token ids")]:
        with pytest.raises(EngineError, match=cause) as raised:
            await engine.generate(tokens, Sampling())  # type: ignore[arg-type]
        assert not raised.value.retriable
    with pytest.raises(EngineError, match="tokenizer"):
        await engine.generate([1], Sampling(stop=("x",)))
    await engine.close()


@given(
    st.lists(st.integers(0, 27), max_size=120),
    st.lists(st.text("abcdefg", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_watcher_agrees_with_decoding_everything(tokens: list[int], stops: list[str]) -> None:
    stop_checker = StopChecker(stops, _pieces)
    for count in range(1, len(tokens) + 1):
        found = stop_checker.push(tokens[count - 1])
        text = _pieces(tokens[:count])
        assert (found is not None) == any(stop in text for stop in stops)
        if found is not None:
            assert found in stops
            assert found in text
            return


@given(
    st.lists(st.text("abc", max_size=6), max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_watcher_names_the_stop_that_letters_would_meet_first(
    words: list[str], stops: list[str]
) -> None:
    """However the text is cut into tokens; of two that end together, the longer one."""
    text = "".join(words)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    met = [stop for stop in stops if ends and text[: ends[0]].endswith(stop)]
    stop_checker = StopChecker(stops, lambda tokens: "".join(words[token] for token in tokens))
    found = next(filter(None, map(stop_checker.push, range(len(words)))), None)
    assert found == (max(met, key=len) if met else None)


@given(st.text(max_size=60), st.text(min_size=1, max_size=4))
def test_watcher_on_bytes_of_any_script(text: str, stop: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = list(text.encode(errors="replace"))
    stop_checker = StopChecker([stop], tokenizer.decode)
    found = [count for count, token in enumerate(tokens, 1) if stop_checker.push(token) is not None]
    expected = [n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n])]
    assert found[:1] == expected[:1]


@given(st.integers(0, 300), st.text("abé漢", min_size=1, max_size=30), st.integers(0, 5))
def test_watcher_finds_a_long_stop_string_after_a_long_text(before: int, stop: str, period: int) -> None:
    tokenizer = ByteTokenizer()
    lead = ("xyz " * 80)[:before] + stop[:period]
    tokens = tokenizer.encode(lead + stop)
    stop_checker = StopChecker([stop], tokenizer.decode)
    found = [count for count, token in enumerate(tokens, 1) if stop_checker.push(token) is not None]
    assert found[0] == len(tokenizer.encode(lead[: (lead + stop).find(stop)] + stop)[: len(tokens)])


def test_watcher_decodes_a_short_tail_only() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return "" if tokens[0] == 0 else "x" * len(tokens)

    for token in (0, 1):
        stop_checker = StopChecker(["</call>"], decode)
        for _ in range(3000):
            assert stop_checker.push(token) is None
    assert longest <= 150


async def test_a_lossy_tokenizer_breaks_nothing() -> None:
    model = make()
    expected = stock_greedy(model, prompts([8])[0], 12)
    engine = EmbeddedEngine(model, lambda tokens: "?" * len(tokens))
    sampling = Sampling(max_tokens=12, temperature=0, stop=("abc",))
    completion = await engine.generate(prompts([8])[0], sampling)
    assert completion.tokens == expected
    await engine.close()


async def test_a_decoder_that_raises_fails_its_request_alone() -> None:
    def decode(tokens: Sequence[int]) -> str:
        raise ValueError("no such piece")

    engine = EmbeddedEngine(make(), decode)
    broken, fine = await asyncio.gather(
        engine.generate([1, 2], Sampling(stop=("x",))),
        engine.generate([1, 2], Sampling(max_tokens=4)),
        return_exceptions=True,
    )
    assert isinstance(broken, EngineError)
    assert "no such piece" in str(broken)
    assert not isinstance(fine, BaseException)
    assert len(fine.tokens) == 4
    await engine.close()
