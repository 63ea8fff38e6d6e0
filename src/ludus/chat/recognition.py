"""The action format of a model, recognised by the calls that its chat template writes."""

from __future__ import annotations

import logging
from typing import Any

from ludus.chat.formats import NATIVE, ActionFormat, load_format
from ludus.chat.template_features import CALL, reads, written_calls
from ludus.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

AUTO = "auto"
USUAL = "hermes"


def format_for(tokenizer: Tokenizer, name: str | None, **options: Any) -> ActionFormat:
    """The format of that name; for "auto", and without a name, the one in which the template writes calls."""
    if name not in (None, AUTO):
        return load_format(str(name), **options)
    found = recognised_format(tokenizer)
    if found is None:
        log.info("the chat template writes no calls that a format reads: agent.format is %r", USUAL)
    elif found != USUAL:
        log.info("agent.format is %r, as the chat template writes calls", found)
    return load_format(found or USUAL, **options)


def recognised_format(tokenizer: Tokenizer) -> str | None:
    """The name of the format in which the template writes calls; None where there is none."""
    read: list[str] = []
    written = [text for _, text in written_calls(tokenizer)]
    for name in NATIVE if written else ():
        format = load_format(name)
        if any(reads(format, text, tokenizer) for text in written):
            if any(format.render_action("", [CALL]) in text for text in written):
                return name
            read.append(name)
    return read[0] if read else None
