"""Environments on AgentGym servers, by their HTTP protocol: `agentgym:http://host:port`."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import Any

from ludus.core.failures import ConfigError, InfraError, ToolFault
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.envs.adapters import CLOSE_SECONDS, as_reward, as_text, server_at
from ludus.envs.env import OVER, Env, Step
from ludus.envs.world import EnvAdapter

_INDEX = ("data_idx", "game", "session_id", "item_id", "idx", "id", "seed")
"""The servers' names for the number of a task, in a request to reset."""
_DEFAULTS = {"world_type": "Text", "seed": 0}
_GONE = re.compile(r"is not valid|has been deleted|not exist|^'?\d+'?$")
"""Errors of the servers for an instance that they do not have (any more)."""
_FULL = re.compile(
    r"too many|capacity|\b(?:max|limit)\w*\b.*\b(?:session|env|instance)|no (?:free|room)", re.I
)
"""What a server may say that makes no further instance: there is no rule."""
_LISTED = re.compile(r"Available actions: (\[.*\])\s*$", re.DOTALL)


class AgentGymEnv(Env):
    """One instance on an AgentGym server (`agentgym:http://host:port`).

    The servers differ in what they call an instance and a task; their OpenAPI document says it. A task gives
    its number as `envs = {"textcraft": {"data_idx": 3}}`, with any of the servers' names for it, or as the
    digits at the end of its id (`textcraft_3`), as AgentGym's own files do. Actions are what the servers take;
    the form in which AgentGym's prompts wrap them (`Action: ...`) is not theirs.
    """

    step_rewards = "last"  # as AgentGym does: where there is a score, it is the score so far

    def __init__(self, address: str, timeout: float = 300.0) -> None:
        """`timeout` are the seconds for one request; a pool's deadlines may be shorter."""
        self._server = server_at(address, timeout)
        self._fields: dict[str, list[str]] = {}
        self._id: Any = None
        self._done = False
        self._actions: Any = None

    @staticmethod
    async def probe(address: str, seconds: float, timeout: float = 300.0) -> None:
        """Refuse an address at which no such server answers within `seconds`."""
        await server_at(address, timeout).probe("/openapi.json", seconds)

    async def reset(self, task: Task, **arguments: Any) -> str:
        if self._id is None:
            await self._create()
        self._done, self._actions = False, None
        body = {self._id_name: self._id, **self._task_fields(task, arguments)}
        answer = self._checked("/reset", await self._server.json("POST", "/reset", body))
        if isinstance(answer, list):
            answer = answer[0] if answer else ""
        if not isinstance(answer, dict):
            return as_text(answer)
        texts = [answer.get("task_description"), answer.get("observation", answer.get("state"))]
        seen = "\n".join(str(text) for text in texts if text)
        self._note_actions(answer, seen)
        return seen

    async def step(self, action: str) -> Step:
        """Act in the environment.

        Args:
            action: What to do, in the environment's own words.
        """
        if self._done:
            return Step(OVER, terminated=True)
        body = {self._id_name: self._id, "action": action}
        answer = self._checked("/step", await self._server.json("POST", "/step", body))
        if not isinstance(answer, dict) or not {"observation", "state"} & answer.keys():
            raise self._server.failure("/step", f"an answer without an observation: {answer!r:.200}")
        self._done = bool(answer.get("done", answer.get("terminated", False)))
        seen = as_text(answer.get("observation", answer.get("state")))
        self._note_actions(answer, seen)
        reward = as_reward(answer.get("score", answer.get("reward")), self._server, "/step")
        return Step(seen, reward, terminated=self._done)

    async def available_actions(self) -> list[str] | None:
        found = self._actions
        if found is None and "/available_actions" in self._fields and not self._done:
            found = await self._server.json("GET", "/available_actions", **{self._id_name: self._id})
        if isinstance(found, dict) and "clickables" in found:  # WebShop's
            clicks = [f"click[{one}]" for one in found["clickables"]]
            return ["search[<keywords>]", *clicks] if found.get("has_search_bar") else clicks
        return [str(one) for one in found] if isinstance(found, list) else None

    def _note_actions(self, answer: Json, seen: str) -> None:
        """Some servers list the possible actions in a field, others at the end of what they show."""
        self._actions = answer.get("available_actions")
        listed = _LISTED.search(seen)
        if self._actions is None and listed is not None:
            with suppress(ValueError):
                self._actions = json.loads(listed[1])

    async def close(self) -> None:
        number, self._id = self._id, None
        if number is not None and "/close" in self._fields:
            with suppress(InfraError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._server.json("POST", "/close", {self._id_name: number})

    async def _create(self) -> None:
        document = await self._server.json("GET", "/openapi.json")
        try:
            self._fields = {path: _body_fields(document, path) for path in document["paths"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise self._server.failure("/openapi.json", f"no OpenAPI document ({error!r})") from error
        if missing := {"/create", "/reset", "/step"} - self._fields.keys():
            raise ConfigError(
                f"{self._server.address} is no AgentGym server: it has no {', '.join(sorted(missing))}"
            )
        answer = self._checked("/create", await self._server.json("POST", "/create", {"id": 0}))
        self._id = answer.get("id") if isinstance(answer, dict) else answer
        if not isinstance(self._id, int | str):
            raise self._server.failure("/create", f"an answer without an id: {answer!r:.200}")

    @property
    def _id_name(self) -> str:
        return "env_idx" if "env_idx" in self._fields["/step"] else "id"

    def _task_fields(self, task: Task, arguments: Json) -> Json:
        """Fields of a request to reset that name the task, for this server."""
        fields = [name for name in self._fields["/reset"] if name != self._id_name]
        named = {name: value for name, value in arguments.items() if name in fields}
        numbers = [value for name, value in arguments.items() if name in _INDEX]
        digits = re.search(r"\d+$", task.id)
        number = numbers[0] if numbers else int(digits[0]) if digits else None
        wanted = next((name for name in _INDEX if name in fields), None)
        if wanted is not None and number is None:
            raise ConfigError(
                f"task {task.id!r} says no number for {self._server.address}: give it as the environment's "
                f"{wanted!r} (envs = {{ NAME = {{ {wanted} = 3 }} }}), or at the end of the task's id"
            )
        defaults = {name: value for name, value in _DEFAULTS.items() if name in fields}
        return {**defaults, **({} if wanted is None else {wanted: number}), **named}

    def _checked(self, path: str, answer: Any) -> Any:
        """AgentGym's servers report errors with status 200."""
        if not isinstance(answer, dict) or "error" not in answer:
            return answer
        message = str(answer["error"])
        if path == "/create" and _FULL.search(message):
            raise self._server.full(path, message)
        if path != "/step" or _GONE.search(message):
            raise self._server.failure(path, message)
        raise ToolFault(f"Error: {message}")  # what the action led to


def _body_fields(document: Json, path: str) -> list[str]:
    """The fields that a path's request takes."""
    for operation in document["paths"][path].values():
        if not isinstance(operation, dict) or "requestBody" not in operation:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return list(schema.get("properties", {}))
    return []


ADAPTER = EnvAdapter(
    "agentgym:http://...",
    "One on an AgentGym server.",
    env=AgentGymEnv,
    probe=AgentGymEnv.probe,
    extra="serve",
    packages=("aiohttp",),
)
