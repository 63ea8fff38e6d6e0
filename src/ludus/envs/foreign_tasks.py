"""Task sets of others, as tasks and a reward: reasoning-gym and verifiers.

A recipe names one where it names tasks, with options behind a question mark, and the reward by its name:

    tasks = { train = "reasoning_gym:leg_counting", evaluation = "reasoning_gym:leg_counting@held_out" }
    rewards = ["reasoning_gym"]

A task says which item of which set it is; the reward builds the set again where it runs, and asks it for the
score.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.messages import Json, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards import reward

SIZES = {"train": 2000, "held_out": 200}
"""How many tasks a split has when the reference does not say it."""
HELD_OUT_SEED = 2**40
"""Added to the seed of held-out items: an item's own seed is the set's and its number."""


def parse_reference(reference: str) -> tuple[str, str, Json]:
    """`name@split?size=100&word=text`: name, split and options; numbers and JSON are read as such."""
    named, _, query = reference.partition("?")
    name, _, split = named.partition("@")
    if not name or split not in ("", *SIZES):
        raise ConfigError(
            f"{reference!r} is written NAME@SPLIT?option=value, where SPLIT is {' or '.join(SIZES)}"
        )
    return name, split or "train", {key: _value(text) for key, text in parse_qsl(query)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def imported(package: str, extra: str, purpose: str) -> Any:
    """A package that an extra brings."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == package.split(".")[0]:
            raise MissingExtraError(package.split(".")[0], extra, purpose) from error
        raise


# reasoning-gym --------------------------------------------------------------------------------------


def reasoning_gym_tasks(reference: str) -> list[Task]:
    """Tasks of one or several sets (`leg_counting+chain_sum`); options are `size`, `seed`, and the sets' own.

    The splits have different seeds. Of the held-out ones those are left out whose question a training task has
    (of as many as a training split has without `size`), which happens in small sets.
    """
    names, split, options = parse_reference(reference)
    size = options.pop("size", SIZES[split])
    tasks: list[Task] = []
    for name in names.split("+"):
        known = (
            set() if split == "train" else {one["question"] for one in _first(name, json.dumps(options))}
        )
        spec: Json = {"set": name, "options": options}
        if split != "train":
            spec["options"] = {**options, "seed": options.get("seed", 0) + HELD_OUT_SEED}
        found: list[Task] = []
        for index in range(4 * size):
            item = _item(name, json.dumps(spec["options"], sort_keys=True), index)
            if len(found) == size:
                break
            if item["question"] in known:
                continue
            id = f"{name}-{split}-{index}"
            where: Json = {**spec, "index": index}
            more = {"reasoning_gym": where, "subtask": name}
            found.append(Task.of(item["question"], item["answer"], id=id, metadata=more))
        if not found:
            raise ConfigError(
                f"reasoning_gym:{reference}: every item of {name!r} is among the training tasks; the set is "
                "too small to hold any out (give its options a larger range)"
            )
        tasks += found
    return tasks


@lru_cache(maxsize=64)
def _first(name: str, options: str) -> list[Json]:
    return [_item(name, options, index) for index in range(SIZES["train"])]


@lru_cache(maxsize=256)
def _dataset(name: str, options: str) -> Any:
    package = imported("reasoning_gym", "reasoning-gym", "a task set of reasoning-gym")
    try:
        return package.create_dataset(name, **{"seed": 0, **json.loads(options), "size": 2**31 - 1})
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning_gym:{name}: {error}") from error


@lru_cache(maxsize=65_536)
def _item(name: str, options: str, index: int) -> Json:
    found: Json = _dataset(name, options)[index]
    return found


_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward(name="reasoning_gym")
def reasoning_gym_score(answer: str, task: Task) -> float:
    """The set's own score of the answer: what stands in the last <answer> tags, or all of it."""
    where = task.metadata.get("reasoning_gym")
    if where is None:
        raise ConfigError(f"task {task.id!r} is none of reasoning-gym's; the reward is for these only")
    options = json.dumps(where["options"], sort_keys=True)
    tagged = _TAGGED.findall(answer or "")
    given = (tagged[-1] if tagged else answer or "").strip()
    item = _item(where["set"], options, where["index"])
    return float(_dataset(where["set"], options).score_answer(given, item))


# verifiers ------------------------------------------------------------------------------------------


def verifiers_tasks(reference: str) -> list[Task]:
    """The tasks of a task set; options are `skip`, `take`, and fields of the set's own config.

    It is a package or module that exports a `Taskset` (verifiers 0.4), such as `gsm8k` or `my_taskset`.
    """
    name, query = reference.partition("?")[::2]
    options = {key: _value(text) for key, text in parse_qsl(query)}
    skip, take = options.pop("skip", 0), options.pop("take", SIZES["train"])
    tasks = []
    for index, one in enumerate(_taskset(name, json.dumps(options, sort_keys=True), skip + take)):
        if index < skip:
            continue
        _check_coverage(name, one)
        data = one.data
        prompt = data.prompt if isinstance(data.prompt, str) else _chat(data.prompt)
        where: Json = {"taskset": name, "options": options, "index": index}
        id = f"{name.rpartition('/')[2]}-{data.id or index}"
        system = data.system_prompt
        tasks.append(Task.of(prompt, id=id, system=system, metadata={"verifiers": where}))
    return tasks


def _check_coverage(name: str, task: Any) -> None:
    missing = ""
    if task.NEEDS_CONTAINER:
        missing = "a container"
    elif task.toolsets(task.config):
        missing = "tool servers of its own (toolsets)"
    elif task.data.prompt is None:
        missing = "a simulated user, who opens the conversation"
    elif task.config.judges:
        missing = "judges"
    if missing:
        raise ConfigError(
            f"verifiers:{name} needs {missing}, which is not covered: task sets with prompts and rewards that "
            "read the conversation are"
        )


def _chat(messages: Any) -> list[Json]:
    return [{"role": one.role, "content": one.content} for one in messages]


@lru_cache(maxsize=64)
def _taskset(name: str, options: str, size: int) -> list[Any]:
    loaders = imported("verifiers.v1.utils.loaders", "verifiers", "a task set of verifiers")
    generic = import_module("verifiers.v1.utils.generic")
    configs = import_module("verifiers.v1.configs.taskset")
    tasksets = import_module("verifiers.v1.taskset")
    try:
        kind = loaders.taskset_class(name)
        config = generic.concrete_type(kind, configs.TasksetConfig, origin=tasksets.Taskset)
        made = kind((config or configs.TasksetConfig)(id=name, **json.loads(options)))
        shared = type(made).toolsets(made.config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers:{name}: {error}") from error
    if shared:
        raise ConfigError(f"verifiers:{name} has shared tool servers (toolsets), which is not covered")
    return list(made.take(size))


@reward(name="verifiers")
async def verifiers_score(trajectory: Trajectory, task: Task) -> float:
    """The weighted sum of the task set's own rewards, given the conversation."""
    where = task.metadata.get("verifiers")
    if where is None:
        raise ConfigError(f"task {task.id!r} is none of verifiers'; the reward is for these only")
    options, index = json.dumps(where["options"], sort_keys=True), where["index"]
    theirs = _taskset(where["taskset"], options, index + 1)[index]
    trace = _trace(theirs, trajectory.messages)
    await theirs.score(trace, None)
    return float(trace.reward)


def _trace(task: Any, messages: list[Message]) -> Any:
    """The conversation as verifiers records it; the model's turns are those after the prompt."""
    traces, types = import_module("verifiers.v1.trace"), import_module("verifiers.v1.types")
    graph, agents = import_module("verifiers.v1.graph"), import_module("verifiers.v1.configs.agent")
    nodes = []
    for position, one in enumerate(messages):
        made: Any
        if one.role == "assistant":
            calls = [
                types.ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments))
                for call in one.tool_calls
            ]
            made = types.AssistantMessage(content=one.content, tool_calls=calls or None)
        elif one.role == "tool":
            made = types.ToolMessage(tool_call_id=one.tool_call_id or "", content=one.content)
        else:
            kind = types.SystemMessage if one.role == "system" else types.UserMessage
            made = kind(content=one.content)
        parent = position - 1 if position else None
        nodes.append(graph.MessageNode(parent=parent, message=made, sampled=one.role == "assistant"))
    recorded = traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = traces.AgentInfo(config=agents.AgentConfig())
    return traces.Trace(task=recorded, agent=agent, nodes=nodes, is_completed=True, ok=True)
