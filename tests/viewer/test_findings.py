"""Findings that are none: PPO, single attempts, asynchronous and solved runs, SFT, DPO, resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import running_viewer, write_run

import ludus
from ludus.core import Fault, Group, Segment, SegmentKind, StopReason, Task, Trajectory
from ludus.core.trajectory import TokenSequence
from ludus.observe.console import numbers_text
from ludus.observe.findings import Finding, metric_findings
from ludus.viewer.run_view import planned_steps

Column = Callable[[int], float]


def rows(**columns: Column) -> list[dict[str, float]]:
    names = {name: name.replace("__", "/") for name in columns}
    return [{"step": n} | {names[name]: of(n) for name, of in columns.items()} for n in range(30)]


def found(given: list[dict[str, float]]) -> dict[str, Finding]:
    return {one.kind: one for one in metric_findings(given)}


def always(value: float) -> Column:
    return lambda n: value


def test_a_solved_run_is_told_as_solved_and_not_as_trouble() -> None:
    """GRPO that has solved its tasks has groups in which all succeed."""
    solved = rows(
        success=lambda n: min(1.0, n / 15),
        reward=lambda n: min(1.0, n / 15),
        reward_std=lambda n: 0.0 if n > 15 else 0.4,
        no_signal=lambda n: float(n > 15),
        without_advantage=lambda n: 1.0 if n > 15 else 0.3,
        groups_without_signal=lambda n: 1.0 if n > 15 else 0.3,
        entropy=lambda n: 1e-3 if n > 12 else 2.0,
        tokens__action=lambda n: 100 / (n + 1),
        truncated=always(0.9),
    )
    one = found(solved)
    assert set(one) == {"solved"} and one["solved"].severity == "note"
    assert "harder tasks" in one["solved"].detail and "easier" not in one["solved"].detail


@pytest.mark.parametrize(
    ("numbers", "said", "unsaid"),
    [
        ({"success": 0.0, "reward": 0.0, "reward_std": 0.0}, "easier tasks", "harder"),
        ({"success": 0.0, "reward": 0.5, "reward_std": 0.0}, "pays every episode the same", "easier"),
        ({"success": 0.5, "reward": 0.5, "reward_std": 0.5}, "almost deterministic", "easier"),
        ({"success": 1.0, "reward": 1.0, "reward_std": 0.0}, "harder tasks", "easier"),
    ],
)
def test_advice_fits_its_cause(numbers: dict[str, float], said: str, unsaid: str) -> None:
    detail = next(iter(found(rows(no_signal=always(1.0), **{n: always(v) for n, v in numbers.items()}))
                       .values())).detail  # fmt: skip
    assert said in detail and unsaid not in detail


def test_groups_are_no_matter_where_advantages_are_not_made_from_them() -> None:
    """PPO has a critic, REINFORCE a single attempt: groups are without signal, and nothing is lost by it."""
    usual = {
        "success": always(0.5),
        "reward": always(0.5),
        "reward_std": always(0.5),
        "no_signal": always(0.0),
    }
    assert found(rows(**usual, groups_without_signal=always(1.0), without_advantage=always(0.0))) == {}
    idle = found(rows(**usual, groups_without_signal=always(0.95), without_advantage=always(0.95)))
    assert set(idle) == {"no_signal"} and idle["no_signal"].severity == "warning"


def test_what_a_policy_is_paid_for_beside_success_is_no_hacking_once_it_succeeds() -> None:
    rising = {"reward": lambda n: 0.5 + n / 60, "success": always(0.97)}
    assert found(rows(**rising)) == {}
    graded = {"reward": lambda n: n / 40, "success": always(0.0)}
    assert found(rows(**graded)) == {}, "where no reward says what success is, 0% of totals reach 1"
    assert set(found(rows(**graded, reward__success=always(0.0)))) == {"reward_hacking"}


def test_shorter_answers_that_succeed_more_are_a_note() -> None:
    shrinking: dict[str, Column] = {"tokens__action": lambda n: 100 / (n + 1)}
    better = found(rows(**shrinking, success=lambda n: n / 40, reward=lambda n: n / 40))
    assert better["short"].severity == "note"
    assert (
        found(rows(**shrinking, success=always(0.2), reward=always(0.2)))["short"].severity == "warning"
    )


@pytest.mark.parametrize(
    ("turns", "tokens", "cut", "title", "advice", "stop"),
    [
        (0.0, 0.6, 0.6, "tokens in a turn", "Raise budgets.max_turn_tokens.", "max_tokens"),
        (0.0, 0.6, 0.0, "tokens in all", "Raise budgets.max_tokens.", "max_tokens"),
        (0.6, 0.0, 0.0, "turns", "Raise budgets.max_turns, or let budgets.remind tell the model.", "max_turns"),
        (0.2, 0.4, 0.4, "tokens in a turn or turns", "Raise budgets.max_turn_tokens or budgets.max_turns, or "
         "let budgets.remind tell the model.", "max_tokens"),
    ],
)  # fmt: skip
def test_a_truncated_run_names_the_budget_that_cut_it(
    turns: float, tokens: float, cut: float, title: str, advice: str, stop: str
) -> None:
    stops = {"stop__max_turns": always(turns), "stop__max_tokens": always(tokens)}
    seconds = {"stop__max_seconds": always(0.0)}
    one = found(rows(truncated=always(0.6), turn_cut=always(cut), **stops, **seconds))["truncated"]
    assert one.title == f"60.0% of the episodes run out of {title}"
    assert one.detail == advice and one.query == {"stop": stop}
    old = found(rows(truncated=always(0.6), **stops, **seconds))["truncated"]
    assert "budgets.max_turns, budgets.max_turn_tokens or budgets.max_tokens" in old.detail, (
        "not recorded"
    )


@pytest.mark.parametrize("stage", ["sft", "dpo", "rejection", "distill"])
def test_imitation_and_preferences_can_diverge_too(stage: str) -> None:
    fine = {f"{stage}__loss": always(1.0), f"{stage}__entropy": lambda n: 0.001 if n > 15 else 2.0}
    assert found(rows(**fine)) == {}
    broken = rows(**fine | {f"{stage}__loss": lambda n: float("nan") if n == 9 else 1.0})
    assert set(found(broken)) == {"diverged"} and "step 9" in found(broken)["diverged"].title


def test_progress_does_not_shout_at_a_solved_step() -> None:
    row = {"reward": 1.0, "success": 1.0, "no_signal": 1.0}
    assert "NO SIGNAL" not in numbers_text(row)
    assert "NO SIGNAL" in numbers_text({**row, "success": 0.0})


def test_a_stage_in_epochs_or_rounds_has_its_own_length() -> None:
    sft = {"kind": "sft", "steps": 100, "epochs": 2.0}
    rl = {"kind": "rl", "steps": 10, "epochs": 3}
    rejection = {"kind": "rejection", "steps": 5, "rounds": 4}
    assert planned_steps({"stage": [sft, rl]}) == 0, "the data say how many these are"
    assert planned_steps({"stage": [{**sft, "epochs": None}, rl, rejection]}) == 100 + 10 + 20


def faulty(task: int, answer: str, success: float, *faults: Fault) -> Trajectory:
    call = ludus.ToolCall("add", {})
    action = Segment(SegmentKind.ACTION, [1], [0.0], calls=(call,), faults=faults,
                     faulted=("add",) * len(faults))  # fmt: skip
    return Trajectory(
        Task.of("?", target=str(task), id=str(task)),
        [TokenSequence([Segment(SegmentKind.PROMPT, [2]), action])],
        answer=answer,
        stop=StopReason.ANSWERED,
        reward=success,
        rewards={"success": success},
    )


def kinds_of(folder: Path, steps: dict[int, list[Trajectory]]) -> set[str]:
    write_run(folder / "run", {n: [Group(t.task, [t]) for t in played] for n, played in steps.items()})
    with running_viewer(folder) as viewer:
        viewer.settled()
        return {one["kind"] for one in viewer.get("/api/run/run").json["findings"]}


def test_mistakes_that_a_model_has_unlearned_are_past(tmp_path: Path) -> None:
    wrong = [faulty(n, str(n), 0.0, Fault.MALFORMED_CALL) for n in range(12)]
    right = [faulty(n, str(n), 1.0) for n in range(3)]
    still = dict.fromkeys(range(1, 11), wrong)
    assert {"tool", "malformed"} <= kinds_of(tmp_path / "still", still)
    learned = still | dict.fromkeys(range(11, 20), right)
    assert not kinds_of(tmp_path / "learned", learned) & {"tool", "malformed"}


def test_one_answer_to_everything_is_fine_where_it_is_right(tmp_path: Path) -> None:
    """An agent that says "done" when it has done it."""
    done = {1: [faulty(n, "done", 1.0) for n in range(20)]}
    lazy: dict[int, list[Any]] = {1: [faulty(n, "done", 0.0) for n in range(20)]}
    assert "one_answer" not in kinds_of(tmp_path / "done", done)
    assert "one_answer" in kinds_of(tmp_path / "lazy", lazy)


def test_a_run_in_which_nothing_succeeds_needs_a_person(tmp_path: Path) -> None:
    """From the first silent step on; what an untrained model was measured at is no news."""
    silent = rows(no_signal=always(1.0), success=always(0.0), reward=always(0.0), reward_std=always(0.0))
    one = found(silent[:1])["no_signal"]
    assert one.severity == "error" and "0.0% succeed" in one.title
    assert found(rows(no_signal=always(1.0), success=always(0.95)))["no_signal"].severity == "note"
    lost = [faulty(n, str(n), 0.0) for n in range(20)]
    assert "never_succeeds" in kinds_of(tmp_path / "lost", {1: lost})
    assert "never_succeeds" not in kinds_of(tmp_path / "one", {1: [*lost, faulty(9, "a", 1.0)]})
    assert "never_succeeds" not in kinds_of(tmp_path / "few", {1: lost[:9]})
