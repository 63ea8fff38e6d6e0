"""What a turn of an episode costs the host: rendering, parsing, tools and bookkeeping, next to a bare loop.

    python benchmarks/turns.py [--tasks 64] [--attempts 8] [--tokenizer NAME_OR_FOLDER]

While a GPU generates for hundreds of episodes, one Python thread does all the rest for them, and an engine's
thread wants the same interpreter. Here the engine is a recording that answers at once, so what is left is that
rest. Episodes are those of `examples/directory.py`, played by its expert once and then by groups of attempts:

    ludus      `Rollout`, as in training: templates, content kept from forging control tokens, parsed actions,
               validated arguments, deadlines, exact tokens, rewards
    bare loop  the same coroutines with the tool called as a function, and each prompt and result encoded once:
               no loop that tokenizes does less

each alone, and beside a thread that wants the interpreter two thirds of the time, as an engine's thread does.
The tokenizer is fitted on the spot unless one is named.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.chat import HFTokenizer, Renderer, load_format, load_tokenizer
from ludus.core import Completion, FinishReason, Sampling, Task, Trajectory
from ludus.core.registry import import_object
from ludus.envs import EnvPool
from ludus.remote.threads import frozen_gc
from ludus.rewards import Scorer
from ludus.rollouts import Agent, Budgets, Demonstrator, Rollout
from ludus.tools import as_toolset
from ludus.training import fit_tokenizer

EXAMPLE = Path(__file__).parents[1] / "examples" / "directory.py"
WORK, REST = 0.0008, 0.0004


def example(name: str) -> Any:
    return import_object(f"{EXAMPLE}:{name}")


@dataclass
class Recording:
    """An engine that says at once what the expert said."""

    actions: dict[str, list[list[int]]] = field(default_factory=dict)
    """By task."""
    policy_version: int = 0
    _said: Counter[str] = field(default_factory=Counter)

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str | None = None, **_: Any
    ) -> Completion:
        assert session is not None
        await asyncio.sleep(0)
        action = self.actions[session.split("/")[1]][self._said[session]]
        self._said[session] += 1
        return Completion(action, [0.0] * len(action), FinishReason.STOP_TOKEN)

    async def release(self, session: str) -> None:
        self._said.pop(session, None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Milliseconds a turn."""

    company: str
    turns: int
    ludus: float
    bare: float


def rollout_of(engine: Any, tokenizer: HFTokenizer, agent: Agent, attempts: int, places: int) -> Rollout:
    """As a recipe for the example describes it, with nothing remembered from earlier."""
    return Rollout(
        engine=engine,
        renderer=Renderer(tokenizer, load_format("tags")),
        scorer=Scorer([example("right"), example("on_the_way")]),
        tools=as_toolset([]),
        pools={"directory": EnvPool(example("Directory"), name="directory", size=places)},
        agent=agent,
        budgets=Budgets(max_turns=16),
        attempts=attempts,
        max_in_flight=places,
    )


async def play(rollout: Rollout, tasks: Sequence[Task]) -> list[Trajectory]:
    groups = [group async for group in rollout.groups(tasks, seed=0)]
    played = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory.failure for trajectory in played if trajectory.failure]
    if failed:
        raise RuntimeError(f"{len(failed)} episodes failed, the first with: {failed[0]}")
    return played


@dataclass(frozen=True, slots=True)
class Script:
    """One episode for the bare loop."""

    prompt: str
    actions: list[list[int]]
    calls: list[str]
    """The names that are looked up."""
    cards: Any


def script_of(trajectory: Trajectory, tokenizer: HFTokenizer) -> Script:
    first = trajectory.sequences[0].segments[0]
    called = [call for action in trajectory.actions for call in action.calls]
    return Script(
        prompt=tokenizer.decode(first.tokens),
        actions=[list(action.tokens) for action in trajectory.actions],
        calls=[str(call.arguments["name"]) for call in called],
        cards=trajectory.task.envs["directory"]["cards"],
    )


async def bare(scripts: Sequence[Script], tokenizer: HFTokenizer) -> None:
    """These episodes, with nothing but what cannot be left out."""
    encode = tokenizer.inner.backend_tokenizer.encode

    async def episode(script: Script) -> list[int]:
        env = example("Directory")()
        await env.reset(None, script.cards)
        tokens = encode(script.prompt, add_special_tokens=False).ids
        for number, action in enumerate(script.actions):
            await asyncio.sleep(0)
            tokens += action
            if number < len(script.calls):
                card = await env.look_up(script.calls[number])
                text = (
                    f"\n<|im_start|>user\n<result>\n{card}\n</result><|im_end|>\n<|im_start|>assistant\n"
                )
                tokens += encode(text, add_special_tokens=False).ids
        return list(tokens)

    await asyncio.gather(*(episode(script) for script in scripts))


@contextmanager
def company(is_wanted: bool) -> Iterator[None]:
    """A thread that wants the interpreter most of the time."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            until = time.perf_counter() + WORK
            while time.perf_counter() < until:
                pass
            time.sleep(REST)

    thread = threading.Thread(target=work, daemon=True)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if is_wanted:
            thread.join()


def measure(tasks: int, attempts: int, tokenizer: HFTokenizer) -> list[Outcome]:
    given, places = example("training_tasks")()[:tasks], tasks * attempts
    engine = Recording()
    shown = asyncio.run(
        play(rollout_of(engine, tokenizer, Demonstrator(example("expert")), 1, places), given)
    )
    engine.actions = {t.task.id: [list(action.tokens) for action in t.actions] for t in shown}
    scripts = [script_of(t, tokenizer) for t in shown for _ in range(attempts)]
    outcomes: list[Outcome] = []
    for is_busy in (False, True):
        rollout = rollout_of(engine, tokenizer, Agent(), attempts, places)
        with frozen_gc(), company(is_busy):
            started = time.perf_counter()
            played = asyncio.run(play(rollout, given))
            ludus = time.perf_counter() - started
            started = time.perf_counter()
            asyncio.run(bare(scripts, tokenizer))
            plain = time.perf_counter() - started
        turns = sum(trajectory.turns for trajectory in played)
        if turns != sum(len(script.actions) for script in scripts):
            raise RuntimeError("the two loops did not play the same turns")
        name = "a busy thread" if is_busy else "nothing"
        outcomes.append(Outcome(name, turns, 1e3 * ludus / turns, 1e3 * plain / turns))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| beside | turns | Ludus, ms a turn | bare loop, ms a turn | ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {o.company} | {o.turns:,} | {o.ludus:.3f} | {o.bare:.3f} | {o.ludus / o.bare:.1f} |"
        for o in outcomes
    ]
    return "\n".join(lines)


def fitted() -> HFTokenizer:
    """A tokenizer of the example's own words."""
    texts = [message.content for task in example("training_tasks")()[:256] for message in task.messages]
    return HFTokenizer(fit_tokenizer(texts, vocabulary=2048))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a turn costs the host.")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--tokenizer", help="a folder or a hub name; one is made when left out")
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.tokenizer) if given.tokenizer else fitted()
    print(table(measure(given.tasks, given.attempts, tokenizer)))


if __name__ == "__main__":
    main()
