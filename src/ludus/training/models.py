"""Where models come from: a folder, a hub, or made on the spot."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ludus.core.failures import ConfigError
from ludus.rollout.tokenizers import CHATML, HFTokenizer
from ludus.training.recipe import ModelConfig, ScratchConfig

CONTROL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def device_of(config: ModelConfig) -> torch.device:
    """The device a recipe asks for; auto is the first GPU, or else the CPU."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def dtype_of(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The number format a recipe asks for."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def load_model(
    config: ModelConfig, seed: int, corpus: Iterable[str] = ()
) -> tuple[nn.Module, HFTokenizer]:
    """The model and its tokenizer. `corpus` is what a tokenizer made from scratch is fitted to."""
    device = device_of(config)
    dtype = dtype_of(config, device)
    if config.scratch is not None:
        tokenizer = fit_tokenizer(corpus, config.scratch.vocabulary)
        model = scratch_model(config.scratch, tokenizer, seed)
        return model.to(device=device, dtype=dtype), HFTokenizer(tokenizer)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.name)
        model = AutoModelForCausalLM.from_pretrained(config.name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.name = {config.name!r} is neither a folder with a model in Hugging Face format nor a "
            f"name that the hub answers to: {error}"
        ) from error
    return model.to(device), HFTokenizer(tokenizer)


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
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    return model


def fit_tokenizer(corpus: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer fitted to these texts, digits always on their own.

    Nothing is split before merging but digits, so whole phrases of boilerplate become one token: a small
    model then spends its steps on the choices that matter. Every byte has a token: any text can be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
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
    tokenizer.train_from_iterator((piece for text in corpus for piece in cut.split(text)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast
