"""Asking a language model for an environment: first its tools, then its rules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ludus.core.chat import ChatModel, ChatOptions
from ludus.core.messages import Message
from ludus.envs.sandboxed import WorldSpec
from ludus.synth.asking import ask

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


async def write_rules(
    page: str,
    spec: WorldSpec,
    model: ChatModel,
    options: ChatOptions,
    previous: str = "",
    problems: Sequence[str] = (),
) -> str:
    """The rules; `previous` ones are asked again for, with what was wrong with them."""
    asked = [
        Message("system", PROGRAMMER),
        Message("user", f"{page[:_MOST_PAGE]}\n\nThe tools:\n{spec.model_dump_json(indent=1)}"),
    ]
    if problems:
        listed = "\n".join(f"- {one}" for one in problems)
        text = (
            f"That module was tried, and this is wrong with it:\n{listed}\nWrite the whole module again."
        )
        asked += [Message("assistant", f"```python\n{previous}\n```"), Message("user", text)]
    return code_in((await model.chat(asked, options)).text)


def code_in(text: str) -> str:
    """The longest block of code in an answer; all of it where there is none."""
    blocks = _FENCE.findall(text)
    return max(blocks, key=len)[:_MOST_RULES] if blocks else text[:_MOST_RULES]
