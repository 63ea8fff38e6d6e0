"""`ludus serve`: tools, environments and models behind HTTP, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.cli.options import (
    ConfigOption,
    Serving,
    Settings,
    announcing,
    env_reference,
    model_greeting,
    private_stdout,
    tools_file,
    with_server_options,
)
from ludus.cli.run_commands import CheckpointOption
from ludus.core.config import toml_table
from ludus.core.failures import ConfigError
from ludus.core.messages import Json

if TYPE_CHECKING:
    from ludus.core.task import Task
    from ludus.engine import EngineConfig
    from ludus.serve import ServerConfig
    from ludus.tools.hosting import ToolReference

serve_app = typer.Typer(
    help="Serve tools, environments and models over HTTP.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Backend = Literal["local", "processes", "ray"]
Isolated = Literal["none", "thread", "process"]


@serve_app.callback()
def _serve() -> None:
    """Serve tools, environments and models over HTTP."""


@serve_app.command("vllm")
def serve_vllm(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="To train with: a recipe's file, or the name of a prebuilt one. To use: a run's folder, a "
            "checkpoint of it, or what ludus export has written.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings of a recipe to change.", show_default=False
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="An interpreter that has vLLM: start the server. Without, a recipe's command is shown, and a "
            "run is served if vLLM is installed here."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the model is written; NAME-vllm when left out.")
    ] = None,
    checkpoint: CheckpointOption = None,
    name: Annotated[
        str | None,
        typer.Option(help="The name of a run's model in the API; RECIPE-step-N when left out."),
    ] = None,
    host: Annotated[str, typer.Option(help="Give others an --extra='--api-key=...'.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    extra: Annotated[
        list[str] | None, typer.Option(help="A further flag for vLLM, such as --extra=--enforce-eager.")
    ] = None,
) -> None:
    """Start a vLLM server: for a recipe, which trains on it by cluster.servers, or with a trained model."""
    from ludus.cli.export.commands import serve_trained, start_vllm
    from ludus.engine.servers.vllm_server import ServeOptions, check_python, serve_command
    from ludus.training.config.parts import load_parts
    from ludus.training.config.recipe import load_recipe, packaged_recipes
    from ludus.training.placement import write_policy
    from ludus.training.run_context import load_policy

    if python is not None:
        check_python(python)
    if Path(source).is_dir() and source not in packaged_recipes():
        if overrides:
            raise ConfigError(f"{overrides[0]}: a trained model has no settings to change")
        trained = ServeOptions(host, port, name, tuple(extra or ()))
        serve_trained(Path(source), folder, checkpoint, python, trained)
        return
    if checkpoint is not None or name is not None:
        raise ConfigError(
            "--checkpoint and --name are for a run's folder, and what is served is a recipe"
        )
    settings = load_recipe(source, overrides or [])
    place = (folder or Path(f"{settings.name}-vllm")).absolute()
    model, tokenizer = asyncio.run(load_policy(settings, load_parts(settings)))
    written = write_policy(model, tokenizer, place)
    options = ServeOptions(host, port, extra=tuple(extra or ()))
    started = serve_command(
        python or "python", written.folder, written.dtype, written.context, written.on_cpu, options
    )
    then = f"ludus train {source} 'cluster.servers=[\"http://{host}:{port}\"]'"
    start_vllm(*started, then, starts=python is not None)


@serve_app.command("model")
@with_server_options(
    "a model server",
    ("max_sessions", "idle_seconds", "orphan_seconds"),
    queue=1024,
    held_bytes=64_000_000,
)
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
        str | None, typer.Option(help="The model's name in the API; MODEL when left out.")
    ] = None,
    format: Annotated[
        str,
        typer.Option(help="How tool calls are written; auto: as the chat template writes them."),
    ] = "auto",
    history: Annotated[
        Literal["strict", "keep", "split"],
        typer.Option(help="Handling of a chat template that rewrites earlier turns, as in a recipe."),
    ] = "split",
    temperature: Annotated[float, typer.Option(min=0.0, help="Default temperature of requests.")] = 1.0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a reply, where a request does not say.")
    ] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Number format of the weights.")
    ] = "auto",
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Variables of the chat template: '{ enable_thinking = false }'; those of a run's recipe when "
            "left out.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the model brings.")
    ] = False,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that one step computes (vLLM's max-num-batched-tokens): long prompts are cut, and "
            "replies wait for a step between two tokens. 8192 on a GPU, 512 elsewhere.",
        ),
    ] = None,
    *,
    serving: Serving,
) -> None:
    """Serve a model by OpenAI's and Anthropic's APIs: chat completions, responses, messages.

    Prints what to export and a first request when it is ready; elsewhere than on a terminal {"address": ...}.
    SIGTERM drains it. Clients send the token as their API key.
    """
    config = serving.config()
    token, kept = serving.token()

    from ludus.chat import Renderer, format_for
    from ludus.core.generation import Sampling
    from ludus.engine import EmbeddedEngine
    from ludus.model import context_limit
    from ludus.model.hf_model import device_of
    from ludus.serve.app import check_exposure, serve_until_told
    from ludus.serve.model import CheckpointService, ModelServer
    from ludus.training.config.run import ModelConfig
    from ludus.training.models.loading import check_source, load_model

    check_exposure(config.host, token)  # before minutes of loading
    serving.log()
    greeting = partial(model_greeting, name=name or model, token_file=kept, has_token=token is not None)
    ready = announcing(private_stdout(), kept, greeting)
    where = _newest_checkpoint(model)
    told = _of_its_run(where) if chat_template_kwargs is None else toml_table(chat_template_kwargs)
    source = ModelConfig.parse(
        {
            "name": where,
            "device": device,
            "dtype": dtype,
            "chat_template_kwargs": told,
            "trust_remote_code": trust_remote_code,
        },
        "the command line",
    )
    try:
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    async def serve() -> None:
        check_source(source)
        loaded, tokenizer = load_model(source, seed=0)
        engine = EmbeddedEngine(
            loaded, tokenizer, _engine_config(tokens_per_step, device_of(loaded).type)
        )
        service = CheckpointService(
            engine,
            Renderer(tokenizer, format_for(tokenizer, format), history),
            name or model,
            config,
            token=token,
            sampling=sampling,
            max_context=context_limit(loaded),
        )
        try:
            await serve_until_told(ModelServer(service, config), ready)
        finally:
            await engine.close()

    asyncio.run(serve())


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


def _of_its_run(folder: str) -> Json:
    """The template's variables with which a checkpoint was trained."""
    from ludus.observe.files import read_regular

    try:
        told = json.loads(read_regular(Path(folder).parent.parent / "recipe.json"))["model"]
        return dict(told.get("chat_template_kwargs", {}))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


@serve_app.command("tools")
@with_server_options("a tool server")
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
    backend: Annotated[
        Backend, typer.Option(help="Where tools run: this process, worker processes, Ray actors.")
    ] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Processes or actors.")] = 2,
    limit: Annotated[
        list[str] | None, typer.Option(help="Calls of one tool that run at once: NAME=NUMBER.")
    ] = None,
    *,
    serving: Serving,
) -> None:
    """Serve tools to runs elsewhere. Prints {"address": ...} when it is ready; SIGTERM drains it."""
    config = serving.config(tool_concurrency=_limits(limit or []))
    file = tools_file(settings)
    if not references and not file.tools:
        raise ConfigError("name at least one tool, or give --config with a list tools = [...]")
    _run([*(references or ()), *file.references], backend, workers, config, serving)


@serve_app.command("env")
@with_server_options("an environment server", concurrency=1024, idle_seconds=900.0)
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
        float, typer.Option(help="Seconds until an instance that no session holds is closed.")
    ] = 600.0,
    *,
    serving: Serving,
) -> None:
    """Serve environments to runs elsewhere, which name the address: envs = { craft = "http://host:port" }.

    Prints {"address": ...} when it is ready; SIGTERM drains it.
    """
    config = serving.config()
    pool: Settings = {"size": size, "spares": spares, "isolation": isolation, "max_idle": max_idle}
    pool |= {"step_timeout": step_timeout, "reset_timeout": reset_timeout, "max_wait": max_wait}
    served: list[ToolReference] = [env_reference(reference, pool) for reference in references or ()]
    for one in tools_file(settings).references:
        if isinstance(one, dict) and "env" in one:
            one = {**one, "pool": {**pool, **one["pool"]}}
        served.append(one)
    if len(served) == 1:
        raise ConfigError("name at least one environment, or give --config with a table [envs]")
    _run(served, "local" if replicas == 1 else "processes", replicas, config, serving)


def _run(
    references: list[ToolReference],
    backend: Backend,
    workers: int,
    config: ServerConfig,
    serving: Serving,
) -> None:
    from ludus.envs.served import LOADER, load_served
    from ludus.serve import ToolServer, serve_until_told
    from ludus.tools.hosting import LocalHost, ProcessHost, ToolHost

    token, token_file = serving.token()
    serving.log()
    announce = private_stdout()

    def make_host() -> ToolHost:
        if backend == "processes":
            return ProcessHost(references, workers, loader=LOADER)
        if backend == "ray":
            from ludus.dist import RayHost

            return RayHost(references, workers, loader=LOADER)
        return LocalHost(lambda: load_served(references))

    async def serve() -> None:
        server = ToolServer(make_host(), config, token=token)
        await serve_until_told(server, announcing(announce, token_file))

    asyncio.run(serve())


def _limits(texts: list[str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not number.isdecimal():
            raise ConfigError(f"--limit is written NAME=NUMBER, not {text!r}")
        limits[name] = int(number)
    return limits


_NOT_OF_MCP = (
    "concurrency", "queue", "drain_seconds", "orphan_seconds", "client_seconds", "keepalive_seconds",
    "max_body_bytes", "held_bytes",
)  # fmt: skip


@serve_app.command("mcp")
@with_server_options("an MCP server", _NOT_OF_MCP, max_sessions=256)
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
    *,
    serving: Serving,
) -> None:
    """Serve tools and environments to other agents, as an MCP server; each session has its own sandbox.

    Over stdio it is started by its client; with --http it prints {"address": ...} when it is ready.
    """
    from ludus.serve.app import check_exposure, serve_until_told

    serving.log(quiet=not http)
    references, worlds = _tools_and_envs(names or [], settings)
    given = _tasks_of(worlds, tasks)
    token, kept = serving.token() if http else (None, None)
    config = serving.config()
    if http:
        check_exposure(config.host, token)
    try:
        from ludus.serve.mcp import AgentSessions, McpServer, serve_stdio
    except ModuleNotFoundError as error:
        from ludus.core.failures import MissingExtraError

        raise MissingExtraError("mcp", "mcp", "serving as an MCP server") from error

    async def serve() -> None:
        from ludus.envs.served import load_served
        from ludus.tools.hosting import LocalHost

        served = LocalHost(lambda: load_served(references))
        sessions = AgentSessions(
            served, given, most=config.max_sessions, idle_seconds=config.idle_seconds
        )
        try:
            await served.start()
            if http:
                server = McpServer(sessions, config.host, config.port, token)
                await serve_until_told(server, announcing(private_stdout(), kept))
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
        return list(load_tasks(tasks))
    if len(worlds) == 1 and worlds[0] in WORLDS:
        return list(WORLDS[worlds[0]].tasks("held_out"))
    return [Task("start")] if worlds else []


def _tools_and_envs(names: list[str], settings: Path | None) -> tuple[list[ToolReference], list[str]]:
    """Tools to serve, and the environments among them: prebuilt names, and names prefixed with env:."""
    from ludus.envs import WORLDS
    from ludus.tools.library import TOOLS

    file = tools_file(settings)
    worlds = [name.removeprefix("env:") for name in names
              if name.startswith("env:") or (name in WORLDS and name not in TOOLS)]  # fmt: skip
    others = [name for name in names if name.removeprefix("env:") not in worlds]
    if not names and not file.tools and not file.envs:
        raise ConfigError("name at least one tool or environment, or give --config")
    pool: Settings = {"size": 64}
    return [*others, *(env_reference(name, pool) for name in worlds), *file.references], worlds
