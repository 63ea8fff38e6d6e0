"""A run with three planted failures, to learn the viewer by: python examples/helpdesk_run.py, ludus view runs/

A help desk answers questions about orders, stock and returns. Tools, rewards, prompts, episodes and files are
real; only the policy is a script, so that it takes seconds and always goes wrong in the same three ways. Can
you find them? docs/viewer.md has the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ludus
from ludus.chat import Renderer, load_format
from ludus.chat.tokenizers import HFTokenizer
from ludus.core import Group, Sampling, Task, key
from ludus.engine import FakeEngine
from ludus.observe import RunWriter, prefixed, rollout_metrics
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset
from ludus.training.models.scratch import fit_tokenizer

STEPS = 16
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
ITEMS = ("lamp", "chair", "kettle", "rug", "clock", "vase")
DESK = "You work at the help desk of a shop. Use the tools, then answer the customer in one sentence."
RETURNS = (
    "You work at the returns desk of a shop. Call a tool like this:\n"
    "<tool_call>returns(item='lamp')</tool_call>\nThen answer the customer in one sentence."
)


@ludus.tool
async def order(number: int) -> str:
    """Look up when an order arrives.

    Args:
        number: The order's number.
    """
    return f"Order {number} arrives on {DAYS[number % len(DAYS)]}."


@ludus.tool(timeout=0.05)
async def stock(item: str) -> str:
    """Look up how many of an item are in stock.

    Args:
        item: What is asked for.
    """
    await asyncio.sleep(30)  # the warehouse does not answer
    return f"{len(item)} in stock"


@ludus.tool
async def returns(item: str) -> str:
    """Look up how long an item can be returned.

    Args:
        item: What is returned.
    """
    return f"A {item} can be returned within {10 * len(item)} days."


@ludus.reward(name="success", weight=1.0)
async def success(trajectory: ludus.Trajectory, target: str) -> float:
    """1 when the answer names what was asked for."""
    return float(target.lower() in (trajectory.answer or "").lower())


@ludus.reward(name="polite", weight=1.0)
async def polite(trajectory: ludus.Trajectory) -> float:
    """A tenth of a point for thanking the customer."""
    return 0.1 * (trajectory.answer or "").lower().count("thank you")


def tasks() -> list[Task]:
    """Four of each kind."""
    found = []
    for number in range(4):
        order_number, item = 100 + 7 * number, ITEMS[number]
        found.append(
            Task.of(
                f"When does my order {order_number} arrive?",
                DAYS[order_number % len(DAYS)],
                id=f"orders-{number}",
                system=DESK,
            )
        )
        found.append(
            Task.of(
                f"Do you have a {item} in stock?",
                f"{len(item)} in stock",
                id=f"stock-{number}",
                system=DESK,
            )
        )
        found.append(
            Task.of(
                f"How long can I return a {item}?",
                f"{10 * len(item)} days",
                id=f"returns-{number}",
                system=RETURNS,
            )
        )
    return found


class Script:
    """The policy. It reads the conversation as the model would, and gets more polite with every step."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.tokenizer = tokenizer
        self.step = 0

    def __call__(self, tokens: list[int], sampling: Sampling, session: str | None) -> str:
        text = self.tokenizer.decode(tokens)
        draw = random.Random(key(sampling.seed, "script"))
        question = text.rpartition("<|im_start|>user\n")[2] if "<tool_response>" not in text else text
        turn = text.count("<|im_start|>assistant")
        thanks = "Thank you! " * max(0, round(draw.gauss(self.step * 0.9, 1.0)))
        if turn == 1:
            if "order" in question:
                number = question.split("order ")[1].split(" ")[0]
                if draw.random() < 0.25:
                    number = str(int(number) + 1)
                return _call("order", f'{{"number": {number}}}')
            if "in stock" in question:
                return _call("stock", f'{{"item": "{question.split("a ")[1].split(" ")[0]}"}}')
            item = question.split("return a ")[1].split("?")[0]
            return f"I look it up.\n<tool_call>returns(item='{item}')</tool_call>"
        answer = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        if "arrives on" in answer:
            return f"{thanks}{answer}"
        return f"{thanks}I am sorry, I cannot tell."


def _call(name: str, arguments: str) -> str:
    return f'I look it up.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def note_advantages(groups: Sequence[Group]) -> None:
    """What GRPO would train each token with."""
    for group in groups:
        rewards = [one.reward for one in group.trainable if one.reward is not None]
        spread = statistics.pstdev(rewards) if len(rewards) > 1 else 0.0
        for one in group.trainable:
            advantage = ((one.reward or 0.0) - statistics.mean(rewards)) / spread if spread else 0.0
            for action in one.actions:
                action.advantages = [advantage] * len(action.tokens)


async def play(folder: Path) -> Path:
    """All steps, written as training writes them; the run's folder."""
    chosen = tasks()
    tokenizer = HFTokenizer(
        fit_tokenizer([m.content for t in chosen for m in t.messages] * 8, vocabulary=500)
    )
    script = Script(tokenizer)
    rollout = Rollout(
        engine=FakeEngine(script, tokenizer, seconds=0.002),
        renderer=Renderer(tokenizer, load_format("hermes")),
        scorer=Scorer([success, polite]),
        tools=as_toolset([order, stock, returns]),
        budgets=Budgets(max_turns=3, max_turn_tokens=400),
        attempts=4,
    )
    recipe: dict[str, Any] = {
        "name": "helpdesk",
        "seed": 0,
        "rewards": ["helpdesk_run.py:success", "helpdesk_run.py:polite"],
        "model": {"name": "(a script)"},
        "agent": {
            "format": "hermes",
            "tools": [f"helpdesk_run.py:{one}" for one in ("order", "stock", "returns")],
        },
        "budgets": {"max_turns": 3, "max_turn_tokens": 400},
        "rl": {"algorithm": "grpo", "steps": STEPS, "tasks": len(chosen), "attempts": 4},
    }
    with RunWriter.create_numbered("helpdesk", recipe, root=folder) as run:
        for step in range(STEPS + 1):
            script.step = step
            played = rollout.groups(chosen, key("helpdesk", step))
            groups = sorted([group async for group in played], key=lambda group: group.task.id)
            if step % 8 == 0:
                run.write_groups(groups, step, "eval")
                run.log(step, prefixed("eval", rollout_metrics(groups)))
            if step:
                note_advantages(groups)
                run.write_groups(groups, step)
                run.log(step, rollout_metrics(groups))
        with run.checkpoint(STEPS) as checkpoint:
            tokenizer.inner.save_pretrained(checkpoint)
        return run.path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a run with three planted failures.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to (runs)")
    made = asyncio.run(play(parser.parse_args().folder))
    print(f"{made}: now look at it with: ludus view {made.parent}")
