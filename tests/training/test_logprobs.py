"""Log-probabilities through the head in chunks, against plain autograd over whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_steps import packs, rows_of_lengths, small_model
from torch import Tensor, nn

from ludus.model import head_logits, plain_head
from ludus.training import action_logprobs
from ludus.training.optim import logprobs
from ludus.training.optim.logprobs import chunk_rows, linear_logprobs

ROWS = rows_of_lengths([9, 14, 6, 12])


def plainly(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def slopes(results: tuple[Tensor, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of an arbitrary function of both results."""
    logprobs_A, entropies_A = results
    along = torch.linspace(-1, 2, len(logprobs_A), dtype=logprobs_A.dtype)
    loss = (along * logprobs_A.exp()).sum() + (along.flip(0) * entropies_A.tanh()).sum()
    return list(torch.autograd.grad(loss, inputs))


@given(
    count=st.integers(1, 40),
    vocabulary=st.integers(2, 60),
    rows=st.integers(1, 50),
    kept=st.integers(0, 50),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    seed=st.integers(0, 1000),
)
def test_chunks_change_nothing(
    count: int, vocabulary: int, rows: int, kept: int, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 8, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).requires_grad_()
    tokens = torch.randint(vocabulary, (count,), generator=generator)
    given = linear_logprobs(hidden, weight, tokens, temperature, rows, kept)
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = plainly(exact[0], exact[1], tokens, temperature)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    found, wanted = slopes(given, [hidden, weight]), slopes(expected, exact)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("kept", [0, 300, 600])
def test_half_precision_is_summed_in_float32(kept: int) -> None:
    """The head's gradient over many chunks is as near as that of one, whether logits are kept or not."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(40, (600,), generator=generator)
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = plainly(exact[0], exact[1], tokens, 1.0)
    given = linear_logprobs(hidden, weight, tokens, 1.0, rows=2, kept=kept)
    assert all(result.dtype == torch.float32 for result in given)
    torch.testing.assert_close(given[0].double(), expected[0], atol=1e-4, rtol=1e-5)
    found, wanted = slopes(given, [hidden, weight]), slopes(expected, exact)
    assert found[1].dtype == torch.bfloat16
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).abs().max()) < 0.01 * float(other.abs().max())


@pytest.mark.parametrize("sharpness", [0.3, 3.0, 12.0])
def test_kept_probabilities_give_confident_tokens_their_gradient(sharpness: float) -> None:
    """Where a token is nearly certain, what is left to 1 is all of its gradient."""
    generator = torch.Generator().manual_seed(0)
    hidden = (sharpness * torch.randn(200, 16, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    tokens = (hidden @ weight.t()).argmax(1)
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    along = torch.linspace(0.5, 2, 200)
    wanted = torch.autograd.grad(plainly(*exact, tokens, 1.0)[0] @ along.double(), exact)
    errors = {}
    for kept in (0, 200):
        logprobs_A, _ = linear_logprobs(hidden, weight, tokens, 1.0, rows=64, kept=kept)
        found = torch.autograd.grad(logprobs_A @ along, [hidden, weight])
        errors[kept] = [
            float((f.double() - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True)
        ]
    assert all(one < 2 * other + 1e-3 for one, other in zip(errors[200], errors[0], strict=True))


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden = torch.randn(5, 8).requires_grad_()
    weight = torch.randn(11, 8)
    logprobs_A, _ = linear_logprobs(hidden, weight, torch.arange(5), 1.0, 2)
    logprobs_A.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    other = torch.randn(11, 8).requires_grad_()
    logprobs_A, _ = linear_logprobs(hidden.detach(), other, torch.arange(5), 1.0, 2)
    logprobs_A.sum().backward()
    assert other.grad is not None


def sizes_of_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many places go through the head at once; the list grows as they do."""
    sizes: list[int] = []
    exact = logprobs.linear_float32

    def noted(x: Tensor, weight: Tensor) -> Tensor:
        sizes.append(len(x))
        return exact(x, weight)

    monkeypatch.setattr(logprobs, "linear_float32", noted)
    return sizes


def test_no_more_logits_than_a_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of_products(monkeypatch)
    hidden, weight = torch.randn(10, 4).requires_grad_(), torch.randn(7, 4).requires_grad_()
    logprobs_A, _ = linear_logprobs(hidden, weight, torch.zeros(10, dtype=torch.long), 1.0, 4)
    assert sizes == [4, 4, 2]
    logprobs_A.sum().backward()
    assert sizes == [4, 4, 2] * 2


def test_kept_logits_are_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of_products(monkeypatch)
    hidden, weight = torch.randn(10, 4).requires_grad_(), torch.randn(7, 4).requires_grad_()
    tokens = torch.zeros(10, dtype=torch.long)
    logprobs_A, _ = linear_logprobs(hidden, weight, tokens, 1.0, rows=4, kept=9)
    logprobs_A.sum().backward()
    assert sizes == [4, 4, 1, 1, 1]  # the last place was not kept
    assert logprobs.kept_places(weight) == 0  # there is nothing to spare on a host


def test_nothing_is_kept_where_no_gradient_will_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    monkeypatch.setattr(logprobs, "summarise_and_keep", lambda *given: kept.append(given[2]))
    hidden, weight = torch.randn(10, 4), torch.randn(7, 4).requires_grad_()
    with torch.no_grad():
        linear_logprobs(hidden, weight, torch.zeros(10, dtype=torch.long), 1.0, rows=4, kept=9)
    assert not kept


def test_a_second_backward_pass_computes_what_the_first_has_used_up() -> None:
    hidden, weight = torch.randn(10, 4).requires_grad_(), torch.randn(7, 4).requires_grad_()
    logprobs_A, _ = linear_logprobs(hidden, weight, torch.arange(10) % 7, 1.0, rows=4, kept=9)
    once, twice = (
        torch.autograd.grad(logprobs_A.sum(), [hidden, weight], retain_graph=True) for _ in range(2)
    )
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other)


def test_chunks_are_bounded_by_bytes() -> None:
    rows = chunk_rows(151_936, torch.device("cpu"))
    assert 128 <= rows <= (1 << 30) // (6 * 151_936)
    assert chunk_rows(10_000_000, torch.device("cpu")) == 128


def changed(**config: object) -> nn.Module:
    model: Any = small_model(tie_word_embeddings=False)
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


def with_bias() -> nn.Module:
    model: Any = small_model(tie_word_embeddings=False)
    head = nn.Linear(32, 50, bias=True)
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


def wrapped() -> nn.Module:
    class Adapter(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * 2

    model: Any = small_model(tie_word_embeddings=False)
    model.lm_head = Adapter(32, 50, bias=False)
    return model


@pytest.mark.parametrize(
    ("model", "is_plain"),
    [
        (small_model(), True),
        (changed(), True),
        (changed(logit_scale=1.0), True),
        (changed(logit_scale=0.25), False),
        (changed(logits_scaling=4.0), False),
        (changed(final_logit_softcapping=3.0), False),
        (with_bias(), False),
        (wrapped(), False),
    ],
)
def test_every_head_gives_what_the_model_gives(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, is_plain: bool
) -> None:
    """The short way and the general one, forwards and backwards, the tied head included."""
    assert (plain_head(model) is not None) == is_plain
    monkeypatch.setattr(logprobs, "chunk_rows", lambda *_: 5)
    model.train()
    (pack,) = packs(ROWS)
    results = action_logprobs(model, pack, 0.8)
    model.zero_grad()
    torch.autograd.backward((results[0] * pack.weights_A).sum() + results[1].mean())
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(found) == len(list(model.parameters()))
    model.zero_grad()
    expected = _row_by_row(model, 0.8)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    torch.autograd.backward((expected[0] * pack.weights_A).sum() + expected[1].mean())
    for one, parameter in zip(found, model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(one, parameter.grad, atol=1e-6, rtol=1e-3)


def _row_by_row(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Whole logits of each row alone, with the library's attention; rows as the pack has them."""
    found: list[tuple[Tensor, Tensor]] = []
    lengths = ROWS.lengths_R.tolist()
    rows = zip(ROWS.tokens_T.split(lengths), ROWS.action_T.split(lengths), strict=True)
    for tokens, is_action in sorted(rows, key=lambda row: -len(row[0])):
        hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        logp = (head_logits(model, hidden) / temperature).log_softmax(-1)
        place = is_action.nonzero()[:, 0]
        before = logp[place - 1]
        found.append((before.gather(1, tokens[place, None])[:, 0], -(before.exp() * before).sum(-1)))
    logprobs_A, entropies_A = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logprobs_A, entropies_A
