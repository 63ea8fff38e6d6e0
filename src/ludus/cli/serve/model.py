"""`ludus serve model`: a model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.cli.serve.options import (
    ClientSeconds,
    DrainSeconds,
    HeldBytes,
    Host,
    KeepaliveSeconds,
    MaxBodyBytes,
    NoToken,
    Port,
    Quiet,
    TokenFile,
    Verbose,
    announcing,
    chosen_token,
    log_level,
    private_stdout,
    server_config,
)
from ludus.core.config import toml_table
from ludus.core.failures import ConfigError
from ludus.core.messages import Json

if TYPE_CHECKING:
    from ludus.chat.renderer import History
    from ludus.core.generation import Sampling
    from ludus.engine import EngineConfig
    from ludus.serve import ServerConfig
    from ludus.training.config.model import ModelConfig


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
        str, typer.Option(help="How tool calls are written: hermes, llama3, tags, fenced, react.")
    ] = "hermes",
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
    config = server_config(
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
    token, kept = chosen_token(token_file, no_token, host)

    from ludus.core.generation import Sampling
    from ludus.serve.server import check_exposure
    from ludus.serve.telemetry import log_as_json
    from ludus.training.config.model import ModelConfig

    check_exposure(host, token)  # before minutes of loading
    log_as_json(level=log_level(quiet, verbose))
    ready = announcing(private_stdout(), kept)
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
    asyncio.run(
        _serve(source, name or model, config, token, ready, sampling, format, history, tokens_per_step)
    )


async def _serve(
    source: ModelConfig,
    name: str,
    config: ServerConfig,
    token: str | None,
    ready: Callable[[str], None],
    sampling: Sampling,
    format: str,
    history: History,
    tokens_per_step: int | None,
) -> None:
    """Load the model, and serve it until SIGINT or SIGTERM."""
    from ludus.chat import Renderer, load_format
    from ludus.engine import EmbeddedEngine
    from ludus.model import context_limit
    from ludus.model.hf_model import device_of
    from ludus.serve.model import CheckpointService, ModelServer
    from ludus.serve.server import serve_until_told
    from ludus.training.models.loading import check_source, load_model

    check_source(source)
    loaded, tokenizer = load_model(source, seed=0)
    engine = EmbeddedEngine(loaded, tokenizer, _engine_config(tokens_per_step, device_of(loaded).type))
    service = CheckpointService(
        engine,
        Renderer(tokenizer, load_format(format), history),
        name,
        config,
        token=token,
        sampling=sampling,
        max_context=context_limit(loaded),
    )
    try:
        await serve_until_told(ModelServer(service, config), ready)
    finally:
        await engine.close()


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
