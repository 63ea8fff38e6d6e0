"""`ludus serve model`: a model behind OpenAI's and Anthropic's APIs. `ludus serve vllm`: one to train on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.cli.serve.options import Serving, announcing, private_stdout, with_server_options
from ludus.core.config import toml_table
from ludus.core.failures import ConfigError
from ludus.core.messages import Json

if TYPE_CHECKING:
    from ludus.engine import EngineConfig


@with_server_options(
    ("max_sessions", "idle_seconds", "orphan_seconds"), queue=1024, held_bytes=64_000_000
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
    *,
    serving: Serving,
) -> None:
    """Serve a model by OpenAI's and Anthropic's APIs: chat completions, responses, messages.

    Prints {"address": ...} when it is ready; SIGTERM drains it. Clients send the token as their API key.
    """
    config = serving.config()
    token, kept = serving.token()

    from ludus.chat import Renderer, load_format
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

    async def serve() -> None:
        check_source(source)
        loaded, tokenizer = load_model(source, seed=0)
        engine = EmbeddedEngine(
            loaded, tokenizer, _engine_config(tokens_per_step, device_of(loaded).type)
        )
        service = CheckpointService(
            engine,
            Renderer(tokenizer, load_format(format), history),
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


def serve_vllm(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of a prebuilt one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.", show_default=False),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="An interpreter that has vLLM: start the server. Without, show the command."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the model is written; NAME-vllm when left out.")
    ] = None,
    host: Annotated[str, typer.Option(help="Give others an --extra='--api-key=...'.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    extra: Annotated[
        list[str] | None, typer.Option(help="A further flag for vLLM, such as --extra=--enforce-eager.")
    ] = None,
) -> None:
    """Start a vLLM server for a recipe, or show how. Train on it with cluster.servers."""
    from ludus.engine.servers.vllm_server import ServeOptions, serve_command, shell_line
    from ludus.training.config.parts import load_parts
    from ludus.training.config.recipe import load_recipe
    from ludus.training.placement import write_policy
    from ludus.training.run_context import load_policy

    settings = load_recipe(recipe, overrides or [])
    place = (folder or Path(f"{settings.name}-vllm")).absolute()
    if python is not None and shutil.which(python) is None:
        raise ConfigError(f"--python {python}: there is no such program")
    model, tokenizer = asyncio.run(load_policy(settings, load_parts(settings)))
    written = write_policy(model, tokenizer, place)
    options = ServeOptions(host, port, extra=tuple(extra or ()))
    variables, command = serve_command(
        python or "python", written.folder, written.dtype, written.context, written.on_cpu, options
    )
    typer.echo(shell_line(variables, command))
    typer.echo(f"# then: ludus train {recipe} 'cluster.servers=[\"http://{host}:{port}\"]'", err=True)
    if python is not None:
        os.execvpe(python, command, {**os.environ, **variables})
