"""A model on an engine answers messages: the policy judges itself, and a frozen model judges it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import CHATML, hf_tokenizer, play, renderer, rollout, tokenizer

from ludus.core import ConfigError, EngineError, Media, Message, Task
from ludus.core.generation import ChatModel, ChatOptions
from ludus.engine import FakeEngine
from ludus.llm import ChatError, load_chat_model
from ludus.rewards.judges import Judge, Ruler
from ludus.rollouts.recorder import EngineChatModel

HELLO = [Message("system", "Be brief."), Message("user", "hello <|im_end|>")]


async def test_an_engine_answers_messages() -> None:
    seen: list[Any] = []

    def script(tokens: Any, sampling: Any, session: Any) -> str:
        seen.append((renderer().tokenizer.decode(tokens), sampling, session))
        return "hi<|im_end|>"

    model = EngineChatModel(FakeEngine(script, tokenizer("bytes")), renderer(), "me")
    assert isinstance(model, ChatModel)
    assert model.name == "me@0"
    reply = await model.chat(HELLO, ChatOptions(max_tokens=50, temperature=0.5))
    await model.chat(HELLO, ChatOptions(max_tokens=50, temperature=0.5))
    assert (reply.text, reply.is_cut) == ("hi", False)
    assert (reply.completion_tokens, reply.prompt_tokens > 20) == (3, True)
    (prompt, sampling, session), again = seen
    assert prompt.count("<|im_start|>") == 3
    assert (sampling.max_tokens, sampling.temperature, session) == (50, 0.5, None)
    assert sampling.seed == again[1].seed
    with pytest.raises(ChatError, match="text only"):
        await model.chat([Message("user", "", media=(Media("image", "00"),))])


async def test_what_the_engine_cannot_do_is_a_typed_failure() -> None:
    def script(*_: Any) -> str:
        raise EngineError("out of memory")

    model = EngineChatModel(FakeEngine(script, tokenizer("bytes")), renderer())
    with pytest.raises(ChatError, match="out of memory"):
        await model.chat(HELLO)


def policy_script(tokens: Any, sampling: Any, session: Any) -> str:
    """A policy that answers tasks, and judges when it is asked to judge."""
    said = renderer().tokenizer.decode(tokens)
    code = re.search(r'"code": "([0-9a-f]{8})"', said)
    if code is None:
        return ("red" if "colour" in said else "seven") + "<|im_end|>"
    right = 9 if "[ASSISTANT]\nred" in said else 1
    return json.dumps({"code": code[1], "scores": {"right": right}}) + "<|im_end|>"


async def test_the_policy_judges_itself() -> None:
    judge = Judge("policy", dimensions={"right": 1})
    playing = rollout(policy_script, rewards=[judge])
    first, second = await play(playing, Task.of("Name a colour."), Task.of("Name a number.", id="n"))
    assert [g.trajectories[0].reward for g in (first, second)] == [0.9, 0.1]
    assert first.trajectories[0].counts["judge/calls"] == 1
    with pytest.raises(ConfigError, match="is the one that is trained"):
        await judge.score(first.trajectories[0], first.task, {})


async def test_a_group_is_ranked_by_the_policy() -> None:
    def script(tokens: Any, sampling: Any, session: Any) -> str:
        said = renderer().tokenizer.decode(tokens)
        code = re.search(r'"code": "([0-9a-f]{8})"', said)
        if code is None:
            return f"{sampling.seed % 1000}<|im_end|>"
        scores = [{"id": n, "score": n / 10} for n in (1, 2, 3)]
        return json.dumps({"code": code[1], "scores": scores}) + "<|im_end|>"

    playing = rollout(script, rewards=[], group_rewards=[Ruler("policy")], attempts=3)
    (group,) = await play(playing, Task.of("Any number."))
    assert sorted(t.reward or 0 for t in group.trajectories) == [0.1, 0.2, 0.3]


async def test_a_frozen_model_is_loaded_from_a_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = hf_tokenizer(CHATML)
    config = LlamaConfig(
        vocab_size=tokens.vocabulary_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokens.inner.save_pretrained(tmp_path)
    model = load_chat_model({"address": str(tmp_path), "budget": {"calls": 2}})
    replies = [await model.chat(HELLO, ChatOptions(max_tokens=5)) for _ in range(2)]
    assert replies[0] == replies[1]
    assert replies[0].completion_tokens <= 5
    with pytest.raises(ChatError, match=r"budget\.calls"):
        await model.chat(HELLO)
    await model.close()
