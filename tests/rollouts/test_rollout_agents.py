"""Agents: the default loop, agents of one's own, the two examples, and experts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import assert_exact, called, fake, play_one, renderer, rollout, tokenizer

from ludus.chat import Renderer, load_format
from ludus.core import (
    Boundary,
    ConfigError,
    Fault,
    FinishReason,
    Message,
    SegmentKind,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
)
from ludus.core.registry import import_object
from ludus.envs import EnvPool
from ludus.rollouts import Agent, Demonstrator, Episode
from ludus.tools import tool
from ludus.training import trajectory_of
from ludus.worlds.safe import Safe, expert, held_out_tasks, opened

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents.py"


def example(name: str) -> Any:
    return import_object(f"{EXAMPLES}:{name}")


@tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@tool
def finish() -> ToolResult:
    """End the episode."""
    return ToolResult("over", terminated=True, reward=0.5)


def said(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in trajectory.messages]


async def test_the_default_loop() -> None:
    trajectory = await play_one(rollout([called("double", number=4), "8"], tools=[double]))
    assert said(trajectory)[2:] == [("tool", "8"), ("assistant", "8")]
    assert trajectory.answer == "8" and trajectory.stop is StopReason.ANSWERED


async def test_a_tool_that_terminates_ends_the_episode() -> None:
    both = called("finish") + called("double", number=1)
    playing = rollout([both, "never asked"], tools=[double, finish])
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.TERMINATED and trajectory.turns == 1
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["over", "2"]
    assert trajectory.actions[0].reward == 0.5
    kinds = [segment.kind for segment in trajectory.sequences[0].segments]
    assert kinds == [SegmentKind.PROMPT, SegmentKind.ACTION], "what nobody reads is not rendered"


async def test_calls_beyond_the_limit_are_refused_one_by_one() -> None:
    many = "".join(called("double", number=n) for n in range(5))
    playing = rollout([many, "done"], tools=[double], budgets={"max_calls": 2})
    trajectory = await play_one(playing)
    contents = [m.content for m in trajectory.messages if m.role == "tool"]
    assert contents[:2] == ["0", "2"]
    assert all("at most 2 calls" in content for content in contents[2:]) and len(contents) == 5
    assert trajectory.actions[0].faults == (Fault.LIMIT,) * 3


async def test_turns_run_out() -> None:
    playing = rollout(
        lambda *_: called("double", number=1), tools=[double], budgets={"max_turns": 3, "remind": True}
    )
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.turns == 3
    read = playing.renderer.tokenizer.decode(fake(playing).calls[-1].consumed)
    assert [f"[{n} turn" in read for n in (3, 2, 1, 0)] == [True, True, True, False]
    assert "[1 turn left]" in read
    assert trajectory.messages[-1].role == "tool", "the last result is there for rewards to read"


async def test_tokens_run_out_before_an_observation_that_does_not_fit() -> None:
    @tool
    def recite() -> str:
        """Say very much."""
        return "la " * 100

    playing = rollout(
        lambda *_: called("recite"), tools=[recite], budgets={"max_tokens": 1500, "max_turns": 50}
    )
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert trajectory.turns > 1 and len(trajectory.tokens) <= 1500
    assert trajectory.action_mask[-1], "it ends with what the model said"
    assert trajectory.messages[-1].content.startswith("la la")


async def test_a_prompt_that_is_too_long_leaves_nothing_to_say() -> None:
    trajectory = await play_one(rollout(["done"], budgets={"max_tokens": 10}))
    assert trajectory.stop is StopReason.MAX_TOKENS and trajectory.turns == 0


async def test_an_agent_may_call_before_the_model_has_spoken() -> None:
    class Prefetch(Agent):
        async def run(self, episode: Episode) -> None:
            episode.observe(await episode.call([ToolCall("double", {"number": 21}), ToolCall("nobody")]))
            await super().run(episode)

    playing = rollout(["42"], tools=[double], agent=Prefetch())
    trajectory = await play_one(playing)
    assert trajectory.failure is None
    assert trajectory.faults == [], "the model did not make these calls"
    assert "42" in playing.renderer.tokenizer.decode(fake(playing).calls[0].consumed)


async def test_faults_and_rewards_go_to_the_action_that_made_the_call() -> None:
    class Patient(Agent):
        """Lets the model speak twice, and only then runs what it asked for first."""

        async def run(self, episode: Episode) -> None:
            first = await episode.generate()
            await episode.generate()
            episode.observe(await episode.call(first.calls))
            await super().run(episode)

    playing = rollout([called("nobody") + called("pay"), "wait", "done"], tools=[pay], agent=Patient())
    trajectory = await play_one(playing)
    assert [a.faults for a in trajectory.actions] == [(Fault.UNKNOWN_TOOL,), (), ()]
    assert [a.reward for a in trajectory.actions] == [2.0, None, None]
    assert_exact(trajectory, fake(playing))


@tool
def pay() -> ToolResult:
    """Be paid."""
    return ToolResult("paid", reward=2.0)


async def test_an_agents_own_limit_is_its_own_to_judge() -> None:
    class Curious(Agent):
        async def run(self, episode: Episode) -> None:
            turn = await episode.generate(max_tokens=4)
            assert turn.finish is FinishReason.LENGTH and turn.text == "a lo"
            episode.observe(Message("user", "Shorter!"))
            await super().run(episode)

    trajectory = await play_one(rollout(["a long story", "ok"], agent=Curious()))
    assert trajectory.answer == "ok" and trajectory.stop is StopReason.ANSWERED
    assert len(trajectory.actions[0].tokens) == 4


async def test_nothing_is_generated_after_the_end() -> None:
    class Eager(Agent):
        async def run(self, episode: Episode) -> None:
            await super().run(episode)
            assert episode.over
            await episode.generate()
            raise AssertionError("it went on after its answer")

    trajectory = await play_one(rollout(["done", "more"], agent=Eager()))
    assert trajectory.answer == "done" and trajectory.turns == 1 and trajectory.is_trainable


async def test_an_agent_that_just_returns_has_ended_the_episode() -> None:
    class Silent(Agent):
        async def run(self, episode: Episode) -> None:
            await episode.generate()

    trajectory = await play_one(rollout(["hm"], agent=Silent()))
    assert trajectory.stop is StopReason.TERMINATED and trajectory.answer is None


# The examples -----------------------------------------------------------------------------------------


async def test_plan_then_act() -> None:
    plan = "1. double it 2. answer " + called("double", number=1)
    playing = rollout(
        [plan, called("double", number=4), "8"], tools=[double], agent=example("PlanThenAct")()
    )
    trajectory = await play_one(playing)
    agent = example("PlanThenAct")
    users = [content for role, content in said(trajectory) if role == "user"]
    assert users == ["Go.", agent.ask, agent.begin]
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["8"], "the plan was not run"
    assert trajectory.answer == "8" and trajectory.turns == 3
    assert_exact(trajectory, fake(playing))


async def test_a_plan_without_end_is_cut_and_the_episode_goes_on() -> None:
    playing = rollout(["plan " * 400, "8"], agent=example("PlanThenAct")())
    trajectory = await play_one(playing)
    assert len(trajectory.actions[0].tokens) == 128 and trajectory.answer == "8"


async def test_reflect_and_retry() -> None:
    script = ["7", "No: 4 was to be doubled.", called("double", number=4), "8", "Yes."]
    playing = rollout(script, tools=[double], agent=example("ReflectAndRetry")())
    trajectory = await play_one(playing)
    agent = example("ReflectAndRetry")
    users = [content for role, content in said(trajectory) if role == "user"]
    assert users == ["Go.", agent.ask, agent.again, agent.ask]
    assert trajectory.answer == "8" and trajectory.turns == 5
    assert_exact(trajectory, fake(playing))


@pytest.mark.parametrize(("tries", "turns"), [(1, 1), (2, 3), (3, 5)])
async def test_reflection_ends_after_its_tries(tries: int, turns: int) -> None:
    playing = rollout(lambda *_: "wrong", agent=example("ReflectAndRetry")(tries))
    trajectory = await play_one(playing)
    assert trajectory.turns == turns and trajectory.answer == "wrong"


async def test_reflection_keeps_its_answer_when_turns_run_out() -> None:
    playing = rollout(lambda *_: "wrong", agent=example("ReflectAndRetry")(9), budgets={"max_turns": 4})
    trajectory = await play_one(playing)
    assert trajectory.turns == 3 and trajectory.stop is StopReason.ANSWERED


async def test_reflection_stops_when_the_environment_ends_the_episode() -> None:
    playing = rollout([called("finish")], tools=[finish], agent=example("ReflectAndRetry")())
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.TERMINATED and trajectory.turns == 1


# Experts ----------------------------------------------------------------------------------------------


async def test_an_expert_plays_real_episodes() -> None:
    pool = EnvPool(Safe, name="safe", size=4)
    playing = rollout(
        [],
        rewards=[opened],
        pools={"safe": pool},
        agent=Demonstrator(expert),
        budgets={"max_turns": 100, "max_tokens": 100_000},
    )
    for task in held_out_tasks()[:3]:
        trajectory = await play_one(playing, task)
        assert trajectory.reward == 1.0 and trajectory.stop is StopReason.TERMINATED
        assert trajectory.faults == []
        assert set(trajectory.logprobs) == {0.0}, "nobody sampled it"
        end = playing.renderer.tokenizer.stop_tokens[0]
        assert all(action.tokens[-1] == end for action in trajectory.actions)
    assert fake(playing).calls == []
    await pool.close()


@pytest.mark.parametrize("format", ["hermes", "llama3", "tags", "react"])
async def test_a_demonstration_reads_like_what_a_model_would_have_said(format: str) -> None:
    """Saying the expert's tokens gives the same episode: imitation is on what the model will meet."""

    def shown(task: Task) -> Generator[ToolCall | str, str, None]:
        heard = yield ToolCall("echo", {"text": "hi"})
        yield f"it said {heard}"

    @tool
    def echo(text: str) -> str:
        """Say it again.

        Args:
            text: What to say.
        """
        return text.upper()

    by = renderer("chatml", format)
    expert_plays = rollout([], tools=[echo], agent=Demonstrator(shown), rendered_by=by)
    demonstration = await play_one(expert_plays)
    assert demonstration.answer == "it said HI"
    model_plays = rollout([a.tokens for a in demonstration.actions], tools=[echo], rendered_by=by)
    played = await play_one(model_plays)
    assert played.answer == demonstration.answer and played.messages == demonstration.messages
    if format == "tags":
        # the model's turn ends with the tag and we add the end of turn, which the expert says himself
        assert [*played.tokens, by.end_of_turn] == demonstration.tokens
        assert sum(demonstration.action_mask) == sum(played.action_mask) + 2
    else:
        assert played.tokens == demonstration.tokens
        assert played.action_mask == demonstration.action_mask


async def test_an_expert_may_look_before_it_acts() -> None:
    def looks(task: Task) -> Generator[ToolCall | str | None, str, None]:
        seen = yield None
        heard = yield ToolCall("double", {"number": len(seen.split("?")[0])})
        yield f"{heard} for {seen}"

    trajectory = await play_one(
        rollout([], tools=[double], agent=Demonstrator(looks)), Task.of("abc?", id="t")
    )
    assert trajectory.answer is not None and trajectory.answer.endswith("abc?")
    assert trajectory.turns == 2 and trajectory.answer.split()[0] == str(
        2 * len(trajectory.answer.split(" for ", 1)[1].split("?")[0])
    )


async def test_an_expert_that_stops_early() -> None:
    def gives_up(task: Task) -> Generator[ToolCall | str, str, None]:
        yield ToolCall("double", {"number": 2})

    trajectory = await play_one(rollout([], tools=[double], agent=Demonstrator(gives_up)))
    assert trajectory.stop is StopReason.TERMINATED and trajectory.turns == 1


async def test_experts_of_two_episodes_think_at_the_same_time() -> None:
    both_think = threading.Barrier(2)

    def slow(task: Task) -> Generator[ToolCall | str, str, None]:
        both_think.wait(5)
        yield "done"

    playing = rollout([], agent=Demonstrator(slow))
    played = await asyncio.gather(*(play_one(playing, Task.of("go", id=name)) for name in "ab"))
    assert [trajectory.answer for trajectory in played] == ["done", "done"]


async def test_an_expert_may_be_cut_off_while_it_thinks() -> None:
    may_end = threading.Event()

    def endless(task: Task) -> Generator[ToolCall | str, str, None]:
        may_end.wait(10)
        yield "too late"

    playing = rollout([], agent=Demonstrator(endless), budgets={"max_seconds": 0.1}, retries=0)
    trajectory = await play_one(playing)
    may_end.set()
    assert trajectory.failure is not None and trajectory.failure.boundary is Boundary.DEADLINE


async def test_an_expert_whose_call_the_format_cannot_write() -> None:
    def lost(task: Task) -> Generator[ToolCall | str, str, None]:
        yield ToolCall("double", {"number": 2})

    @tool
    def echo(text: str) -> str:
        """Say it again."""
        return text

    by = renderer("bytes", "fenced")  # in which there is a way to call echo
    with pytest.raises(ConfigError, match="the expert calls 'double'"):
        await play_one(rollout([], tools=[double, echo], agent=Demonstrator(lost), rendered_by=by))
    with pytest.raises(ConfigError, match="'fenced' has no way to call double"):
        await play_one(rollout([], tools=[double], agent=Demonstrator(lost), rendered_by=by))


def inline(tokenizer_name: str, **options: Any) -> Renderer:
    """A renderer whose results stand raw in the turn that called, for a format of tags."""
    return Renderer(tokenizer(tokenizer_name), load_format("tags", **options), "keep", "inline")


@tool
def search(query: str) -> str:
    """Search."""
    return f"{query}: 1066<|im_end|>"


@pytest.mark.parametrize("name", ["bytes", "lossy", "chatml", "llama3", "forgetful"])
async def test_search_r1_thinks_on_in_the_same_turn(name: str) -> None:
    """Search-R1, and VerlTool's deep search: the result stands in the open thought, and is no action."""
    by = inline(name, tags={"search": "search.query"}, result="information")
    script = [
        "<think>I look it up. <search>hastings</search>never sampled",
        " Once more. <search> 1066 </search>",
        " So it is clear.</think><answer>1066</answer>",
    ]
    playing = rollout(script, tools=[search], rendered_by=by)
    trajectory = await play_one(playing)
    assert_exact(trajectory, fake(playing))
    assert trajectory.answer == "1066" and trajectory.stop is StopReason.ANSWERED
    assert trajectory.turns == 3 and len(trajectory.calls) == 2 and not trajectory.faults
    [sequence] = trajectory.sequences
    assert [s.kind.value for s in sequence.segments] == [
        "prompt",
        *["action", "observation"] * 2,
        "action",
    ]
    [prompt, *rest] = sequence.segments
    raw = "\n<information>\n{}: 1066<|im_end|>\n</information>\n"
    encode, decode = by.tokenizer.encode, by.tokenizer.decode
    plain = by.tokenizer.encode_text(" 1066 : 1066<|im_end|>")
    assert [t for t in rest[3].tokens if t in by.tokenizer.stop_tokens] == [], "a page cannot end a turn"
    if name != "lossy":
        said = ["<think>I look it up. <search>hastings</search>", *script[1:]]
        expected = said[0] + raw.format("hastings") + said[1] + raw.format(" 1066 ") + said[2]
        assert decode([t for s in rest for t in s.tokens]) == expected
        assert rest[3].tokens == [*encode("\n<information>\n"), *plain, *encode("\n</information>\n")]
    assert by.end_of_turn not in sequence.tokens[len(prompt.tokens) :], "the turn is never closed"
    mask = [segment.kind is SegmentKind.ACTION for segment in sequence.segments for _ in segment.tokens]
    assert sequence.action_mask == mask


async def test_retool_runs_code_inside_its_thought() -> None:
    """ReTool: `<code>` with a fenced block, answered by `<interpreter>`; a mistake is an observation too."""

    @tool
    def python(code: str) -> str:
        """Run code."""
        return str(eval(code))

    by = inline("chatml", tags={"code": "python.code"}, result="interpreter")
    script = [
        "<think>Let me see.\n<code>\n```python\n1 +\n```\n</code>",
        "\nA slip.\n<code>\n```python\n6 * 7\n```\n</code>",
        "\n</think>\n<answer>42</answer>",
    ]
    playing = rollout(script, tools=[python], rendered_by=by)
    trajectory = await play_one(playing)
    assert_exact(trajectory, fake(playing))
    assert trajectory.answer == "42" and trajectory.faults == [Fault.TOOL_RAISED]
    text = by.tokenizer.decode(trajectory.tokens)
    assert "</code>\n<interpreter>\n42\n</interpreter>\n\n</think>" in text
    assert text.count("<|im_start|>assistant") == 1 and "<|im_start|>tool" not in text


async def test_a_turn_that_the_model_ends_itself_goes_on_as_a_chat() -> None:
    by = inline("chatml", tags={"search": "search.query"})
    playing = rollout(
        ["<think>I give up<|im_end|>", "<answer>none</answer>"], tools=[search], rendered_by=by
    )
    trajectory = await play_one(playing)
    assert_exact(trajectory, fake(playing))
    assert trajectory.faults == [Fault.MALFORMED_CALL] and trajectory.answer == "none"
    text = by.tokenizer.decode(trajectory.tokens)
    assert "I give up<|im_end|>\n<|im_start|>user\n<result>\n" in text


@pytest.mark.parametrize("name", ["bytes", "chatml", "llama3"])
@pytest.mark.parametrize("opens", [False, True])
async def test_experts_write_what_an_inline_model_would(name: str, opens: bool) -> None:
    """An expert's call stays in the turn, and in the thought that the prompt opens, until it answers."""
    by = inline(name, tags={"search": "search.query"})
    if opens:
        by.features = replace(by.features, opens_thinking="<think>\n")

    def expert(task: Task) -> Generator[ToolCall | str, str, None]:
        found = yield ToolCall("search", {"query": "when?"})
        yield found.partition(": ")[2][:4]

    playing = rollout([], tools=[search], rendered_by=by, agent=Demonstrator(expert))
    trajectory = await play_one(playing)
    assert trajectory.answer == "1066"
    [_, call, read, answer] = trajectory.sequences[0].segments
    decode = by.tokenizer.decode
    assert decode(call.tokens) == "<search>\nwhen?\n</search>"
    assert decode(read.tokens) == "\n<result>\nwhen?: 1066<|im_end|>\n</result>\n"
    closing = "\n</think>\n\n" if opens else ""
    assert decode(answer.tokens[:-1]) == f"{closing}<answer>1066</answer>"
    assert answer.tokens[-1] == by.end_of_turn
    assert (call.finish, answer.finish) == (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN)
    # the conversation it is recorded as gives the same tokens when it is read from a file
    specs = [search.spec]
    shown = trajectory_of(trajectory.messages, by, specs)
    assert [s.tokens for s in shown.sequences[0].segments[1:]] == [
        s.tokens for s in trajectory.sequences[0].segments[1:]
    ]


async def test_an_expert_follows_the_agents_own_loop() -> None:
    """Demonstrations are of the loop that is trained: asked for a plan first, the expert gives one."""
    heard: list[str] = []

    def planner(task: Task) -> Generator[ToolCall | str, str, None]:
        heard.append((yield "First I double it."))
        heard.append((yield ToolCall("double", {"number": 4})))
        yield f"It is {heard[-1]}."

    loop = example("PlanThenAct")()
    playing = rollout([], tools=[double], agent=Demonstrator(planner, loop))
    trajectory = await play_one(playing)
    assert said(trajectory)[1:] == [
        ("user", loop.ask),
        ("assistant", "First I double it."),
        ("user", loop.begin),
        ("assistant", called("double", number=4)),
        ("tool", "8"),
        ("assistant", "It is 8."),
    ]
    assert heard == [loop.begin, "8"]
    assert trajectory.answer == "It is 8." and trajectory.stop is StopReason.ANSWERED
