"""Every compiled kernel against its plain twin, on random ragged inputs, poisoned outputs and odd sizes."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton")

from ludus.kernels import (  # noqa: E402
    adamw,
    attention,
    layers,
    logprobs,
    triton_adamw,
    triton_attention,
    triton_layers,
    triton_logprobs,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert given.shape == expected.shape
    assert torch.isfinite(given).all()
    error = (given - expected).norm() / expected.norm().clamp(min=1e-12)
    assert float(error) < tolerance


@pytest.mark.parametrize("width", [64, 100, 896])
def test_norm_and_its_gradient(width):
    x, residual, weight = randn(7, width), randn(7, width, seed=1), randn(width, seed=2)
    normed, total, rstd = triton_layers.rms_norm_forward(x, residual, weight, 1e-6)
    close(total, x + residual)
    close(normed, layers.rms_norm_reference(x + residual, weight, 1e-6))
    alone, same, _ = triton_layers.rms_norm_forward(x, None, weight, 1e-6)
    assert same is x
    close(alone, layers.rms_norm_reference(x, weight, 1e-6))

    summed, own = (x + residual).requires_grad_(), weight.clone().requires_grad_()
    grad, grad_sum = randn(7, width, seed=3), randn(7, width, seed=4)
    out = layers.rms_norm_reference(summed, own, 1e-6)
    torch.autograd.backward([out, summed * 1], [grad, grad_sum])
    dx, dweight = triton_layers.rms_norm_backward(grad, grad_sum, total, weight, rstd)
    close(dx, summed.grad)
    close(dweight, own.grad)
    again = torch.full_like(x, math.nan)
    triton_layers.rms_norm_backward(grad, grad_sum, total, weight, rstd, again)
    close(again, normed)


@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_gate_and_its_gradient(width):
    both = randn(5, 2 * width).requires_grad_()
    expected = layers.silu_mul(both.cpu()).to(DEVICE)
    close(triton_layers.silu_mul_forward(both.detach()), expected.detach())
    grad = randn(5, width, seed=1)
    expected.backward(grad)
    close(triton_layers.silu_mul_backward(grad, both.detach()), both.grad)
    product = torch.full_like(grad, math.nan)
    close(triton_layers.silu_mul_backward(grad, both.detach(), product), both.grad)
    close(product, expected.detach())


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (3, 3, 48), (4, 1, 16)])
def test_rotation_and_its_gradient(heads, kv_heads, size):
    qkv = randn(6, (heads + 2 * kv_heads) * size)
    angle = randn(6, size // 2, seed=1)
    cos, sin = (torch.cat([f(angle), f(angle)], dim=1) for f in (torch.cos, torch.sin))
    source = qkv.cpu().requires_grad_()
    expected = layers.rotate(source, cos.cpu(), sin.cpu(), heads, kv_heads)
    given = triton_layers.rotary_split(qkv, cos, sin, heads, kv_heads)
    grads = [randn(*e.shape, seed=i) for i, e in enumerate(expected)]
    for one, other in zip(given, expected, strict=True):
        close(one, other.detach().to(DEVICE))
    torch.autograd.backward(expected, [g.cpu() for g in grads])
    close(triton_layers.rotary_join(*grads, cos, sin), source.grad.to(DEVICE))


def test_rotated_keys_go_to_their_slots_and_nowhere_else():
    heads, kv_heads, size, block = 6, 2, 16, 4
    qkv, angle = randn(5, (heads + 2 * kv_heads) * size), randn(5, size // 2, seed=1)
    cos, sin = (torch.cat([f(angle), f(angle)], dim=1) for f in (torch.cos, torch.sin))
    slots = torch.tensor([9, 13, 0, 15, 2], device=DEVICE)
    blocks = [torch.full((4, kv_heads, block, size), 7.0, device=DEVICE) for _ in range(4)]
    query = triton_layers.rotary_store(qkv, cos, sin, blocks[0], blocks[1], slots, heads)
    expected = layers.rotate_and_store(
        qkv.cpu(), cos.cpu(), sin.cpu(), heads, kv_heads, *(p.cpu() for p in blocks[2:]), slots.cpu()
    )
    close(query, expected.to(DEVICE))
    plain = [torch.full((4, kv_heads, block, size), 7.0) for _ in range(2)]
    layers.rotate_and_store(qkv.cpu(), cos.cpu(), sin.cpu(), heads, kv_heads, *plain, slots.cpu())
    for given, wanted in zip(blocks[:2], plain, strict=True):
        close(given, wanted.to(DEVICE))
        assert int((given != 7.0).any(-1).sum()) == 5 * kv_heads


def blocks_of(lengths, kv_heads, size, block, width):
    """Random blocks with NaN wherever no context lies, and tables that scatter them."""
    total = sum(-(-length // block) for length in lengths) + 3
    keys, values = (
        randn(total, kv_heads, block, size, seed=5),
        randn(total, kv_heads, block, size, seed=6),
    )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(7)).tolist()
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    written = torch.zeros(total, block, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for i in range(-(-length // block)):
            tables[row, i] = order.pop()
            written[tables[row, i], : min(block, length - i * block)] = True
    spoiled = ~written[:, None, :, None].to(DEVICE)
    return keys.masked_fill(spoiled, math.nan), values.masked_fill(spoiled, math.nan), tables.to(DEVICE)


SHAPES = ((14, 2, 64), (4, 4, 8), (3, 1, 24))
"""Query heads, KV heads, head size. Every shape meets every rule under `make test-slow`."""


@pytest.mark.parametrize(
    ("case", "window", "softcap"),
    [
        ((14, 2, 64), None, None),
        ((14, 2, 64), 37, None),
        ((4, 4, 8), None, 5.0),
        ((3, 1, 24), None, None),
        ((3, 1, 24), 16, 3.0),
        *(
            pytest.param(case, *rule, marks=pytest.mark.slow)
            for case in SHAPES
            for rule in ((None, None), (37, None), (None, 5.0), (16, 3.0))
        ),
    ],
)
@pytest.mark.parametrize("programs", [1, 264])
def test_decoding_reads_its_own_blocks(case, window, softcap, programs, monkeypatch):
    """Whether a context is read by one program or by several."""
    monkeypatch.setattr(triton_attention, "_PROGRAMS", programs)
    heads, kv_heads, size = case
    lengths = [1, 0, 17, 300, 64]
    keys, values, tables = blocks_of(lengths, kv_heads, size, 16, 40)
    query = randn(len(lengths), heads, size)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rule = {"scaling": size**-0.5, "window": window, "softcap": softcap}
    given = triton_attention.decode(query, keys, values, tables, lengths, **rule)
    plain = attention.paged_decode(*(t.cpu() for t in (query, keys, values, tables, lengths)), **rule)
    assert torch.isfinite(given).all()
    real = lengths > 0
    close(given[real], plain.to(DEVICE)[real], 1e-3 if DEVICE == "cuda" else 2e-5)


def test_a_context_is_split_for_few_rows_only():
    assert triton_attention.parts_for(1, 2, 8192) == 32
    assert triton_attention.parts_for(1, 2, 100) == 1
    assert triton_attention.parts_for(64, 2, 32768) == 4
    assert triton_attention.parts_for(256, 2, 32768) == 1
    assert triton_attention.parts_for(4096, 8, 32768) == 1


@pytest.mark.parametrize(
    ("case", "window", "softcap", "padding"),
    [
        ((14, 2, 64), None, None, 0),
        ((4, 4, 8), 37, None, 90),
        ((3, 1, 24), None, None, 7),
        ((3, 1, 24), 16, 3.0, 7),
        *(
            pytest.param(case, *rule, marks=pytest.mark.slow)
            for case in SHAPES
            for rule in ((None, None, 0), (37, None, 90), (16, 3.0, 7))
        ),
    ],
)
def test_prefill_reads_its_own_blocks_causally(case, window, softcap, padding):
    heads, kv_heads, size = case
    counts, lengths = [5, 0, 1, 70, 33, 0], [5, 20, 40, 70, 133, 3]
    keys, values, tables = blocks_of(lengths, kv_heads, size, 16, 12)
    query = randn(sum(counts) + padding, heads, size)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rule = {"scaling": size**-0.5, "window": window, "softcap": softcap}
    inputs = (query, keys, values, tables, starts, lengths)
    given = triton_attention.prefill(*inputs, **rule)
    plain = attention.paged_prefill(*(t.cpu() for t in inputs), **rule)
    real = sum(counts)  # what follows belongs to nobody
    close(given[:real], plain[:real].to(DEVICE), 1e-3 if DEVICE == "cuda" else 2e-5)


def rows_of_logits(rows, size):
    logits = randn(rows, size) * 4
    logits[0, size // 2 :] = -math.inf  # what cannot be drawn
    return logits


CASES = [
    (1, 100, 5, [(0, 40)]),
    (37, 300, 16, [(0, 64), (64, 32), (96, 32)]),
    (9, 900, 8, [(0, 70), (102, 33)]),  # what lies between them gets nothing
    (66, 64, 70, [(16, 48), (64, 129), (193, 7)]),
    (1100, 48, 4, [(0, 96)]),
]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "depth", "rank", "columns"), CASES)
def test_adapters_add_to_their_columns_alone(tokens, depth, rank, columns, kind):
    x, width = randn(tokens, depth).to(kind), sum(columns[-1]) + 11
    down = randn(rank * len(columns), depth, seed=1)
    up = randn(sum(count for _, count in columns), rank, seed=2)
    start = randn(tokens, width, seed=3).to(kind)
    out = start.clone()
    inner = triton_layers.low_rank_add(out, x, down, up, columns, 0.3)
    exact = x.double() @ down.double().t()
    close(inner.sum(0).double(), exact, 1e-3 if kind == torch.bfloat16 else 1e-5)
    expected, row = start.double(), 0
    for number, (first, count) in enumerate(columns):
        own = exact[:, number * rank : (number + 1) * rank]
        expected[:, first : first + count] += 0.3 * own @ up[row : row + count].double().t()
        row += count
    # half of the last bit of bf16 on average; the interpreter cuts where a GPU rounds
    close(out.double(), expected, 5e-3 if kind == torch.bfloat16 else 1e-5)
    untouched = torch.ones(width, dtype=torch.bool)
    for first, count in columns:
        untouched[first : first + count] = False
    assert torch.equal(out[:, untouched], start[:, untouched])
    strided = torch.stack([x, x], dim=2)[:, :, 0]
    again = start.clone()
    triton_layers.low_rank_add(again, strided, down, up, columns, 0.3)
    assert torch.equal(again, out)
    twin = start.clone()
    layers.low_rank_add_reference(twin, x, down, up, columns, 0.3)
    close(twin.double(), expected, 3e-3 if kind == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
@pytest.mark.parametrize("which", ["down", "up"])
def test_an_adapter_that_is_no_number_is_not_taken_for_none(which, bits):
    """The first is the NaN that GPUs make; rounded like a number it would be a zero."""
    factors = {"down": randn(8, 64, seed=1), "up": randn(32, 8, seed=2)}
    factors[which].view(torch.int32).fill_(bits)
    out = torch.zeros(5, 32, dtype=torch.bfloat16, device=DEVICE)
    x = randn(5, 64).bfloat16()
    triton_layers.low_rank_add(out, x, factors["down"], factors["up"], ((0, 32),), 1.0)
    assert out.isnan().all()


def test_kernels_for_adapters_that_are_wrong_are_found_out(monkeypatch, caplog):
    monkeypatch.setattr(layers, "unavailable", lambda device: None)
    device, real = torch.device(DEVICE), triton_layers.low_rank_add

    def wrong(out, *given):
        inner = real(out, *given)
        out[3, 60] += 40
        return inner

    def broken(*given):
        raise RuntimeError("no such instruction")

    def crowded(*given):
        raise torch.OutOfMemoryError("no room")

    layers.low_rank_unusable.cache_clear()
    monkeypatch.setattr(triton_layers, "low_rank_add", crowded)
    with pytest.raises(torch.OutOfMemoryError):  # which says nothing about the kernel
        layers.low_rank_unusable(device)
    for kernel, is_distrusted in ((real, False), (wrong, True), (broken, True)):
        layers.low_rank_unusable.cache_clear()
        monkeypatch.setattr(triton_layers, "low_rank_add", kernel)
        assert layers.low_rank_unusable(device) is is_distrusted
    layers.low_rank_unusable.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "other numbers" in said[0] and "no such instruction" in said[1]


def test_sums_are_split_for_few_tokens_only(monkeypatch):
    monkeypatch.setattr(triton_layers, "_ENOUGH", 8)
    down, up = randn(4, 1024), randn(32, 4)
    parts = {}
    for tokens in (0, 2, 300):
        out, x = randn(tokens, 32), randn(tokens, 1024)
        parts[tokens] = len(triton_layers.low_rank_add(out, x, down, up, [(0, 32)], 1.0))
    assert parts[2] > 1
    assert parts[300] == 1


@pytest.mark.parametrize("size", [50, 4096, 9001])
def test_sampling_inverts_the_distribution(size):
    rows = 12
    logits = rows_of_logits(rows, size)
    temperatures = torch.tensor([1.0, 0.0, 0.3, 1e-4] * 3, device=DEVICE)
    shares = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    shares[0], shares[4] = 0.0, 0.999
    given = triton_logprobs.sample_at_temperature(logits, temperatures, shares)
    plain = logprobs.sample_at_temperature(logits.cpu(), temperatures.cpu(), shares.cpu())
    assert given[0].tolist() == plain[0].tolist()
    assert torch.allclose(given[1].cpu(), plain[1], atol=1e-4)
    assert given[2].all()
    assert given[0][0] < size // 2


def test_the_largest_share_draws_something_possible():
    logits = rows_of_logits(1, 9001)
    shares = torch.tensor([1 - 2**-53], dtype=torch.float64, device=DEVICE)
    token, logprob, sound = triton_logprobs.sample_at_temperature(
        logits, torch.ones(1, device=DEVICE), shares
    )
    assert sound.all()
    assert 4000 < token < 4500
    assert float(logprob) > -40


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # which is what the row is spoiled by
@pytest.mark.parametrize(("size", "where"), [(300, 7), (9001, 0), (9001, 5000), (4097, 4096)])
def test_sampling_says_which_rows_are_spoiled(size, where):
    logits = randn(6, size)
    logits[1, where] = math.nan
    logits[2] = -math.inf
    logits[4, where] = math.inf
    logits[5, where] = -math.inf
    temperatures = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], device=DEVICE)
    shares = torch.full((6,), 0.5, dtype=torch.float64, device=DEVICE)
    tokens, _, sound = triton_logprobs.sample_at_temperature(logits, temperatures, shares)
    assert sound.tolist() == [True, False, False, True, False, True]
    assert ((tokens >= 0) & (tokens < size)).all()
    twin = logprobs.sample_at_temperature(logits.cpu(), temperatures.cpu(), shares.cpu())[2]
    assert twin.tolist() == sound.tolist()


@pytest.mark.parametrize("size", [50, 4096, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropies_and_their_gradient(size, temperature):
    logits = randn(6, size) * 3
    tokens = torch.tensor([0, size - 1, 3, 7, 11, size // 2], device=DEVICE)
    weights, others = randn(6, seed=1), randn(6, seed=2)
    source = logits.double().requires_grad_()
    logp = (source / temperature).log_softmax(1)
    chosen, entropy = logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    (chosen * weights).sum().add((entropy * others).sum()).backward()

    p = torch.empty_like(logits)
    lse, found, shifts = triton_logprobs.summarise(logits, temperature, p)
    for one, other in zip(triton_logprobs.summarise(logits, temperature)[:2], (lse, found), strict=True):
        assert torch.equal(one, other), "whether anything is kept makes no difference"
    given = logits.gather(1, tokens[:, None])[:, 0] / temperature - lse
    close(given.double(), chosen.detach())
    close(found.double(), entropy.detach())
    stretches = shifts.exp().repeat_interleave(triton_logprobs._BLOCK, 1)[:, :size]
    close((p * stretches).double(), logp.exp().detach())
    gradient = triton_logprobs.gradient(
        logits, tokens, temperature, lse, found, weights, others, torch.float32
    )
    close(gradient.double(), source.grad, 1e-4)
    (alone,) = torch.autograd.grad((source / temperature).log_softmax(1).gather(1, tokens[:, None])[:, 0]
                                   @ weights.double(), source)  # fmt: skip
    own = torch.empty_like(logits.cpu())
    *_, own_shifts = logprobs.summarise_and_keep(logits.cpu(), temperature, own)
    plain = logprobs.kept_gradient(own, own_shifts, tokens.cpu(), temperature, weights.cpu())
    close(plain.double(), alone.cpu(), 1e-4)
    kept = triton_logprobs.kept_gradient(p, shifts, tokens, temperature, weights)
    close(kept.double(), alone, 1e-4)
    assert kept is p

    twin = logits.cpu().requires_grad_()
    chosen_twin, entropy_twin = logprobs.token_logprobs(twin, tokens.cpu(), temperature)
    (chosen_twin * weights.cpu()).sum().add((entropy_twin * others.cpu()).sum()).backward()
    close(twin.grad.double(), source.grad.cpu(), 1e-4)


@pytest.mark.parametrize("is_twin", [False, True])
@pytest.mark.parametrize("top", [30.0, 300.0])
def test_a_confident_tokens_gradient_survives_half_precision(is_twin, top):
    """What is left to 1 is all there is of it: a rounded probability, or a rounded sum, would spoil it."""
    rest = torch.logspace(-4, -1, 7)
    size = 9001
    logits = torch.full((7, size), -50.0) + top
    logits[:, 5000] = top
    logits[:, 17] = top + (rest / (1 - rest)).log()  # the only other one that counts
    exact = torch.sigmoid(-(logits[:, 5000].double() - logits[:, 17].double()))
    device = "cpu" if is_twin else DEVICE
    logits, tokens = logits.to(device), torch.full((7,), 5000, device=device)
    kept = torch.empty(7, size, dtype=torch.bfloat16, device=device)
    if is_twin:
        *_, shifts = logprobs.summarise_and_keep(logits, 1.0, kept)
        grad = logprobs.kept_gradient(kept, shifts, tokens, 1.0, torch.ones(7))
    else:
        *_, shifts = triton_logprobs.summarise(logits, 1.0, kept)
        grad = triton_logprobs.kept_gradient(kept, shifts, tokens, 1.0, torch.ones(7, device=device))
    error = (grad[:, 5000].double().cpu() - exact).abs() / exact
    assert float(error.max()) < 0.01


@pytest.mark.parametrize("is_twin", [False, True])
@pytest.mark.parametrize("kinds", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
def test_adamw_is_that_of_torch(kinds, betas, is_twin):
    device = "cpu" if is_twin else DEVICE
    shapes = [(3,), (70, 33), (triton_adamw._CHUNK + 5,), (1,)]
    masters = [randn(*shape, seed=i).to(device) for i, shape in enumerate(shapes)]
    weights = [master.to(kinds[1]) for master in masters]
    exact = [master.double().requires_grad_() for master in masters]
    decays = [0.1, 0.0, 0.3, 0.0]
    groups = [{"params": [one], "weight_decay": decay} for one, decay in zip(exact, decays, strict=True)]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=betas, eps=1e-6)
    means, squares = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    steps = [torch.zeros((), device=device) for _ in masters]
    for number in range(4):
        slopes = [randn(*shape, seed=10 * number + i) for i, shape in enumerate(shapes)]
        slopes = [slope.to(device, kinds[0]) for slope in slopes]
        for one, slope in zip(exact, slopes, strict=True):
            one.grad = slope.double() / 2.5
        reference.step()
        for sound in (0, 1):  # a step that is not sound does nothing
            torch._foreach_add_(steps, float(sound))
            numbers = (
                torch.tensor(decays, device=device),
                torch.tensor(2.5, device=device),
                torch.tensor(sound, dtype=torch.int32, device=device),
            )
            if is_twin:
                tensors = adamw.AdamwTensors(masters, means, squares, steps, slopes, weights, numbers[0])
                rule = adamw.AdamwRule(3e-3, betas, 1e-6, *numbers[1:])
                adamw.adamw_step_reference(tensors, rule)
            else:
                lists = (masters, means, squares, slopes, weights, steps)
                triton_adamw.step(lists, *numbers, rate=3e-3, betas=betas, eps=1e-6)
    for master, weight, one in zip(masters, weights, exact, strict=True):
        close(master.double(), one.detach(), 1e-5)
        if is_twin or DEVICE == "cuda" or kinds[1] == torch.float32:
            assert torch.equal(weight, master.to(kinds[1]))
        else:  # the interpreter cuts digits off where a device rounds
            assert torch.allclose(weight.float(), master, rtol=2**-7)


def test_a_kernel_for_adamw_that_is_wrong_is_found_out(monkeypatch):
    device = torch.device(DEVICE)
    monkeypatch.setattr(adamw, "unavailable", lambda device: None)
    assert adamw.adamw_unavailable.__wrapped__(device) is None
    monkeypatch.setattr(triton_adamw, "step", lambda *_, **__: None)
    assert "other weights" in adamw.adamw_unavailable.__wrapped__(device)
    monkeypatch.delattr(triton_adamw, "step")
    assert "AttributeError" in adamw.adamw_unavailable.__wrapped__(device)
