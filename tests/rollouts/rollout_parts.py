"""What tests of episodes share: tokenizers made on the spot, a rollout in one line, an exactness check."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ludus.chat import ActionFormat, HFTokenizer, History, Renderer, load_format
from ludus.core import ByteTokenizer, Group, SegmentKind, Task, ToolCall, Trajectory
from ludus.engine import FakeEngine
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that drops old thinking, as those of thinking models do."""

SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>"),
)


class LossyBytes(ByteTokenizer):
    """What it encodes it never decodes to the same: it loses case and spaces, and doubles a letter."""

    def encode_text(self, text: str) -> list[int]:
        return super().encode_text(text.lower().replace("  ", " "))

    def decode(self, tokens: Sequence[int]) -> str:
        return super().decode(tokens).replace("v", "vv")


@cache
def hf_tokenizer(template: str) -> HFTokenizer:
    """A byte-level BPE tokenizer with a few merges, some of which join a `>` or a letter with a newline."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "e"), ("te", "x"), ("tex", "t"), (">", "Ċ"), ('"', "}"), ("}", "Ċ"), ("e", "Ċ")]
    words = [*letters, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    return HFTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>"),
        chat_template=template,
    )


@cache
def tokenizer(name: str) -> ByteTokenizer | HFTokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "lossy":
        return LossyBytes()
    return hf_tokenizer({"chatml": CHATML, "llama3": LLAMA3, "forgetful": FORGETFUL}[name])


@cache
def format_for_echo(name: str) -> ActionFormat:
    """The format of that name in which a tool `echo(text)` can be called."""
    options: dict[str, dict[str, Any]] = {
        "fenced": {"languages": {"python": "echo.text"}},
        "plain": {"tool": "echo", "argument": "text"},
    }
    return load_format(name, **options.get(name, {}))


@cache
def renderer(
    tokenizer_name: str = "bytes", format: str = "hermes", history: History = "strict"
) -> Renderer:
    return Renderer(tokenizer(tokenizer_name), format_for_echo(format), history)


@reward
def one() -> float:
    """Every episode is worth 1."""
    return 1.0


def rollout(
    script: Any,
    *,
    tools: Any = (),
    rewards: Sequence[Any] = (one,),
    group_rewards: Sequence[Any] = (),
    budgets: dict[str, Any] | None = None,
    rendered_by: Renderer | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Rollout:
    """A rollout on a fake engine that says what `script` says."""
    by = rendered_by or renderer()
    return Rollout(
        engine=FakeEngine(script, by.tokenizer, **(engine or {})),
        renderer=by,
        scorer=Scorer(rewards, group_rewards),
        tools=as_toolset(tools),
        budgets=Budgets.parse(budgets or {}),
        **settings,
    )


def called(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool, in the Hermes format."""
    return renderer().format.render_action("", [ToolCall(name, arguments)])


def attempt_of(session: str | None) -> int:
    """The attempt that a session belongs to."""
    assert session is not None
    return int(session.split("/")[-2])


async def play(playing: Rollout, *tasks: Task, seed: int = 0) -> list[Group]:
    """Groups in the order of their tasks."""
    given = tasks or (Task.of("Go.", id="t"),)
    groups = [group async for group in playing.groups(given, seed)]
    place = {task.id: number for number, task in enumerate(given)}
    return sorted(groups, key=lambda g: (place[g.task.id], g.trajectories[0].attempt))


async def play_one(playing: Rollout, task: Task | None = None) -> Trajectory:
    [group] = await play(playing, *([task] if task else []))
    [trajectory] = group.trajectories
    return trajectory


def fake(playing: Rollout) -> FakeEngine:
    assert isinstance(playing.engine, FakeEngine)
    return playing.engine


def assert_exact(trajectory: Trajectory, engine: FakeEngine) -> None:
    """The record is what the engine consumed and produced, token by token, and nothing else is an action."""
    mine = f"/{trajectory.task.id}/{trajectory.attempt}/"
    requests = [call for call in engine.calls if mine in (call.session or "")]
    for sequence in trajectory.sequences:
        mask: list[bool] = []
        logprobs: list[float] = []
        read: list[int] = []
        for segment in sequence.segments:
            is_action = segment.kind is SegmentKind.ACTION
            if is_action:
                request = requests.pop(0)
                assert list(request.consumed) == read
                assert segment.tokens == request.completion.tokens
                assert segment.finish is request.completion.finish
                assert segment.versions == request.completion.versions
                logprobs += request.completion.logprobs
            else:
                logprobs += [0.0] * len(segment.tokens)
            read += segment.tokens
            mask += [is_action] * len(segment.tokens)
        assert sequence.tokens == read
        assert sequence.action_mask == mask
        assert sequence.logprobs == logprobs
    assert requests == [], "the engine produced an action that is not in the record"
