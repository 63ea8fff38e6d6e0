"""What `ludus check` does: load the thing, use it, and say what is wrong as (severity, text)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import ToolCall
from ludus.core.success import is_success
from ludus.core.task import Task
from ludus.core.tooling import ToolContext
from ludus.envs import ENVS, check_env
from ludus.rewards import check_rewards
from ludus.rollouts.tasksets import load_tasks
from ludus.sandbox import close_shared_sandboxes
from ludus.tools.library import build_toolset
from ludus.training.parts import Parts, load_parts
from ludus.training.recipe import Recipe, load_recipe
from ludus.training.set_building import SetPlan, plans_of

Findings = list[tuple[str, str]]
SAMPLE = 16
"""How many tasks a check looks at."""
BYTES_PER_TOKEN = 8
"""More than the text of any language takes."""


def recipe_findings(path: Path, overrides: list[str]) -> Findings:
    """Everything that can be found out about a recipe without loading its model, for each task set."""
    recipe = load_recipe(path, overrides)
    parts = load_parts(recipe)
    # torch and transformers are imported from here on: mistakes in the recipe itself are told before
    from ludus.training.beginning import check_parts
    from ludus.training.models import check_source

    refusals = _refusal(check_parts, recipe, parts) + _refusal(check_source, recipe.model)
    findings: Findings = list(dict.fromkeys(refusals))  # both look at the device
    plans = plans_of(recipe, parts)
    for plan in plans:
        of_set = f"{plan.name}: " if len(plans) > 1 else ""
        findings += [(severity, of_set + text) for severity, text in _set_findings(plan)]
    return findings


def _refusal(check: Callable[..., None], *arguments: object) -> Findings:
    """What a check that would end a run has to say."""
    try:
        check(*arguments)
    except LudusError as error:
        return [("error", str(error))]
    return []


def _set_findings(plan: SetPlan) -> Findings:
    """Its tasks, its environments, an episode, and what its rewards make of right and wrong answers."""
    recipe, parts = plan.recipe, plan.parts
    findings: Findings = [("info", f"{len(parts.tasks)} tasks, {len(parts.held_out)} held out")]
    seen = {_content(task) for task in parts.tasks}
    both = [task.id for task in parts.held_out if _content(task) in seen]
    if both:
        findings.append(
            ("warning", f"{len(both)} held-out tasks are trained on too, such as {both[0]!r}")
        )
    for name, factory in parts.envs.items():
        findings += _env(factory, parts.tasks[:1], name)
    if parts.tasks:
        findings += asyncio.run(_episode(recipe, parts))
        findings += asyncio.run(_scores(recipe, parts))
    return findings


def _content(task: Task) -> str:
    """All of a task but its name: what its answer is, or its sandbox holds, may be the only difference."""
    return repr((task.messages, task.target, task.envs, task.metadata))


async def _episode(recipe: Recipe, parts: Parts) -> Findings:
    """One episode in which the model says "hello": do tools, format, agent and rewards work together?"""
    from ludus.engine.fake import FakeEngine
    from ludus.rollouts.tokenizers import HFTokenizer
    from ludus.training.models import fit_tokenizer
    from ludus.training.workshop import build_rollout

    tokenizer = HFTokenizer(fit_tokenizer([], vocabulary=0))
    engine = FakeEngine(lambda tokens, sampling, session: "hello<|im_end|>", tokenizer)
    rollout = build_rollout(recipe, parts, engine, tokenizer)
    # a token here is a byte, of which the model's own tokenizer makes fewer tokens
    room = BYTES_PER_TOKEN * recipe.budgets.max_tokens
    rollout.budgets = recipe.budgets.model_copy(update={"max_tokens": room})
    try:
        trajectory = await rollout.play(parts.tasks[0], attempt=0, seed=recipe.seed)
    finally:
        await asyncio.gather(*(pool.close() for pool in rollout.pools.values()))
    if trajectory.failure is not None:
        failure = trajectory.failure
        return [("error", f"an episode failed at the boundary '{failure.boundary}': {failure.message}")]
    if not trajectory.turns:
        text = (
            "an episode ended before the model could say anything: the first prompt is far longer than "
        )
        return [("error", f"{text}budgets.max_tokens = {recipe.budgets.max_tokens}")]
    if trajectory.reward is None and not parts.group_rewards:
        return [("warning", "an episode was played and not scored: every reward returned None")]
    ended = f"{trajectory.stop}, reward {trajectory.reward}"
    return [("info", f"an episode was played, by a script in the model's place: {ended}")]


async def _scores(recipe: Recipe, parts: Parts) -> Findings:
    """Does the right behaviour score? By the expert where there is one, else by the gold answers."""
    from ludus.engine.fake import FakeEngine
    from ludus.rollouts.tokenizers import HFTokenizer
    from ludus.training.models import fit_tokenizer
    from ludus.training.workshop import build_rollout, play_expert

    tasks = parts.tasks[:SAMPLE]
    expert = parts.demonstrations
    if callable(expert):
        tokenizer = HFTokenizer(fit_tokenizer([], vocabulary=0))
        rollout = build_rollout(recipe, parts, FakeEngine([]), tokenizer)
        played = await play_expert(rollout, expert, tasks, recipe.seed)
        await asyncio.gather(*(pool.close() for pool in rollout.pools.values()))
        won = sum(is_success(trajectory) for trajectory in played)
        text = f"the expert, given all the turns it needs, succeeds on {won} of {len(played)} tasks"
        return [("info" if won == len(played) else "warning", text)]
    if parts.envs or not parts.rewards or any(task.target is None for task in tasks):
        return [("info", "rewards were not tried: the tasks have no targets, or need environments")]
    report = await check_rewards(tasks, parts.rewards)
    return [("info" if report.ok else "error", str(report))]


def env_findings(name: str, tasks: str | None) -> Findings:
    """What an environment does with the first task."""
    return _env(ENVS.load(name), load_tasks(tasks)[:1] if tasks else [], name)


def _env(factory: object, tasks: list[Task], name: str) -> Findings:
    if not callable(factory):
        raise ConfigError(f"the environment {name!r} is not a class or a function that makes one")
    task = tasks[0] if tasks else Task.of("check", id="check")
    found = asyncio.run(check_env(factory, task, name=name))
    findings = [(str(finding.severity), f"{finding.problem}; {finding.fix}") for finding in found]
    if not tasks and any(severity == "error" for severity, _ in findings):
        findings.append(("info", "it was given a task without data; give it one of its own by --tasks"))
    return findings


def tool_findings(reference: str, arguments: str | None) -> Findings:
    """A tool as the model is told of it, and what a call gives."""
    tools = build_toolset([reference])
    context = ToolContext("check", Task.of("check", id="check"))
    try:
        given = json.loads(arguments) if arguments is not None else None
    except ValueError as error:
        raise ConfigError(f"--arguments is not JSON: {error}") from None
    if given is not None and not isinstance(given, dict):
        raise ConfigError("--arguments must be a JSON object")

    async def used() -> Findings:
        spec = (await tools.list(context))[0]
        findings: Findings = [("info", json.dumps(spec.as_openai(), indent=2))]
        if not spec.description:
            findings.append(("warning", "it has no description: write a docstring, the model reads it"))
        if given is not None:
            try:
                await tools.open(context)
                result = await tools.call(ToolCall(spec.name, given), context)
            except LudusError as error:
                return [*findings, ("error", str(error))]
            fault = f" (the model's fault: {result.fault})" if result.fault else ""
            findings.append(("warning" if fault else "info", f"result{fault}: {result.content}"))
            await tools.close(context)
            await close_shared_sandboxes()
        return findings

    return asyncio.run(used())
