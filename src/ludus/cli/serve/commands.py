"""`ludus serve`: tools, environments and models behind HTTP, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.cli.serve.model import serve_model, serve_vllm
from ludus.cli.serve.options import (
    ConfigOption,
    Serving,
    Settings,
    announcing,
    env_reference,
    private_stdout,
    tools_file,
    with_server_options,
)
from ludus.core.failures import ConfigError

if TYPE_CHECKING:
    from ludus.core.task import Task
    from ludus.serve import ServerConfig
    from ludus.tools.hosting import ToolReference


serve_app = typer.Typer(
    help="Serve tools, environments and models over HTTP.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Backend = Literal["local", "processes", "ray"]
Isolated = Literal["none", "thread", "process"]

serve_app.command("vllm")(serve_vllm)
serve_app.command("model")(serve_model)


@serve_app.callback()
def _serve() -> None:
    """Serve tools, environments and models over HTTP."""


@serve_app.command("tools")
@with_server_options()
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
@with_server_options(concurrency=1024, idle_seconds=900.0)
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
@with_server_options(_NOT_OF_MCP, max_sessions=256)
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
