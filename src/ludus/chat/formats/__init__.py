"""Action formats: small classes that know how calls are written, read and answered."""

from __future__ import annotations

from typing import Any

from ludus.chat.formats.base import ActionFormat, ParsedAction
from ludus.core.failures import ConfigError
from ludus.core.registry import Registry

FORMATS = Registry(
    "action format",
    {
        "hermes": "ludus.chat.formats.json_calls:HermesFormat",
        "llama3": "ludus.chat.formats.json_calls:Llama3Format",
        "qwen3_coder": "ludus.chat.formats.xml_calls:Qwen3CoderFormat",
        "function": "ludus.chat.formats.xml_calls:FunctionFormat",
        "glm": "ludus.chat.formats.glm:GlmFormat",
        "glm45": "ludus.chat.formats.glm:Glm45Format",
        "harmony": "ludus.chat.formats.harmony:HarmonyFormat",
        "mistral": "ludus.chat.formats.mistral:MistralFormat",
        "mistral_list": "ludus.chat.formats.mistral:MistralListFormat",
        "deepseek_v3": "ludus.chat.formats.sections:DeepSeekV3Format",
        "deepseek_v31": "ludus.chat.formats.sections:DeepSeekV31Format",
        "deepseek_v32": "ludus.chat.formats.invoke:DeepSeekV32Format",
        "deepseek_v4": "ludus.chat.formats.invoke:DeepSeekV4Format",
        "kimi": "ludus.chat.formats.sections:KimiFormat",
        "minimax": "ludus.chat.formats.invoke:MiniMaxFormat",
        "lfm2": "ludus.chat.formats.pythonic:Lfm2Format",
        "pythonic": "ludus.chat.formats.pythonic:PythonicFormat",
        "tags": "ludus.chat.formats.tags:TagsFormat",
        "fenced": "ludus.chat.formats.fenced:FencedFormat",
        "react": "ludus.chat.formats.react:ReActFormat",
        "plain": "ludus.chat.formats.plain:PlainFormat",
    },
)
"""Short names of the formats; `FORMATS.load(name)` gives the class."""

NATIVE = (
    *(
        "hermes",
        "llama3",
        "qwen3_coder",
        "function",
        "glm",
        "glm45",
        "harmony",
        "mistral",
        "mistral_list",
    ),
    *(
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "kimi",
        "minimax",
        "lfm2",
        "pythonic",
    ),
)
"""Those that chat templates write; "auto" takes the first that writes a call exactly as the template does."""


def load_format(name: str, **options: Any) -> ActionFormat:
    """The format of that name (or `module:Class`) with these options."""
    made = FORMATS.load(name)
    try:
        format_ = made(**options)
    except TypeError as error:
        raise ConfigError(f"the action format {name!r} does not take these options: {error}") from None
    if not isinstance(format_, ActionFormat):
        raise ConfigError(f"{name!r} is not an action format: it must be a subclass of ActionFormat")
    return format_


__all__ = ["FORMATS", "NATIVE", "ActionFormat", "ParsedAction", "load_format"]
