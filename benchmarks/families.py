"""Every decoder-only family of the installed transformers, in small: what Ludus samples and trains exactly.

    python benchmarks/families.py                              # all of them, some minutes
    python benchmarks/families.py lfm2 qwen3_5_text            # these, by transformers' model_type
    python benchmarks/families.py lfm2 -v                      # with the traceback of what fails
    python benchmarks/families.py --write docs/families.md     # regenerate the page

Each family gets a tiny model with random weights (`ludus.model.tiny`: two layers or more, one of each kind), in
a process of its own. Its reference is a copy with the architecture's own eager attention, that is never touched
by Ludus and reads one whole row at a time, without a cache.

sampled   the engine's log-probabilities of what it sampled beside the reference, within 1e-4: rows of several
          lengths in one batch, prompts in chunks, a tool's result and a second turn in each session, a fork,
          a cache too small for all (preemption), KV dropped and computed again, and `score`
trained   the gradient of a micro-batch of packed rows beside that of the reference, one row after the other,
          within 1e-5 of its norm; or as near to the reference in float64 as twice the reference in float32
prefixes  the same of rows that begin alike, folded
LoRA      the same of an adapter's weights

A family is decoder-only where the reference is causal: another last token changes nothing before it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ludus.core.failures import LudusError
from ludus.core.generation import Sampling
from ludus.engine.config import EngineConfig
from ludus.engine.embedded.engine import EmbeddedEngine
from ludus.model.fused_model import unsupported
from ludus.model.hf_model import auto_class, decoder_of
from ludus.model.probes import use_ludus_attention
from ludus.model.tiny import VOCABULARY, tiny_config
from ludus.training.config.run import LoraConfig
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import micro_batches
from ludus.training.models.lora import add_adapter
from ludus.training.optim.logprobs import action_logprobs, shares_prefixes

SECONDS, BYTES = 120.0, 6 << 30
"""What one family may take."""
SAMPLED, TRAINED = 1e-4, 1e-5
CONTEXT = 4
"""Tokens of a row that are not trained."""

ODD: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"first_k_dense_replace": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "reformer": {"is_decoder": True},
    "smollm3": {"layer_types": ["full_attention"] * 36},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"] * 20},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256}
    | {"indexer_budget": 2048, "indexer_compress_ratio": 2},
}
"""What the default configuration of a family lacks to be built, or to have all of its kinds of layers."""
ODD["qwen4_exp"] = {"text_config": ODD["qwen4_exp_text"]}


@dataclass
class Row:
    """What was found out about one family."""

    family: str
    architecture: str = ""
    layers: list[str] = field(default_factory=list)
    excluded: str = ""
    """Why it is no decoder-only family that can be built here."""
    refused: str = ""
    """The sentence with which Ludus refuses it."""
    sampled: float | str = ""
    """The largest difference of a log-probability; or what went wrong."""
    trained: float | str = ""
    """The relative error of the gradient; or what went wrong."""
    prefixes: float | str = ""
    lora: float | str = ""
    packed: str = ""
    """Whether the rows of a micro-batch go through the decoder in one pass."""
    fused: str = ""
    """Why the fused forward is not for it."""
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether it is sampled and trained exactly."""
        return _within(self.sampled, SAMPLED) and _within(self.trained, TRAINED)


def _within(found: float | str, most: float) -> bool:
    return isinstance(found, float) and found <= most


def tiny_model(family: str) -> tuple[nn.Module, Any]:
    """A tiny random model of a family, and its configuration."""
    config = AutoConfig.for_model(family, **ODD.get(family, {}))
    config = tiny_config(config)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # large enough that choices depend on the context, and that no bias or sink is 0
            if weight.ndim > 1 and not name.endswith("conv1d.weight"):
                weight.mul_(3)
            elif weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
    return model, config


def drawn(count: int, seed: int) -> list[int]:
    """Arbitrary tokens, none of them special."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY - 20, (count,), generator=source).tolist()


def row_logprobs(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """The log-probability of each token given those before it, by the model's own forward; 0 for the first."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    rest = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return torch.cat([rest.new_zeros(1), rest])


def why_not_decoder_only(model: nn.Module) -> str:
    """Empty where the model's own forward reads tokens alone, and from left to right."""
    tokens = torch.tensor([drawn(24, 1)])
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 100 + 5
    with torch.no_grad():
        try:
            one, two = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (tokens, other))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's forward raises
            return f"its own forward does not run on tokens alone: {_told(error)}"
    if not bool(one.isfinite().all()):
        return "its own forward gives no finite numbers with random weights"
    return "" if float((one - two).abs().max()) < 1e-5 else "it reads in both directions"


# What is sampled.


async def sampling_error(model: nn.Module, stock: nn.Module) -> float:
    """The largest difference between the engine's log-probabilities and the reference's."""
    found = 0.0
    placeholders = {
        token
        for name, token in vars(stock.config).items()
        if re.match("(image|video|audio|boi|eoi).*token_(id|index)$", name)
    }

    def compare(tokens: Sequence[int], start: int, logprobs: Sequence[float]) -> None:
        nonlocal found
        with torch.no_grad():
            expected = row_logprobs(stock, tokens)[start:]
        # behind the placeholder of an image that is not there, own forwards read something else
        stop = (
            next((i for i, token in enumerate(tokens) if token in placeholders), len(tokens)) + 1 - start
        )
        if stop > 0:
            found = max(found, float((torch.tensor(logprobs) - expected)[:stop].abs().max()))

    for cache, running in ((4096, 8), (96, 4)):  # the second cannot hold all that runs
        config = EngineConfig(
            cache_tokens=cache, block_size=8, max_running=running, tokens_per_step=max(16, running)
        )
        engine = EmbeddedEngine(model, config=config)
        try:
            for tokens, start, logprobs in await _episodes(engine, cache > 1000):
                compare(tokens, start, logprobs)
            if cache < 1000 and engine.stats.preemptions == 0:
                raise AssertionError("nothing was preempted: the check does not check")
        finally:
            await engine.close()
    return found


Sampled = list[tuple[list[int], int, list[float]]]


async def _episodes(engine: EmbeddedEngine, is_roomy: bool) -> Sampled:
    """(tokens, where the sampled ones begin, their log-probabilities) of what is played at once."""
    sampled: Sampled = []

    async def play(number: int) -> None:
        context, session = drawn((3, 21, 8, 13)[number], number), f"s{number}"
        for turn in range(2):
            sampling = Sampling(max_tokens=20, seed=10 * number + turn)
            done = await engine.generate(context, sampling, session=session)
            sampled.append((context + done.tokens, len(context), done.logprobs))
            # a tool's result, and the next turn
            context = [*context, *done.tokens, *drawn(5 + number, 50 + number)]
        if is_roomy:
            await engine.fork(session, f"{session}-fork")
            for place in (session, f"{session}-fork"):
                done = await engine.generate(context, Sampling(max_tokens=9, seed=77), session=place)
                sampled.append((context + done.tokens, len(context), done.logprobs))
        await engine.release(session)

    await engine.pause()
    played = asyncio.gather(*(play(number) for number in range(4)))
    await asyncio.sleep(0.01)  # all of them have asked
    await engine.resume()
    await played
    if is_roomy:
        context = drawn(17, 9)
        first = await engine.generate(context, Sampling(max_tokens=6, seed=1), session="again")
        await engine.forget()
        longer = [*context, *first.tokens, 7, 8]
        done = await engine.generate(longer, Sampling(max_tokens=6, seed=2), session="again")
        sampled.append((longer + done.tokens, len(longer), done.logprobs))
        scored = await engine.score(longer)
        sampled.append((longer, 0, scored))
    return sampled


# What is trained.


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of what is trained; zero where there is none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]


def training_error(
    model: nn.Module, stock: nn.Module, rows: Sequence[Sequence[int]], *, share: bool
) -> tuple[float, int]:
    """(The relative error of the gradient, passes through the decoder for a micro-batch.)"""
    slopes = [torch.linspace(-1, 1, len(row) - CONTEXT) for row in rows]
    model.zero_grad(set_to_none=True)
    batch = Batch.of_tokens(rows, [[i >= CONTEXT for i in range(len(row))] for row in rows])
    passes = 0

    def note(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = decoder_of(model).register_forward_hook(note)
    slope_T = torch.zeros(len(batch.tokens_T))
    slope_T[batch.trained_T] = torch.cat(slopes)
    try:
        for part in micro_batches(batch, 1 << 16, share=share):
            logprobs, _ = action_logprobs(model, part, 1.0)
            (logprobs * slope_T[part.source_index_A]).sum().backward()
    finally:
        hook.remove()
    given, wanted = gradients(model), stock_gradients(stock, rows, slopes)
    error = relative_error(given, wanted)
    if error > TRAINED:  # is it rounding, which small differences of large numbers amplify?
        exact = stock_gradients(copy.deepcopy(stock).double(), rows, slopes)
        if relative_error(given, exact) <= 2 * relative_error(wanted, exact):
            error = TRAINED
    return error, passes


def stock_gradients(
    stock: nn.Module, rows: Sequence[Sequence[int]], slopes: Sequence[Tensor]
) -> list[Tensor]:
    """The reference's gradient, one row after the other."""
    stock.zero_grad(set_to_none=True)
    for row, slope in zip(rows, slopes, strict=True):
        (row_logprobs(stock, row)[CONTEXT:] * slope).sum().backward()
    return gradients(stock)


def relative_error(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of what differs, as a part of the norm of what is wanted."""
    distance = sum(float((a - b).double().square().sum()) for a, b in zip(given, wanted, strict=True))
    norm = sum(float(one.double().square().sum()) for one in wanted)
    if norm == 0:
        raise AssertionError("there is no gradient to compare")
    return float((distance / norm) ** 0.5)


def packed_rows() -> list[list[int]]:
    return [drawn(count, 20 + count) for count in (19, 7, 40, 12)]


def alike_rows() -> list[list[int]]:
    """Rows that share 64 tokens, two of them 80, and one that shares nothing."""
    prompt, turn = drawn(64, 3), drawn(16, 4)
    return [
        [*prompt, *drawn(9, 5)],
        [*prompt, *turn, *drawn(6, 6)],
        [*prompt, *turn, *drawn(11, 7)],
        drawn(15, 8),
    ]


# One family, in a process of its own.


def examined(family: str, told: Callable[[str], None]) -> Row:
    """What Ludus does with one family."""
    row = Row(family)
    try:
        config = AutoConfig.for_model(family, **ODD.get(family, {}))
        if config.is_encoder_decoder:
            row.excluded = "an encoder and a decoder"
            return row
        stock, made = tiny_model(family)
    except Exception as error:  # noqa: BLE001 - a stranger's constructor
        told(traceback.format_exc())
        row.excluded = f"cannot be built: {_told(error)}"
        return row
    row.architecture = type(stock).__name__
    row.layers = _kinds(made)
    row.excluded = why_not_decoder_only(stock)
    if row.excluded:
        return row
    model = copy.deepcopy(stock)
    try:
        use_ludus_attention(model)
    except LudusError as error:
        row.refused = " ".join(str(error).split())
        return row
    except Exception as error:  # noqa: BLE001 - a failure that nothing has put into words
        told(traceback.format_exc())
        row.sampled = row.trained = f"fails: {_told(error)}"
        return row
    row.fused = unsupported(decoder_of(model)) or ""

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except LudusError as error:
            return f"refused: {_short(error)}"
        except Exception as error:  # noqa: BLE001 - it becomes a cell of the table
            told(traceback.format_exc())
            return _told(error)

    row.sampled = attempt(lambda: asyncio.run(sampling_error(model, stock)))
    trained = attempt(lambda: training_error(model, stock, packed_rows(), share=False))
    row.trained, row.packed = (
        (trained[0], "yes" if trained[1] == 1 else "row by row")
        if isinstance(trained, tuple)
        else (trained, "")
    )
    if shares_prefixes(model):
        shared = attempt(lambda: training_error(model, stock, alike_rows(), share=True))
        row.prefixes = shared[0] if isinstance(shared, tuple) else shared
    else:
        row.prefixes = "off"
    row.lora = attempt(lambda: lora_error(model, stock))
    return row


def lora_error(model: nn.Module, stock: nn.Module) -> float:
    """The relative error of an adapter's gradient."""
    adapted = [add_adapter(one, LoraConfig(rank=4), "tiny", seed=3) for one in (model, stock)]
    for one in adapted:
        torch.manual_seed(5)
        with torch.no_grad():
            for name, weight in one.named_parameters():
                if "lora_B" in name:  # which begins at 0
                    weight.copy_(0.1 * torch.randn_like(weight))
    return training_error(adapted[0], adapted[1], packed_rows(), share=False)[0]


def _kinds(config: Any) -> list[str]:
    text = config.get_text_config()
    return sorted(set(getattr(text, "layer_types", None) or ()))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return text.partition(". ")[0][:160]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {_short(error)}"


def in_a_process(family: str, verbose: bool = False) -> Row:
    """`examined` in a forked process, that is ended when it takes too long, or too much."""
    with tempfile.TemporaryFile("w+") as told:
        began = time.perf_counter()
        child = os.fork()
        if child == 0:
            _child(family, told, verbose)
        row = _awaited(child, family, told)
        row.seconds = round(time.perf_counter() - began, 1)
        return row


def _child(family: str, told: Any, verbose: bool) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        torch.set_num_threads(1)
        if not verbose:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        row = examined(family, lambda text: print(text, file=sys.stderr))
        told.write(json.dumps(asdict(row)))
        told.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - the parent says so
        traceback.print_exc()
    finally:
        os._exit(code)


def _awaited(child: int, family: str, told: Any) -> Row:
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Row(family, sampled=f"took more than {SECONDS:g} s")
        time.sleep(0.02)
    told.seek(0)
    text = told.read()
    if not text:
        return Row(family, sampled=f"its process ended ({os.waitstatus_to_exitcode(status)})")
    return Row(**json.loads(text))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of others."""
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


# The page.

HEAD = ["family", "layers", "sampled", "trained", "packed", "prefixes", "LoRA", "fused"]
PAGE = ("<!-- table: python benchmarks/families.py --write docs/families.md -->", "<!-- end -->")


def families() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cell(found: float | str, most: float) -> str:
    if isinstance(found, str):
        return found or "–"
    return "yes" if found <= most else f"**no** ({found:.1g})"


def sees(family: str) -> bool:
    return family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def line(row: Row) -> list[str]:
    kinds = ", ".join(one.removesuffix("_attention") for one in row.layers)
    name = f"`{row.family}`"
    if row.refused:
        return [name, kinds, f"refused: {row.refused}", "", "", "", "", ""]
    return [
        name,
        kinds,
        cell(row.sampled, SAMPLED),
        cell(row.trained, TRAINED),
        row.packed or "–",
        cell(row.prefixes, TRAINED),
        cell(row.lora, TRAINED),
        "yes" if row.packed and not row.fused else "–",
    ]


def markdown(rows: Sequence[Row]) -> str:
    there = [row for row in rows if not row.excluded]
    lines = [line(row) for row in there]
    table = "\n".join(
        f"| {' | '.join(one)} |".replace("|  ", "| ") for one in (HEAD, ["---"] * len(HEAD), *lines)
    )
    out = [f"- `{row.family}`: {row.excluded}" for row in rows if row.excluded]
    return "\n\n".join([counted(rows), table, "Not in the table:", "\n".join(out) or "- nothing"])


def counted(rows: Sequence[Row]) -> str:
    there = [row for row in rows if not row.excluded]
    exact = sum(row.is_exact for row in there)
    refused = sum(bool(row.refused) for row in there)
    share = 100 * exact / max(1, len(there))
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}: {len(there)} "
        f"families; {exact} ({share:.0f}%) are sampled and trained exactly, {refused} are refused, "
        f"{len(there) - exact - refused} are neither."
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("families", nargs="*", help="model types; all when left out")
    options.add_argument("--write", type=Path, help="the page whose table is replaced")
    options.add_argument("-v", "--verbose", action="store_true", help="tracebacks of what fails")
    given = options.parse_args()
    unknown = set(given.families) - set(families())
    if unknown:
        raise SystemExit(f"not in transformers {transformers.__version__}: {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    for family in given.families or families():
        with quiet():
            rows.append(in_a_process(family, given.verbose))
        print(f"{rows[-1].seconds:5.1f} s  {' | '.join(filter(None, told(rows[-1])))}", flush=True)
    print(f"\n{counted(rows)}")
    if given.write is not None:
        write(given.write, markdown(rows))


def told(row: Row) -> list[str]:
    """A line for a terminal."""
    if row.excluded:
        return [row.family, row.excluded]
    shown = zip(
        ("", "layers", "sampled", "trained", "packed", "prefixes", "LoRA", "fused"),
        line(row),
        strict=True,
    )
    return [f"{name} {value}".strip() if value else "" for name, value in shown]


def write(page: Path, text: str) -> None:
    """Replace the page's table."""
    before, _, rest = page.read_text(encoding="utf-8").partition(PAGE[0])
    _, _, after = rest.partition(PAGE[1])
    page.write_text(f"{before}{PAGE[0]}\n\n{text}\n\n{PAGE[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
