"""`ludus export`, and `ludus serve vllm RUN`: the command, its options, and what it prints."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from ludus.cli.run_commands import CheckpointOption
from ludus.core.failures import ConfigError

if TYPE_CHECKING:
    from ludus.engine.servers.vllm_server import ServeOptions
    from ludus.observe import RunFolder
    from ludus.training.export.model import Exported


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the command's options say."""

    out: Path | None = None
    checkpoint: str | None = None
    adapter: bool = False
    dtype: str | None = None
    gguf: bool = False
    push: str | None = None
    public: bool = False


def run_export(source: Path, options: ExportOptions) -> None:
    """Write a trained model into a folder; with it a GGUF file and a repository on the hub, where asked for."""
    if options.gguf and options.adapter:
        raise ConfigError("--gguf is of a whole model: leave out --adapter")
    if options.public and options.push is None:
        raise ConfigError("--public is for --push OWNER/NAME")
    from ludus.observe import printable
    from ludus.training.export.publish import Hub, gguf_converter, write_gguf

    converter = gguf_converter() if options.gguf else None
    hub = Hub(options.push) if options.push is not None else None
    if hub is not None:
        hub.check()
    made = _export(source, options)
    console = Console()
    lines = [f"model:    {made.folder}", f"checked:  {made.compared}, token for token"]
    if converter is not None:
        lines.append(f"gguf:     {write_gguf(made.folder, made.facts.name, converter)}")
    if hub is not None:
        address = hub.push(made.folder, private=not options.public)
        lines.append(f"pushed:   {address}{'' if options.public else ' (private)'}")
    lines += [f"note:     {note}" for note in made.notes]
    if not made.facts.is_adapter:
        lines.append(f"next:     ludus serve vllm {made.folder}")
    console.print(Text(printable("\n".join(lines))), soft_wrap=True)


def _export(source: Path, options: ExportOptions) -> Exported:
    from ludus.training.export.model import export_model

    run, checkpoint = _found(source, options.checkpoint)
    # "step-000320" of the run "tickets-001" is tickets-001-step-000320 where no folder is named
    out = options.out or Path(f"{run.name}-{checkpoint.name}")
    with Console(stderr=True).status("exporting"):
        return export_model(run, checkpoint, out, adapter=options.adapter, dtype=options.dtype)


def _found(source: Path, which: str | None) -> tuple[RunFolder, Path]:
    """The run and the checkpoint that a path means: a run's folder, or one of its checkpoints'."""
    from ludus.cli.eval import checkpoint_of
    from ludus.cli.show import missing_run
    from ludus.observe import RunFolder

    if not source.exists():
        raise ConfigError(missing_run(source))
    run, place = RunFolder(source), source.resolve()
    if run.is_run:
        return run, checkpoint_of(source, which or "last")
    run = RunFolder(place.parent.parent)
    if not run.is_run or place.parent != run.checkpoints_path:
        raise ConfigError(
            f"{source} is neither a run's folder nor a checkpoint of one (RUN/checkpoints/step-...): only a "
            "run knows how its model was prompted"
        )
    if which is not None:
        raise ConfigError(f"{source} is a checkpoint already: leave out --checkpoint {which}")
    return run, checkpoint_of(run.path, place.name.removeprefix("step-"))


def serve_trained(
    source: Path, folder: Path | None, which: str | None, python: str | None, options: ServeOptions
) -> None:
    """Serve an exported model by vLLM; a run's model is exported first."""
    import torch

    from ludus.engine.servers.vllm_server import INSTALL, TOOL_PARSERS, use_command
    from ludus.training.export.model import exported_facts

    facts, place = exported_facts(source), source
    if facts is not None and (which is not None or folder is not None):
        raise ConfigError(
            f"{source} is an exported model: --checkpoint and --folder are for a run's folder"
        )
    if facts is None:
        run, checkpoint = _found(source, which)
        place = folder or Path(f"{run.name}-{checkpoint.name}-vllm")
        facts = exported_facts(place) if folder is None else None  # of an earlier start
        if facts is None:
            made = _export(source, ExportOptions(out=place, checkpoint=which))
            facts = made.facts
            for note in made.notes:
                typer.echo(f"# note: {note}", err=True)
    if facts.is_adapter:
        raise ConfigError(
            f"{source} is an adapter alone: export the run without --adapter, which merges it"
        )
    if facts.format not in TOOL_PARSERS:
        typer.echo(
            f"# vLLM has no parser for the action format {facts.format!r}: calls come as text. ludus serve "
            f"model RUN --format {facts.format} parses them",
            err=True,
        )
    has_vllm = python is not None or importlib.util.find_spec("vllm") is not None
    variables, command = use_command(
        python or (sys.executable if has_vllm else "python"),
        place.absolute(),
        facts.dtype,
        facts.context,
        not torch.cuda.is_available(),
        facts.format,
        replace(options, name=options.name or facts.name),
    )
    address = f"http://{options.host}:{options.port}/v1"
    start_vllm(variables, command, f"curl {address}/models", starts=has_vllm)
    raise ConfigError(f"vLLM is not installed here, so nothing was started. {INSTALL}")


def start_vllm(variables: Mapping[str, str], command: Sequence[str], then: str, *, starts: bool) -> None:
    """Show the command that starts a server, and what can be done then; become the server where `starts`."""
    from ludus.engine.servers.vllm_server import shell_line

    typer.echo(shell_line(variables, command))
    typer.echo(f"# then: {then}", err=True)
    if starts:
        sys.stdout.flush()
        os.execvpe(command[0], list(command), {**os.environ, **variables})


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder, or a checkpoint of it: RUN/checkpoints/step-..."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder to make; NAME-step-N when left out."),
    ] = None,
    checkpoint: CheckpointOption = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="A LoRA adapter alone, not merged into its base.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Number format of the weights; the checkpoint's own when left out."),
    ] = None,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write a GGUF file, too, by llama.cpp's converter.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Upload it to the Hugging Face hub under this name: owner/name.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: anybody may see it; private otherwise.")
    ] = False,
) -> None:
    """Write a trained model for transformers, vLLM and llama.cpp, which prompt it as it was trained."""
    run_export(source, ExportOptions(out, checkpoint, adapter, dtype, gguf, push, public))
