"""A model made on the spot: a small Llama, and a tokenizer fitted to texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ludus.chat.tokenizers import CHATML
from ludus.core.failures import ConfigError
from ludus.kernels.device import all_memory
from ludus.training.config.run import ScratchConfig

CONTROL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def scratch_model(config: ScratchConfig, tokenizer: Any, seed: int) -> nn.Module:
    """A small Llama with random weights, the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=config.width,
                intermediate_size=config.width * 8 // 3 // 8 * 8,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.context,
                # the library's 0.02 is for wide models; a narrow one starts learning far later with it
                initializer_range=config.width**-0.5,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    return model


_TRAINED_BYTES = 16
"""Per parameter: weight, gradient and Adam's two moments in float32; bfloat16 with masters has no less."""
_LONGEST_FITTED, _MOST_FITTED = 10_000, 1_000_000
"""Characters of a text, and of all, that a tokenizer is fitted to."""
_LEAST_VOCABULARY = 256 + len(CONTROL_TOKENS)


def scratch_parameters(config: ScratchConfig, vocabulary: int = _LEAST_VOCABULARY) -> int:
    """How many parameters `scratch_model` has with a tokenizer of so many tokens."""
    width, inner = config.width, config.width * 8 // 3 // 8 * 8
    attention = 2 * width * width + 2 * width * (width // config.heads * config.kv_heads)
    return config.layers * (attention + 3 * width * inner + 2 * width) + vocabulary * width + width


def check_size(config: ScratchConfig, device: torch.device) -> None:
    """Refuse a model whose training cannot fit into the device's memory, before anything is allocated."""
    count = scratch_parameters(config)
    needed, there = _TRAINED_BYTES * count, all_memory(device)
    if needed > there:
        raise ConfigError(
            f"model.scratch has {count:,} parameters, and training them takes {needed / 2**30:,.1f} GiB "
            f"(weights, gradients, Adam's moments), where {device} has {there / 2**30:,.1f} GiB: lower "
            f"model.scratch.width ({config.width}) or model.scratch.layers ({config.layers})"
        )


def fit_tokenizer(corpus: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer fitted to these texts, digits always on their own.

    Nothing is split before merging but digits and the header of an action, so whole phrases of boilerplate
    become one token: a small model then spends its steps on the choices that matter. Every byte has a token:
    any text can be written.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # where a sampled action begins: a whole conversation gives the tokens that were sampled one by one
            pre_tokenizers.Split(Regex("^assistant\\n"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=8,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # the trainer does not know where control tokens will cut a text, so it is cut for it
    cut = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))
    pieces = _fitted(piece for text in corpus for piece in cut.split(text))
    tokenizer.train_from_iterator((p.encode("utf-8", "replace").decode() for p in pieces), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def _fitted(pieces: Iterable[str]) -> Iterator[str]:
    """What of these texts is looked at. Merging takes the square of a piece's length: 100,000 take seconds."""
    left = _MOST_FITTED
    for piece in pieces:
        if left <= 0:
            return
        shown = piece[: min(left, _LONGEST_FITTED)]
        left -= len(shown)
        yield shown
