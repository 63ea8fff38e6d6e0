"""`ludus serve mcp`: tools and environments for other agents, as an MCP server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.cli.serve.options import (
    ConfigOption,
    Host,
    IdleSeconds,
    MaxSessions,
    NoToken,
    Port,
    Quiet,
    Settings,
    TokenFile,
    Verbose,
    announcing,
    chosen_token,
    env_reference,
    log_level,
    private_stdout,
    tools_file,
)
from ludus.core.failures import ConfigError

if TYPE_CHECKING:
    from ludus.core.task import Task
    from ludus.tools.hosting import ToolReference


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
    from ludus.serve.server import check_exposure, serve_until_told
    from ludus.serve.telemetry import log_as_json

    log_as_json(level=log_level(quiet or not http, verbose))
    references, worlds = _tools_and_envs(names or [], settings)
    given = _tasks_of(worlds, tasks)
    token, kept = chosen_token(token_file, no_token, host) if http else (None, None)
    if http:
        check_exposure(host, token)
    try:
        from ludus.serve.mcp import AgentSessions, McpServer, serve_stdio
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
                server = McpServer(sessions, host, port, token)
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
