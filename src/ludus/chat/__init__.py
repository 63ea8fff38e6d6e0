"""Text to tokens and back: tokenizers, chat templates, the renderer, action formats, streams."""

from ludus.chat.formats import FORMATS, ActionFormat, ParsedAction, load_format
from ludus.chat.recognition import format_for
from ludus.chat.renderer import History, NextContext, Renderer
from ludus.chat.tokenizers import CHATML, HFTokenizer, load_tokenizer

__all__ = [
    "CHATML",
    "FORMATS",
    "ActionFormat",
    "HFTokenizer",
    "History",
    "NextContext",
    "ParsedAction",
    "Renderer",
    "format_for",
    "load_format",
    "load_tokenizer",
]
