"""`ludus synth astra`: an environment, tasks and trajectories from a page of text.

A language model designs the tools and writes the rules. What it wrote is hostile until shown otherwise: it is
tried in the sandbox (`examination`), and the model reads what is wrong and writes it again. Only an
environment without findings is packaged. Its folder has all that `ludus check env` and `ludus train` need::

    page.txt               what it was made from
    world.json, world.py   tools and rules, as the language model wrote them; they run in the sandbox only
    environment.py         the environment, its reward and its demonstrator: the same few lines for every folder
    tasks.jsonl, held_out.jsonl
    demonstrations.parquet every solution, played
    recipe.toml            imitation, then GRPO
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ludus.core.config import Place, toml_text
from ludus.core.failures import ConfigError, LudusError
from ludus.core.generation import ChatModel, ChatOptions
from ludus.core.messages import Json, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory, is_success
from ludus.core.user_files import read_user_text
from ludus.envs.sandboxed import WorldSpec
from ludus.observe import ReportTable, atomic_write, write_trajectories
from ludus.synth.examination import examine, make_tasks, play_solutions
from ludus.synth.method import ModelSpec, SynthConfig, SynthContext, SynthMethod, ask
from ludus.synth.result import ItemResult, Rejected, SynthResult, with_provenance

_BATCH = 32
"""Tasks that are made and played together."""


class AstraConfig(SynthConfig):
    """ASTRA: an environment from a page of text."""

    page: Place
    """The text file that describes the job."""
    designer: ModelSpec
    """The language model that designs the environment and writes its rules."""
    attempts: int = Field(default=4, ge=1)
    """How often the rules may be written until nothing is found wrong with them."""
    train: int = Field(default=64, ge=4)
    """Training tasks."""
    held_out: int = Field(default=16, ge=1)
    """Held-out tasks."""
    sample: int = Field(default=8, ge=2)
    """Tasks on which rules are tried."""
    max_tokens: int = Field(default=6000, ge=256)
    """Of an answer of the language model."""
    temperature: float = Field(default=0.3, ge=0)
    """Of the language model."""


class Astra(SynthMethod[AstraConfig]):
    """An environment with tasks and trajectories from a page of text."""

    title = "ASTRA"
    settings_type = AstraConfig
    needs_policy = False

    async def run(self, context: SynthContext) -> SynthResult:
        page = read_user_text(self.settings.page)
        if not page.strip():
            raise ConfigError(f"{self.settings.page} is empty: it should describe a job")
        spec = await self._designed(context, page)
        drafts: list[Json] = []
        folder = Path(context.folder.path) / "environment"
        while not drafts or drafts[-1]["findings"]:
            if len(drafts) >= self.settings.attempts:
                lines = [
                    f"draft {number}: {'; '.join(one['findings'])}"
                    for number, one in enumerate(drafts, start=1)
                ]
                raise LudusError(
                    f"no environment could be made of {self.settings.page} in {len(drafts)} attempts\n"
                    + "\n".join(lines)
                )
            drafts.append(await self._draft(context, drafts, folder, page, spec))
        rules = str(drafts[-1]["rules"])
        write_world(folder, page, spec, rules)
        result = await self._played(context, folder, spec, rules)
        rows: list[list[Any]] = [
            [number, "; ".join(one["findings"]) or "good"] for number, one in enumerate(drafts, start=1)
        ]
        result.tables.append(ReportTable(("draft", "found"), rows, "Drafts of the rules"))
        for way, share in drafts[-1]["refused"].items():
            result.numbers[f"{way}_solutions_refused"] = share
        return result

    @property
    def _options(self) -> ChatOptions:
        return ChatOptions(self.settings.max_tokens, self.settings.temperature)

    async def _designed(self, context: SynthContext, page: str) -> WorldSpec:
        model = await context.model(self.settings.designer)

        async def design() -> ItemResult:
            spec = await design_spec(page, model, self._options)
            return ItemResult(notes={"spec": spec.model_dump(mode="json")})

        return WorldSpec.model_validate((await context.once("design", design)).notes["spec"])

    async def _draft(
        self, context: SynthContext, drafts: Sequence[Json], folder: Path, page: str, spec: WorldSpec
    ) -> Json:
        """The rules, written and tried; after a draft, written again with what was wrong with it."""
        model = await context.model(self.settings.designer)
        asked = [
            Message("system", PROGRAMMER),
            Message("user", f"{page[:_MOST_PAGE]}\n\nThe tools:\n{spec.model_dump_json(indent=1)}"),
        ]
        if drafts:
            listed = "\n".join(f"- {one}" for one in drafts[-1]["findings"])
            text = (
                f"That module was tried, and this is wrong with it:\n{listed}\n"
                "Write the whole module again."
            )
            previous = Message("assistant", f"```python\n{drafts[-1]['rules']}\n```")
            asked += [previous, Message("user", text)]

        async def write() -> ItemResult:
            rules = code_in((await model.chat(asked, self._options)).text)
            write_world(folder, page, spec, rules)
            found = await examine(folder, spec, rules, self.settings.sample)
            notes = {"rules": rules, "findings": found.findings, "refused": found.refused}
            return ItemResult(notes=notes)

        return (await context.once(f"draft-{len(drafts) + 1}", write)).notes

    async def _played(
        self, context: SynthContext, folder: Path, spec: WorldSpec, rules: str
    ) -> SynthResult:
        """The tasks and their solutions, played; and the folder."""
        wanted = self.settings.train + self.settings.held_out
        batches = [range(start, min(start + _BATCH, wanted)) for start in range(0, wanted, _BATCH)]

        async def play(seeds: range) -> ItemResult:
            tasks = await make_tasks(spec, rules, seeds)
            return ItemResult(await play_solutions(folder, spec, tasks))

        pieces = await context.each("tasks", batches, play, name=str)
        result = SynthResult()
        seen: set[str] = set()
        kept = []
        for one in [trajectory for piece in pieces for trajectory in piece.trajectories]:
            alike = json.dumps([one.task.messages[-1].content, one.task.metadata["state"]])
            if not is_success(one):
                result.rejected.append(Rejected(one, "unsolved", f"reward {one.reward}"))
            elif alike in seen:
                result.rejected.append(Rejected(one, "duplicate", one.task.messages[-1].content))
            else:
                seen.add(alike)
                kept.append(with_provenance(one, method="astra", environment=spec.name))
        # an even share of what there is, where the rules give fewer different tasks than were asked for
        share = self.settings.held_out / wanted
        apart = min(self.settings.held_out, max(1, round(share * len(kept))))
        if len(kept) < 4:
            raise LudusError(f"only {len(kept)} different tasks could be made: {dict(result.reasons)}")
        if len(kept) < wanted:
            result.warnings.append(
                f"{len(kept)} of {wanted} tasks could be made: {dict(result.reasons)}"
            )
        result.kept = kept[apart:]
        training: list[Task] = [one.task for one in result.kept]
        write_package(folder, spec, training, [one.task for one in kept[:apart]], result.kept)
        result.numbers |= {"training_tasks": len(training), "held_out_tasks": apart}
        result.numbers["tools"] = len(spec.tools)
        result.warnings.append(_next(folder))
        return result


def _next(folder: Path) -> str:
    file, recipe = folder / "environment.py", shlex.quote(str(folder / "recipe.toml"))
    check = ["ludus", "check", "env", f"{file}:World", "--tasks", str(folder / "tasks.jsonl")]
    check += ["--expert", f"{file}:expert", "--reward", f"{file}:success"]
    return f"the environment is in {folder}: {shlex.join(check)}; ludus train {recipe}"


_ENVIRONMENT = '''"""The environment that world.json describes, made from page.txt by `ludus synth astra`.

The rules are in world.py, which runs in the sandbox only.
"""

from pathlib import Path

from ludus.envs.sandboxed import SandboxedWorld, recorded_solution, solved


class World(SandboxedWorld):
    folder = Path(__file__).parent


success = solved
expert = recorded_solution
'''


def write_world(folder: Path, page: str, spec: WorldSpec, rules: str) -> None:
    """Write the files of an environment. Its names become keys and functions, so they are checked again."""
    WorldSpec.model_validate(spec.model_dump())
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "page.txt", page)
    atomic_write(folder / "world.json", spec.model_dump_json(indent=2))
    atomic_write(folder / "world.py", rules)
    atomic_write(folder / "environment.py", _ENVIRONMENT)


def write_package(
    folder: Path,
    spec: WorldSpec,
    training: Sequence[Task],
    held_out: Sequence[Task],
    demonstrations: Sequence[Trajectory],
) -> None:
    atomic_write(folder / "tasks.jsonl", "".join(_line(task) for task in training))
    atomic_write(folder / "held_out.jsonl", "".join(_line(task) for task in held_out))
    write_trajectories(folder / "demonstrations.parquet", demonstrations)
    longest = max(one.turns for one in demonstrations)
    # of the byte tokenizer that demonstrations are recorded with, which has the most tokens of all
    tokens = max(len(action.tokens) for one in demonstrations for action in one.actions)
    recipe: Json = {
        "name": spec.name,
        "rewards": ["environment.py:success"],
        "model": {"scratch": {"layers": 2, "width": 128}},
        "tasks": {"train": "tasks.jsonl", "evaluation": "held_out.jsonl"},
        "agent": {"envs": {spec.name: "environment.py:World"}},
        "budgets": {"max_turns": longest + 2, "max_turn_tokens": max(64, tokens)},
        "warm_start": {
            "demonstrations": "demonstrations.parquet",
            "steps": max(100, 4 * len(demonstrations)),
            "batch": 16,
            "optimizer": {"learning_rate": 3e-3},
        },
        "rl": {
            "algorithm": "grpo",
            "steps": 30,
            "tasks": 16,
            "attempts": 8,
            "updates": 2,
            "optimizer": {"learning_rate": 1e-3},
        },
    }
    comment = 'Made from page.txt by `ludus synth astra`. For another model: [model] name = "..."'
    atomic_write(folder / "recipe.toml", toml_text(recipe, comment))


def _line(task: Task) -> str:
    row: Json = {
        "id": task.id,
        "prompt": task.messages[-1].content,
        "target": task.target,
        "envs": task.envs,
        "metadata": {"solution": task.metadata["solution"]},
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
"""A block of code; one that was cut off is not closed."""
_MOST_PAGE = 20_000
_MOST_RULES = 60_000

DESIGNER = """You design small simulated environments in which an agent practises a job with tools.
You are given a page of text that describes the job. Choose 2 to 8 tools that change or show a state.
Answer with JSON and nothing else:
{"name": "short_name", "description": "one sentence",
 "tools": [{"name": "tool_name", "description": "what it does",
            "parameters": [{"name": "x", "type": "string", "description": "what it is", "required": true,
                            "choices": ["a", "b"]}]}]}
Types are string, integer, number, boolean, list (of texts). "choices" only where there are few.
Names are lower case with underscores."""

PROGRAMMER = """You write the rules of a simulated environment as one Python module, world.py.
Only the standard library; no files, no network, no input. The state is a dictionary that JSON can hold.
The module must have:

def reset(seed): return a new state, decided by seed alone (random.Random(seed)).
def task(state, seed): return {"prompt": what the agent is asked, "goal": what check needs}, decided by its
    arguments alone. The prompt says everything that is needed and that no tool can find out.
    Different seeds should give different tasks.
def TOOL(state, ...): one function for each tool, with exactly the parameters of its description after state.
    It changes state in place and returns text or JSON for the agent. For a mistake of the agent, raise
    ValueError with a message that helps it.
def check(state, goal, answer): return True or False: whether the goal has been reached. It must be False
    in a state in which nothing has been done, and after a wrong solution.
def solve(state, goal): return the calls that reach the goal from a fresh state:
    [{"tool": "name", "arguments": {...}}, ..., {"answer": "final words, if any"}]. Use only what an agent
    could know: call the tools that find out what is needed first.

For a job in which lamps are switched on, with the tools look() and switch(lamp), it would be:

```python
import random

def reset(seed):
    return {"lamps": random.Random(seed).sample(["red", "green", "blue", "white", "pink"], 3), "on": []}

def task(state, seed):
    lamp = random.Random(seed).choice(state["lamps"])
    return {"prompt": f"Switch the {lamp} lamp on, and no other.", "goal": {"lamp": lamp}}

def look(state):
    return {lamp: lamp in state["on"] for lamp in state["lamps"]}

def switch(state, lamp):
    if lamp not in state["lamps"]:
        raise ValueError(f"there is no lamp {lamp}")
    state["on"].append(lamp)
    return f"the {lamp} lamp is on"

def check(state, goal, answer):
    return state["on"] == [goal["lamp"]]

def solve(state, goal):
    return [{"tool": "look", "arguments": {}}, {"tool": "switch", "arguments": {"lamp": goal["lamp"]}}]
```

Answer with the module in one ```python block."""


async def design_spec(page: str, model: ChatModel, options: ChatOptions) -> WorldSpec:
    """The tools; `ChatError` where no answer fits."""
    return await ask(
        model, DESIGNER, page[:_MOST_PAGE], WorldSpec, options, check=_check_acts_on_something
    )


def _check_acts_on_something(spec: WorldSpec) -> None:
    """Small models put what a tool takes into its description alone; no rules can be written for that."""
    if not any(tool.parameters for tool in spec.tools):
        raise ValueError(
            "no tool has parameters: give each tool a list of what it takes, such as "
            f'"{spec.tools[-1].name}", "parameters": [{{"name": "title", "description": "..."}}]'
        )


def code_in(text: str) -> str:
    blocks = _FENCE.findall(text)
    return max(blocks, key=len)[:_MOST_RULES] if blocks else text[:_MOST_RULES]
