"""Stages: every way of learning runs, says what it did, and goes on after a stop as if there had been none."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_runs import Talker, assert_same_runs, numbers
from training_helpers import TINY, add, even, expert, tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

import ludus
from ludus.core import ConfigError, LudusError
from ludus.observe import RunFolder, RunWriter, prefixed
from ludus.observe.metrics import undefined
from ludus.training import Parts, Recipe, Result, load_recipe, train_async
from ludus.training.config.recipe import STAGE_CONFIGS
from ludus.training.config.stages import BaseStageConfig
from ludus.training.optim.optimizers import MasterAdamW
from ludus.training.report import write_report
from ludus.training.stages import STAGES

RATE = {"learning_rate": 1e-2}
SFT = {"kind": "sft", "steps": 2, "batch": 2}
RL = {"kind": "rl", "steps": 2, "tasks": 2, "attempts": 2, "optimizer": RATE}
PPO = {**RL, "algorithm": "ppo", "critic": {"warmup_steps": 1, "optimizer": RATE}}
DPO = {"kind": "dpo", "steps": 2, "tasks": 2, "attempts": 2, "optimizer": RATE}
REJECTION = {"kind": "rejection", "rounds": 2, "steps": 2, "tasks": 2, "attempts": 2, "batch": 2,
             "threshold": 0.0, "optimizer": RATE}  # fmt: skip
EVAL = {"kind": "eval", "attempts": 3}
GROWING = {
    "setting": "budgets.max_turns",
    "adaptive": {"start": 1, "stop": 3, "by": 1, "metric": "reward", "above": 0.0, "over": 1},
}


def code(**other: Any) -> dict[str, Any]:
    parts = {"tasks": tasks(6), "held_out": tasks(2, first=50), "tools": [add], "rewards": [even]}
    return {**parts, "agent": Talker(), **other}


def settings(folder: Path, *stages: dict[str, Any], **tables: Any) -> dict[str, Any]:
    whole = {name: table for name, table in TINY.items() if name != "rl"}
    run = {"checkpoint_every": 1, "keep_checkpoints": 50, **tables.pop("run", {}), "folder": str(folder)}
    return {**whole, "max_in_flight": 1, **tables, "stage": list(stages), "run": run}


def run(folder: Path, *stages: dict[str, Any], **other: Any) -> Result:
    """Train in these stages; what is code is told from tables by its name."""
    parts = {name: other.pop(name) for name in list(other) if name in Parts.__slots__}
    imitates = any(stage["kind"] == "sft" for stage in stages)
    wanted = code(**{**({"demonstrations": expert} if imitates else {}), **parts})
    on_step = other.pop("on_step", None)
    result = ludus.train(**settings(folder, *stages, **other), **wanted, on_step=on_step)
    logged = {name for row in result.metrics for name in row} - {"step", "time", "nonfinite"}
    assert undefined(logged) == [], "every number that is logged has a written definition"
    return result


def column(result: Result, name: str) -> list[float]:
    return [row[name] for row in result.metrics if name in row]


def weights(result: Result, number: int = -1) -> dict[str, torch.Tensor]:
    return load_file(result.run.checkpoints()[number].path / "model.safetensors")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_an_expert_plays_what_is_learned_from_and_no_more(tmp_path: Path) -> None:
    played: list[str] = []

    def counted(task: ludus.Task) -> Any:
        played.append(task.id)
        return expert(task)

    def learned_from(name: str, count: int, **settings: Any) -> list[str]:
        played.clear()
        run(tmp_path / name, {**SFT, **settings}, tasks=tasks(count), demonstrations=counted)
        return sorted(played[count:])  # a tokenizer made from scratch is fitted to all of them first

    few = learned_from("few", 40, held_out=0.25)
    assert len(set(few)) == len(few) == 6, "two steps of two, and a quarter of all to measure on"
    assert few != sorted(task.id for task in tasks(6)), "drawn from all tasks, not the first"
    assert learned_from("again", 40, held_out=0.25) == few, "the same in a run of the same seed"
    every = sorted(task.id for task in tasks(6))
    assert learned_from("all", 6, steps=9) == every, "each once, where all of them are needed"


PIECES = '''
import ludus


@ludus.tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@ludus.tool
async def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


@ludus.reward
async def even(trajectory: ludus.Trajectory) -> float:
    said = [token for action in trajectory.actions for token in action.tokens]
    return sum(token % 2 == 0 for token in said) / len(said)


@ludus.reward
async def brief(trajectory: ludus.Trajectory) -> float:
    return 1 / sum(len(action.tokens) for action in trajectory.actions)


def expert(task):
    heard = yield ludus.ToolCall("add", {"a": task.metadata["a"], "b": task.metadata["b"]})
    yield heard


def _tasks(first, count, word):
    return [ludus.Task.of(f"{n} {word} {n + 1}?", id=str(n), a=n, b=n + 1) for n in range(first, count)]


def sums():
    return _tasks(0, 4, "plus")


def words():
    return _tasks(0, 4, "and")


def held_out():
    return _tasks(50, 52, "plus")
'''


@pytest.fixture
def pieces(tmp_path: Path) -> str:
    file = tmp_path / "pieces.py"
    file.write_text(PIECES)
    return str(file)


def test_a_recipe_of_stages_in_one_file(tmp_path: Path, pieces: str) -> None:
    """Demonstrations, imitation, RL and a measurement with pass@k, from TOML alone."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"""
        name = "stages"
        threads = 1
        max_in_flight = 1
        rewards = ["{pieces}:even"]
        model.scratch = {{ layers = 1, width = 32, heads = 2, kv_heads = 1, vocabulary = 400 }}
        tasks = {{ train = "{pieces}:sums", evaluation = "{pieces}:held_out" }}
        agent.tools = ["{pieces}:add"]
        budgets = {{ max_turns = 2, max_turn_tokens = 20, max_tokens = 512 }}
        engine = {{ cache_tokens = 8192, max_running = 16, tokens_per_step = 512 }}
        run.folder = "{tmp_path / "run"}"

        [[stage]]
        kind = "sft"
        demonstrations = "{pieces}:expert"
        steps = 2
        batch = 2

        [[stage]]
        kind = "rl"
        steps = 1
        tasks = 2
        attempts = 2

        [[stage]]
        kind = "eval"
        attempts = 3
        pass_at = [1, 3]
    """)
    result = ludus.train(recipe)
    rows = result.metrics
    assert [row["step"] for row in rows if "sft/loss" in row] == [1, 2]
    assert [row["step"] for row in rows if "reward" in row] == [3]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 2, 3, 4]
    last = rows[-1]
    assert {name for name in last if "@" in name} == {
        f"eval/{what}@{k}" for what in ("pass", "average") for k in (1, 3)
    }
    assert last["eval/episodes"] == 6 and last["eval/pass@1"] <= last["eval/pass@3"]
    assert undefined(set().union(*rows) - {"step", "time"}) == []
    report = result.run.report_path.read_text()
    for words in ("at the start", "after the warm start", "after RL", "after the evaluation"):
        assert words in report
    assert re.search(r"after step 4 *\| k = 1 *\| k = 3", report)
    assert len(result.run.trajectories(4, "eval")) == 6
    again = ludus.train(resume=result.run.path)
    assert numbers(again.run) == numbers(result.run), "a finished run has nothing left to do"


def test_stages_and_keywords_say_the_same_as_a_warm_start_and_rl(tmp_path: Path) -> None:
    staged = run(tmp_path / "staged", SFT, RL)
    tables = settings(tmp_path / "tables", warm_start=SFT, rl=RL)
    del tables["stage"]
    ludus.train(**tables, **code(demonstrations=expert))
    assert_same_runs(tmp_path / "tables", staged.run.path)


def test_preferences_mined_from_groups(tmp_path: Path) -> None:
    result = run(tmp_path / "run", DPO)
    assert column(result, "dpo/pairs") == [2, 2]
    assert column(result, "dpo/margin")[0] == 0 != column(result, "dpo/margin")[1]
    assert column(result, "dpo/loss")[0] == pytest.approx(0.6931, abs=1e-4), "log 2 at the reference"
    assert not are_equal(weights(result, 0), weights(result))
    assert len(result.run.trajectories(1)) == 4


def pairs_file(folder: Path) -> Path:
    question = {"role": "user", "content": "1 plus 2?"}
    sides = {"chosen": "3", "rejected": "11"}
    pair = {side: [question, {"role": "assistant", "content": text}] for side, text in sides.items()}
    file = folder / "pairs.jsonl"
    file.write_text(json.dumps(pair) + "\n")
    return file


def test_preferences_given_in_a_file(tmp_path: Path) -> None:
    """Nothing is played for them, so there need not be tasks or rewards."""
    given = {"kind": "dpo", "pairs": str(pairs_file(tmp_path)), "steps": 8, "batch": 1, "loss": {"beta": 1.0},
             "optimizer": RATE}  # fmt: skip
    result = run(tmp_path / "run", given, tasks=None, held_out=None, rewards=None)
    margins = column(result, "dpo/margin")
    assert margins[0] == 0 and margins[-1] > 1
    assert column(result, "dpo/accuracy")[-1] == 1
    assert result.run.trajectory_files() == []
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no pairs to learn from"):
        run(tmp_path / "empty", {**given, "pairs": str(tmp_path / "none.jsonl")})


SUMS = [{"q": f"{n} plus {n + 1}?", "a": str(2 * n + 1)} for n in range(6)]
NAMES = {"prompt": "q", "completion": "a"}


def sums_file(folder: Path, name: str, rows: list[dict[str, str]]) -> str:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return str(folder / name)


def test_epochs_are_passes_over_the_demonstrations(tmp_path: Path) -> None:
    shown = sums_file(tmp_path, "sums.jsonl", SUMS)
    sft = {"kind": "sft", "demonstrations": shown, "columns": NAMES, "epochs": 1.5, "batch": 2}
    whole = {"tasks": None, "held_out": None, "rewards": None, "demonstrations": None}
    result = run(tmp_path / "run", sft, **whole)
    assert len(column(result, "sft/loss")) == 5, "9 demonstrations, two at a time"
    tables = settings(tmp_path / "cut", sft)

    def stop(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ludus.train(**tables, tools=[add], agent=Talker(), on_step=stop)
    ludus.train(resume=tmp_path / "cut", tools=[add], agent=Talker())
    assert numbers(RunFolder(tmp_path / "cut")) == numbers(result.run)
    played = run(tmp_path / "played", {"kind": "sft", "epochs": 2, "batch": 4}, held_out=None)
    assert len(column(played, "sft/loss")) == 3, "an expert plays 6 tasks"
    with pytest.raises(ConfigError, match="steps or epochs, not both"):
        run(tmp_path / "both", {**sft, "steps": 3})


def test_the_loss_on_held_out_conversations(tmp_path: Path) -> None:
    """It is that of the saved weights, computed here by the library's own model."""
    shown, other = (sums_file(tmp_path, f"{i}.jsonl", SUMS[i::2]) for i in (0, 1))
    sft = {"kind": "sft", "demonstrations": shown, "columns": NAMES, "steps": 4, "batch": 3,
           "held_out": other, "optimizer": RATE}  # fmt: skip
    whole = {"tasks": None, "held_out": None, "rewards": None, "tools": [], "demonstrations": None}
    result = run(tmp_path / "run", sft, **whole)
    seen = {
        row["step"]: row["sft/held_out_loss"] for row in result.metrics if "sft/held_out_loss" in row
    }
    assert list(seen) == [1, 4]
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    model = AutoModelForCausalLM.from_pretrained(result.model)
    losses = []
    for row in SUMS[1::2]:
        asked = [{"role": "user", "content": row["q"]}]
        start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompt, answer = (tokenizer(text)["input_ids"] for text in (start, row["a"] + "<|im_end|>"))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        losses += [-logits[len(prompt) + i - 1, token].item() for i, token in enumerate(answer)]
    assert seen[4] == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    share = run(tmp_path / "share", {**sft, "held_out": 0.5}, evaluation={"every": 2}, **whole)
    assert [row["step"] for row in share.metrics if "sft/held_out_loss" in row] == [1, 2, 4]
    for held_out, problem in (
        ("none.jsonl", "stage.0.held_out: there is no file"),
        (2.0, "less than 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            run(tmp_path / "none", {**sft, "held_out": held_out}, **whole)


@pytest.mark.parametrize("loss", ["ipo", "simpo", "kto"])
def test_other_preference_losses_in_a_recipe(tmp_path: Path, loss: str) -> None:
    """Mined pairs, and given ones; KTO takes answers with a label."""
    mined = run(tmp_path / "mined", {**DPO, "loss": loss})
    assert not are_equal(weights(mined, 0), weights(mined))
    rows = [{"question": "1 plus 2?", "good": "3", "bad": "11"}]
    names = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    if loss == "kto":
        sides = [("3", True), ("11", False), ("12", False)]
        rows = [{"question": "1 plus 2?", "said": text, "ok": ok} for text, ok in sides]
        names = {"prompt": "question", "completion": "said", "label": "ok"}
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    stage = {"kind": "dpo", "loss": loss, "pairs": str(file), "columns": names, "steps": 8, "batch": 3,
             "optimizer": RATE}  # fmt: skip
    given = run(tmp_path / "given", stage, tasks=None, held_out=None, rewards=None)
    margins = column(given, "dpo/margin")
    assert margins[-1] > margins[0] + 0.1
    assert column(given, "dpo/accuracy")[-1] == 1
    assert ("reference_point" in " ".join(given.metrics[-1])) == (loss == "kto")
    assert (given.run.path / "stages" / "0").exists() == (loss != "simpo"), "a reference is not saved"


@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_given_data_do_not_depend_on_the_sampling_temperature(tmp_path: Path, kind: str) -> None:
    """Nobody sampled them, so they are read at temperature 1."""
    given = {
        "kind": "dpo",
        "pairs": str(pairs_file(tmp_path)),
        "steps": 2,
        "batch": 1,
        "optimizer": RATE,
    }
    stage = {**SFT, "optimizer": RATE} if kind == "sft" else given
    runs = [
        run(tmp_path / str(t), stage, held_out=None, sampling={"temperature": t}) for t in (1.0, 0.5)
    ]
    assert are_equal(weights(runs[0]), weights(runs[1]))
    assert numbers(runs[0].run) == numbers(runs[1].run)


def test_pairs_of_equals_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = pairs_file(tmp_path)
    given = {"kind": "dpo", "pairs": str(file), "steps": 1, "batch": 2}
    run(tmp_path / "different", given, tasks=None, held_out=None, rewards=None)
    assert "both sides say the same" not in capsys.readouterr().err
    equal = json.loads(file.read_text())
    equal["rejected"] = equal["chosen"]
    with file.open("a") as lines:
        lines.write(json.dumps(equal) + "\n")
    run(tmp_path / "equal", given, tasks=None, held_out=None, rewards=None)
    assert "in 1 of 2 pairs both sides say the same" in capsys.readouterr().err
    file.write_text(json.dumps(equal))
    with pytest.raises(ConfigError, match="in every pair both sides say the same"):
        run(tmp_path / "nothing", given, tasks=None, held_out=None, rewards=None)
    assert not (tmp_path / "nothing").exists(), "told before a folder is made"


@pytest.mark.parametrize("restart", [False, True])
def test_rejection_sampling_in_rounds(tmp_path: Path, restart: bool) -> None:
    rate = {"learning_rate": 1e-3, "schedule": "linear"}
    result = run(tmp_path / "run", {**REJECTION, "restart": restart, "optimizer": rate})
    assert column(result, "rejection/kept") == [2, 2]
    assert [row["step"] for row in result.metrics if "rejection/reward" in row] == [1, 3]
    rates = [round(share / 1e-3, 6) for share in column(result, "rejection/learning_rate")]
    assert rates == ([1, 0.55, 1, 0.55] if restart else [1, 0.775, 0.55, 0.325])
    at_start = (result.run.path / "stages" / "0").exists()
    assert at_start == restart, "the weights to return to are kept where they are needed"


def test_rejection_sampling_beside_demonstrations(tmp_path: Path) -> None:
    """A file that somebody has made is imitated too, even where no episode is worth it."""
    rows = [{"prompt": f"{n} plus {n}?", "completion": str(2 * n)} for n in range(3)]
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {**REJECTION, "rounds": 1, "threshold": 2.0, "batch": 8, "demonstrations": str(file)}
    result = run(tmp_path / "run", stage, held_out=None)
    assert column(result, "rejection/kept") == [0] and len(column(result, "rejection/loss")) == 2
    with pytest.raises(ConfigError, match=r"stage\.0\.demonstrations: there is no file"):
        run(tmp_path / "no", {**stage, "demonstrations": str(tmp_path / "no.jsonl")})


def test_nothing_worth_imitating_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no episode of 2 round\(s\) reached the reward 2"):
        run(tmp_path / "run", {**REJECTION, "threshold": 2.0})


def test_nothing_to_prefer_is_said(tmp_path: Path) -> None:
    """After the last step, as for rejection sampling; and a run that was cut off before knows of it."""

    @ludus.reward
    async def same(trajectory: ludus.Trajectory) -> float:
        return 1.0

    said = r"in 2 step\(s\), no two attempts at a task differed in reward, so there was no pair"
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", DPO, rewards=[same])
    rows = RunFolder(tmp_path / "run").metrics()
    assert [row["dpo/pairs"] for row in rows if "dpo/pairs" in row] == [0]
    with pytest.raises(ConfigError, match=said):
        ludus.train(resume=tmp_path / "run", **code(rewards=[same]))


@pytest.mark.parametrize("lucky", [1, 2])
def test_a_round_without_successes_is_passed_over(tmp_path: Path, lucky: int) -> None:
    """Whether it is the first or the last one; and a run that is stopped in it knows that it was so."""
    played = 0

    @ludus.reward
    async def sometimes(trajectory: ludus.Trajectory) -> float:
        nonlocal played
        played += 1
        return float(played > 4 if lucky == 2 else played <= 4)

    stage = {**REJECTION, "threshold": 1.0, "restart": True}
    result = run(tmp_path / "run", stage, rewards=[sometimes], held_out=None)
    assert column(result, "rejection/kept") == ([0, 2] if lucky == 2 else [2, 0])
    assert len(column(result, "rejection/loss")) == 2, "two of four steps had something to learn from"
    assert f"no episode of round {3 - lucky} reached the reward 1" in result.run.log_path.read_text()
    empty = 0 if lucky == 2 else 2
    assert are_equal(weights(result, empty), weights(result, empty + 2))
    played = 0
    with pytest.raises(Stop):
        run(tmp_path / "cut", stage, rewards=[sometimes], held_out=None, on_step=stop_after(3, Stop))
    ludus.train(resume=tmp_path / "cut", **code(rewards=[sometimes], held_out=None))
    assert_same_runs(tmp_path / "run", tmp_path / "cut")


@pytest.mark.parametrize("stage", [RL, DPO, REJECTION], ids=lambda stage: stage["kind"])
def test_how_many_failures_are_too_many_is_a_setting(tmp_path: Path, stage: dict[str, Any]) -> None:
    class Unlucky(Talker):
        async def run(self, episode: ludus.Episode) -> None:
            if int(episode.task.id) % 2 == 0:
                raise RuntimeError("no luck")
            await super().run(episode)

    how = {"agent": Unlucky(), "tasks": tasks(2), "held_out": None}
    run(tmp_path / "lenient", stage, max_failures=0.5, **how)
    with pytest.raises(LudusError, match=r"more than max_failures = 0\.4 allows.*no luck"):
        run(tmp_path / "strict", stage, max_failures=0.4, **how)


def test_failures_of_an_evaluation_stage_count_by_the_recipes_setting(tmp_path: Path) -> None:
    class Unlucky(Talker):
        async def run(self, episode: ludus.Episode) -> None:
            if int(episode.task.id) % 2 == 0:
                raise RuntimeError("no luck")
            await super().run(episode)

    how: dict[str, Any] = {"agent": Unlucky(), "held_out": tasks(2)}
    run(tmp_path / "lenient", {"kind": "eval"}, max_failures=0.6, **how)
    with pytest.raises(LudusError, match=r"more than max_failures = 0\.4 allows.*no luck"):
        run(tmp_path / "strict", {"kind": "eval"}, max_failures=0.4, **how)


def test_the_last_checkpoint_of_every_stage_stays(tmp_path: Path) -> None:
    result = run(tmp_path / "run", SFT, {**RL, "steps": 3}, EVAL, DPO, run={"keep_checkpoints": 1})
    assert [c.step for c in result.run.checkpoints()] == [2, 5, 8]
    result = run(tmp_path / "two", {**RL, "steps": 4}, run={"keep_checkpoints": 2})
    assert [c.step for c in result.run.checkpoints()] == [3, 4]


def test_stages_of_one_kind_are_counted(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    run(tmp_path / "run", SFT, RL, {**RL, "steps": 1}, EVAL,
        on_step=lambda phase, step, total, metrics: heard.append((phase, step, total)))  # fmt: skip
    learned = [said for said in heard if said[0] != "evaluation"]
    assert learned == [("warm start", 1, 2), ("warm start", 2, 2), ("RL (1 of 2)", 1, 2),
                       ("RL (1 of 2)", 2, 2),
                       ("RL (2 of 2)", 1, 1)]  # fmt: skip
    assert [step for phase, step, _ in heard if phase == "evaluation"] == [0, 2, 4, 5, 6]


@pytest.mark.parametrize("kind", ["model", "head"])
def test_ppo_warms_its_critic_up(tmp_path: Path, kind: str) -> None:
    critic = {"kind": kind, "warmup_steps": 1, "optimizer": RATE}
    result = run(tmp_path / "run", {**PPO, "steps": 3, "critic": critic})
    assert len(column(result, "value_loss")) == 3 and len(column(result, "loss")) == 2
    assert are_equal(weights(result, 0), weights(result, 1)), "the policy waits for its critic"
    assert not are_equal(weights(result, 1), weights(result, 2))


def test_reinforce_pp_with_the_divergence_in_the_reward(tmp_path: Path) -> None:
    result = run(tmp_path / "run", {**RL, "algorithm": "reinforce_pp", "kl": {
                                    "weight": 0.5, "place": "reward", "estimator": "k1"}})  # fmt: skip
    first, second = column(result, "kl")
    assert first == pytest.approx(0, abs=1e-5) and second != pytest.approx(0, abs=1e-5)


def test_groups_without_signal_are_refilled(tmp_path: Path) -> None:
    @ludus.reward
    async def by_task(task: ludus.Task, trajectory: ludus.Trajectory) -> float:
        return float(trajectory.attempt % 2) if int(task.id) % 3 == 0 else 0.0

    result = run(tmp_path / "run", {**RL, "steps": 3, "refill": {"rounds": 2}}, rewards=[by_task])
    assert sum(column(result, "refilled")) > 0
    episodes = [result.run.trajectories(step) for step in (1, 2, 3)]
    empty = [sum(t.task.id not in ("0", "3") for t in step) / 2 for step in episodes]
    assert column(result, "without_signal") == empty


def test_attempts_that_resampling_left_out_are_no_group_without_signal(tmp_path: Path) -> None:
    @ludus.reward
    async def by_attempt(trajectory: ludus.Trajectory) -> float:
        return float(trajectory.attempt % 2)

    stage = {**RL, "attempts": 4, "keep_attempts": 3}
    result = run(tmp_path / "run", stage, rewards=[by_attempt])
    assert column(result, "resampled") == [2, 2] and column(result, "groups_without_signal") == [0, 0]


def test_length_and_brokenness_have_their_price(tmp_path: Path) -> None:
    shaping = {
        "overlong": {"longest": 2, "buffer": 1, "price": 5.0},
        "broken": {"no_answer": "mask", "over_length": -3.0, "tool_error": "keep"},
        "attempts": 4,
        "keep_attempts": 2,
    }
    result = run(tmp_path / "run", {**RL, **shaping, "steps": 1})
    (row,) = [row for row in result.metrics if "reward" in row]
    assert row["reward/overlong"] == -5 and row["resampled"] == 4 and row["episodes"] == 8
    assert row["masked"] == row["broken/no_answer"] == 4
    assert row["broken/over_length"] == 0
    episodes = result.run.trajectories(1)
    assert len(episodes) == 4
    for one in episodes:
        assert one.reward == pytest.approx(sum(one.rewards[n] for n in ("even", "overlong", "broken")))


def test_a_horizon_that_grows_by_a_schedule(tmp_path: Path) -> None:
    schedule = {"setting": "budgets.max_turns", "schedule": [[0, 1], [1, 3]]}
    result = run(tmp_path / "run", {**RL, "curriculum": [schedule]})
    assert column(result, "curriculum/budgets.max_turns") == [1, 3]
    assert column(result, "turns") == [1, 3]


def test_a_horizon_that_grows_when_the_model_is_ready(tmp_path: Path) -> None:
    result = run(tmp_path / "run", {**RL, "steps": 4, "curriculum": [GROWING]})
    assert column(result, "curriculum/budgets.max_turns") == [1, 2, 3, 3]
    assert column(result, "turns") == [1, 2, 3, 3]


def test_task_sets_with_their_own_tools_and_rewards(tmp_path: Path, pieces: str) -> None:
    """Both sets have tasks of the same ids, which are nevertheless different tasks."""
    sets = [
        {"name": "sums", "train": f"{pieces}:sums", "evaluation": f"{pieces}:held_out", "weight": 3},
        {"name": "words", "train": f"{pieces}:words", "evaluation": f"{pieces}:held_out",
         "tools": [f"{pieces}:shout"], "rewards": [f"{pieces}:brief"], "budgets": {"max_turns": 1}},
    ]  # fmt: skip
    tables = settings(tmp_path / "run", {**RL, "tasks": 4}, EVAL, task_sets=sets)
    result = ludus.train(**tables, tools=[add], rewards=[even], agent=Talker())
    rows = [row for row in result.metrics if "reward" in row]
    assert [row["sets/sums/episodes"] for row in rows] == [6, 6]
    assert [row["sets/words/episodes"] for row in rows] == [2, 2]
    assert all(row["sets/words/turns"] == 1 and row["sets/sums/turns"] == 3 for row in rows)
    for one in result.run.trajectories(1):
        asks_for_words = " and " in one.messages[0].content
        assert set(one.rewards) == ({"brief"} if asks_for_words else {"even"})
    last = result.metrics[-1]
    assert last["eval/episodes"] == 12 and last["eval/pass@3"] >= last["eval/pass@1"]
    assert {"eval/sets/sums/reward", "eval/sets/words/turns"} <= set(last)
    assert "eval/pass@4" not in last, "attempts of two sets at the same id are not attempts at one task"
    logged = {name for row in result.metrics for name in row} - {"step", "time"}
    assert undefined(logged) == []


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"stage": [SFT], "rl": {"steps": 3}},
            r"\[\[stage\]\] tables replace \[warm_start\] and \[rl\]",
        ),
        ({"stage": [RL], "warm_start": {"steps": 3}}, r"\[\[stage\]\] tables replace"),
        (
            {"stage": [{"kind": "rlhf"}]},
            r"stage\.0\.kind.*'sft', 'rl', 'dpo', 'rejection', 'distill', 'eval'.*'rlhf'",
        ),
        ({"stage": [{"steps": 3}]}, r"stage\.0.*kind"),
        (
            {"stage": [RL, {**DPO, "marginn": 1}]},
            r"stage\.1\.marginn: unknown key; did you mean 'margin'",
        ),
        (
            {"stage": [{**RL, "critic": {"warmup": 1}}]},
            r"stage\.0\.critic\.warmup: unknown key; did you mean 'warmup_steps'",
        ),
        (
            {"stage": [SFT, {**RL, "algorithm": "ppoo"}]},
            r"stage\.1: there is no algorithm called 'ppoo'. Did you mean 'ppo'",
        ),
        (
            {"stage": [{**RL, "algorithm": {"name": "grpo", "discont": 1}}]},
            r"stage\.0: .*estimator 'grpo'.*discont: unknown key",
        ),
        (
            {"stage": [{**RL, "loss": {"clip": 1}}]},
            r"loss 'clipped'.*clip: unknown key; did you mean 'clip_low'",
        ),
        ({"stage": [{**RL, "attempts": 1}]}, r"stage\.0: .* attempts = 1 can teach nothing"),
        ({"stage": [{**RL, "keep_attempts": 2}]}, r"stage\.0: keep_attempts"),
        (
            {"stage": [{**RL, "broken": {"no_answer": "skip"}}]},
            r"stage\.0\.broken\.no_answer: must be 'keep', 'mask' or 'verltool', or a number",
        ),
        (
            {"stage": [{**RL, "kl": {"weight": 0.1, "estimator": "k1"}}]},
            r"stage\.0: .*k1.*expectation is 0.*k2.*k3",
        ),
        ({"stage": [{**RL, "kl": {"place": "reward"}}]}, r"stage\.0: .*kl.weight = 0 leaves out"),
        ({"stage": [{**RL, "kl": {"estimator": "k2"}}]}, r"stage\.0: .*kl.weight = 0 leaves out"),
        ({"stage": [{**RL, "critic": {}}]}, r"stage\.0: .*critic, and grpo asks for none"),
        ({"stage": []}, r"stage = \[\] has no table"),
        ({"stage": [RL], "task_sets": []}, r"task_sets = \[\] has no table"),
        ({"stage": [{**EVAL, "pass_at": [4]}]}, r"stage\.0\.pass_at.*there are 3"),
        ({"stage": [{**RL, "curriculum": [{"setting": "rl.tasks"}]}]}, r"curriculum\.0\.setting"),
    ],
)
def test_mistakes_in_stages_are_named(tmp_path: Path, tables: dict[str, Any], message: str) -> None:
    made = {**settings(tmp_path / "run"), **tables}
    with pytest.raises(ConfigError) as error:
        ludus.train(**made, **code())
    assert re.search(message, str(error.value), re.S), str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_measurement_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to measure on"):
        run(tmp_path / "run", RL, EVAL, held_out=None)


# Going on after a stop.

EVERYTHING = (
    SFT,
    {**PPO, "steps": 3, "refill": {"rounds": 1}, "curriculum": [GROWING], "kl": 0.1, "updates": 2},
    {**REJECTION, "restart": True},
    EVAL,
    DPO,
)


class Stop(Exception):
    """Whatever ends a run."""


def stop_after(step: int, error: type[BaseException]) -> Any:
    """An observer that ends the run after so many steps; evaluations are none."""
    seen = 0

    def on_step(phase: str, number: int, total: int, metrics: dict[str, float]) -> None:
        nonlocal seen
        seen += phase != "evaluation" or "eval/pass@1" in metrics
        if seen == step:
            raise error("stopped here")

    return on_step


@pytest.mark.slow
def test_a_run_that_is_stopped_after_every_step_is_the_same_run(tmp_path: Path) -> None:
    """Every kind of stage is stopped in its midst and at its ends, with evaluations that come due then."""
    how: dict[str, Any] = {"run": {"checkpoint_every": 100}, "evaluation": {"every": 1},
                           "group_rewards": ["count_bonus"]}  # fmt: skip
    run(tmp_path / "whole", *EVERYTHING, **how)
    with pytest.raises(Stop):
        run(tmp_path / "cut", *EVERYTHING, **how, on_step=stop_after(1, Stop))
    parts = code(demonstrations=expert)
    stops = 1
    while True:
        error = KeyboardInterrupt if stops % 2 else Stop
        again = {**parts, "group_rewards": ["count_bonus"]}
        try:
            ludus.train(resume=tmp_path / "cut", **again, on_step=stop_after(1, error))
        except (Stop, KeyboardInterrupt):
            stops += 1
        else:
            break
    assert stops == 12, "each of the steps was the last one of a run"
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_the_policy_version_counts_updates_alone(tmp_path: Path) -> None:
    """Not evaluations, and the same after a stop."""
    how = {"evaluation": {"every": 1}}
    stages = (SFT, {**RL, "steps": 3})
    whole = run(tmp_path / "whole", *stages, **how)
    assert column(whole, "policy_version") == [2, 3, 4], "the version that played the step"
    with pytest.raises(Stop):
        run(tmp_path / "cut", *stages, **how, on_step=stop_after(4, Stop))
    cut = ludus.train(resume=tmp_path / "cut", **code(demonstrations=expert))
    assert column(cut, "policy_version") == [2, 3, 4]
    played = cut.run.trajectories(5)[0]
    assert {span.version for action in played.actions for span in action.versions} == {4}


class Counting:
    """A group reward that remembers how many groups it has seen."""

    name, weight, uses_envs = "counting", 1.0, False

    def __init__(self) -> None:
        self.seen = 0

    async def score_group(self, group: ludus.Group) -> list[float]:
        self.seen += 1
        return [float(self.seen)] * len(group.trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_step_that_is_cut_off_while_playing_leaves_no_trace(tmp_path: Path) -> None:
    """Rewards that remember forget the half that was played, and whatever was measured."""
    heard = 0

    def parts(cut_at: int = 0) -> dict[str, Any]:
        @ludus.reward(name="even")
        async def even_until(trajectory: ludus.Trajectory) -> float:
            nonlocal heard
            heard += 1
            if heard == cut_at:
                running.cancel()
            said = [token for action in trajectory.actions for token in action.tokens]
            return sum(token % 2 == 0 for token in said) / len(said)

        return code(rewards=[even_until], group_rewards=[Counting()])

    async def begin() -> None:
        nonlocal running
        recipe = Recipe.parse(settings(tmp_path / "cut", three, run={"checkpoint_every": 100}))
        # 2 episodes of the evaluation, 4 of the first step, and 3 of the second: one group is scored
        running = asyncio.create_task(train_async(recipe, Parts(**parts(cut_at=9))))
        with pytest.raises(asyncio.CancelledError):
            await running

    three = {**RL, "steps": 3}
    running: asyncio.Task[Any]
    whole = run(tmp_path / "whole", three, **parts())
    assert column(whole, "reward/counting") == [1.5, 3.5, 5.5]
    assert column(whole, "eval/reward/counting") == [1.5, 7.5]
    heard = 0
    asyncio.run(begin())
    assert RunFolder(tmp_path / "cut").checkpoints()[-1].step == 1
    ludus.train(resume=tmp_path / "cut", **parts())
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_an_update_that_fails_in_its_midst_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two updates the second raises: the weights are half a step ahead, and no checkpoint says otherwise."""
    raises_at = 4
    original = MasterAdamW.apply_gradients
    taken = 0

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == raises_at:
            raise LudusError("the optimizer has had enough")
        return original(self, *args, **kwargs)

    stages = {**RL, "steps": 3, "updates": 2}
    run(tmp_path / "whole", stages)
    monkeypatch.setattr(MasterAdamW, "apply_gradients", failing)
    with pytest.raises(LudusError, match="had enough"):
        run(tmp_path / "cut", stages, run={"checkpoint_every": 100})
    monkeypatch.undo()
    assert [c.step for c in RunFolder(tmp_path / "cut").checkpoints()] == [0]
    ludus.train(resume=tmp_path / "cut", **code())
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_every_kind_of_stage_is_complete() -> None:
    """What a run asks of each kind: a class that runs it, a name, and metrics of its own."""
    assert STAGES.keys() == set(STAGE_CONFIGS)
    assert (
        len({kind.prefix for kind in STAGE_CONFIGS}) == len({kind.label for kind in STAGE_CONFIGS}) == 6
    )


@pytest.mark.parametrize("kind", [kind for kind in STAGE_CONFIGS if kind.draws_tasks])
def test_lost_episodes_of_any_stage_are_in_the_report(
    tmp_path: Path, kind: type[BaseStageConfig]
) -> None:
    recipe = Recipe.parse({"model": {"scratch": {}}})
    with RunWriter.create(tmp_path / "run", recipe.model_dump(mode="json")) as writer:
        counts = {"episodes": 10.0, "failures": 4.0}
        writer.log(1, prefixed(kind.prefix, counts) if kind.prefix else counts)
        report = write_report(writer, recipe)
    assert any("4 of 10 training episodes (40.0%) were lost" in text for text in report.warnings)


def test_a_warm_start_of_no_steps_is_left_out() -> None:
    recipe = load_recipe("search", ["warm_start.steps=0"])
    assert [stage.kind for stage in recipe.stages] == ["rl"] and recipe.warm_start is None
    assert [stage.kind for stage in load_recipe("search").stages] == ["sft", "rl"]
    alone = load_recipe("search", ["rl=none", "tasks.evaluation=none"])
    assert [stage.kind for stage in alone.stages] == ["sft"] and alone.tasks.evaluation is None
    with pytest.raises(ConfigError, match=r"warm_start\.steps"):
        load_recipe("search", ["warm_start.steps=-1"])
