"""`ludus serve`: tools, environments and models behind HTTP, until told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ludus.cli.serve_vllm import serve_vllm
from ludus.core.failures import ConfigError

if TYPE_CHECKING:
    from ludus.core.task import Task
    from ludus.engine import EngineConfig
    from ludus.serve import ServerConfig
    from ludus.tools.hosting import ToolReference, ToolsFile


serve_app = typer.Typer(
    help="Serve tools, environments and models over HTTP.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Backend = Literal["local", "processes", "ray"]
Isolated = Literal["none", "thread", "process"]
Settings = dict[str, Any]

# The options that both servers have.
Host = Annotated[str, typer.Option(help="Others can reach it only with a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Calls that run at once.")]
Queue = Annotated[int, typer.Option(min=0, help="Calls that wait; more are refused.")]
MaxSessions = Annotated[int, typer.Option(min=1, help="Sessions open at once.")]
IdleSeconds = Annotated[float, typer.Option(help="When an unused session is closed.")]
DrainSeconds = Annotated[float, typer.Option(help="Grace for running calls at the end.")]
OrphanSeconds = Annotated[float, typer.Option(help="How long a call outlives its caller's connection.")]
ClientSeconds = Annotated[float, typer.Option(help="Patience with slow clients.")]
KeepaliveSeconds = Annotated[float, typer.Option(help="Patience with silent ones.")]
MaxBodyBytes = Annotated[int, typer.Option(min=1024, help="The largest request.")]
HeldBytes = Annotated[
    int, typer.Option(min=1024, help="Large requests held at once, in bytes; more are read later.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the token; LUDUS_TOKEN when left out, on loopback a token of your own."
    ),
]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Let every user of this machine call the server.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file with tools = [...] and tables sandbox and envs, as in a recipe."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log warnings only.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log every request and every call.")]


serve_app.command("vllm")(serve_vllm)


@serve_app.callback()
def _serve() -> None:
    """Serve tools, environments and models over HTTP."""


@serve_app.command("tools")
def serve_tools(
    references: Annotated[
        list[str] | None,
        typer.Argument(
            help="module:function, file.py:function, or a name such as python, bash, sql.",
            metavar="TOOL...",
            show_default=False,
        ),
    ] = None,
    settings: ConfigOption = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    backend: Annotated[
        Backend, typer.Option(help="Where tools run: this process, worker processes, Ray actors.")
    ] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Processes or actors.")] = 2,
    concurrency: Concurrency = 256,
    queue: Queue = 4096,
    limit: Annotated[
        list[str] | None, typer.Option(help="Calls of one tool that run at once: NAME=NUMBER.")
    ] = None,
    max_sessions: MaxSessions = 16_384,
    idle_seconds: IdleSeconds = 1800.0,
    drain_seconds: DrainSeconds = 30.0,
    orphan_seconds: OrphanSeconds = 5.0,
    client_seconds: ClientSeconds = 30.0,
    keepalive_seconds: KeepaliveSeconds = 75.0,
    max_body_bytes: MaxBodyBytes = 8_000_000,
    held_bytes: HeldBytes = 32_000_000,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve tools to runs elsewhere. Prints {"address": ...} when it is ready; SIGTERM drains it."""
    config = _config(
        host=host,
        port=port,
        concurrency=concurrency,
        queue=queue,
        tool_concurrency=_limits(limit or []),
        max_sessions=max_sessions,
        idle_seconds=idle_seconds,
        drain_seconds=drain_seconds,
        orphan_seconds=orphan_seconds,
        client_seconds=client_seconds,
        keepalive_seconds=keepalive_seconds,
        max_body_bytes=max_body_bytes,
        held_bytes=held_bytes,
    )
    token, kept = _token(token_file, no_token, host)
    level = _log_level(quiet, verbose)
    _run(_tools(references or [], settings), backend, workers, config, token, kept, level)


@serve_app.command("env")
def serve_env(
    references: Annotated[
        list[str] | None,
        typer.Argument(
            help="A prebuilt one's name (ludus envs), module:Class, file.py:Class; with a name of its own as "
            "NAME=...",
            metavar="ENV...",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option("--config", help="A TOML file with tables envs and pools, as in a recipe's agent."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Processes behind the address; a session stays in one of them.")
    ] = 1,
    size: Annotated[int, typer.Option(min=1, help="Instances of each in each replica at most.")] = 64,
    spares: Annotated[int, typer.Option(min=0, help="Instances kept ready beside those in use.")] = 0,
    isolation: Annotated[
        Isolated | None, typer.Option(help="Where an instance lives; as its class says when left out.")
    ] = None,
    step_timeout: Annotated[float, typer.Option(help="Seconds that a call may take.")] = 60.0,
    reset_timeout: Annotated[float, typer.Option(help="Seconds that a start or reset may take.")] = 60.0,
    max_wait: Annotated[
        float, typer.Option(help="Seconds that a session waits for an instance.")
    ] = 300.0,
    max_idle: Annotated[
        float, typer.Option(help="When an instance that no session holds is closed.")
    ] = 600.0,
    host: Host = "127.0.0.1",
    port: Port = 0,
    concurrency: Concurrency = 1024,
    queue: Queue = 4096,
    max_sessions: MaxSessions = 16_384,
    idle_seconds: IdleSeconds = 900.0,
    drain_seconds: DrainSeconds = 30.0,
    orphan_seconds: OrphanSeconds = 5.0,
    client_seconds: ClientSeconds = 30.0,
    keepalive_seconds: KeepaliveSeconds = 75.0,
    max_body_bytes: MaxBodyBytes = 8_000_000,
    held_bytes: HeldBytes = 32_000_000,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve environments to runs elsewhere, which name the address: envs = { craft = "http://host:port" }.

    Prints {"address": ...} when it is ready; SIGTERM drains it.
    """
    config = _config(
        host=host,
        port=port,
        concurrency=concurrency,
        queue=queue,
        max_sessions=max_sessions,
        idle_seconds=idle_seconds,
        drain_seconds=drain_seconds,
        orphan_seconds=orphan_seconds,
        client_seconds=client_seconds,
        keepalive_seconds=keepalive_seconds,
        max_body_bytes=max_body_bytes,
        held_bytes=held_bytes,
    )
    token, kept = _token(token_file, no_token, host)
    pool: Settings = {"size": size, "spares": spares, "isolation": isolation, "max_idle": max_idle}
    pool |= {"step_timeout": step_timeout, "reset_timeout": reset_timeout, "max_wait": max_wait}
    served: list[ToolReference] = [_env(reference, pool) for reference in references or ()]
    for one in _file(settings).references:
        if isinstance(one, dict) and "env" in one:
            one = {**one, "pool": {**pool, **one["pool"]}}
        served.append(one)
    if len(served) == 1:
        raise ConfigError("name at least one environment, or give --config with a table [envs]")
    level = _log_level(quiet, verbose)
    _run(served, "local" if replicas == 1 else "processes", replicas, config, token, kept, level)


@serve_app.command("model")
def serve_model(
    model: Annotated[
        str,
        typer.Argument(
            help="A run's folder, a checkpoint, a model's folder, a .gguf file, a short or a hub name.",
            metavar="MODEL",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="What /v1/models calls it; MODEL when left out.")
    ] = None,
    format: Annotated[
        str, typer.Option(help="How tool calls are written: hermes, llama3, tags, fenced, react.")
    ] = "hermes",
    history: Annotated[
        Literal["strict", "keep", "split"],
        typer.Option(
            help="What to do with a chat template that rewrites earlier turns, as in a recipe."
        ),
    ] = "split",
    temperature: Annotated[float, typer.Option(min=0.0, help="Where a request names none.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply, likewise.")] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Of the weights.")
    ] = "auto",
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that one step computes (vLLM's max-num-batched-tokens): long prompts are cut, and "
            "replies wait for a step between two tokens. 8192 on a GPU, 512 elsewhere.",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 256,
    queue: Annotated[int, typer.Option(min=0, help="Requests that wait; more get a 429.")] = 1024,
    drain_seconds: DrainSeconds = 30.0,
    client_seconds: ClientSeconds = 30.0,
    keepalive_seconds: KeepaliveSeconds = 75.0,
    max_body_bytes: MaxBodyBytes = 8_000_000,
    held_bytes: HeldBytes = 64_000_000,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model by OpenAI's and Anthropic's APIs: chat completions, responses, messages.

    Prints {"address": ...} when it is ready; SIGTERM drains it. Clients send the token as their API key.
    """
    config = _config(
        host=host,
        port=port,
        concurrency=concurrency,
        queue=queue,
        drain_seconds=drain_seconds,
        client_seconds=client_seconds,
        keepalive_seconds=keepalive_seconds,
        max_body_bytes=max_body_bytes,
        held_bytes=held_bytes,
    )
    token, kept = _token(token_file, no_token, host)

    from ludus.core.generation import Sampling
    from ludus.serve.server import check_exposure, serve_until_told
    from ludus.serve.telemetry import log_as_json

    check_exposure(host, token)  # before minutes of loading
    log_as_json(level=_log_level(quiet, verbose))
    announce = _private_stdout()

    async def serve() -> None:
        from ludus.engine import EmbeddedEngine, context_limit
        from ludus.rollouts import Renderer, load_format
        from ludus.serve.model import CheckpointService, ModelServer
        from ludus.training.config.model import ModelConfig
        from ludus.training.models.loading import check_source, load_model

        source = ModelConfig(name=_newest_checkpoint(model), device=device, dtype=dtype)
        check_source(source)
        loaded, tokenizer = load_model(source, seed=0)
        engine = EmbeddedEngine(loaded, tokenizer, _engine_config(tokens_per_step, loaded.device.type))
        renderer = Renderer(tokenizer, load_format(format), history)
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
        service = CheckpointService(
            engine,
            renderer,
            name or model,
            config,
            token=token,
            sampling=sampling,
            max_context=context_limit(loaded),
        )
        try:
            await serve_until_told(ModelServer(service, config), _announcing(announce, kept))
        finally:
            await engine.close()

    asyncio.run(serve())


@serve_app.command("mcp")
def serve_mcp(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tools (python, bash, file.py:function, ...) and environments (textcraft, env:file.py:Class).",
            metavar="NAME...",
            show_default=False,
        ),
    ] = None,
    settings: ConfigOption = None,
    http: Annotated[
        bool,
        typer.Option("--http", help="Streamable HTTP at /mcp, instead of standard input and output."),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of the environments, as in a recipe; a prebuilt one's own if left out."
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    max_sessions: MaxSessions = 256,
    idle_seconds: IdleSeconds = 1800.0,
    token_file: TokenFile = None,
    no_token: NoToken = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve tools and environments to other agents, as an MCP server; each session has its own sandbox.

    Over stdio it is started by its client; with --http it prints {"address": ...} when it is ready.
    """
    from ludus.serve.server import check_exposure
    from ludus.serve.telemetry import log_as_json

    log_as_json(level=_log_level(quiet or not http, verbose))
    references, worlds = _tools_and_envs(names or [], settings)
    given = _tasks_of(worlds, tasks)
    token, kept = _token(token_file, no_token, host) if http else (None, None)
    if http:
        check_exposure(host, token)
    try:
        from ludus.serve.mcp import AgentSessions, serve_http, serve_stdio
    except ModuleNotFoundError as error:
        from ludus.core.failures import MissingExtraError

        raise MissingExtraError("mcp", "mcp", "serving as an MCP server") from error

    async def serve() -> None:
        from ludus.envs.served import load_served
        from ludus.tools.hosting import LocalHost

        served = LocalHost(lambda: load_served(references))
        sessions = AgentSessions(served, given, most=max_sessions, idle_seconds=idle_seconds)
        try:
            await served.start()
            if http:
                await serve_http(sessions, host, port, token, _announcing(_private_stdout(), kept))
            else:
                await serve_stdio(sessions)
        finally:
            await sessions.close_all()
            await served.stop()

    asyncio.run(serve())


def _tasks_of(worlds: list[str], tasks: str | None) -> list[Task]:
    """The tasks that agents may begin: those that are named, or a prebuilt environment's own."""
    from ludus.core.task import Task
    from ludus.envs import WORLDS
    from ludus.rollouts.tasksets import load_tasks

    if tasks is not None:
        return load_tasks(tasks)
    if len(worlds) == 1 and worlds[0] in WORLDS:
        return list(WORLDS[worlds[0]].tasks("held_out"))
    return [Task("start")] if worlds else []


def _tools_and_envs(names: list[str], settings: Path | None) -> tuple[list[ToolReference], list[str]]:
    """What to serve, and the environments among it: those of a prebuilt name, or with env: before it."""
    from ludus.envs import WORLDS
    from ludus.tools.library import TOOLS

    file = _file(settings)
    worlds = [name.removeprefix("env:") for name in names
              if name.startswith("env:") or (name in WORLDS and name not in TOOLS)]  # fmt: skip
    others = [name for name in names if name.removeprefix("env:") not in worlds]
    if not names and not file.tools and not file.envs:
        raise ConfigError("name at least one tool or environment, or give --config")
    pool: Settings = {"size": 64}
    return [*others, *(_env(name, pool) for name in worlds), *file.references], worlds


def _engine_config(tokens_per_step: int | None, device: str) -> EngineConfig:
    """A server's engine: on a CPU in short steps, since a step is what every reply waits for."""
    from ludus.engine import EngineConfig

    if tokens_per_step is None and device == "cpu":
        tokens_per_step = 512
    most = EngineConfig().max_running
    return EngineConfig(tokens_per_step=tokens_per_step, max_running=min(most, tokens_per_step or most))


def _newest_checkpoint(model: str) -> str:
    """Where the model is: a run's folder stands for its newest checkpoint."""
    from ludus.observe import RunFolder

    run = RunFolder(model)
    if not run.is_run:
        return model
    latest = run.latest_checkpoint()
    if latest is None:
        raise ConfigError(f"the run {model} has no checkpoint yet")
    return str(latest.path)


def _log_level(quiet: bool, verbose: bool) -> int:
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose: give one of them")
    return logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO


def _env(text: str, pool: Settings) -> ToolReference:
    name, equals, reference = text.partition("=")
    if not equals or not name.isidentifier():  # an address may have a = of its own
        return {"env": text, "pool": pool}
    return {"env": reference, "name": name, "pool": pool}


def _config(**settings: object) -> ServerConfig:
    from ludus.serve import ServerConfig

    return ServerConfig.parse(settings, "the command line")


def _tools(references: list[str], settings: Path | None) -> list[ToolReference]:
    """The tools of the command line and of the file, and where they run."""
    file = _file(settings)
    if not references and not file.tools:
        raise ConfigError("name at least one tool, or give --config with a list tools = [...]")
    return [*references, *file.references]


def _file(settings: Path | None) -> ToolsFile:
    from ludus.tools.hosting import ToolsFile

    return ToolsFile.load(settings) if settings is not None else ToolsFile()


def _run(
    references: list[ToolReference],
    backend: Backend,
    workers: int,
    config: ServerConfig,
    token: str | None,
    token_file: Path | None,
    log_level: int,
) -> None:
    from ludus.envs.served import LOADER, load_served
    from ludus.serve import ToolServer, serve_until_told
    from ludus.serve.telemetry import log_as_json
    from ludus.tools.hosting import LocalHost, ProcessHost, ToolHost

    log_as_json(level=log_level)
    announce = _private_stdout()

    def make_host() -> ToolHost:
        if backend == "processes":
            return ProcessHost(references, workers, loader=LOADER)
        if backend == "ray":
            from ludus.dist import RayHost

            return RayHost(references, workers, loader=LOADER)
        return LocalHost(lambda: load_served(references))

    async def serve() -> None:
        server = ToolServer(make_host(), config, token=token)
        await serve_until_told(server, _announcing(announce, token_file))

    asyncio.run(serve())


def _announcing(stream: int, token_file: Path | None) -> Callable[[str], None]:
    """Says on `stream` that the server is ready."""

    def ready(address: str) -> None:
        with suppress(BrokenPipeError):  # the parent may have closed its end
            told: dict[str, str | int] = {"address": address, "pid": os.getpid()}
            if token_file is not None:
                told["token_file"] = str(token_file)
            os.write(stream, json.dumps(told).encode() + b"\n")

    return ready


def _private_stdout() -> int:
    """Keep standard output for the one line that programs read; what tools print goes to standard error."""
    sys.stdout.flush()
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def _token(file: Path | None, no_token: bool, host: str) -> tuple[str | None, Path | None]:
    """The token, and the file where clients find it if it is one of our own."""
    from ludus.tools.remote_http import is_loopback, own_token

    given = os.environ.get("LUDUS_TOKEN")
    if no_token and (file or given):
        raise ConfigError(
            "--no-token stands beside a token (--token-file or LUDUS_TOKEN); give one of them"
        )
    if file is not None:
        try:
            return file.read_text(encoding="ascii").strip(), file
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {file}: {error}") from error
    if no_token or given is not None or not is_loopback(host):
        return given or None, None
    try:
        return own_token()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no token can be kept for your clients: {error}. Set LUDUS_TOKEN, or --no-token where "
            "nobody else uses this machine"
        ) from error


def _limits(texts: list[str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not number.isdecimal():
            raise ConfigError(f"--limit is written NAME=NUMBER, not {text!r}")
        limits[name] = int(number)
    return limits
