"""The task-set checker, and rewards from recipes."""

from __future__ import annotations

import pytest

from ludus.core import ConfigError, Task
from ludus.rewards import (
    GROUP_REWARDS,
    REWARDS,
    CountBonus,
    Format,
    FormatGate,
    RewardProblem,
    build_group_reward,
    build_reward,
    check_rewards,
    contains,
    exact_match,
    f1,
    numeric,
    reward,
    synthetic_episode,
)

TASKS = [Task.of("2+2?", "4"), Task.of("3+3?", "6"), Task.of("1+3?", "4")]


async def problems(tasks, rewards, **options):
    report = await check_rewards(tasks, rewards, **options)
    return [(finding.task, finding.problem) for finding in report.findings]


@pytest.mark.parametrize("made", [exact_match, f1, contains, numeric])
async def test_a_good_task_set_passes(made):
    report = await check_rewards(TASKS, [made])
    assert report.ok
    assert str(report) == "3 tasks, 11 answers scored, 0 problem(s)"


async def test_neighbours_with_the_same_answer_are_not_wrong_answers():
    report = await check_rewards(TASKS[:1] + TASKS[2:], [exact_match])
    assert (report.ok, report.episodes) == (True, 6)


async def test_a_reward_that_pays_for_anything_is_found():
    assert set(await problems(TASKS[:1], [reward(lambda: 1, name="kind")])) == {
        ("0", RewardProblem.WRONG_PASSES)
    }


async def test_a_gold_answer_that_fails_is_found_and_its_parts_are_shown():
    tasks = [Task.of("?", "four", id="spelt"), Task.of("?", 4, id="digit")]
    report = await check_rewards(tasks, [numeric])
    assert {f.task for f in report.findings} == {"spelt"}
    assert "the target holds no number" in str(report)
    report = await check_rewards(tasks, [exact_match.using(weight=0.5)])
    assert [f.problem for f in report.findings] == [RewardProblem.GOLD_FAILS] * 2
    assert "'exact_match': 1.0" in str(report)
    assert (await check_rewards(tasks, [exact_match.using(weight=0.5)], threshold=0.5)).ok


async def test_missing_targets_broken_and_silent_rewards_are_found():
    def broken():
        raise OSError("no judge")

    assert ("0", RewardProblem.NO_GOLD) in await problems([Task.of("?")], [exact_match])
    assert set(await problems(TASKS[:1], [reward(broken)])) == {("0", RewardProblem.BROKEN)}
    silent = reward(lambda: None, name="silent")
    assert set(await problems(TASKS[:1], [silent])) == {("0", RewardProblem.UNSCORED)}


async def test_gold_and_wrong_may_be_whole_trajectories():
    made = FormatGate(Format(tags=["answer"]), contains)

    def gold(task):
        return synthetic_episode(task, task.target, text=f"<answer>{task.target}</answer>")

    assert [p for _, p in await problems(TASKS, [made])] == [RewardProblem.GOLD_FAILS] * 3
    assert await problems(TASKS, [made], gold=gold) == []
    assert await problems(TASKS, [made], gold=gold, wrong=lambda task: [gold(task)]) == [
        (str(i), RewardProblem.WRONG_PASSES) for i in range(3)
    ]


async def test_environments_are_made_for_rewards_that_read_them():
    @reward
    def state(env, answer):
        return float(env[answer]) if answer in env else 0.0

    assert await problems(TASKS, [state], envs=lambda task: {"e": {task.target: True}}) == []


async def test_nothing_to_check_is_an_error():
    with pytest.raises(ValueError, match="no tasks"):
        await check_rewards([], [exact_match])


def test_every_short_name_loads():
    for registry in (REWARDS, GROUP_REWARDS):
        for name in registry:
            assert callable(registry.load(name))


def test_recipes_build_rewards_with_options():
    made = build_reward({"reward": "numeric", "rel_tol": 0.1, "weight": 0.5, "name": "sum"})
    assert (made.name, made.weight, made("95", 100)) == ("sum", 0.5, 1.0)
    assert build_reward("exact_match") is exact_match
    assert build_reward(exact_match) is exact_match
    counting = build_group_reward({"reward": "count_bonus", "decay": 0.5})
    assert isinstance(counting, CountBonus) and counting.decay == 0.5
    with pytest.raises(ConfigError, match="'decay'"):
        build_group_reward({"reward": "curiosity", "decay": 0.5})
    assert build_group_reward("ranking").name == "ranking"


async def test_recipes_nest_rewards(episode):
    made = build_reward(
        {
            "reward": "format_gate",
            "format": {"reward": "format", "tags": ["answer"]},
            "inner": {"reward": "tool_bonus", "inner": "contains", "bonus": 0.2},
            "penalty": -0.5,
        }
    )
    trajectory = episode("<answer>Rome</answer>", turns=[["search"], []])
    assert await made.score(trajectory, trajectory.task, {}) == {
        "format_gate": 0.2,
        "format": 1.0,
        "tool_bonus": 0.2,
        "contains": 0.0,
    }


def test_recipes_name_functions_in_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def loud(answer):\n    return float(answer.isupper())\n")
    made = build_reward(f"{file}:loud")
    assert (made.name, made("A")) == ("loud", 1.0)
    with pytest.raises(ConfigError, match="@reward"):
        build_reward({"reward": f"{file}:loud", "weight": 2})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_mach", "Did you mean 'exact_match'"),
        ({"reward": "format", "tagz": ["a"]}, "'tagz'.*its options are: tags"),
        ({"reward": "numeric", "tolerance": 1}, "no option 'tolerance'; it has:.*rel_tol"),
        ({"reward": "efficiency"}, "missing a required argument"),
        ({"weight": 1.0}, "key 'reward' names it"),
    ],
)
def test_wrong_recipes_name_the_fix(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_reward(spec)
