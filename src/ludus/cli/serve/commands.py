"""`ludus serve`: tools, environments and models behind HTTP, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.cli.serve.mcp import serve_mcp
from ludus.cli.serve.model import serve_model
from ludus.cli.serve.options import (
    ClientSeconds,
    Concurrency,
    ConfigOption,
    DrainSeconds,
    HeldBytes,
    Host,
    IdleSeconds,
    KeepaliveSeconds,
    MaxBodyBytes,
    MaxSessions,
    NoToken,
    OrphanSeconds,
    Port,
    Queue,
    Quiet,
    Settings,
    TokenFile,
    Verbose,
    announcing,
    chosen_token,
    env_reference,
    log_level,
    private_stdout,
    server_config,
    tools_file,
)
from ludus.cli.serve.vllm import serve_vllm
from ludus.core.failures import ConfigError

if TYPE_CHECKING:
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
serve_app.command("mcp")(serve_mcp)


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
    config = server_config(
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
    token, kept = chosen_token(token_file, no_token, host)
    level = log_level(quiet, verbose)
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
        float, typer.Option(help="Seconds until an instance that no session holds is closed.")
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
    config = server_config(
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
    token, kept = chosen_token(token_file, no_token, host)
    pool: Settings = {"size": size, "spares": spares, "isolation": isolation, "max_idle": max_idle}
    pool |= {"step_timeout": step_timeout, "reset_timeout": reset_timeout, "max_wait": max_wait}
    served: list[ToolReference] = [env_reference(reference, pool) for reference in references or ()]
    for one in tools_file(settings).references:
        if isinstance(one, dict) and "env" in one:
            one = {**one, "pool": {**pool, **one["pool"]}}
        served.append(one)
    if len(served) == 1:
        raise ConfigError("name at least one environment, or give --config with a table [envs]")
    level = log_level(quiet, verbose)
    _run(served, "local" if replicas == 1 else "processes", replicas, config, token, kept, level)


def _tools(references: list[str], settings: Path | None) -> list[ToolReference]:
    """The tools of the command line and of the file, and where they run."""
    file = tools_file(settings)
    if not references and not file.tools:
        raise ConfigError("name at least one tool, or give --config with a list tools = [...]")
    return [*references, *file.references]


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
