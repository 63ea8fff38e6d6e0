"""Format by tags and by pattern, and that no pattern can hang us."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, Message, StopReason, Task, Trajectory
from ludus.rewards import Format
from ludus.rewards.text_rewards import has_tags


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("<think>a</think><answer>b</answer>", True, True),
        (" <think>a</think>\n <answer></answer> ", True, True),
        ("x <think>a</think> y <answer>b</answer> z", True, False),
        ("<answer>b</answer><think>a</think>", False, False),
        ("<think>a</think>", False, False),
        ("<think>a<answer>b</answer></think>", False, False),
        ("<think>a</think><think>a</think><answer>b</answer>", False, False),
        ("<think>a</think><answer>b", False, False),
        ("</think>a<think><answer>b</answer>", False, False),
        ("<think>a</think><answer>b</answer></answer>", False, False),
        ("", False, False),
    ],
)
def test_tags(text, loose, strict):
    assert has_tags(text, ["think", "answer"]) is loose
    assert has_tags(text, ["think", "answer"], only=True) is strict


inner = st.text(alphabet=st.characters(blacklist_characters="<>"), max_size=20)


@given(st.lists(st.sampled_from(["plan", "think", "call", "answer"]), unique=True), inner)
def test_a_text_made_of_tags_has_them_and_no_other_order(tags, content):
    text = "".join(f"<{tag}>{content}</{tag}>" for tag in tags)
    assert has_tags(text, tags, only=True)
    if len(tags) > 1:
        assert not has_tags(text, tags[::-1])


def said(*turns):
    task = Task.of([Message("user", "hi"), Message("assistant", "<answer>shown</answer>")], "x")
    messages = [*task.messages, *(Message("assistant", turn) for turn in turns)]
    return Trajectory(task, messages=messages, stop=StopReason.ANSWERED)


async def scored(made, trajectory):
    return (await made.score(trajectory, trajectory.task, {}))["format"]


async def test_where_says_which_turns_count_and_the_tasks_own_do_not():
    last, every = Format(tags=["answer"]), Format(tags=["answer"], where="every")
    good, bad = "<answer>x</answer>", "x"
    for turns, on_last, on_every in (
        ([good], 1.0, 1.0),
        ([bad, good], 1.0, 0.0),
        ([good, bad], 0.0, 0.0),
        ([good, good], 1.0, 1.0),
        ([], 0.0, 0.0),
    ):
        assert await scored(last, said(*turns)) == on_last
        assert await scored(every, said(*turns)) == on_every


async def test_a_pattern_matches_the_whole_text_across_lines():
    made = Format(pattern=r"<think>.*</think>\s*<answer>\d+</answer>")
    assert await scored(made, said(" <think>a\nb</think>\n<answer>5</answer>\n")) == 1.0
    assert await scored(made, said("so <think>a</think><answer>5</answer>")) == 0.0
    assert await scored(made, said("<think>a</think><answer>5</answer> done")) == 0.0


@pytest.mark.timeout(60)
async def test_a_text_that_makes_the_pattern_backtrack_for_ever_scores_0_and_hangs_nobody(caplog):
    made = Format(pattern="(a+)+b")
    assert await scored(made, said("a" * 64)) == 0.0  # unscored, a policy could learn to write it
    assert "backtracks" in caplog.text
    assert await scored(made, said("aab")) == 1.0


async def test_a_text_beyond_the_limit_is_not_well_formed():
    for made in (Format(tags=["a"], max_chars=10), Format(pattern=".*", max_chars=10)):
        assert await scored(made, said("<a></a>" + " " * 10)) == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tags": ["a"], "pattern": "a"},
        {"tags": "answer"},
        {"tags": [""]},
        {"pattern": "("},
        {"tags": ["a"], "where": "first"},
    ],
)
def test_impossible_formats_are_refused(options):
    with pytest.raises(ConfigError, match="'format'"):
        Format(**options)


async def test_what_was_said_in_one_turn_can_be_read_as_one_text(episode):
    """Inline turns: a thought is opened in one action and closed in another, with a result between them."""
    trajectory = episode(turns=[["search"], []])
    first, last = [i for i, m in enumerate(trajectory.messages) if m.role == "assistant"]
    texts = {first: "<think>I ask <search>x</search>", last: "so</think><answer>4</answer>"}
    for place, text in texts.items():
        trajectory.messages[place] = Message("assistant", text)
    for where, score in (("last", 0.0), ("every", 0.0), ("joined", 1.0)):
        made = Format(tags=["think", "answer"], only=True, where=where)
        assert await made.score(trajectory, trajectory.task, {}) == {"format": score}
