"""Requirements on a vLLM server for training, checked before the first episode. Pure.

Each problem names the flag or the setting that mends it. What cannot be asked for is measured: the canary
compares log-probabilities after every update (`engine/canary.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.messages import Json
from ludus.remote.client import BadResponse

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
"""Routes for weights, pausing and the server's settings exist only with it."""
SCALE_OUT = "--enable-scale-out"
LOGPROBS = "processed_logprobs"
SERVE_COMMAND = "ludus serve vllm RECIPE"
"""The command that starts a server with the required settings."""

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
    name: str = "policy"
    extra: Sequence[str] = ()
    """Further flags for the server."""


def serve_command(
    python: str, folder: Path, dtype: str, context: int | None, on_cpu: bool, options: ServeOptions
) -> tuple[dict[str, str], list[str]]:
    """(variables of the environment, command) that start a server that can be trained on."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", options.name, "--host", options.host, "--port", str(options.port)]
    command += ["--dtype", dtype, SCALE_OUT, "--logprobs-mode", LOGPROBS]
    if context is not None:
        command += ["--max-model-len", str(context)]
        command += whole_prompts(context) if on_cpu else []
    name, _, value = DEV_MODE.partition("=")
    return {name: value}, [*command, *options.extra]


def shell_line(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Variables and command as one line for a shell."""
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(command)])
