"""Whole episodes with a memory: played, and played again without the tools."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from recording_samples import Notebook

from ludus.chat import Renderer, load_format
from ludus.core import Boundary, ByteTokenizer, ConfigError, Task, ToolCall, ToolSet, Trajectory
from ludus.engine import FakeEngine
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools.recording import Label, Mode, RecordedTools, RecordingConfig, recorded


@reward
def one() -> float:
    """Every episode is worth 1."""
    return 1.0


def wrap(config: RecordingConfig, tools: ToolSet | None) -> RecordedTools:
    return recorded(tools, config.path, **config.options)


def rollout(tools: ToolSet, *, seed: int = 0) -> Rollout:
    """Two turns of random calls, the same for the same attempt and seed; then an answer."""
    tokenizer = ByteTokenizer()
    format = load_format("hermes")
    turns: Counter[str | None] = Counter()

    def say(tokens: object, sampling: object, session: str | None) -> str:
        turns[session] += 1
        if turns[session] > 2:
            return "done<|im_end|>"
        source = random.Random(f"{seed} {session} {turns[session]}")
        names = source.choices(["write", "read", "upper", "nonsense"], k=3)
        calls = [ToolCall(name, {"text": source.choice("ab")}) for name in names]
        return format.render_action("", calls) + "<|im_end|>"

    return Rollout(
        engine=FakeEngine(say, tokenizer),
        renderer=Renderer(tokenizer, format),
        scorer=Scorer([one]),
        tools=tools,
        budgets=Budgets(max_turns=4, max_tokens=8_000),
        attempts=4,
    )


async def played(tools: ToolSet, *, seed: int = 0) -> list[Trajectory]:
    tasks = [Task.of("go", id=str(number)) for number in range(3)]
    groups = [group async for group in rollout(tools, seed=seed).groups(tasks, seed=7)]
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    return sorted(episodes, key=lambda trajectory: (trajectory.task.id, trajectory.attempt))


async def test_a_run_is_played_again_token_by_token_without_its_tools(tmp_path: Path) -> None:
    config = RecordingConfig(path=str(tmp_path / "calls.sqlite"), mode=Mode.RECORD, stateless=("upper",))
    recording = wrap(config, Notebook(pause=random.Random(1)))
    first = await played(recording)
    assert all(trajectory.failure is None for trajectory in first)
    replaying = wrap(config.model_copy(update={"mode": Mode.REPLAY}), None)
    again = await played(replaying)
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert replaying.statistics.hits > 20 and replaying.statistics.misses == 0
    await recording.aclose()
    await replaying.aclose()


async def test_another_policy_reuses_what_it_can_and_gets_the_truth(tmp_path: Path) -> None:
    config = RecordingConfig(path=str(tmp_path / "calls.sqlite"), stateless=("upper",))
    first = wrap(config, Notebook(pause=random.Random(1)))
    await played(first, seed=0)
    second = wrap(config, Notebook(pause=random.Random(2)))
    cached = await played(second, seed=1)
    bare = await played(RecordedTools(Notebook(), _Forgetful(), stateless=["upper"]), seed=1)
    assert [one.tokens for one in cached] == [one.tokens for one in bare]
    assert second.statistics.hits > 0 and second.statistics.caught_up > 0
    assert second.statistics.diverged == 0
    await first.aclose()
    await second.aclose()


async def test_a_miss_is_a_failure_of_ours_not_a_reward(tmp_path: Path) -> None:
    config = RecordingConfig(path=str(tmp_path / "calls.sqlite"), mode=Mode.RECORD)
    recording = wrap(config, Notebook())
    await played(recording, seed=0)
    replaying = wrap(config.model_copy(update={"mode": Mode.REPLAY}), None)
    failures = [one.failure for one in await played(replaying, seed=1) if one.failure is not None]
    assert failures and all(failure.boundary is Boundary.TOOL for failure in failures)
    assert all("no recorded result" in failure.message for failure in failures)
    await recording.aclose()
    await replaying.aclose()


def test_a_recipe_that_is_wrong_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode"):
        RecordingConfig.parse({"path": "x", "mode": "playback"})
    with pytest.raises(ConfigError, match="did you mean 'stateless'"):
        RecordingConfig.parse({"path": "x", "statless": []})


class _Forgetful:
    """A store that keeps nothing."""

    async def get(self, key: str) -> bytes | None:
        return None

    async def put(self, key: str, data: bytes, *, label: Label | None, replace: bool) -> None:
        pass

    async def similar(self, label: Label, most: int) -> list[Label]:
        return []

    async def close(self) -> None:
        pass
