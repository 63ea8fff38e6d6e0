"""The tokenizer in a GGUF file.

How transformers reads it differs from version to version, down to which token ends a turn. So what a file says
is followed here: its vocabulary, its merges, its special tokens, its chat template. How text is split before
merging is a mere name in the file; where that name is not known here, transformers' reading is the start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTROL = 3
"""The type of a token that never comes from text."""
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}


def read_tokenizer(file: Path) -> Any:
    """A `transformers` tokenizer that does as the file says."""
    from gguf import GGUFReader

    reader = GGUFReader(file)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    tokens = field("tokenizer.ggml.tokens")
    known = {name: tokens[field(key)] for name, key in _SPECIAL.items() if field(key) is not None}
    split = _splitters().get(field("tokenizer.ggml.pre"))
    if split is not None and field("tokenizer.ggml.model") == "gpt2":
        tokenizer = _built(tokens, field, split(), known)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        for name, token in known.items():
            setattr(tokenizer, name, token)
    tokenizer.chat_template = field("tokenizer.chat_template")
    return tokenizer


def _built(tokens: list[str], field: Callable[[str], Any], split: Any, known: dict[str, str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = split
    inner.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **known)


def _splitters() -> dict[str | None, Callable[[], Any]]:
    """How text is split before merging, by the name that a file has for it."""
    from tokenizers import pre_tokenizers

    def smollm() -> Any:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )

    return {"smollm": smollm}
