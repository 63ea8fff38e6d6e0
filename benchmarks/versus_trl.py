"""Tool-calling GRPO in Ludus and in TRL, on the same CPU, tasks, checkpoint and number of episodes.

    python benchmarks/versus_trl.py [--prompts 8] [--generations 8] [--steps 5] [--threads 2]
                                    [--slow-prompts 4] [--slow-steps 2] [--latency 0.1]
                                    [--trl-python PATH] [--checkpoint FOLDER] [--seed 0]

A small model is warm-started once. Then both frameworks train it with GRPO from that checkpoint: first with tools that
answer at once, then with tools that take a while. TRL runs in its own virtual environment, `.venvs/trl`, which is
made when it is missing. What is compared, and what is not: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trl_side import Job, SafeBox, StepRecord

import ludus
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.core.tooling import ToolContext
from ludus.envs.safe import expert, training_tasks
from ludus.rollouts.formats import load_format
from ludus.rollouts.renderers import Renderer
from ludus.rollouts.tokenizers import load_tokenizer
from ludus.tools import LocalTools
from ludus.training.batches import items_of_step

ROOT = Path(__file__).resolve().parent.parent
TRL = ("trl==1.16.0", "jmespath")
"""The version that was measured."""
ENOUGH_TOKENS = 1024
"""Of an episode; far more than any uses."""


class LudusSafe(SafeBox, ludus.Env):
    """The same safe for Ludus: its methods become tools as they are, and run in threads."""

    turn = ludus.tool(SafeBox.turn)
    open = ludus.tool(SafeBox.open)

    async def reset(self, task: Task, combination: Sequence[int]) -> None:
        self._start(list(combination))


class LoopLikeTRL(ludus.Agent):
    """The loop as TRL has it, so that both sides play the same episodes.

    It differs from Ludus's own in two ways: a malformed call ends the episode, where Ludus would tell the model what
    was wrong; and the calls of the last turn are not run, as nobody would read the results.
    """

    async def run(self, episode: ludus.Episode) -> None:
        while not episode.over:
            turn = await episode.generate()
            if not turn.calls or any(call.fault for call in turn.calls):
                episode.answer(turn.text)
            elif episode.turns_left > 0:
                episode.observe(await episode.call(turn.calls))
            else:
                return


@ludus.reward
async def opened(env: LudusSafe) -> float:
    return env.get_reward()


def talking_expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """The quickstart's expert, with a last word."""
    yield from expert(task)
    yield "Done."


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

    def mean(self, field: str) -> float:
        return statistics.fmean(getattr(step, field) for step in self.steps)

    def median(self, field: str) -> float:
        return statistics.median(getattr(step, field) for step in self.steps)


def warm_start(folder: Path, threads: int, seed: int) -> Path:
    """A checkpoint that knows the format and wins some of its games."""
    result = ludus.train(
        name="warm-start",
        seed=seed,
        threads=threads,
        model={"scratch": {"layers": 2, "width": 128, "vocabulary": 2000}},
        tasks=training_tasks(),
        envs={"safe": LudusSafe},
        rewards=[opened],
        demonstrations=talking_expert,
        warm_start={
            "steps": 160,
            "batch": 16,
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 10, "schedule": "cosine"},
        },
        rl={"steps": 0},
        run={"folder": str(folder)},
    )
    return result.model


def make_job(checkpoint: Path, given: argparse.Namespace) -> Job:
    """The work, with the tasks in the order in which Ludus will take them."""
    tools = asyncio.run(LocalTools(LudusSafe().tools()).list(ToolContext("", Task("", ()))))
    tasks = training_tasks()
    renderer = Renderer(load_tokenizer(checkpoint), load_format("hermes"))
    prompt = tasks[0].messages
    job = Job(
        checkpoint=str(checkpoint),
        prompt=prompt[0].content,
        combinations=[],
        tools=[spec.as_openai() for spec in tools],
        prompt_tokens=renderer.bound(tools).prompt(prompt, tools),
        prompts=given.prompts,
        generations=given.generations,
        steps=given.steps + 1,
        max_turns=12,
        max_turn_tokens=24,
        max_tokens=ENOUGH_TOKENS,
        learning_rate=1e-4,
        temperature=1.0,
        threads=given.threads,
        latency=0.0,
        sigma=1.0,
        seed=given.seed,
    )
    return with_tasks(job)


def with_tasks(job: Job) -> Job:
    """The job with the combinations of its steps."""
    tasks = training_tasks()
    chosen = [
        task for step in range(job.steps) for task in items_of_step(tasks, step, job.prompts, job.seed)
    ]
    return replace(job, combinations=[list(task.envs["safe"]["combination"]) for task in chosen])


def run_ludus(job: Job, folder: Path) -> list[StepRecord]:
    """Train with Ludus, and measure every step."""
    SafeBox.latency, SafeBox.sigma = job.latency, job.sigma
    records: list[StepRecord] = []
    before = len(SafeBox.calls)
    last = time.perf_counter()

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        nonlocal before, last
        now = time.perf_counter()
        training = metrics["time_share/training"] * metrics["step_seconds"]
        records.append(
            StepRecord(
                seconds=now - last,
                playing=now - last - training,
                tool_calls=len(SafeBox.calls) - before,
                action_tokens=metrics["tokens/action"],
                reward=metrics["reward"],
            )
        )
        before, last = len(SafeBox.calls), now

    ludus.train(
        name="ludus",
        seed=job.seed,
        threads=job.threads,
        model=job.checkpoint,
        tasks=training_tasks(),
        envs={"safe": LudusSafe},
        rewards=[opened],
        agent=LoopLikeTRL(),
        budgets={
            "max_turns": job.max_turns,
            "max_turn_tokens": job.max_turn_tokens,
            "max_tokens": job.max_tokens + len(job.prompt_tokens),
        },
        sampling={"temperature": job.temperature},
        rl={
            "steps": job.steps,
            "tasks": job.prompts,
            "attempts": job.generations,
            "optimizer": {"learning_rate": job.learning_rate, "micro_batch_tokens": 4096},
        },
        run={"folder": str(folder), "checkpoint_every": job.steps, "trajectories_every": 0},
        on_step=on_step,
    )
    return records


def run_trl(job: Job, folder: Path, python: Path) -> list[StepRecord]:
    """The same in TRL, in a process of its own."""
    folder.mkdir()
    job_path, result_path, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    side = Path(__file__).with_name("trl_side.py")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": "",
    }
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [python, side, job_path, result_path],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"TRL's side failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
    return [StepRecord(**row) for row in json.loads(result_path.read_text(encoding="utf-8"))]


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made when there is none."""
    home = ROOT / ".venvs" / "trl"
    python = home / "bin" / "python"
    ready = home / ".installed"
    if not ready.exists():
        print(f"installing {TRL[0]} into {home.relative_to(ROOT)}", flush=True)
        venv.create(home, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = str(ROOT / "constraints.txt")
        subprocess.run([*pip, "-r", constraints], check=True)  # torch first: a plain one may bring CUDA
        subprocess.run([*pip, "-c", constraints, *TRL], check=True)
        ready.touch()
    return python


def compare(title: str, job: Job, folder: Path, python: Path) -> list[Measured]:
    """Both sides of one job, one after the other; the first step of each is not counted."""
    folder.mkdir()
    episodes = (job.steps - 1) * job.prompts * job.generations
    sides = [
        Measured("Ludus", episodes, run_ludus(job, folder / "ludus")[1:]),
        Measured("TRL", episodes, run_trl(job, folder / "trl", python)[1:]),
    ]
    print(f"\n{title}: {job.prompts} tasks x {job.generations} episodes x {job.steps - 1} steps")
    print(table(*sides), flush=True)
    return sides


def table(ours: Measured, theirs: Measured) -> str:
    """Both sides next to each other, and their ratio."""
    rows = [
        ("episodes per second", ours.episodes_per_second, theirs.episodes_per_second),
        ("seconds in all", ours.seconds, theirs.seconds),
        ("seconds per step (median)", ours.median("seconds"), theirs.median("seconds")),
        ("  playing", ours.median("playing"), theirs.median("playing")),
        ("  training", *(_training(side) for side in (ours, theirs))),
        ("tool calls per episode", ours.tool_calls, theirs.tool_calls),
        ("action tokens per episode", ours.mean("action_tokens"), theirs.mean("action_tokens")),
        ("reward per episode", ours.mean("reward"), theirs.mean("reward")),
    ]
    lines = [f"{'':<28}{ours.name:>10}{theirs.name:>10}{'ratio':>10}"]
    lines += [f"{name:<28}{a:>10.2f}{b:>10.2f}{a / b:>10.2f}" for name, a, b in rows]
    return "\n".join(lines)


def _training(side: Measured) -> float:
    return statistics.median(step.seconds - step.playing for step in side.steps)


def verdict(sides: Sequence[Measured]) -> str:
    """The ratio, and whether both sides did the same work."""
    ours, theirs = sides
    ratio = ours.episodes_per_second / theirs.episodes_per_second
    work = {
        "tool calls": ours.tool_calls / theirs.tool_calls,
        "action tokens": ours.mean("action_tokens") / theirs.mean("action_tokens"),
    }
    worst = max(work, key=lambda name: abs(work[name] - 1))
    same = abs(work[worst] - 1) <= 0.05
    said = "the same work within 5%" if same else f"NOT the same work: {worst} differ by more than 5%"
    return f"Ludus plays and trains {ratio:.1f} times as many episodes per second ({said})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tool-calling GRPO in Ludus and in TRL.")
    parser.add_argument("--prompts", type=int, default=8, help="tasks in a step")
    parser.add_argument("--generations", type=int, default=8, help="episodes for each task")
    parser.add_argument("--steps", type=int, default=5, help="measured steps; one more comes before")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slow-prompts", type=int, default=4, help="the same with slow tools; 0 skips")
    parser.add_argument("--slow-steps", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.1, help="mean seconds of a slow tool's call")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL")
    parser.add_argument("--checkpoint", type=Path, help="a warm start made before")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    python = given.trl_python or trl_python()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = given.checkpoint or warm_start(folder / "warm", given.threads, given.seed)
        job = make_job(checkpoint, given)
        load = os.getloadavg()[0]
        print(f"{job.threads} threads, {os.cpu_count()} cores, load {load:.1f} before the start")
        fast = compare("tools that answer at once", job, folder / "fast", python)
        print(verdict(fast))
        if given.slow_prompts:
            slow = replace(
                job, prompts=given.slow_prompts, steps=given.slow_steps + 1, latency=given.latency
            )
            title = f"tools that take {given.latency:g} s on average (lognormal, sigma {slow.sigma:g})"
            print(verdict(compare(title, with_tasks(slow), folder / "slow", python)))


if __name__ == "__main__":
    sys.exit(main())
