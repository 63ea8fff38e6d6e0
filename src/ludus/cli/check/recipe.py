"""The checks of `ludus check`: load a part, use it, and report problems as (severity, text)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.cli.check.prompts import prompt_findings
from ludus.cli.options import until_told
from ludus.core.failures import ConfigError, Failure, Fault, LudusError, MissingExtraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet
from ludus.core.registry import import_object
from ludus.core.task import Task, spread
from ludus.core.trajectory import is_success
from ludus.envs import WORLDS, PoolConfig, RemoteEnvs, World, load_env
from ludus.envs.env import Isolation
from ludus.envs.instances import probe_env
from ludus.llm.config import check_reachable
from ludus.remote.threads import busy_locations
from ludus.rewards import build_reward, check_rewards
from ludus.rewards.judges.asking import asked_models
from ludus.rollouts.agent import Agent
from ludus.rollouts.env_contract import Clause, EnvContract, Verdict, check_env
from ludus.rollouts.episode import Episode
from ludus.rollouts.rollout import Rollout
from ludus.rollouts.tasksets import load_tasks, undecodable_images
from ludus.sandbox import close_shared_sandboxes
from ludus.tools import example_of, shut
from ludus.tools.calling import first_call_errors, forget_errors
from ludus.tools.json_schema import schema_mistakes
from ludus.tools.library import build_toolset
from ludus.tools.toolset import effects_of
from ludus.training.config.parts import Parts, TaskSetSpec, load_parts, task_set_specs
from ludus.training.config.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from ludus.chat.tokenizers import HFTokenizer

Findings = list[tuple[str, str]]
SAMPLE = 16
"""How many tasks a check looks at."""
BYTES_PER_TOKEN = 8
"""More than the text of any language takes."""
MOST_TOLD = 5
"""Most findings of one kind that are listed one by one."""
VARIANTS = 3
"""How often a check calls each tool, with other arguments each time."""
SECONDS = 60.0
"""How long a part of a check may take."""
GRACE = 5.0
"""How long what is stopped may take to clean up."""


def recipe_findings(
    path: Path, overrides: list[str], call_tools: bool | None = None, seconds: float = SECONDS
) -> Findings:
    """Everything that can be found out about a recipe without loading its model, for each task set.

    Tools are called, but for those of MCP servers that do not declare that they change nothing; `call_tools`
    calls all of them, or none.
    `seconds` is how long each of the things that it tries may take.
    """
    recipe = load_recipe(path, overrides)
    parts = load_parts(recipe)
    # torch and transformers are imported from here on: mistakes in the recipe are reported before
    from ludus.training.config.recipe import rate_notes, with_usual_settings
    from ludus.training.early_end import idle_patience
    from ludus.training.models.loading import check_source
    from ludus.training.preflight import check_engines, check_parts, check_servers

    refusals = _refusal(check_parts, recipe, parts) + _refusal(check_source, recipe.model)
    findings: Findings = list(dict.fromkeys(refusals))  # both look at the device
    if text := idle_patience(recipe):
        findings.append(("warning", text))
    findings += [("info", text) for text in rate_notes(with_usual_settings(recipe))]
    plans = task_set_specs(recipe, parts)

    async def every_set() -> None:  # in one event loop, as a run has one: tools may hold on to it
        try:
            await check_servers(recipe, parts)
            await check_engines(recipe)
            asking = [one for plan in plans for one in (*plan.parts.rewards, *plan.parts.group_rewards)]
            await check_reachable(*asked_models(asking))
        except LudusError as error:  # whatever is tried would wait for the server, and fail by it
            findings.append(("error", str(error)))
            return
        for plan in plans:
            of_set = f"{plan.name}: " if len(plans) > 1 else ""
            found = await _set_findings(plan, call_tools, seconds)
            findings.extend((severity, of_set + text) for severity, text in found)
        if len(plans) == 1 and not any(severity == "error" for severity, _ in findings):
            findings.extend(await _within(seconds, "an episode", _prompts(recipe, parts)))
        await close_shared_sandboxes()

    try:
        asyncio.run(until_told(every_set()))
    except asyncio.CancelledError:  # by a signal
        raise KeyboardInterrupt from None
    return findings


def _refusal(check: Callable[..., None], *arguments: object) -> Findings:
    """The findings of a check whose error would end a run."""
    try:
        check(*arguments)
    except LudusError as error:
        return [("error", str(error))]
    return []


async def _set_findings(plan: TaskSetSpec, call_tools: bool | None, seconds: float) -> Findings:
    """Findings of a task set: tasks, environments, an episode, and the rewards of right and wrong answers."""
    recipe, parts = plan.recipe, plan.parts
    findings: Findings = [("info", f"{len(parts.tasks)} tasks, {len(parts.held_out)} held out")]
    both = _in_both(parts.tasks, parts.held_out)
    if both:
        findings.append(
            ("warning", f"{len(both)} held-out tasks are trained on too, such as {both[0]!r}")
        )
    findings += await asyncio.to_thread(_images, parts)
    for name, factory in parts.all_envs.items():
        settings = recipe.agent.pools.get(name, PoolConfig())
        found = _env(factory, parts.tasks[:1], name, settings.isolation)
        findings += await _within(seconds, f"the check of the environment {name!r}", found)
    # where an environment is broken, an episode would fail by it; so would the expert's, and each of the calls
    if parts.tasks and not any(severity == "error" for severity, _ in findings):
        findings += await _within(seconds, "an episode", _episode(recipe, parts))
        if not any(severity == "error" for severity, _ in findings):
            what = "the check of the rewards"
            if callable(parts.demonstrations):
                named = recipe.first_sft.demonstrations or getattr(parts.demonstrations, "__name__", "")
                what = f"the expert {named} on {min(SAMPLE, len(parts.tasks))} tasks"
            findings += await _within(seconds, what, _scores(recipe, parts))
        if call_tools is not False and not any(severity == "error" for severity, _ in findings):
            calls = _tool_calls(recipe, parts, may_change=call_tools is True)
            findings += await _within(seconds * VARIANTS, "the calls of the tools", calls)
    return findings


def _images(parts: Parts) -> Findings:
    """Every image of the tasks and demonstrations, decoded as a run would decode it."""
    tasks = (task.messages for task in chain(parts.tasks, parts.held_out))
    shown = parts.demonstrations
    conversations = () if shown is None or callable(shown) else shown
    messages = [message for one in chain(tasks, conversations) for message in one if message.media]
    if not messages:
        return []
    try:
        broken = list(undecodable_images(messages))
    except MissingExtraError as error:
        return [("skipped", f"images were not decoded: {error}")]
    told = [("error", text) for text in broken[:MOST_TOLD]]
    if len(broken) > MOST_TOLD:
        told.append(("error", f"and {len(broken) - MOST_TOLD} more images cannot be decoded"))
    return told or [("info", f"the images of {len(messages)} messages can be decoded")]


async def _within(seconds: float, what: str, work: Coroutine[Any, Any, Findings]) -> Findings:
    """The findings of a part of a check, or an error that says where it still waits at the deadline."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if done:
        return task.result()
    places = busy_locations()
    task.cancel()
    await asyncio.wait([task], timeout=GRACE)
    where = f": it waits at {', '.join(places)}" if places else ""
    more = "mend what it waits for, or raise --seconds"
    return [("error", f"{what} did not end within {seconds:g} s{where}; {more}")]


def _in_both(tasks: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    """The held-out tasks that are trained on, too, by all that they say but their names.

    Where that does not tell training tasks apart, their names do: an environment draws its seed from them.
    """
    seen = {_content(task) for task in tasks}
    if len(seen) < len(tasks):
        ids = {task.id for task in tasks}
        return [task.id for task in held_out if task.id in ids and _content(task) in seen]
    return [task.id for task in held_out if _content(task) in seen]


def _content(task: Task) -> int:
    """All of a task but its name: what its answer is, or its sandbox holds, may be the only difference."""
    return hash(repr((task.messages, task.target, task.envs, task.metadata)))


@asynccontextmanager
async def _rollout(
    recipe: Recipe, parts: Parts, tokenizer: HFTokenizer | None = None
) -> AsyncIterator[Rollout]:
    """The recipe's rollout with a script in the model's place, which always says "hello"."""
    from ludus.chat.tokenizers import HFTokenizer
    from ludus.engine import FakeEngine
    from ludus.training.models.scratch import fit_tokenizer
    from ludus.training.task_sets import build_rollout

    tokenizer = tokenizer or HFTokenizer(fit_tokenizer([], vocabulary=0))
    engine = FakeEngine(lambda tokens, sampling, session: "hello", tokenizer)
    rollout = build_rollout(recipe, parts, engine, tokenizer)
    try:
        yield rollout
    finally:
        if (close := getattr(rollout.agent, "close", None)) is not None:
            await close()
        await asyncio.gather(*(pool.close() for pool in rollout.pools.values()))


async def _episode(recipe: Recipe, parts: Parts) -> Findings:
    """One episode in which the model says "hello": do tools, format, agent and rewards work together?"""
    # a token here is a byte, of which the model's own tokenizer makes fewer tokens
    room = BYTES_PER_TOKEN * recipe.budgets.max_tokens
    async with _rollout(recipe, parts) as rollout:
        rollout.budgets = recipe.budgets.model_copy(update={"max_tokens": room})
        rollout.retries = 0  # a server that is not there is waited for once
        trajectory = await rollout.play(parts.tasks[0], attempt=0, seed=recipe.seed)
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


async def _prompts(recipe: Recipe, parts: Parts) -> Findings:
    """The prompts of demonstrations and of an episode, by the model's own tokenizer where it can be loaded."""
    from ludus.training.models.loading import tokenizer_of
    from ludus.training.task_sets import tool_specs

    shown, name = parts.demonstrations, recipe.model.name
    if shown is None or callable(shown) or not parts.tasks:
        return []
    tokenizer, notes = None, Findings()
    if name is not None:
        try:
            tokenizer = await asyncio.to_thread(tokenizer_of, recipe.model)
        except LudusError as error:
            other = "prompts were compared by the chat template of models made from scratch"
            notes.append(
                ("skipped", f"{other}, because the tokenizer of {name} cannot be loaded: {error}")
            )
    async with _rollout(recipe, parts, tokenizer) as rollout:
        limits = {"max_turns": 1, "max_tokens": BYTES_PER_TOKEN * recipe.budgets.max_tokens}
        rollout.budgets = recipe.budgets.model_copy(update=limits)
        specs = await tool_specs(rollout)
        played = await rollout.play(parts.tasks[0], attempt=0, seed=recipe.seed)
        return notes + prompt_findings(rollout, shown[:SAMPLE], specs, played)


async def _scores(recipe: Recipe, parts: Parts) -> Findings:
    """Does the right behaviour score? By the expert where there is one, else by the gold answers."""
    from ludus.training.task_sets import play_expert

    tasks = spread(parts.tasks, SAMPLE)
    expert = parts.demonstrations
    if callable(expert):
        async with _rollout(recipe, parts) as rollout:
            played = await play_expert(rollout, expert, tasks, recipe.seed)
        won = sum(is_success(trajectory) for trajectory in played)
        text = f"the expert, given all the turns it needs, succeeds on {won} of {len(tasks)} tasks"
        if lost := len(tasks) - len(played):
            text += f" ({lost} failed, and would be left out)"
        if won == len(played):
            return [("info", text)]
        if won and any(stage.needs_rewards for stage in recipe.stages):  # as in recipes/tickets.toml
            return [("info", f"{text}; the others are imitated too, for RL to do better")]
        more = "its mistakes are imitated too" if won else "is it the expert, or the reward?"
        return [("warning", f"{text}: {more}")]
    if parts.all_envs or not parts.rewards or any(task.target is None for task in tasks):
        return [("info", "rewards were not tried: the tasks have no targets, or need environments")]
    report = await check_rewards(tasks, parts.rewards)
    if report.ignores_answers:
        text = (
            "the rewards score every answer alike, the right one too, so whether they are right was not tried: "
            "they read what an answer by itself has not, such as calls, or are broken. An expert tells "
            "(demonstrations of [warm_start])"
        )
        return [("warning", text)]
    return [("info" if report.ok else "error", str(report))]


async def _tool_calls(recipe: Recipe, parts: Parts, *, may_change: bool) -> Findings:
    """Each tool called with arguments that its schema allows: does it raise, whatever it is given?"""
    from ludus.rewards import Scorer
    from ludus.training.task_sets import tool_specs

    forget_errors()
    budgets = recipe.budgets.model_copy(update={"max_seconds": SECONDS})
    findings: Findings = []
    async with _rollout(recipe, parts) as rollout:
        try:
            specs = await tool_specs(rollout)
            left_out = frozenset() if may_change else effects_of(rollout.tools)
            if left_out:
                names = ", ".join(repr(name) for name in sorted(left_out))
                text = (
                    f"{names}: not called, because what a call changes on their MCP server is not known"
                )
                findings.append(("skipped", f"{text} (no readOnlyHint); --call-tools calls them"))
            for spec in specs:
                if spec.name in left_out:
                    continue
                played: list[tuple[ToolResult | None, Failure | None]] = []
                for variant in range(VARIANTS):
                    arguments = example_of(spec.parameters, variant)
                    trial = OneCall(ToolCall(spec.name, arguments))
                    playing = replace(
                        rollout, agent=trial, budgets=budgets, scorer=Scorer(()), retries=0
                    )
                    trajectory = await playing.play(parts.tasks[0], attempt=variant, seed=recipe.seed)
                    played.append((trial.result, trajectory.failure))
                findings += judge_tool_calls(spec.name, played)
        finally:
            await shut(rollout.tools)
            await close_shared_sandboxes()
    return findings


class OneCall(Agent):
    """An agent that makes one call and keeps its result."""

    def __init__(self, call: ToolCall) -> None:
        self.call = call
        self.result: ToolResult | None = None

    async def run(self, episode: Episode) -> None:
        [(_, self.result)] = await episode.call([self.call])


def judge_tool_calls(tool: str, played: Sequence[tuple[ToolResult | None, Failure | None]]) -> Findings:
    """Findings about one tool, from its calls with different arguments."""
    failures = [failure for _, failure in played if failure is not None]
    if failures:
        return [("error", f"the tool {tool!r} failed when it was called: {failures[0].message}")]
    results = [result for result, _ in played if result is not None]
    if any(result.fault is None for result in results):
        return []
    accidents = first_call_errors(tool)
    if len(accidents) == len(results) and len(set(accidents)) == 1:
        fix = "mend it; or, if it refuses arguments in this way, let it raise ToolFault, which says so"
        return [("error", f"the tool {tool!r} raises {accidents[0]}, whatever it is given: {fix}")]
    refusal = f"{results[0].fault}: {results[0].content}" if results else "no result"
    told = f"the tool {tool!r} took none of {len(results)} generated calls ({refusal:.200})"
    if results and all(result.fault is Fault.TOOL_TIMEOUT for result in results):
        return [("warning", f"{told}: does it ever return? Its `timeout` says how long a call may take")]
    return [("info", f"{told}: try it yourself with ludus check tool")]


QUICK = {"sample": 3, "gold": 5, "instances": 4, "episodes": 20, "seconds": SECONDS}
THOROUGH = {"sample": 20, "gold": 200, "instances": 16, "episodes": 200, "seconds": 10 * SECONDS}
"""How much of an environment's contract `ludus check env` tries."""


def env_findings(
    reference: str,
    tasks: str | None,
    name: str | None = None,
    *,
    expert: str | None = None,
    rewards: Sequence[str] = (),
    thorough: bool = False,
    episodes: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Whether an environment keeps its contract, clause by clause; `name` is what tasks call it."""
    world = WORLDS.get(reference)
    factory = load_env(reference) if world is None or world.env is not None else None
    if factory is not None:
        asyncio.run(probe_env(factory, reference, {}))
        is_given = tasks is not None and expert is not None and bool(rewards)
        if world is None and not is_given and (world := _served_world(factory)) is not None:
            used = "its tasks, expert and rewards are used where others are not given"
            yield "info", f"the server calls it {world.name!r}, like the prebuilt environment: {used}"
    given = load_tasks(tasks) if tasks else world.tasks("held_out") if world is not None else []
    called = name or _name_in(given, reference)
    if factory is not None:
        found = asyncio.run(_env(factory, given[:1], called))
        yield from found
        if any(severity == "error" for severity, _ in found):
            return  # every clause would fail by the same
    settings: dict[str, Any] = dict(THOROUGH if thorough else QUICK)
    if episodes is not None:
        settings["episodes"] = episodes
    if world is not None:
        settings |= {"expert": world.expert, "rewards": world.rewards, "max_turns": world.max_turns}
    if expert is not None:
        settings["expert"] = import_object(expert)
    if rewards:
        settings["rewards"] = [build_reward(one) for one in rewards]
    if world is not None and world.tools:
        settings["tools"] = world.toolset()
    contract = EnvContract(factory, given, called, **settings)
    with asyncio.Runner() as runner:
        clauses = contract.clauses()
        while (one := runner.run(anext_or_none(clauses))) is not None:
            yield str(one.verdict), f"{one.name}: {one.text}"
        runner.run(close_shared_sandboxes())


def _served_world(factory: object) -> World | None:
    """The prebuilt environment that a server's is called like, if it can be used here."""
    served = factory.served_name if isinstance(factory, RemoteEnvs) else None
    world = WORLDS.get(served) if served else None
    return world if world is not None and world.env is not None and not world.missing() else None


async def anext_or_none(clauses: AsyncIterator[Clause]) -> Clause | None:
    """The next clause, as soon as it is there; None at the end."""
    return await anext(clauses, None)


def _name_in(tasks: Sequence[Task], reference: str) -> str:
    """The tasks' name for an environment that the command line names by a file or a module."""
    names = list(tasks[0].envs) if tasks else []
    if reference in names or not names:
        return reference
    if len(names) > 1:
        raise ConfigError(
            f"task {tasks[0].id!r} has the environments {', '.join(names)}: say by --name which one "
            f"{reference!r} is"
        )
    return names[0]


async def _env(
    factory: object, tasks: Sequence[Task], name: str, isolation: Isolation | None = None
) -> Findings:
    if not callable(factory):
        raise ConfigError(f"the environment {name!r} is not a class or a function that makes one")
    found = await check_env(factory, tasks[0] if tasks else None, name=name, isolation=isolation)
    severities = {Verdict.FAILED: "error", Verdict.WARNING: "warning"}
    return [(severities[one.verdict], one.text) for one in found]


def tool_findings(reference: str, arguments: str | None, name: str | None = None) -> Findings:
    tools = build_toolset([reference])
    context = ToolContext("check", Task.of("check", id="check"))
    try:
        given = json.loads(arguments) if arguments is not None else None
    except ValueError as error:
        raise ConfigError(f"--arguments is not JSON: {error}") from None
    if given is not None and not isinstance(given, dict):
        raise ConfigError("--arguments must be a JSON object")

    async def used() -> Findings:
        try:
            return await _used_tool(tools, context, given, name)
        finally:
            await tools.close(context)
            await shut(tools)
            await close_shared_sandboxes()

    return asyncio.run(used())


async def _used_tool(
    tools: ToolSet, context: ToolContext, given: dict[str, Any] | None, name: str | None
) -> Findings:
    specs = {spec.name: spec for spec in await tools.list(context)}
    if name is not None and name not in specs:
        raise ConfigError(f"there is no tool {name!r} among {', '.join(specs)}")
    chosen = list(specs.values()) if name is None else [specs[name]]
    findings: Findings = []
    for spec in chosen:
        findings.append(("info", json.dumps(spec.as_openai(), indent=2)))
        if not spec.description:
            told = "it has no description: write a docstring, the model reads it"
            findings.append(("warning", told if len(chosen) == 1 else f"{spec.name}: no description"))
        mistakes = schema_mistakes(spec.parameters)
        findings += [("warning", f"{spec.name}: {mistake}") for mistake in mistakes]
    if given is None:
        return findings
    if len(chosen) > 1:
        raise ConfigError(f"which of the tools shall be called? --name {' or '.join(specs)}")
    try:
        await tools.open(context)
        result = await tools.call(ToolCall(chosen[0].name, given), context)
    except LudusError as error:
        return [*findings, ("error", str(error))]
    fault = f" (the model's fault: {result.fault})" if result.fault else ""
    findings.append(("warning" if fault else "info", f"result{fault}: {result.content}"))
    return findings
