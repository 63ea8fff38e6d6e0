from pathlib import Path
from runpy import run_path

import pytest
from observe_strategies import episode

from ludus.core import Boundary, Failure, Fault, Group, StopReason, Task, TokenSequence
from ludus.observe import SPLITS, definition_of, has_signal, prefixed, rollout_metrics
from ludus.observe.metrics import CATALOGUE, combine, undefined


def group(*episodes):
    return Group(Task.of("q", id="t"), list(episodes))


def batch():
    lost = Failure(Boundary.SANDBOX, "OSError", "gone")
    return [
        group(
            episode(reward=1.0, rewards={"success": 1.0, "format": 0.5}),
            episode(
                reward=0.0, rewards={"success": 0.0}, stop=StopReason.MAX_TURNS, faults=(Fault.LIMIT,)
            ),
            episode(reward=None, rewards={"success": 1.0}, stop=StopReason.FAILED, failure=lost),
        ),
        group(
            episode(reward=0.5, stop=StopReason.TERMINATED),
            episode(reward=0.5, stop=StopReason.TERMINATED),
            episode(reward=9.0, stop=StopReason.ABORTED),
            episode(reward=None),
        ),
    ]


def test_the_numbers_of_a_batch_by_hand():
    metrics = rollout_metrics(batch())
    expected = {
        "episodes": 7,
        "episodes_scored": 4,
        "reward": 0.5,
        "reward_std": 0.125**0.5,
        "reward/success": 0.5,
        "reward/format": 0.5,
        "success": 0.25,
        "turns": 2,
        "tool_calls": 1,
        "invalid_calls": 0.25,
        "invalid_call_share": 0.25,
        "fault/limit": 0.25,
        "fault/bad_arguments": 0,
        "fault_share/limit": 0.25,
        "stop/answered": 0.25,
        "stop/max_turns": 0.25,
        "stop/terminated": 0.5,
        "truncated": 0.25,
        "turn_cut": 0,
        "tokens/prompt": 4,
        "tokens/action": 3,
        "tokens/observation": 3,
        "groups_without_signal": 0.5,
        "failures": 1,
        "failure/sandbox": 1,
        "failure/engine": 0,
        "failure_share": 1 / 7,
        "aborted": 1,
        "unscored": 1,
        "seconds/generate": 0.5,
        "seconds/tools": 0.25,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_failed_episodes_change_no_mean():
    healthy = [group(*[t for t in g.trajectories if t.is_trainable]) for g in batch()]
    with_failures, without = rollout_metrics(batch()), rollout_metrics(healthy)
    lost = ("episodes", "failure", "aborted", "unscored")
    for name, value in without.items():
        if not name.startswith(lost):
            assert with_failures[name] == value, name


def test_success_can_be_defined_by_the_caller():
    assert rollout_metrics(batch(), success=lambda t: t.reward >= 0.5)["success"] == 0.75


def test_a_mean_over_nothing_is_left_out():
    empty = rollout_metrics([])
    assert empty["episodes"] == 0
    assert empty["failures"] == 0
    assert not {"reward", "success", "turns", "groups_without_signal", "failure_share"} & set(empty)
    lost = rollout_metrics([group(episode(reward=None))])
    assert "reward" not in lost
    assert lost["groups_without_signal"] == 1
    assert rollout_metrics([group()])["episodes"] == 0


def test_malformed_calls_count_as_calls():
    mute = episode(faults=(Fault.MALFORMED_CALL,) * 3)
    metrics = rollout_metrics([group(mute)])
    assert metrics["tool_calls"] == 3
    assert metrics["invalid_call_share"] == 1


def test_signal_needs_two_different_scores():
    assert not has_signal(group(episode()))
    assert not has_signal(group(episode(), episode(reward=None)))
    assert has_signal(group(episode(), episode(reward=0.0)))


def test_further_sequences_count():
    trajectory = episode()
    trajectory.sequences.append(TokenSequence(list(trajectory.sequences[0].segments)))
    assert rollout_metrics([group(trajectory)])["tokens/action"] == 6


def test_everything_that_is_measured_is_defined():
    metrics = rollout_metrics(batch())
    assert undefined(metrics) == []
    assert undefined(prefixed("eval", metrics)) == []


def test_definitions_are_found_by_name_family_and_split():
    assert definition_of("reward").name == "reward"
    assert definition_of("reward/a part/with a slash").name == "reward/<part>"
    assert definition_of("eval/reward/format").name == "reward/<part>"
    assert definition_of("sft/loss").name == "loss"
    assert definition_of("custom/anything").unit == "any"
    assert undefined(
        ["nonsense", "eval/nonsense", "rewards", "reward/", "elsewhere/reward", "loss"]
    ) == [
        "nonsense",
        "eval/nonsense",
        "rewards",
        "reward/",
        "elsewhere/reward",
    ]
    with pytest.raises(ValueError, match="a split is one of"):
        prefixed("elsewhere", {})


def test_the_catalogue_is_unambiguous():
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))
    assert all(metric.definition.endswith(".") and metric.unit for metric in CATALOGUE)
    assert not {name.partition("/")[0] for name in names} & set(SPLITS)
    for metric in CATALOGUE:
        assert definition_of(metric.name) == metric


def test_combining_follows_the_definitions():
    rows = [
        {"episodes": 2, "reward": 1.0, "logprob_difference_max": 3.0, "policy_version": 5, "own": 1.0},
        {"episodes": 3, "reward": 0.0, "logprob_difference_max": 1.0, "policy_version": 6},
    ]
    assert combine(rows) == {
        "episodes": 5,
        "reward": 0.5,
        "logprob_difference_max": 3.0,
        "policy_version": 6,
        "own": 1.0,
    }
    assert combine([]) == {}


def test_the_page_is_the_catalogue():
    root = Path(__file__).parents[2]
    made = run_path(str(root / "dev" / "metrics_page.py"))["catalogue_markdown"]()
    assert (root / "docs" / "metrics.md").read_text(encoding="utf-8") == made
