"""What cannot work is refused before a run begins: no folder, no evaluation, no lost hour."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from training_helpers import TINY, even, expert, tasks

import ludus
from ludus.core import ConfigError
from ludus.training import check_parts

RL = {"kind": "rl", "steps": 1, "tasks": 2, "attempts": 2}
SFT = {"kind": "sft", "steps": 1}
INF, NAN = float("inf"), float("nan")


def refused(tmp_path: Path, *stages: dict[str, Any], **other: Any) -> str:
    """The message with which training is refused; there must be no run then, and nothing played."""
    played: list[str] = []

    @ludus.reward
    async def counted(trajectory: ludus.Trajectory) -> float:
        played.append(trajectory.task.id)
        return 1.0

    tables = {name: table for name, table in TINY.items() if name != "rl"}
    usual = {"tasks": tasks(2), "held_out": tasks(2, first=50), "rewards": [counted]}
    run = {"folder": str(tmp_path / "run")}
    with pytest.raises(ConfigError) as error:
        ludus.train(**{**tables, "stage": list(stages), "run": run, **usual, **other})
    assert not (tmp_path / "run").exists() and not played
    return str(error.value)


def test_imitation_without_demonstrations(tmp_path: Path) -> None:
    said = refused(tmp_path, RL, SFT)
    assert re.match(r"stage\.1 has no demonstrations to imitate: set stage\.1\.demonstrations", said)
    (tmp_path / "none.jsonl").write_text("")
    none = str(tmp_path / "none.jsonl")
    empty, measured = {**SFT, "demonstrations": none}, {**SFT, "held_out": none}
    for stages, key in (
        ([empty], "stage.0.demonstrations"),
        ([SFT, empty], "stage.1.demonstrations"),
        ([measured], "stage.0.held_out"),
    ):
        shown = {} if stages == [empty] else {"demonstrations": expert}
        assert refused(tmp_path, *stages, **shown).startswith(f"{key}: {none} is empty")
    tables = {name: table for name, table in TINY.items() if name != "rl"}
    with pytest.raises(ConfigError, match="warm_start has no demonstrations"):
        ludus.train(**tables, warm_start={"steps": 1}, tasks=tasks(2), rewards=[even])


def test_files_of_later_stages_are_looked_at_first(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.jsonl")
    later = {**SFT, "demonstrations": missing}
    assert "nothing.jsonl" in refused(tmp_path, SFT, RL, later, demonstrations=expert)
    given = {"kind": "dpo", "steps": 1}
    said = refused(tmp_path, RL, {**given, "pairs": missing})
    assert said.startswith("stage.1.pairs: ") and "nothing.jsonl" in said
    (tmp_path / "bad.jsonl").write_text(json.dumps({"chosen": []}))
    assert "line 1" in refused(tmp_path, RL, {**given, "pairs": str(tmp_path / "bad.jsonl")})


def test_a_model_behind_an_address_can_be_evaluated_only(tmp_path: Path) -> None:
    said = refused(tmp_path, RL, model={"name": "http://127.0.0.1:1/v1#m"})
    assert "can be evaluated only (ludus eval" in said and "name a folder" in said


def test_task_sets_have_their_own_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1?"}\n')
    sets = [{"name": "a", "train": str(tmp_path / "a.jsonl")}]
    assert "leave out tasks=" in refused(tmp_path, RL, task_sets=sets)
    said = refused(tmp_path, RL, task_sets=sets, tasks=None, held_out=None, rewards=None)
    assert "nothing is rewarded in the task set 'a'" in said
    said = refused(tmp_path, {"kind": "eval"}, task_sets=sets, tasks=None, held_out=None)
    assert "stage.0" in said and "nothing to measure on" in said


@pytest.mark.parametrize("name", ["stage", "task_sets"])
def test_lists_without_tables(tmp_path: Path, name: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{name} = []\n[model.scratch]\n")
    with pytest.raises(ConfigError, match=rf"{name} = \[\] has no table"):
        ludus.train(recipe)
    with pytest.raises(ConfigError, match=rf"{name} = \[\] has no table"):
        ludus.training.load_recipe(recipe)


def moving(setting: str, *values: float) -> dict[str, Any]:
    schedule = [[step, value] for step, value in enumerate(values)]
    return {**RL, "curriculum": [{"setting": setting, "schedule": schedule}]}


def graded(*difficulties: float | None) -> list[ludus.Task]:
    return [
        ludus.Task.of("1?", id=str(n), **({} if level is None else {"difficulty": level}))
        for n, level in enumerate(difficulties)
    ]


def test_a_curriculum_of_what_there_is_not(tmp_path: Path) -> None:
    said = refused(tmp_path, SFT, moving("rewards.strictness", 0.5), demonstrations=expert)
    assert said.startswith("stage.1.curriculum.0 moves rewards.strictness, but no reward takes it")
    said = refused(tmp_path, RL, moving("tasks.difficulty", 1))
    assert said.startswith("stage.1.curriculum.0 moves tasks.difficulty, but no task has a difficulty")
    said = refused(tmp_path, RL, moving("tasks.difficulty", 3, 1), tasks=graded(2, 3))
    assert said.startswith(
        "stage.1.curriculum.0: no task of the set 'tasks' has a difficulty of at most 1"
    )
    assert "'hard'" in refused(tmp_path, RL, moving("tasks.difficulty", 1), tasks=graded("hard"))


def test_curricula_that_can_be_run_are_not_refused() -> None:
    def strict(answer: str, *, strictness: float = 0.0) -> float:
        return strictness

    tables = {name: table for name, table in TINY.items() if name != "rl"}
    stages = [moving("tasks.difficulty", 1, 2), moving("rewards.strictness", 0.5, 1)]
    recipe = ludus.training.Recipe.parse({**tables, "stage": stages})
    parts = ludus.training.Parts(tasks=graded(None, 2), rewards=[ludus.reward(strict)])
    check_parts(recipe, parts)


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        (
            {"stage": [RL, {**RL, "optimizer": {"betas": [0.9, 1.0]}}]},
            "stage.1.optimizer.betas.1: must be",
        ),
        (
            {"stage": [{**SFT, "optimizer": {"betas": [-0.1, 0.9]}}]},
            "stage.0.optimizer.betas.0: must be",
        ),
        ({"rl": {"optimizer": {"learning_rate": INF}}}, "rl.optimizer.learning_rate: must be a finite"),
        ({"budgets": {"max_seconds": INF}}, "budgets.max_seconds: must be a finite number"),
        ({"evaluation": {"temperature": NAN}}, "evaluation.temperature: must be"),
        ({"stage": [{"kind": "rejection", "threshold": -INF}]}, "stage.0.threshold: must be a finite"),
        ({"rewards": [{"reward": "f1", "weight": INF}]}, "rewards.0.weight: must be a finite number"),
        ({"rl": {"loss": {"clip_low": NAN}}}, "rl: the options of the loss"),
        (
            {"stage": [{"kind": "rejection", "keep": 9}]},
            "stage.0: keep = 9 episodes of a task cannot be",
        ),
        ({"stage": [{"kind": "dpo", "pairs": "x", "attempts": 8}]}, "stage.0: attempts would have no"),
        (
            {"stage": [{"kind": "dpo", "pairs": "x", "margin": 1}]},
            "stage.0: margin would have no effect",
        ),
        ({"stage": [{"kind": "dpo", "batch": 2}]}, "stage.0: batch would have no effect"),
        (
            {"rl": {"algorithm": "ppo", "steps": 5, "critic": {"warmup_steps": 5}}},
            "rl: critic.warmup_steps = 5 leaves none of 5 step(s)",
        ),
        (
            {"rl": {"overlong": {"longest": 4097, "buffer": 512}}},
            "rl.overlong.longest: no episode says 4097 tokens; the budgets end it after 4096",
        ),
        (
            {"rl": {"attempts": 4, "tree": {}}, "budgets": {"max_turns": 1}},
            "rl.tree: a branch begins at a second turn or later, and budgets.max_turns = 1 allows none",
        ),
        (
            {"rl": {"algorithm": "reinforce", "attempts": 1, "refill": {}}},
            "rl: refill replaces groups whose rewards are all equal",
        ),
        ({"rl": {"algorithm": "dr_grpo"}}, "rl: dr_grpo divides by a fixed length"),
        ({"rl": {"optimizer": {"activation_memory": True}}}, "rl.optimizer.activation_memory: must be"),
        ({"stage": [{"kind": "eval", "pass_at": [9]}]}, "stage.0.pass_at: pass@k needs k attempts"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused_in_one_line(
    tables: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ludus.training.Recipe.parse({"model": {"scratch": {}}, **tables})
    said = str(error.value).splitlines()[1:]
    assert said[0].startswith(f"  {line}"), said
    assert sum(text.startswith("  ") and not text.startswith("    ") for text in said) == 1


@pytest.mark.parametrize(
    "tables",
    [
        {"rl": {"algorithm": "dr_grpo", "aggregation": "token"}},
        {"rl": {"algorithm": "dr_grpo", "aggregation": {"length": 64}}},
        {"rl": {"overlong": {"longest": 4096, "buffer": 512}}},
        {
            "rl": {
                "overlong": {"longest": 5000, "buffer": 512},
                "curriculum": [{"setting": "budgets.max_turns", "schedule": [[0, 2], [9, 12]]}],
            }
        },
        {"rl": {"optimizer": {"activation_memory": 2, "betas": [0, 0.95]}}},
        {"stage": [{"kind": "dpo", "pairs": "x.jsonl", "batch": 2}, {"kind": "dpo", "attempts": 8}]},
    ],
)
def test_what_has_an_effect_is_accepted(tables: dict[str, Any]) -> None:
    recipe = ludus.training.Recipe.parse({"model": {"scratch": {}}, **tables})
    assert ludus.training.Recipe.parse(recipe.model_dump(mode="json")) == recipe, "as a run is resumed"


def test_an_unreachable_length_is_measured_by_the_largest_of_the_sets() -> None:
    sets = [
        {"name": "a", "train": "a.jsonl", "budgets": {"max_turns": 2}},
        {"name": "b", "train": "b.jsonl", "budgets": {"max_turns": 3, "max_turn_tokens": 100}},
    ]
    raw = {"model": {"scratch": {}}, "task_sets": sets}
    ludus.training.Recipe.parse({**raw, "rl": {"overlong": {"longest": 1024, "buffer": 9}}})
    with pytest.raises(ConfigError, match="after 1024"):
        ludus.training.Recipe.parse({**raw, "rl": {"overlong": {"longest": 1025, "buffer": 9}}})


def test_missing_files_are_named_by_their_key(tmp_path: Path) -> None:
    tables = {name: table for name, table in TINY.items() if name != "rl"}
    missing = str(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match=r"^tasks\.train: .*nothing"):
        ludus.training.load_parts(ludus.training.Recipe.parse({**tables, "tasks": {"train": missing}}))


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"rl": {"max_failures": 0.8}}, "rl.max_failures: is called otherwise now: max_failures, above"),
        (
            {"stage": [{"kind": "eval", "max_failures": 0.5}]},
            "stage.0.max_failures: is called otherwise",
        ),
        ({"rl": {"loss_options": {"clip_low": 0.2}}}, "now: rl.loss = { name = ..., OPTION = ... }"),
        (
            {"stage": [{"kind": "rl", "kl_in": "reward"}]},
            "now: stage.0.kl = { weight = ..., place = ... }",
        ),
        ({"stage": [{"kind": "dpo", "beta": 0.1}]}, "now: stage.0.loss = { name = ..., beta = ... }"),
        ({"agent": {"env_pool": 8}}, "agent.env_pool: is called otherwise now: agent.pools.NAME.size"),
        (
            {"cluster": {"replicas": 2}},
            "cluster.replicas: is called otherwise now: cluster.dp_replicate",
        ),
    ],
)
def test_a_key_of_the_last_version_is_refused_with_the_new_one(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        ludus.training.Recipe.parse({"model": {"scratch": {}}, **raw})


def test_an_option_of_an_algorithm_outside_of_its_table_is_told_where_it_belongs() -> None:
    told = (
        r"rl\.power: unknown key; known keys: .*; options of an algorithm are in its table: algorithm ="
    )
    with pytest.raises(ConfigError, match=told):
        ludus.training.Recipe.parse({"model": {"scratch": {}}, "rl": {"power": 2.0}})


def test_sampling_may_say_that_nothing_is_cut() -> None:
    off = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    recipe = ludus.training.Recipe.parse({"model": {"scratch": {}}, "sampling": off})
    assert recipe.sampling.temperature == 0.5


def test_a_value_stands_for_the_first_key_of_its_table() -> None:
    short = {"algorithm": "ppo", "kl": 0.1, "staleness": 1, "loss": "cispo"}
    long = {
        "algorithm": {"name": "ppo"},
        "kl": {"weight": 0.1},
        "staleness": {"steps": 1},
        "loss": {"name": "cispo"},
    }
    first, second = (
        ludus.training.Recipe.parse({"model": {"scratch": {}}, "rl": rl}) for rl in (short, long)
    )
    assert first == second == ludus.training.Recipe.parse(first.model_dump(mode="json"))
    changed = ludus.training.Recipe.parse(
        {
            "model": {"scratch": {}},
            "rl": {"loss": {"clip_high": 0.3}, "algorithm": {"name": "ppo", "lam": 0.9}},
        }
    )
    assert changed.rl.algorithm_settings["loss_options"] == {"clip_high": 0.3}
    assert changed.rl.algorithm_settings["options"] == {"lam": 0.9}
    with pytest.raises(ConfigError, match=r"rl\.kl\.weight: must be a number \(given: 'much'\)"):
        ludus.training.Recipe.parse({"model": {"scratch": {}}, "rl": {"kl": "much"}})


def test_a_recipe_is_written_down_in_the_form_that_it_was_given() -> None:
    model = {"model": {"scratch": {}}}
    short = ludus.training.Recipe.parse({**model, "warm_start": {}, "rl": {"steps": 3}})
    listed = ludus.training.Recipe.parse(
        {**model, "stage": [{"kind": "sft"}, {"kind": "rl", "steps": 3}]}
    )
    assert short.stages == listed.stages
    assert [name for name, _ in short.named_stages] == ["warm_start", "rl"]
    assert [name for name, _ in listed.named_stages] == ["stage.0", "stage.1"]
    assert "stage" not in short.model_dump() and not {"warm_start", "rl"} & listed.model_dump().keys()
    for recipe in (short, listed):
        longer = recipe.with_stages(s.model_copy(update={"steps": 9}) for s in recipe.stages)
        assert [stage.total_steps for stage in longer.stages] == [9, 9]
        assert ludus.training.Recipe.parse(longer.model_dump(mode="json")) == longer
