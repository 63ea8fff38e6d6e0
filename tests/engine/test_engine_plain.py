"""The module itself stays an ordinary Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_models import FAMILIES, make, prompts
from transformers import AutoModelForCausalLM

from ludus.core import ConfigError
from ludus.model import (
    PackedContext,
    hidden_states,
    set_activation_checkpointing,
    use_ludus_attention,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_calls_padding_and_generate_work_as_before(family: str) -> None:
    model = make(family)
    model.set_attn_implementation("eager")
    short, long = prompts([9, 22])
    ids = torch.tensor([[0] * 13 + short, long])
    mask = torch.tensor([[0] * 13 + [1] * 9, [1] * 22])

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            padded = model(input_ids=ids, attention_mask=mask).logits
            return [
                model(input_ids=torch.tensor([long])).logits,
                padded[mask.bool()],
                model.generate(
                    torch.tensor([long]), do_sample=False, max_new_tokens=8, eos_token_id=None
                ),
                model.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=8, eos_token_id=None
                ),
            ]

    expected = outputs()
    use_ludus_attention(model)
    use_ludus_attention(model)
    for given, wanted in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(given, wanted, atol=1e-4, rtol=1e-4)


def test_a_saved_model_knows_nothing_of_ludus(tmp_path: Path) -> None:
    model = make()
    use_ludus_attention(model)
    model.save_pretrained(tmp_path)
    assert "ludus" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != "ludus"


def test_a_model_that_hands_no_arguments_to_its_attention_is_packed_and_checkpointed() -> None:
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = StableLmForCausalLM(StableLmConfig(**sizes, **heads)).train()
    rows = [row.tolist() for row in torch.split(torch.arange(12) * 7 % 60, [5, 4, 3])]
    expected: list[torch.Tensor] = []
    for row in rows:
        expected.append(model.model(torch.tensor([row])).last_hidden_state[0])
    torch.cat(expected).square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.model.parameters()]
    use_ludus_attention(model)
    for layers in (0, 2):
        set_activation_checkpointing(model, layers)
        model.zero_grad()
        context = PackedContext([5, 4, 3])
        tokens = torch.tensor([token for row in rows for token in row])
        given = hidden_states(model, tokens, context.position_ids, context)
        torch.testing.assert_close(given, torch.cat(expected), atol=1e-5, rtol=1e-5)
        given.square().sum().backward()
        for parameter, gradient in zip(model.model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-4)


def test_what_is_not_a_causal_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="causal language model"):
        use_ludus_attention(make().model)
    with pytest.raises(ConfigError, match="causal language model"):
        use_ludus_attention(torch.nn.Linear(2, 2))
