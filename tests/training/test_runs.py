"""Whole runs: what they leave behind, and that going on after a stop changes nothing."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_runs import assert_same_runs
from training_helpers import TINY, add, even, expert, tasks
from transformers import AutoTokenizer

import ludus
from ludus.chat import HFTokenizer, Renderer, load_format, load_tokenizer
from ludus.core import ByteTokenizer, ConfigError, LudusError, Message, Sampling
from ludus.core.config import apply_overrides
from ludus.engine import FakeEngine
from ludus.engine.servers import TranscriptTokenizer
from ludus.envs import Step
from ludus.observe import RunFolder
from ludus.observe.metrics import undefined
from ludus.training import (
    Learner,
    OptimizerConfig,
    Parts,
    Recipe,
    RunProgress,
    ScratchConfig,
    build_rollout,
    fit_tokenizer,
    load_parts,
    save_model,
    scratch_model,
    trajectory_of,
)
from ludus.training.api import resolve
from ludus.training.checkpoint import check_extension, finished_text
from ludus.training.config.parts import demonstrations_of, resolve_part
from ludus.training.config.recipe import load_recipe
from ludus.training.early_end import best_of, idle_patience, is_exhausted
from ludus.training.models.scratch import scratch_parameters


def settings(folder: Path, **tables: Any) -> dict[str, Any]:
    merged = {**TINY, **tables}
    merged["run"] = {**TINY["run"], **tables.get("run", {}), "folder": str(folder)}
    merged["rl"] = {**TINY["rl"], **tables.get("rl", {})}
    return merged


def code() -> dict[str, Any]:
    return {"tasks": tasks(6), "held_out": tasks(2, first=50), "tools": [add], "rewards": [even]}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_is_a_folder(tmp_path: Path, real_curves: None) -> None:
    result = ludus.train(**settings(tmp_path / "run"), **code(), demonstrations=expert,
                         warm_start={"steps": 2, "batch": 2})  # fmt: skip
    run = RunFolder(tmp_path / "run")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2, 3, 4, 5]
    assert result.model == run.checkpoints()[-1].path
    rows = run.metrics()
    assert [row["step"] for row in rows if "reward" in row] == [3, 4, 5]
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 2, 5]
    logged = {name for row in rows for name in row} - {"step", "time", "nonfinite"}
    assert undefined(logged) == [], "every number that is logged has a written definition"
    assert run.curve_path.read_bytes().startswith(b"\x89PNG")
    assert "after the warm start" in run.report_path.read_text()
    episodes = run.trajectories(4)
    assert len(episodes) == 6 and all(t.reward is not None for t in episodes)
    reloaded = ludus.rollout(model=str(result.model), tasks=tasks(1), tools=[add], rewards=[even],
                             budgets=TINY["budgets"], attempts=2)  # fmt: skip
    assert len(reloaded[0].trajectories) == 2


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """With one episode at a time nothing depends on timing, and the weights are equal bit by bit."""
    whole = settings(tmp_path / "whole", max_in_flight=1)
    ludus.train(**whole, **code())
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{step:06d}")
    ludus.train(resume=tmp_path / "cut", **code())
    old, new = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert [c.step for c in new.checkpoints()] == [0, 1, 2, 3]
    for name, value in weights(old.checkpoints()[-1].path).items():
        assert torch.equal(value, weights(new.checkpoints()[-1].path)[name]), name
    steps = [row["step"] for row in new.metrics() if "reward" in row]
    assert steps == [1, 2, 3], "no step is recorded twice"
    rewards = [[row["reward"] for row in run.metrics() if "reward" in row] for run in (old, new)]
    assert rewards[0] == rewards[1]


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    ludus.train(**settings(tmp_path / "run", rl={"steps": 2}), **code())
    run = RunFolder(tmp_path / "run")
    before = run.metrics()
    for file in run.checkpoints_path.glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
        ludus.train(resume=tmp_path / "run", **code())
    assert run.metrics() == before and before


def test_resuming_with_a_reference_keeps_the_first_one(tmp_path: Path) -> None:
    whole = settings(tmp_path / "whole", max_in_flight=1, rl={"kl": 0.5})
    ludus.train(**whole, **code())
    assert all("kl" in row for row in RunFolder(tmp_path / "whole").metrics() if "reward" in row)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000003")
    ludus.train(resume=tmp_path / "cut", **code())
    last = [RunFolder(tmp_path / name).metrics()[-2] for name in ("whole", "cut")]
    assert last[0]["kl"] == last[1]["kl"] > 0


def test_what_adapts_and_follows_goes_on_after_a_stop(tmp_path: Path) -> None:
    """An adaptive KL coefficient, a reference that follows the policy, epochs with an early stop."""
    followed = {
        "kl": {"weight": 0.5, "control": {"target": 1e-3, "horizon": 10}}, "steps": 4,
        "epochs": 3, "target_kl": 1e-3, "reference_sync": {"every": 2, "mixup_alpha": 0.5},
    }  # fmt: skip
    ludus.train(**settings(tmp_path / "whole", max_in_flight=1, rl=followed), **code())
    for done in (1, 3):
        cut = tmp_path / f"cut-{done}"
        shutil.copytree(tmp_path / "whole", cut)
        for step in range(done + 1, 5):
            shutil.rmtree(cut / "checkpoints" / f"step-{step:06d}")
        ludus.train(resume=cut, **code())
        assert_same_runs(tmp_path / "whole", cut)
    rows = [row for row in RunFolder(tmp_path / "whole").metrics() if "reward" in row]
    assert rows[0]["kl_coefficient"] == 0.5
    assert len({row["kl_coefficient"] for row in rows}) == 4
    assert any(row["updates"] < 3 for row in rows), "nothing was stopped early"


def test_a_reference_follows_the_policy(tmp_path: Path) -> None:
    """After step 2 it is the policy and the first reference in the shares that the recipe says."""
    sync = {"every": 2, "mixup_alpha": 0.25}
    ludus.train(
        **settings(tmp_path / "run", rl={"kl": 0.5, "steps": 3, "reference_sync": sync}), **code()
    )
    run = RunFolder(tmp_path / "run")
    start, _, policy, last = (weights(checkpoint.path) for checkpoint in run.checkpoints())
    for step, share in ((1, 0.0), (2, 0.25), (3, 0.25)):
        folder = run.checkpoints()[step].path
        reference = load_file(folder / "reference.safetensors")
        assert reference.keys() == start.keys()
        for name, value in reference.items():
            torch.testing.assert_close(value, share * policy[name] + (1 - share) * start[name])
    assert any(not torch.equal(last[name], start[name]) for name in start)


@pytest.mark.parametrize(
    ("rl", "told"),
    [
        ({"reference_sync": {}}, r"reference_sync would have no effect: kl\.weight = 0"),
        ({"kl": {"control": {"target": 0.1}}}, r"kl.control would have no effect: kl.weight = 0"),
        ({"target_kl": 0.1}, r"target_kl would have no effect"),
        ({"epochs": 10**23}, r"rl\.epochs.*1000"),
    ],
)
def test_settings_of_the_divergence_without_effect_are_refused(
    tmp_path: Path, rl: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        ludus.train(**settings(tmp_path / "run", rl=rl), **code())


def test_a_reference_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    ludus.train(**settings(tmp_path / "run", rl={"kl": 0.5}), **code())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    before = RunFolder(tmp_path / "run").metrics()
    shutil.rmtree(tmp_path / "run" / "stages")
    with pytest.raises(ConfigError, match=r"stages/0 is gone"):
        ludus.train(resume=tmp_path / "run", **code())
    assert RunFolder(tmp_path / "run").metrics()[:3] == before[:3]


def test_the_reference_of_a_stage_that_is_over_is_not_needed(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run")
    del tables["rl"]
    stages = [
        {"kind": "rl", **TINY["rl"], "steps": 1, "kl": 0.5},
        {"kind": "rl", **TINY["rl"], "steps": 1},
    ]
    ludus.train(**tables, stage=stages, **code())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    shutil.rmtree(tmp_path / "run" / "stages")
    result = ludus.train(resume=tmp_path / "run", **code())
    assert [row["step"] for row in result.metrics if "reward" in row] == [1, 2]


def test_a_resumed_run_that_is_refused_can_be_resumed_again(tmp_path: Path) -> None:
    ludus.train(**settings(tmp_path / "run"), **code())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    for wrong, problem in (({}, "made in Python"), ({**code(), "tasks": 3}, "tasks")):
        with pytest.raises(ConfigError, match=problem):
            ludus.train(resume=tmp_path / "run", **wrong)
    ludus.train(resume=tmp_path / "run", **code())


def test_a_run_that_lost_its_checkpoints_keeps_its_records(tmp_path: Path) -> None:
    ludus.train(**settings(tmp_path / "run"), **code())
    run = RunFolder(tmp_path / "run")
    before = run.metrics()
    shutil.rmtree(run.checkpoints_path)
    with pytest.raises(ConfigError, match="has recorded steps and has no checkpoint"):
        ludus.train(resume=tmp_path / "run", **code())
    assert run.metrics() == before and before


def test_imitation_that_was_cut_off_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", warm_start={"steps": 3, "batch": 2}, rl={"steps": 0})
    tables["run"]["checkpoint_every"] = 50
    both = code() | {"demonstrations": expert}
    ludus.train(**tables, **both)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    result = ludus.train(resume=tmp_path / "run", **both)
    assert [row["step"] for row in result.metrics if "sft/loss" in row] == [1, 2, 3]


def test_a_checkpoint_with_other_content_is_left_out(tmp_path: Path, capsys: Any) -> None:
    """Of the same size: only its checksum tells."""
    ludus.train(**settings(tmp_path / "run"), **code())
    file = tmp_path / "run" / "checkpoints" / "step-000003" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    ludus.train(resume=tmp_path / "run", **code())
    assert "optimizer.safetensors has other content than was written" in capsys.readouterr().err
    assert [c.step for c in RunFolder(tmp_path / "run").checkpoints()] == [0, 1, 2, 3]


def test_no_reference_is_loaded_without_a_weight(tmp_path: Path) -> None:
    ludus.train(**settings(tmp_path / "run", rl={"steps": 1}), **code())
    run = RunFolder(tmp_path / "run")
    assert not (run.path / "reference").exists()
    assert all("kl" not in row for row in run.metrics())


def test_too_many_failures_stop_the_run_and_name_the_cause(tmp_path: Path) -> None:
    @ludus.reward
    async def broken(answer: str) -> float:
        raise RuntimeError("the judge is on strike")

    parts = code() | {"rewards": [broken], "held_out": None}
    with pytest.raises(LudusError, match=r"max_failures(.|\n)*boundary 'reward'(.|\n)*on strike"):
        ludus.train(**settings(tmp_path / "run"), **parts)


def test_conversations_can_be_imitated(tmp_path: Path) -> None:
    """Files of conversations are rendered with the tokenizer that learns from them."""
    file = tmp_path / "demos.jsonl"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    conversation = [
        {"role": "user", "content": "1 plus 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    file.write_text(json.dumps({"messages": conversation}) + "\n")
    warm = {"demonstrations": str(file), "steps": 60, "batch": 4, "optimizer": {"learning_rate": 1e-2}}
    result = ludus.train(**settings(tmp_path / "run", rl={"steps": 0}, warm_start=warm), **code())
    losses = [row["sft/loss"] for row in result.metrics if "sft/loss" in row]
    assert losses[-1] < 0.1 < losses[0]
    played = ludus.rollout(model=str(result.model), tasks=[{"prompt": "1 plus 2?"}], tools=[add],
                           rewards=[even], budgets={**TINY["budgets"], "max_turn_tokens": 40},
                           sampling=Sampling(temperature=0))  # fmt: skip
    trajectory = played[0].trajectories[0]
    assert [call.name for call in trajectory.calls] == ["add"] and trajectory.answer == "3"


class Twice(ludus.Agent):
    async def run(self, episode: ludus.Episode) -> None:
        for _ in range(2):
            await episode.generate(max_tokens=5)


def test_two_messages_in_a_row_are_learned_as_they_are_played(tmp_path: Path) -> None:
    """Between them the model reads that it is its turn again, and that is not its own."""
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    asked = {"role": "user", "content": "1 plus 2?"}
    warm = {"steps": 1, "batch": 1}
    tables = settings(tmp_path / "run", rl={"steps": 0}, warm_start=warm)
    model = ludus.train(**tables, **code(), demonstrations=[[asked, *said]]).model
    (group,) = ludus.rollout(
        model=str(model), tasks=[{"prompt": "1 plus 2?"}], rewards=[even], agent=Twice()
    )
    played = group.trajectories[0].sequences[0].segments
    tokenizer = load_tokenizer(model)
    conversation = [Message.parse(message) for message in (asked, *said)]
    shown = (
        trajectory_of(conversation, Renderer(tokenizer, load_format("hermes")), []).sequences[0].segments
    )
    assert [segment.kind for segment in shown] == [segment.kind for segment in played]
    # what was played was cut off, so that the end of its turn is among what is read
    assert played[2].tokens[-len(shown[2].tokens) :] == shown[2].tokens
    texts = [tokenizer.decode(segment.tokens) for segment in shown]
    whole = tokenizer.inner.apply_chat_template([asked, *said], tokenize=False)
    assert "".join(texts).strip() == whole.strip()


ANSWER = [{"role": "user", "content": "1 plus 2?"}, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize("given", [[ANSWER], [{"messages": ANSWER}]])
def test_conversations_can_be_passed_as_dictionaries(tmp_path: Path, given: Any) -> None:
    tables = settings(tmp_path / "run", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    result = ludus.train(**tables, **code(), demonstrations=given)
    assert any("sft/loss" in row for row in result.metrics)


@pytest.mark.parametrize("name", ["add", "divide"])
def test_tools_that_a_run_does_not_have_are_told_of(tmp_path: Path, name: str, capsys: Any) -> None:
    call = {"function": {"name": name, "arguments": {"a": 1, "b": 2}}}
    shown = [ANSWER[0], {"role": "assistant", "tool_calls": [call]}]
    tables = settings(tmp_path / "run", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    ludus.train(**tables, **code(), demonstrations=[shown])
    told = "call tools that neither their rows nor this run have: divide" in capsys.readouterr().err
    assert told is (name == "divide")


def test_a_demonstration_that_is_none_is_named(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    wrong: Any = [ANSWER, ["user: 1 plus 2?"]]
    with pytest.raises(ConfigError, match="demonstration 2 is not a list of messages"):
        ludus.train(**tables, **code(), demonstrations=wrong)


@pytest.mark.parametrize("given", [5, [{"msgs": ANSWER}], ANSWER, [[{"role": "nobody", "content": ""}]]])
def test_what_is_no_conversation_is_refused(tmp_path: Path, given: Any) -> None:
    tables = settings(tmp_path / "run", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    with pytest.raises(ConfigError, match="demonstration"):
        ludus.train(**tables, **code(), demonstrations=given)


def test_a_file_of_demonstrations_can_be_a_path(tmp_path: Path) -> None:
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps({"messages": ANSWER}))
    tables = settings(tmp_path / "run", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    tables["run"]["folder"] = tmp_path / "run"
    result = ludus.train(**tables, **code(), demonstrations=file)
    assert any("sft/loss" in row for row in result.metrics)


@pytest.mark.parametrize("wrong", ["long", "silent"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_a_later_stage_cannot_read_is_refused_before_the_first(
    tmp_path: Path, kind: str, wrong: str
) -> None:
    long = [ANSWER[0], {"role": "assistant", "content": "3 " * 2000}]
    bad = long if wrong == "long" else [ANSWER[0]]
    stages: list[dict[str, Any]] = [{"kind": "rl", **TINY["rl"]}]
    shown: dict[str, Any] = {}
    if kind == "sft":
        stages.append({"kind": "sft", "steps": 1, "batch": 1})
        shown = {"demonstrations": [ANSWER, bad]}
    else:
        pairs = [{"chosen": ANSWER, "rejected": ANSWER}, {"chosen": ANSWER, "rejected": bad}]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        path = str(tmp_path / "pairs.jsonl")
        stages.append({"kind": "dpo", "steps": 1, "batch": 1, "pairs": path})
    shape = {**TINY["model"]["scratch"], "context": 1024}
    tables = settings(tmp_path / "run", model={"scratch": shape})
    del tables["rl"]
    played: list[str] = []
    with pytest.raises(ConfigError, match=r"demonstration 2|pair 2|line 2"):
        ludus.train(
            **tables, stage=stages, **code(), **shown, on_step=lambda phase, *_: played.append(phase)
        )
    assert played == []
    assert not (tmp_path / "run").exists(), "nothing was trained, so there is no run"


def test_an_expert_does_not_play_for_a_later_stage_before_the_first(tmp_path: Path) -> None:
    """Passed along, it stands in for the file that the stage names, which must not be there then."""
    seen: list[str] = []

    def watched(task: ludus.Task) -> Any:
        seen.append("expert")
        return expert(task)

    stages = [{"kind": "rl", **TINY["rl"], "steps": 1}, {"kind": "sft", "steps": 1, "batch": 1}]
    stages[1]["demonstrations"] = tmp_path / "shown.jsonl"  # a path inside a list of tables
    (tmp_path / "shown.jsonl").write_text(json.dumps({"messages": ANSWER}))
    tables = settings(tmp_path / "run", model=str(trained(tmp_path)))
    del tables["rl"]
    parts = code() | {"demonstrations": watched}
    ludus.train(**tables, stage=stages, **parts, on_step=lambda phase, *_: seen.append(phase))
    assert seen.index("RL") < seen.index("expert") < seen.index("warm start")


def trained(folder: Path) -> Path:
    """A model with a tokenizer, for which nothing has to be played first."""
    tables = settings(folder / "first", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    return ludus.train(**tables, **code(), demonstrations=[ANSWER]).model


def test_a_stage_imitates_what_it_names(tmp_path: Path) -> None:
    """What is passed stands in for what the first of them names, and serves those that name nothing."""
    for name in "bc":
        said = {"messages": [ANSWER[0], {"role": "assistant", "content": name}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(said))
    model, passed = str(trained(tmp_path)), [[ANSWER[0], {"role": "assistant", "content": "p"}]]
    tables = settings(tmp_path / "run", model=model)
    del tables["rl"]
    b, c = str(tmp_path / "b.jsonl"), str(tmp_path / "c.jsonl")
    for named, given, imitated in (
        ([None, b], passed, "pb"),
        ([b, c], passed, "pc"),
        ([b, None], passed, "pp"),
        ([b, c, b], None, "bcb"),
        ([b, None], None, "bb"),
    ):
        stages = [{"kind": "sft", "steps": 1, "batch": 1, "demonstrations": name} for name in named]
        recipe = resolve(None, {**tables, "stage": stages})
        parts = load_parts(recipe)
        parts.demonstrations = (
            resolve_part("demonstrations", given, recipe) if given else parts.demonstrations
        )
        found = [demonstrations_of(stage, recipe, parts) for stage in recipe.stages]
        assert "".join(shown[0][-1].content for shown in found) == imitated
    nothing = {"kind": "sft", "steps": 1, "batch": 1}
    with pytest.raises(ConfigError, match=r"stage\.0 has no demonstrations to imitate"):
        ludus.train(**tables, stage=[nothing, {**nothing, "demonstrations": b}], **code())


def test_what_the_first_stage_cannot_read_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    long = [ANSWER[0], {"role": "assistant", "content": "3 " * 5000}]
    tables = settings(
        tmp_path / "run", model=str(trained(tmp_path)), warm_start={"steps": 1, "batch": 1}
    )
    played: list[str] = []
    with pytest.raises(ConfigError, match="demonstration 1 has"):
        ludus.train(
            **tables, **code(), demonstrations=[long], on_step=lambda phase, *_: played.append(phase)
        )
    assert played == [] and not (tmp_path / "run").exists()


class LateTools(ludus.Env):
    """Its tools are known when it has a task."""

    async def reset(self, task: ludus.Task) -> None:
        self.made = [add]

    def tools(self) -> Any:
        return self.made


def test_an_expert_may_use_tools_that_only_a_task_brings(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", model=str(trained(tmp_path)), rl={"steps": 0})
    given = [ludus.Task.of("1 plus 2?", id="1", a=1, b=2, envs={"late": {}})]
    parts = {"tasks": given, "envs": {"late": LateTools}, "rewards": [even], "demonstrations": expert}
    result = ludus.train(**tables, **parts, warm_start={"steps": 1, "batch": 1})
    assert any("sft/loss" in row for row in result.metrics)


def test_a_run_whose_expert_broke_keeps_its_log(tmp_path: Path) -> None:
    def broken(task: ludus.Task) -> Any:
        raise ValueError("no idea")

    tables = settings(
        tmp_path / "run", model=str(trained(tmp_path)), warm_start={"steps": 1, "batch": 1}
    )
    with pytest.raises(LudusError, match=r"the expert failed on task .*no idea"):
        ludus.train(**tables, **code(), demonstrations=broken)
    assert "no idea" in RunFolder(tmp_path / "run").log_path.read_text()


def test_the_most_frequent_failure_of_an_expert_is_named(tmp_path: Path) -> None:
    given = tasks(4)

    def broken(task: ludus.Task) -> Any:
        raise ValueError("seldom" if task.id == given[0].id else "often")

    tables = settings(
        tmp_path / "run", model=str(trained(tmp_path)), warm_start={"steps": 4, "batch": 1}
    )
    with pytest.raises(LudusError, match=r"most often \(3 times\): .*often.* 4 of 4 tasks failed"):
        ludus.train(**tables, **{**code(), "tasks": given}, demonstrations=broken)


def test_an_expert_may_fail_on_some_tasks(tmp_path: Path) -> None:
    """Half of them, like the episodes of RL; what failed is no demonstration, and is told of."""

    def shaky(failing: set[str]) -> Any:
        def play(task: ludus.Task) -> Any:
            if task.id in failing:
                raise ValueError("no idea")
            yield "5"

        return play

    parts = {**code(), "demonstrations": shaky({"0", "3", "5"})}
    tables = {"model": str(trained(tmp_path)), "rl": {"steps": 0}}
    warm = {"steps": 2, "batch": 3}
    result = ludus.train(**settings(tmp_path / "run", warm_start=warm, **tables), **parts)
    assert any("sft/loss" in row for row in result.metrics)
    assert "of 3 of 6 tasks are left out" in RunFolder(tmp_path / "run").log_path.read_text()
    strict = settings(tmp_path / "strict", warm_start=warm, max_failures=0.4, **tables)
    with pytest.raises(LudusError, match=r"no idea.* 3 of 6 tasks failed; max_failures = 0\.4"):
        ludus.train(**strict, **parts)


def test_an_expert_that_goes_in_circles_is_cut_off_and_not_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.training.task_sets.EXPERT_TURNS", 20)

    def lost(task: ludus.Task) -> Any:
        while task.id in ("1", "4"):
            yield ludus.ToolCall("add", {"a": 1, "b": 1})
        yield "5"

    tables = {"model": str(trained(tmp_path)), "rl": {"steps": 0}}
    tables["warm_start"] = {"steps": 2, "batch": 3}
    ludus.train(**settings(tmp_path / "run", **tables), **code(), demonstrations=lost)
    said = RunFolder(tmp_path / "run").log_path.read_text()
    assert (
        "task '1': it came to no end within 20 turns" in said
        and "it repeats add(a=1, b=1)" in said
        and "of 2 of 6 tasks are left out" in said
    )


def test_an_expert_that_meets_nothing_but_errors_is_told_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.training.task_sets.EXPERT_TURNS", 20)

    class Broken(ludus.Env):
        def reset(self, task: ludus.Task) -> str:
            return "go"

        def step(self, action: str) -> Step:
            raise RuntimeError("boom in step")

    def stubborn(task: ludus.Task) -> Any:
        while True:
            yield ludus.ToolCall("step", {"action": "go"})

    tables = {
        "model": str(trained(tmp_path)),
        "rl": {"steps": 0},
        "warm_start": {"steps": 2, "batch": 3},
    }
    parts = {**code(), "envs": {"broken": Broken}, "tools": [], "demonstrations": stubborn}
    raised = r"the tool 'step' raised RuntimeError: boom in step \(.*test_runs.py:\d+ in step\)"
    with pytest.raises(LudusError, match=rf'it repeats step\(action="go"\); {raised}'):
        ludus.train(**settings(tmp_path / "run", **tables), **parts)


def test_demonstrations_follow_the_agents_loop(tmp_path: Path) -> None:
    class Twice(ludus.Agent):
        async def run(self, episode: ludus.Episode) -> None:
            await episode.generate()
            episode.observe("Sure?")
            episode.answer((await episode.generate()).answer)

    heard: list[str] = []

    def sure(task: ludus.Task) -> Any:
        heard.append((yield "4"))
        yield "5"

    tables = settings(tmp_path / "run", model=str(trained(tmp_path)), rl={"steps": 0})
    ludus.train(**tables, **code(), demonstrations=sure, agent=Twice(),
                warm_start={"steps": 3, "batch": 2})  # fmt: skip
    assert heard == ["Sure?"] * 6


class Paying(ludus.Env):
    """Pays for even actions alone: what it pays nothing is worth 0."""

    def reset(self, task: ludus.Task) -> str:
        return "Say something."

    def step(self, action: str) -> Step:
        return Step("so", reward=1.0 if len(action) % 2 else None, terminated=True)


def test_environments_may_pay_alone(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", rl={"steps": 1, "attempts": 6}, agent={"format": "plain"})
    result = ludus.train(**tables, tasks=tasks(2), envs={"paying": Paying})
    row = next(row for row in result.metrics if "reward" in row)
    assert 0 < row["reward"] < 1, "some were paid, and the others count as 0"
    played = RunFolder(tmp_path / "run").trajectories(row["step"])
    assert len(played) == 12 and {t.reward for t in played} == {0.0, 1.0}


def test_pools_are_set_by_a_recipe(tmp_path: Path) -> None:
    made = Recipe.parse(
        {**TINY, "agent": {"pools": {"paying": {"size": 3, "max_wait": 7, "max_uses": 1}}}}
    )
    rollout = build_rollout(made, Parts(envs={"paying": Paying, "other": Paying}), FakeEngine([]),
                            ByteTokenizer())  # fmt: skip
    pool, other = rollout.pools["paying"], rollout.pools["other"]
    assert (pool.size, pool.max_wait) == (3, 7.0)
    assert (other.size, other.max_wait) == (256, 300.0)
    tables = settings(tmp_path / "run", agent={"format": "plain", "pools": {"payin": {"size": 1}}})
    with pytest.raises(ConfigError, match=r"agent\.pools\.payin: there is no .*there are: paying"):
        ludus.train(**tables, tasks=tasks(2), envs={"paying": Paying})


def test_inline_turns_are_not_for_chat_servers() -> None:
    made = Recipe.parse({**TINY, "agent": {"format": "tags", "turns": "inline"}})
    with pytest.raises(ConfigError, match=r"a chat server cannot.*--tokenizer"):
        build_rollout(made, Parts(), FakeEngine([]), TranscriptTokenizer())


def test_a_file_of_another_kind_has_no_demonstrations(tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(json.dumps(ANSWER))
    tables = settings(tmp_path / "run", warm_start={"steps": 1, "batch": 1})
    with pytest.raises(ConfigError, match=r"in a file \.jsonl, .* not in .*shown\.yaml"):
        ludus.train(**tables, **code(), demonstrations=tmp_path / "shown.yaml")


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_the_model_cannot_read_is_refused(tmp_path: Path, kind: str) -> None:
    long = [ANSWER[0], {"role": "assistant", "content": "3 " * 800}]
    shape = {**TINY["model"]["scratch"], "context": 1024}
    tables = settings(tmp_path / "run", model={"scratch": shape})
    if kind == "sft":
        stage: dict[str, Any] = {"kind": "sft", "steps": 1, "batch": 1}
        match = "demonstration 2 has .* tokens, and the model can look at 1024"
    else:
        pairs = [{"chosen": ANSWER, "rejected": ANSWER}, {"chosen": ANSWER, "rejected": long}]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        stage = {"kind": "dpo", "steps": 1, "batch": 1, "pairs": str(tmp_path / "pairs.jsonl")}
        match = "what was rejected in pair 2 has .* tokens, and the model can look at 1024"
    tables = {name: value for name, value in tables.items() if name != "rl"}
    shown = {"demonstrations": [ANSWER, long]} if kind == "sft" else {}
    with pytest.raises(ConfigError, match=match):
        ludus.train(**tables, stage=[stage], **code(), **shown)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    tables = settings(tmp_path / "first", rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    base = ludus.train(**tables, **code(), demonstrations=[ANSWER]).model
    unmeasured = {name: part for name, part in code().items() if name != "held_out"}
    tokenizer = HFTokenizer(AutoTokenizer.from_pretrained(base)).inner
    tokenizer.add_tokens(["plus"])
    tokenizer.save_pretrained(base)
    tables = settings(tmp_path / "run", model=base, rl={"steps": 0}, warm_start={"steps": 1, "batch": 1})
    with pytest.raises(ConfigError, match=r"demonstration 1 holds the token .* and the model has"):
        ludus.train(**tables, **unmeasured, demonstrations=[ANSWER])


@pytest.mark.parametrize("kind", ["sft", "expert", "dpo", "kto"])
def test_a_batch_larger_than_the_data_is_warned_of_before_the_first_step(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [ANSWER[0], {"role": "assistant", "content": "4"}]
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"chosen": ANSWER, "rejected": wrong}))
    pairs = {"kind": "dpo", "loss": kind, "steps": 1, "batch": 3, "pairs": str(tmp_path / "pairs.jsonl")}
    is_sft = kind in ("sft", "expert")
    stage = {"kind": "sft", "steps": 1, "batch": 9} if is_sft else pairs
    shown = {"demonstrations": [ANSWER] if kind == "sft" else expert} if is_sft else {}
    tables = {name: table for name, table in settings(tmp_path / "run").items() if name != "rl"}
    ludus.train(**tables, stage=[stage], **code(), **shown)
    count = {"sft": 1, "expert": 6, "dpo": 1, "kto": 2}[kind]
    before, _, told = capsys.readouterr().err.partition(
        f"stage.0.batch = {stage['batch']} is larger than"
    )
    assert told.startswith(f" the data ({count} ") and f"Set stage.0.batch={count}, or less\n" in told
    assert "larger than the data" not in told and "1/1" in told and "1/1" not in before, "once, at first"


@pytest.mark.parametrize("shape", [{}, {"layers": 3, "width": 48, "heads": 6, "kv_heads": 3}])
def test_the_size_of_a_model_from_scratch_is_known_before_it_is_made(shape: dict[str, int]) -> None:
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 300)
    config = ScratchConfig(**shape)
    made = scratch_model(config, tokenizer, seed=0)
    assert scratch_parameters(config, len(tokenizer)) == sum(p.numel() for p in made.parameters())


class Weightless(torch.nn.Module):
    def save_pretrained(self, folder: Path) -> None:
        """There is nothing to save."""


def test_a_tokenizer_that_does_not_fit_on_the_disk_is_told(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(fit_tokenizer(["a plus b? add"] * 20, 400))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(LudusError, match=r"the tokenizer could not be written to .*too large"):
            save_model(tmp_path / "new", Weightless(), tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_optimizer_that_does_not_fit_on_the_disk_is_told_in_those_words(tmp_path: Path) -> None:
    layer = torch.nn.Linear(400, 400).bfloat16()  # its masters are float32
    learner = Learner(layer, OptimizerConfig(), 1)
    (tmp_path / "step").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(LudusError, match=r"the optimizer's state could not be written to .*"):
            learner.save(tmp_path / "step" / "optimizer.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("limit", "what"),
    [(5_000, "parquet|jsonl"), (60_000, "the model"), (120_000, "optimizer")],
)
def test_a_run_that_finds_no_room_says_where_and_how_to_go_on(
    tmp_path: Path, limit: int, what: str
) -> None:
    """A limit on the size of files stands in for a full disk: the system refuses the same writes."""
    tables = settings(tmp_path / "run", rl={"steps": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(LudusError) as raised:
            ludus.train(**tables, **code())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = str(raised.value)
    assert f"could not be written to {tmp_path / 'run'}, where " in said and "MiB are free" in said
    assert re.search(what, said) and "Make room, then go on with: ludus.train(resume=" in said
    ludus.train(resume=tmp_path / "run", **code())
    assert RunFolder(tmp_path / "run").checkpoints()[-1].step == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"modle": {}}, "did you mean 'model'"),
        ({"rl": {"step": 3}}, "rl.step: unknown key; did you mean 'steps'"),
        ({"rl": {"num_generations": 8}}, r"unknown key; did you mean 'rl\.attempts'"),
        ({"num_generations": 8}, r"unknown key; did you mean 'rl\.attempts'"),
        ({"rl": {"group_size": 8}}, r"unknown key; did you mean 'rl\.attempts'"),
        ({"rl": {"learning_rate": 1e-5}}, r"unknown key; did you mean 'rl\.optimizer\.learning_rate'"),
        (
            {"warm_start": {"learning_rate": 1e-5}},
            r"did you mean 'warm_start\.optimizer\.learning_rate'",
        ),
        ({"warm_start": {"batch_size": 8}}, r"did you mean 'warm_start\.batch'"),
        (
            {"stage": [{"kind": "dpo", "loss_type": "ipo"}]},
            r"stage\.0\.loss_type.* did you mean 'stage\.0\.loss'",
        ),
        ({"model": {"lora_r": 8}}, r"did you mean 'model\.lora\.rank'"),
        ({"rl": {"max_completion_length": 8}}, r"did you mean 'budgets\.max_turn_tokens'"),
        ({"rl": {"epsilon": 0.2}}, r"did you mean 'rl\.loss = { clip_low = 0\.2 }'"),
        ({"rl": {"beta": 0.1}}, r"rl.beta: unknown key; did you mean 'rl\.kl'"),
        ({"rl": {"steps": "many"}}, "rl.steps"),
        ({"rl": {"steps": "3"}}, "rl.steps: must be a whole number"),
        (
            {"rl": {"broken": {"no_answer": True}}},
            "rl.broken.no_answer: must be 'keep', 'mask' or 'verltool', or a number",
        ),
        (
            {"rl": {"broken": {"void_turn": "0.5"}}},
            "rl.broken.void_turn: must be 'keep', 'mask' or 'verltool'",
        ),
        ({"rl": {"optimizer": {"betas": ["0.9", 0.99]}}}, "rl.optimizer.betas.0: must be a number"),
        ({"model": {}}, "exactly one of model.name and model.scratch"),
        ({"sampling": {"top_p": 0.9}}, "importance ratios wrong"),
        ({"sampling": {"repetition_penalty": 1.1}}, "importance ratios wrong"),
        ({"sampling": {"temperature": 1e300}}, "sampling.temperature"),
        ({"sampling": {"temperature": 1e-320}}, "sampling.temperature"),
        ({"evaluation": {"temperature": 1e300}}, "evaluation.temperature"),
        ({"model": {"scratch": {"width": 30}}}, "even multiple"),
        ({"agent": {"format": "hermse"}}, "Did you mean 'hermes'"),
        ({"tasks": "nothing"}, "no source of data"),
        ({"rewards": ["exact_mach"]}, "exact_match"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ludus.train(**{**settings(tmp_path / "run"), **code(), **override})


def test_a_run_that_could_not_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is rewarded"):
        ludus.train(**settings(tmp_path / "a"), tasks=tasks(2), tools=[add])
    with pytest.raises(ConfigError, match="no \\[warm_start\\]"):
        ludus.train(**settings(tmp_path / "b"), **code(), demonstrations=expert)

    @ludus.reward
    async def silent(answer: str) -> None:
        return None

    with pytest.raises(ConfigError, match="every reward returned None"):
        ludus.train(**settings(tmp_path / "c"), **code() | {"rewards": [silent], "held_out": None})


def test_a_stopped_warm_start_goes_on_where_it_was(tmp_path: Path) -> None:
    """Bit by bit, as with RL: the checkpoint of an unfinished warm start holds its own optimizer."""
    warm = {"steps": 4, "batch": 2}
    both = code() | {"demonstrations": expert}
    ludus.train(
        **settings(tmp_path / "whole", max_in_flight=1, warm_start=warm, rl={"steps": 1}), **both
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{step:06d}")
    ludus.train(resume=tmp_path / "cut", **both)
    old, new = (RunFolder(tmp_path / name).checkpoints()[-1].path for name in ("whole", "cut"))
    for name, value in weights(old).items():
        assert torch.equal(value, weights(new)[name]), name


def test_single_things_need_no_list(tmp_path: Path) -> None:
    one = {"tasks": tasks(2), "tools": add, "rewards": even, "agent": ludus.Agent}
    result = ludus.train(**settings(tmp_path / "run", rl={"steps": 1}), **one)
    assert result.model.exists()


def test_the_recipe_survives_the_run_folder(recipe: Recipe, parts: Parts) -> None:
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe


def test_rewards_that_remember_go_on_where_they_were(tmp_path: Path) -> None:
    """The count bonus counts tool use over the whole run; a resumed run must not start counting anew."""
    curious = {**code(), "group_rewards": ["count_bonus"]}
    ludus.train(**settings(tmp_path / "whole", max_in_flight=1), **curious)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000003")
    ludus.train(resume=tmp_path / "cut", **code() | {"group_rewards": ["count_bonus"]})
    states = [
        (tmp_path / name / "checkpoints" / "step-000003" / "rewards.json").read_text()
        for name in ("whole", "cut")
    ]
    assert states[0] == states[1] != "{}"


def test_a_model_learns_to_call_inside_its_turn(tmp_path: Path) -> None:
    """Inline turns, from the expert's demonstrations to a step of RL: raw results, masked, exact."""

    @ludus.tool
    async def look(word: str) -> str:
        """Look a word up."""
        return word.strip() * 2

    def looking(task: ludus.Task) -> Any:
        found = yield ludus.ToolCall("look", {"word": "ab"})
        yield found

    tables = settings(tmp_path / "run", rl={"steps": 1}, agent={"format": "tags", "turns": "inline"})
    tables["budgets"] = {"max_turns": 4, "max_turn_tokens": 24, "max_tokens": 512}
    learning = {"learning_rate": 5e-3}
    given = [ludus.Task.of("Look up ab.", "abab", id=str(n)) for n in range(2)]
    ludus.train(**tables, tasks=given, tools=[look], rewards=["exact_match"], demonstrations=looking,
                warm_start={"steps": 40, "batch": 2, "optimizer": learning})  # fmt: skip
    run = RunFolder(tmp_path / "run")
    row = next(row for row in run.metrics() if "reward" in row)
    assert row["tool_calls"] > 0, "the demonstrations were learned"
    assert row["logprob_difference_max"] < 1e-3, "the trainer reads what the engine read"
    tokenizer = load_tokenizer(str(run.checkpoints()[-1].path))
    played = [t for t in run.trajectories(row["step"]) if t.calls and t.turns > 1]
    for trajectory in played:
        [sequence] = trajectory.sequences
        first, result = sequence.segments[1:3]
        if first.faults or first.finish != "stop_string":
            continue
        assert tokenizer.decode(result.tokens) == "\n<result>\nabab\n</result>\n"
        after = tokenizer.decode(sequence.tokens[len(sequence.segments[0].tokens) :])
        assert "<|im_start|>" not in after and result.logprobs is None
        return
    raise AssertionError("no episode called the tool")


# -- best checkpoint, early stopping, extending --------------------------------------------------------------


class Falling:
    """A reward that gives these values to the held-out tasks, one after each evaluation."""

    name = "success"

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.asked = 0

    async def score(self, trajectory: Any, task: Any, envs: Any) -> float:
        if int(task.id) < 50:
            return len(trajectory.actions[0].tokens) % 3
        self.asked += 1
        place = min((self.asked - 1) // 2, len(self.values) - 1)  # there are two held-out tasks
        return self.values[place]


def measured_code(values: list[float]) -> dict[str, Any]:
    return {**code(), "rewards": [Falling(values)]}


def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path) -> None:
    tables = settings(
        tmp_path / "run", rl={"steps": 6}, run={"checkpoint_every": 1, "keep_checkpoints": 1},
        evaluation={"every": 1},
    )  # fmt: skip
    result = ludus.train(**tables, **measured_code([0.0, 0.2, 1.0, 0.5, 0.5, 0.1, 0.1]))
    run = RunFolder(tmp_path / "run")
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2, 6]
    assert result.best == run.checkpoints_path / "step-000002" != result.model
    said = "Best checkpoint: `checkpoints/step-000002` (held-out success 100.0%, after 2 steps of RL)"
    assert said in run.report_path.read_text()


def test_the_best_checkpoint_may_be_the_warm_starts_and_is_said_to_be(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", rl={"steps": 1}, warm_start={"steps": 1, "batch": 1})
    result = ludus.train(**tables, **measured_code([0.0, 1.0, 0.5]), demonstrations=[ANSWER])
    assert result.best == tmp_path / "run" / "checkpoints" / "step-000001" != result.model
    assert result.report.best_stage == "after the warm start"
    assert "100.0%, after the warm start)" in RunFolder(tmp_path / "run").report_path.read_text()


def test_a_stage_ends_early_and_a_killed_run_knows_it(tmp_path: Path) -> None:
    """The state of best and patience is in the run's rows: a run that is cut goes on as it would have."""
    values = [0.0, 0.2, 1.0, 1.0, 0.5, 0.9, 0.9, 0.9, 0.9]
    tables = settings(
        tmp_path / "whole", rl={"steps": 8}, max_in_flight=1,
        run={"checkpoint_every": 1, "keep_checkpoints": 50}, evaluation={"every": 1, "patience": 3},
    )  # fmt: skip
    ludus.train(**tables, **measured_code(values))
    whole = RunFolder(tmp_path / "whole")
    assert max(row["step"] for row in whole.metrics()) == 5, "three evaluations after the best, step 2"
    assert whole.recipe()["rl"]["steps"] == 5
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut = RunFolder(tmp_path / "cut")
    cut_recipe = {**whole.recipe(), "rl": {**whole.recipe()["rl"], "steps": 8}}
    (tmp_path / "cut" / "recipe.json").write_text(json.dumps(cut_recipe))
    for step in (4, 5):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-{step:06d}")
    ludus.train(resume=tmp_path / "cut", **measured_code(values[4:]))
    assert max(row["step"] for row in cut.metrics()) == 5
    assert [c.step for c in cut.checkpoints()] == [c.step for c in whole.checkpoints()]
    for name, value in weights(whole.checkpoints()[-1].path).items():
        assert torch.equal(value, weights(cut.checkpoints()[-1].path)[name]), name
    with pytest.raises(ConfigError, match=r"set evaluation\.every"):
        Recipe.parse({**TINY, "evaluation": {"patience": 2}})


def test_a_run_that_stopped_early_trains_on_when_it_is_extended(tmp_path: Path) -> None:
    """Patience counts from the extension, in a run that is killed after it too."""
    tables = settings(
        tmp_path / "whole", rl={"steps": 8}, max_in_flight=1,
        run={"checkpoint_every": 1, "keep_checkpoints": 50}, evaluation={"every": 1, "patience": 2},
    )  # fmt: skip
    ludus.train(**tables, **measured_code([0.0, 1.0, 0.5, 0.5]))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    assert whole.recipe()["rl"]["steps"] == 3
    ludus.train(resume=whole.path, rl={"steps": 8}, **measured_code([0.5]))
    assert max(row["step"] for row in whole.metrics()) == 5, "two more evaluations without a new best"
    shutil.copytree(whole.path, cut.path)
    recipe = {**whole.recipe(), "rl": {**whole.recipe()["rl"], "steps": 8}}
    (cut.path / "recipe.json").write_text(json.dumps(recipe))
    for step in (4, 5):
        shutil.rmtree(cut.path / "checkpoints" / f"step-{step:06d}")
    ludus.train(resume=cut.path, **measured_code([0.5]))
    assert max(row["step"] for row in cut.metrics()) == 5
    for name, value in weights(whole.checkpoints()[-1].path).items():
        assert torch.equal(value, weights(cut.checkpoints()[-1].path)[name]), name


def test_a_rising_reward_is_progress_while_nothing_succeeds() -> None:
    recipe = Recipe.parse({**TINY, "rl": {"steps": 9}, "evaluation": {"every": 1, "patience": 2}})
    rewards = [0.0, 0.1, 0.2, 0.3, 0.3]
    rows = [{"step": n, "eval/success": 0.0, "eval/reward": r} for n, r in enumerate(rewards)]
    best = best_of(rows, recipe)
    assert best is not None and best.step == 3, "the highest reward, and the first of equal ones"
    assert not is_exhausted(rows, recipe, 0, 0)
    assert is_exhausted([*rows, {"step": 5, "eval/success": 0.0, "eval/reward": 0.2}], recipe, 0, 0)
    assert best_of([*rows, {"step": 5, "eval/success": 0.1, "eval/reward": 0.0}], recipe).step == 5  # type: ignore[union-attr]


def test_a_patience_that_cannot_act_is_told(tmp_path: Path) -> None:
    tables = settings(tmp_path / "run", rl={"steps": 2}, evaluation={"every": 1, "patience": 2})
    ludus.train(**tables, **code())
    told = RunFolder(tmp_path / "run").log_path.read_text()
    assert "evaluation.patience = 2 can never end a stage early" in told
    recipe = Recipe.parse({**TINY, "rl": {"steps": 3}, "evaluation": {"every": 1, "patience": 2}})
    assert idle_patience(recipe) is None


@pytest.mark.parametrize(
    ("stage", "key", "wrong"),
    [
        ({"kind": "sft", "epochs": 1.5}, "stage.0.epochs=3.0", "stage.0.epochs=1"),
        ({"kind": "sft", "steps": 4}, "stage.0.steps=8", "stage.0.batch=3"),
        ({"kind": "rejection", "rounds": 2, "steps": 3}, "stage.0.rounds=4", "stage.0.steps=6"),
        ({"kind": "eval"}, None, "stage.0.attempts=2"),
    ],
)
def test_what_a_finished_run_is_extended_by(stage: dict[str, Any], key: str | None, wrong: str) -> None:
    """The command that is suggested is one that is accepted."""
    raw = {**{name: table for name, table in TINY.items() if name != "rl"}, "stage": [stage]}
    recipe, done = Recipe.parse(raw), RunProgress(step=150, stage=0, done=150)
    counted = recipe
    if "epochs" in stage:  # 150 steps, as the data has it
        longer = recipe.stage[0].model_copy(update={"steps": 150, "epochs": None})
        counted = recipe.model_copy(update={"stage": (longer,)})
    text = finished_text(recipe, counted, done, "RUN")
    assert text is not None
    if key is None:
        assert "cannot be extended" in text and "begin a new run" in text
    else:
        assert text.endswith(f"ludus train --resume RUN {key}")
        extended = Recipe.parse(apply_overrides(raw, [key]))
        check_extension(extended, [key.partition("=")[0]], RunProgress(step=4, done=4), recipe)
    with pytest.raises(ConfigError, match=r"cannot be changed|can only be raised"):
        check_extension(
            Recipe.parse(apply_overrides(raw, [wrong])), [wrong.partition("=")[0]], done, recipe
        )


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    """2 steps and then 1 more are 3 steps, bit by bit."""
    ludus.train(**settings(tmp_path / "whole", max_in_flight=1, rl={"steps": 3}), **code())
    ludus.train(**settings(tmp_path / "run", max_in_flight=1, rl={"steps": 2}), **code())
    result = ludus.train(resume=tmp_path / "run", rl={"steps": 3}, **code())
    assert [row["step"] for row in result.metrics if "reward" in row] == [1, 2, 3]
    assert RunFolder(tmp_path / "run").recipe()["rl"]["steps"] == 3
    whole = weights(RunFolder(tmp_path / "whole").checkpoints()[-1].path)
    for name, value in weights(result.model).items():
        assert torch.equal(value, whole[name]), name
    for wrong, problem in (({"rl": {"steps": 1}}, "has done 3 steps"), ({"seed": 3}, "seed cannot be")):
        with pytest.raises(ConfigError, match=problem):
            ludus.train(resume=tmp_path / "run", **wrong, **code())


def test_a_run_made_of_objects_says_which(tmp_path: Path) -> None:
    ludus.train(**settings(tmp_path / "run", rl={"steps": 1}), **code())
    told = RunFolder(tmp_path / "run").objects()
    assert told == {"tasks": "6 tasks", "held_out": "2 tasks", "tools": "add", "rewards": "even"}
    with pytest.raises(ConfigError, match=r"made in Python, .*tools = add; rewards = even"):
        ludus.train(resume=tmp_path / "run", tasks=tasks(6), held_out=tasks(2, first=50))


SINK = '''
import json

class Lines:
    """Writes what it is given to a file of its own."""

    def __init__(self, folder, recipe, first_step):
        self.file = (folder / "own.txt").open("a")
        self.write(first_step, {"name": recipe["name"]})

    def write(self, step, metrics):
        print(json.dumps([step, sorted(metrics)]), file=self.file)

    def close(self):
        self.file.close()
'''


def test_metrics_go_to_sinks_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SINK)
    own = {"sinks": [f"{tmp_path}/own.py:Lines"]}
    result = ludus.train(**settings(tmp_path / "run", run=own, rl={"steps": 1}), **code())
    rows = [json.loads(line) for line in (result.run.path / "own.txt").read_text().splitlines()]
    assert rows[0] == [0, ["name"]]
    assert [step for step, _ in rows[1:]] == [row["step"] for row in result.metrics]
    assert any("reward" in names for _, names in rows)
    with pytest.raises(ConfigError, match=r"^run\.sinks: .* has no 'Missing'"):
        own = {"sinks": [f"{tmp_path}/own.py:Missing"]}
        ludus.train(**settings(tmp_path / "other", run=own), **code())
    assert not (tmp_path / "other").exists()


def test_a_model_from_scratch_replaces_the_named_one_and_the_other_way_round() -> None:
    made = load_recipe("textcraft", ["model.scratch.layers=1", "model.scratch.width=64"]).model
    assert made.name is None and made.scratch is not None and made.scratch.layers == 1
    named = load_recipe("safe", ["model.name=smollm2"]).model
    assert named.name == "smollm2" and named.scratch is None
    with pytest.raises(ConfigError, match=r"exactly one of model\.name and model\.scratch"):
        load_recipe("textcraft", ["model.scratch.layers=1", "model.name=smollm2"])
