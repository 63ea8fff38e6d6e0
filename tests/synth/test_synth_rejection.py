"""Rejection sampling to a dataset: planted duplicates, long and short successes, kills, and who can read it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from synth_parts import Action, Source, attempts, context, open_door, rollout, safe_task, turn
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core import ConfigError
from ludus.observe import read_trajectories
from ludus.rewards import Scorer, reward
from ludus.synth import METHODS, SynthFolder, load_method, provenance_of, write_result
from ludus.synth.rejection import RejectionSampling, RejectionSamplingConfig
from ludus.training import read_conversations, read_pairs

ONE, TWO, THREE = turn("red", 1), turn("green", 2), turn("blue", 3)
WASTE = [turn("red", number) for number in (9, 8, 7, 6, 5)]
PLANS: dict[int, list[Action]] = {
    0: [ONE, TWO, THREE, open_door()],
    1: [THREE, ONE, TWO, open_door()],  # the same set of actions in another order
    2: [*WASTE, ONE, TWO, THREE, open_door()],  # nine calls
    3: [ONE, TWO, open_door()],  # it stays shut
    4: [("", call) for _, call in [turn("red", 4), ONE, TWO, THREE, turn("blue", 3), open_door()]],
    5: [turn("green", 5), TWO, turn("blue", 9), THREE, ONE, open_door()],
}


def plan(task: str, attempt: int) -> list[Action]:
    return PLANS[attempt]


def settings(**given: Any) -> RejectionSamplingConfig:
    return RejectionSamplingConfig.parse({"attempts": len(PLANS), **given})


async def test_where_nothing_is_kept_the_limit_is_named(tmp_path: Path) -> None:
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(plan)))
    result = await RejectionSampling(settings(min_turns=50)).run(made)
    assert not result.kept and any("min_turns" in warning for warning in result.warnings)


async def test_planted_faults_are_left_out_each_with_its_reason(tmp_path: Path) -> None:
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(plan)))
    result = await RejectionSampling(settings()).run(made)
    assert attempts(result.kept) == [("a", 0), ("a", 5)]
    reasons = {one.trajectory.attempt: one.reason for one in result.rejected}
    assert reasons == {1: "duplicate", 2: "too_many_calls", 3: "failed", 4: "low_quality"}
    details = {one.reason: one.detail for one in result.rejected}
    assert details["duplicate"] == "1.00 like attempt 0 at task a"
    assert details["too_many_calls"] == "9 calls > 8" and details["low_quality"] == "0.20 < 0.6"
    assert result.numbers["success"] == pytest.approx(5 / 6) and result.numbers["clusters"] == 1
    assert provenance_of(result.kept[0])["quality"] == pytest.approx(0.5 * 0.6 + 0.5)
    assert provenance_of(result.kept[0])["difficulty"] == "easy", "5 of 6 attempts succeed"
    [(better, worse)] = result.pairs
    assert (better.attempt, worse.attempt) == (0, 3)
    assert made.cost.episodes == 6 and made.cost.tool_calls == sum(map(len, PLANS.values()))


SEARCHED = [turn("red", number) for number in (9, 8, 7, 6)]


@pytest.mark.parametrize(
    ("plans", "kept", "why"),
    [
        # useless turns first, and then what was enough alone
        ([[ONE, TWO], [*SEARCHED, ONE, TWO]], [0], "6 calls, where 2 were enough at the same task"),
        ([[*SEARCHED, ONE, TWO], [ONE, TWO]], [1], "6 calls, where 2 were enough at the same task"),
        # alone, it is known by calls that brought nothing
        ([[ONE, ONE, ONE, TWO]], [], "2 of 4 calls bring nothing"),
        # nothing shorter is known, and two calls more than the shortest are none too many
        ([[*SEARCHED, ONE, TWO]], [0], None),
        ([[ONE, TWO], [*SEARCHED[:2], ONE, TWO]], [0, 1], None),
        # a guess that is left out for its own reason is no measure for others
        ([["I guess: open."], [*SEARCHED, ONE, TWO]], [1], None),
    ],
)
async def test_a_wasteful_success_is_not_kept_beside_a_short_one(
    tmp_path: Path, plans: list[list[Action]], kept: list[int], why: str | None
) -> None:
    @reward(name="success")
    def always() -> float:
        return 1.0

    play = rollout(lambda task, attempt: [*plans[attempt], "Done."])
    play.scorer = Scorer([always])
    made = context(tmp_path / "s", Source([safe_task("a")], play))
    result = await RejectionSampling(settings(attempts=len(plans), max_similarity=1.0)).run(made)
    assert [number for _, number in attempts(result.kept)] == kept
    wasted = [one.detail for one in result.rejected if one.reason == "wasteful"]
    assert (why is None and not wasted) or (why is not None and wasted[0].startswith(why))


async def test_a_success_in_one_turn_teaches_nothing(tmp_path: Path) -> None:
    calls = [call for _, call in (ONE, TWO, THREE, open_door())]
    text = "I know it.\n" + "\n".join(
        f'<tool_call>\n{{"name": "{c.name}", "arguments": {json.dumps(c.arguments)}}}\n</tool_call>'
        for c in calls
    )
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(lambda task, attempt: [text])))
    result = await RejectionSampling(settings(attempts=1)).run(made)
    assert [(one.reason, one.detail) for one in result.rejected] == [("too_short", "1 turn(s) < 2")]


async def test_another_task_with_the_same_actions_is_a_duplicate_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    tasks = [safe_task("a"), safe_task("b")]
    made = context(tmp_path / "s", Source(tasks, rollout(plan)))
    everything = await RejectionSampling(settings(attempts=1)).run(made)
    assert attempts(everything.kept) == [("a", 0)]
    own = await RejectionSampling(settings(attempts=1, similar_to="task")).run(made)
    assert attempts(own.kept) == [("a", 0), ("b", 0)]


def _killed(folder: Path) -> None:
    """A process that is gone in the middle of the third task."""

    def dying(task: str, attempt: int) -> list[Action]:
        if task == "c":
            os.kill(os.getpid(), signal.SIGKILL)
        return plan(task, attempt)

    made = context(folder, Source([safe_task(name) for name in "abcd"], rollout(dying)))
    made.at_once = 1
    asyncio.run(RejectionSampling(settings(attempts=1)).run(made))


async def test_what_is_finished_is_not_played_again_after_a_kill(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(tmp_path / "s",))
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == -signal.SIGKILL
    again: list[str] = []

    def counting(task: str, attempt: int) -> list[Action]:
        again.append(task)
        return plan(task, attempt)

    made = context(tmp_path / "s", Source([safe_task(name) for name in "abcd"], rollout(counting)))
    result = await RejectionSampling(settings(attempts=1, similar_to="task")).run(made)
    assert attempts(result.kept) == [(name, 0) for name in "abcd"]
    assert set(again) == set("cd"), "the first two tasks were finished"
    assert made.cost.episodes == 4, "what was paid before the kill is counted"


async def test_a_damaged_part_is_made_again(tmp_path: Path) -> None:
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(plan)))
    await RejectionSampling(settings(attempts=1)).run(made)
    [part] = (tmp_path / "s" / "parts").rglob("*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    made.sources = [Source([safe_task("a")], rollout(plan))]
    result = await RejectionSampling(settings(attempts=1)).run(made)
    assert attempts(result.kept) == [("a", 0)]


async def test_stages_read_what_is_written(tmp_path: Path) -> None:
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(plan)))
    result = await RejectionSampling(settings()).run(made)
    hostile = replace(result.kept[0].messages[2], content="<script>alert(1)</script>")
    result.kept[0].messages[2] = hostile
    written = write_result(made.folder, "rejection sampling", result, made.cost)
    assert all(path.is_file() for path in written)
    shown = read_conversations(made.folder.examples_path)
    assert [len(one) for one in shown] == [9, 13], "a prompt, and an action and a result for each turn"
    [(chosen, rejected)] = read_pairs(made.folder.pairs_path)
    assert chosen[1].tool_calls[0].arguments == {"dial": "red", "to": 1} and len(rejected) == 7
    out = read_trajectories(made.folder.rejected_path)
    assert sorted(provenance_of(one)["rejected"] for one in out) == sorted(result.reasons)
    report = json.loads((tmp_path / "s" / "report.json").read_text())
    assert report["kept"] == 2 and report["yield"] == pytest.approx(1 / 3)
    page = made.folder.page_path.read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "9 calls &gt; 8" in page
    assert pq.read_table(made.folder.pairs_path).column_names == ["chosen", "rejected"]


def test_another_set_of_settings_needs_another_folder(tmp_path: Path) -> None:
    with SynthFolder(tmp_path / "s", {"attempts": 1}):
        pass
    with pytest.raises(ConfigError, match="examples of other settings:\n  attempts: 1 there, 2 now"):
        SynthFolder(tmp_path / "s", {"attempts": 2})
    with pytest.raises(ConfigError, match=r"no method of synthesis called 'rejectoin'\. Did you mean"):
        load_method("rejectoin")
    for name in METHODS:
        assert load_method(name).settings_type.__doc__


MODULE = '''
import ludus

@ludus.tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@ludus.reward(name="success")
async def lucky(trajectory) -> float:
    return float(trajectory.attempt % 2)

def tasks():
    return [ludus.Task.of(f"{n} plus {n}?", target=str(2 * n), id=str(n)) for n in range(3)]
'''
RECIPE = """
name = "adding"
threads = 1
rewards = ["task.py:lucky"]
[model.scratch]
layers = 1
width = 32
heads = 2
kv_heads = 1
[tasks]
train = "task.py:tasks"
[agent]
tools = ["task.py:add"]
[budgets]
max_turns = 2
max_turn_tokens = 8
[synth.rejection]
attempts = 4
min_turns = 1
"""


def test_the_command_goes_on_and_its_examples_are_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.training.report.plot_curve", lambda path, *_, **__: path.touch())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("task.py").write_text(MODULE)
    Path("recipe.toml").write_text(RECIPE)
    command = ["synth", "rejection", "recipe.toml", "synth.min_quality=0", "--out", "made"]
    for _ in range(2):
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert "3 of 3 were there already" in done.output and "made/examples.parquet" in done.output
    kept = read_trajectories("made/examples.parquet")
    assert kept and all(one.attempt % 2 for one in kept)
    trained = "train recipe.toml rl.steps=0 warm_start.steps=2 warm_start.batch=2 run.folder=run"
    done = CliRunner().invoke(
        app,
        [*trained.split(), "warm_start.demonstrations=made/examples.parquet"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    other = CliRunner().invoke(app, [*command, "synth.rejection.attempts=2"])
    assert "settings.attempts: 4 there, 2 now" in str(other.exception)
    wrong = CliRunner().invoke(app, [*command, "synth.atempts=2"])
    assert "did you mean 'attempts'" in str(wrong.exception)


def test_a_method_of_an_installed_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "outside_package"))
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(app, ["synth"]).output
    assert "first_try  " in listed and "rejection  Attempt each task many times;" in listed
    Path("task.py").write_text(MODULE)
    Path("recipe.toml").write_text(RECIPE)
    command = ["synth", "first_try", "recipe.toml", "synth.threshold=0", "--out", "made"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0 and "first try: yield" in done.output, done.output
    report = json.loads(Path("made/report.json").read_text())
    assert report["candidates"] == 3 and report["method"] == "first try"


def test_two_packages_cannot_register_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ludus.synth]\necho = other:Echo\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"two packages register the method of synthesis 'echo'.*other:Echo"
    ):
        load_method("rejection")
