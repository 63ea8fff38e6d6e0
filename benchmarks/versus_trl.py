"""Tool-calling GRPO in Ludus and in TRL, on the same CPU, tasks, checkpoint and number of episodes.

    python benchmarks/versus_trl.py [--prompts 16] [--generations 8] [--steps 3] [--threads 2]
                                    [--vocabulary 400] [--slow-prompts 8] [--slow-steps 2]
                                    [--latency 0.05] [--trl-python PATH] [--checkpoint FOLDER] [--seed 0]

The quickstart's model is warm-started once. Then both frameworks train it with GRPO from that checkpoint:
first with tools that answer at once, then with tools that take a while. Each side runs in a process of its
own, one after the other; TRL in its own virtual environment, `.venvs/trl`, which is made when it is missing.
What is compared, what is not, and what was measured: docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus_side import RECIPE, LudusSafe
from safe_job import SAMPLE_RESULT, Job, StepRecord

from ludus.chat import Renderer, load_format, load_tokenizer
from ludus.core import Message, Task, ToolContext
from ludus.tools import LocalTools
from ludus.training import items_of_step, load_recipe
from ludus.worlds.safe import training_tasks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRL = ("trl==1.16.0", "jmespath")
"""The version that was measured."""
MAX_TOKENS = 2048
"""Of an episode; more than any uses."""
TOLERANCE = 0.05
"""How far the work of the two sides may differ."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One side of one comparison, over the measured steps."""

    name: str
    episodes: int
    steps: list[StepRecord]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def episodes_per_second(self) -> float:
        return self.episodes / self.seconds

    @property
    def tool_calls(self) -> float:
        return sum(step.tool_calls for step in self.steps) / self.episodes

    @property
    def action_tokens(self) -> float:
        return statistics.fmean(step.action_tokens for step in self.steps)

    @property
    def reward(self) -> float:
        return statistics.fmean(step.reward for step in self.steps)

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Medians: of the whole step, of its playing, of its training."""
        return (
            statistics.median(step.seconds for step in self.steps),
            statistics.median(step.playing for step in self.steps),
            statistics.median(step.seconds - step.playing for step in self.steps),
        )


def make_job(checkpoint: Path, given: argparse.Namespace) -> Job:
    """The work with tools that answer at once."""
    specs = asyncio.run(LocalTools(LudusSafe().tools()).list(ToolContext("", Task("", ()))))
    renderer = Renderer(load_tokenizer(checkpoint), load_format("hermes"))
    question = training_tasks()[0].messages
    result = [Message("tool", SAMPLE_RESULT, name="turn")]
    budgets = load_recipe(RECIPE).budgets
    job = Job(
        checkpoint=str(checkpoint),
        prompt=question[0].content,
        combinations=[],
        tools=[spec.as_openai() for spec in specs],
        prompt_tokens=renderer.prompt(question, specs),
        result_tokens=renderer.observation(renderer.action_tokens(""), result, specs),
        prompts=given.prompts,
        generations=given.generations,
        steps=given.steps + 1,
        max_turns=budgets.max_turns,
        max_turn_tokens=budgets.max_turn_tokens,
        max_tokens=MAX_TOKENS,
        learning_rate=1e-4,
        threads=given.threads,
        latency=0.0,
        sigma=1.0,
        seed=given.seed,
    )
    return with_tasks(job)


def with_tasks(job: Job) -> Job:
    """The job with the combinations of its steps, in the order in which Ludus takes them."""
    tasks = training_tasks()
    chosen = [
        task for step in range(job.steps) for task in items_of_step(tasks, step, job.prompts, job.seed)
    ]
    return replace(job, combinations=[list(task.envs["safe"]["combination"]) for task in chosen])


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made when there is none."""
    home = ROOT / ".venvs" / "trl"
    python, ready = home / "bin" / "python", home / ".installed"
    if not ready.exists():
        print(f"installing {TRL[0]} into {home.relative_to(ROOT)}", flush=True)
        venv.create(home, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ROOT / "constraints.txt"
        subprocess.run([*pip, "-r", constraints], check=True)  # torch first: a plain one may bring CUDA
        subprocess.run([*pip, "-c", constraints, *TRL], check=True)
        ready.touch()
    return python


def run(command: Sequence[str | Path], log: Path, threads: int) -> None:
    """Run one side, in the same surroundings as the other."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait are slow on a shared machine
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise SystemExit(f"{shown} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")


def warm_start(folder: Path, threads: int, vocabulary: int) -> Path:
    """The checkpoint that both sides begin with."""
    settings = [folder / "warm", str(threads), str(vocabulary)]
    command = [sys.executable, HERE / "ludus_side.py", "warm-start", *settings]
    run(command, folder / "warm.txt", threads)
    return max((folder / "warm" / "checkpoints").iterdir())


def measure(name: str, job: Job, folder: Path, command: Sequence[str | Path]) -> Measured:
    """One side's work; the first step, which pays for what is done once, is not counted."""
    folder.mkdir(parents=True)
    asked, answered = folder / "job.json", folder / "result.json"
    job.write(asked)
    run([*command, asked, answered], folder / "log.txt", job.threads)
    return Measured(name, job.episodes, StepRecord.read_all(answered)[1:])


def compare(title: str, job: Job, folder: Path, python: Path) -> None:
    """Both sides of one job, one after the other."""
    ours = measure("Ludus", job, folder / "ludus", [sys.executable, HERE / "ludus_side.py", "train"])
    theirs = measure("TRL", job, folder / "trl", [python, HERE / "trl_side.py"])
    print(f"\n{title}: {job.steps - 1} steps of {job.prompts} tasks x {job.generations} episodes")
    print(table(ours, theirs))
    print(verdict(ours, theirs), flush=True)


def table(ours: Measured, theirs: Measured) -> str:
    """Both sides next to each other, and ours over theirs."""
    names = ("seconds per step (median)", "  playing", "  training")
    rows = [
        ("episodes per second", ours.episodes_per_second, theirs.episodes_per_second),
        *zip(names, ours.step_seconds, theirs.step_seconds, strict=True),
        ("seconds in all", ours.seconds, theirs.seconds),
        ("tool calls per episode", ours.tool_calls, theirs.tool_calls),
        ("action tokens per episode", ours.action_tokens, theirs.action_tokens),
        ("reward per episode", ours.reward, theirs.reward),
    ]
    lines = [f"{'':<28}{ours.name:>10}{theirs.name:>10}{'ratio':>10}"]
    lines += [f"{name:<28}{a:>10.2f}{b:>10.2f}{a / b:>10.2f}" for name, a, b in rows]
    return "\n".join(lines)


def verdict(ours: Measured, theirs: Measured) -> str:
    """The ratio, and whether both sides did the same work."""
    ratio = ours.episodes_per_second / theirs.episodes_per_second
    work = {
        "tool calls": ours.tool_calls / theirs.tool_calls,
        "action tokens": ours.action_tokens / theirs.action_tokens,
    }
    unequal = [name for name, share in work.items() if abs(share - 1) > TOLERANCE]
    said = f"NOT the same work: {' and '.join(unequal)} differ" if unequal else "the same work"
    return f"Ludus: {ratio:.1f} times the episodes per second of TRL ({said}, at a tolerance of 5%)"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tool-calling GRPO in Ludus and in TRL.")
    parser.add_argument("--prompts", type=int, default=16, help="tasks in a step")
    parser.add_argument("--generations", type=int, default=8, help="episodes for each task")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; one more comes before")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=400, help="of the tokenizer that is fitted")
    parser.add_argument("--slow-prompts", type=int, default=8, help="with slow tools; 0 leaves it out")
    parser.add_argument("--slow-steps", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.05, help="mean seconds of a slow tool's call")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL")
    parser.add_argument("--checkpoint", type=Path, help="a warm start that was made before")
    parser.add_argument("--seed", type=int, default=0, help="decides the tasks and the sampling")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    python = given.trl_python or trl_python()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        load = os.getloadavg()[0]
        checkpoint = given.checkpoint or warm_start(folder, given.threads, given.vocabulary)
        job = make_job(checkpoint, given)
        print(f"{os.cpu_count()} cores, {job.threads} threads, load before the start {load:.1f}")
        print(f"prompt: {len(job.prompt_tokens)} tokens, at most {job.max_turns} turns")
        compare("tools that answer at once", job, folder / "fast", python)
        if given.slow_prompts:
            slow = replace(
                job, prompts=given.slow_prompts, steps=given.slow_steps + 1, latency=given.latency
            )
            title = f"tools that take {given.latency:g} s on average (lognormal, sigma {slow.sigma:g})"
            compare(title, with_tasks(slow), folder / "slow", python)


if __name__ == "__main__":
    main()
